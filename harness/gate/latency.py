"""The latency layer: our kernels on a GPU, as ratios to yardsticks timed in the same rounds.

There are two yardsticks. A copy of as many bytes as the call must move shows how close the call is to the speed of the
memory. Contiguous attention of the same shape shows the cost of paging. Each yardstick has its own finding for every
case. A run can be kept as a record and judged on any machine, as long as the kernels are the same.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.bench.cases import KernelCase, gate
from harness.config.errors import UserError
from harness.environment import kernel_digest
from harness.gate.beside import Round, interleaved
from harness.gate.findings import (
    Baseline,
    Finding,
    GateVerdict,
    LayerResult,
    Measured,
    coverage,
    new_baseline,
    read_baseline,
    write_baseline,
)
from harness.gate.settings import GateSettings, compared, default_settings, effect

if TYPE_CHECKING:
    import torch

    from paged_kernels.providers import Case, Provider


# Reasons of NVML (nvmlClocksEventReason…) why the device runs slower than it was asked to.
_SLOWDOWNS = {0x4: "power cap", 0x8: "hardware slowdown"}
_SLOWDOWNS |= {0x20: "thermal (software)", 0x40: "thermal (hardware)"}
# many devices reach their power cap under full load: reported, but no reason to doubt a ratio
_HARMLESS = 0x4


@dataclass(frozen=True)
class ClockState:
    """Clocks in MHz and the reasons why they are not higher. Zeros and no reasons where the driver does not tell."""

    sm_mhz: int = 0
    memory_mhz: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def doubtful(self) -> tuple[str, ...]:
        """Reasons not to trust a measurement."""
        return tuple(reason for reason in self.reasons if reason != _SLOWDOWNS[_HARMLESS])


def clock_state() -> ClockState:
    """The present clocks of the first GPU; an empty state without NVML."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return ClockState()
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        mask = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        kinds = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
        sm, memory = (int(pynvml.nvmlDeviceGetClockInfo(handle, kind)) for kind in kinds)
    except pynvml.NVMLError:  # an old driver, or a virtual device that hides its clocks
        return ClockState()
    return ClockState(sm, memory, tuple(name for bit, name in _SLOWDOWNS.items() if mask & bit))


def write_record(measured: Measured, file: Path) -> None:
    """Write a run as a record. A record has the form of a baseline, so it can become one."""
    write_baseline(file, new_baseline(measured, "record of a run"))


def read_record(file: Path) -> Measured:
    """The run in `file`.

    Raises:
        UserError: the file does not exist, or is not a latency record.
    """
    remedy = "name a record of the latency layer: make gpu writes one as latency.json"
    found = read_baseline(file, "latency", remedy)
    if found is None:
        raise UserError(f"there is no record {file}; make gpu writes one as latency.json")
    run = found.made_on, found.kernels, found.cases, found.environment
    remark = f"recorded on {found.date}; nothing was timed now"
    return Measured("latency", latency_name(str(found.made_on["device"])), *run, (remark,))


def latency_name(device: str) -> str:
    """File name of a device's baseline: `latency-nvidia-h200`."""
    words = "".join(letter if letter.isalnum() else " " for letter in device.lower()).split()
    return "-".join(["latency", *words])


def stale_finding(record: Measured) -> LayerResult | None:
    """None for a record of the present kernels; otherwise a result that says the record is of other kernels."""
    if record.kernels == kernel_digest():
        return None
    reason = f"stale: the record is of kernels {record.kernels}, this tree's are {kernel_digest()}; time them again"
    return LayerResult.undecided("latency", reason, str(record.made_on["device"]), record.remarks)


def measure() -> Measured:
    """Time the cases of the preset `gate` on this machine's GPU.

    A case that fails is left out, and named in the environment, also of a record: that is a regression.

    Raises:
        UserError: torch finds no CUDA device here.
    """
    import torch

    if not torch.cuda.is_available():
        others = "run the layers that need none: gate --layer resource --layer policy"
        recorded = "judge a recorded run with gate --record FILE"
        raise UserError(f"the latency layer needs a CUDA device; {recorded}, or {others}")
    return measure_cases(gate(), torch.device("cuda"), torch.cuda.get_device_name())


def measure_cases(specs: list[KernelCase], device: "torch.device", device_name: str) -> Measured:
    """Time cases on any device, one after the other."""
    cases, failed = dict[str, Any](), dict[str, str]()
    for spec in specs:
        try:
            cases |= dict(_timed(spec, device))
        except Exception as error:  # it fails the gate; the other cases are still worth having
            failed[spec.name] = f"{type(error).__name__}: {str(error)[:300]}"
    made_on = {"device": device_name, "torch": version("torch"), "triton": version("triton")}
    run = made_on, kernel_digest(), cases, {"clocks": asdict(clock_state()), "failed": failed}
    remarks = tuple(f"{name} was not timed: {why}" for name, why in failed.items())
    return Measured("latency", latency_name(device_name), *run, remarks)


def _timed(spec: KernelCase, device: "torch.device") -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs of name and values (`ratios`, `throttled`) of one case, one for each yardstick."""
    from harness.bench.calls import build, cache_bytes, copies_past_cache
    from harness.cost.timings import CONTIGUOUS, OURS, SDPA
    from paged_kernels.providers import find_providers

    count = copies_past_cache(spec.kv_bytes, cache_bytes(device))
    inputs = [build(spec, device, seed) for seed in range(count)]
    known = find_providers()
    kernel = _provider_round(known[OURS], inputs, device)
    whole = CONTIGUOUS if spec.queries == 1 else SDPA  # the contiguous twin exists only for decode
    plain = "copy" if spec.queries == 1 else "matmul"
    yardsticks = {whole: _provider_round(known[whole], inputs, device), plain: _plain_round(inputs, device)}
    before = clock_state()
    ratios = interleaved(kernel, yardsticks)
    doubts = sorted({*before.doubtful, *clock_state().doubtful})
    slowed = {"throttled": ", ".join(doubts)} if doubts else {}
    for name, rounds in ratios.items():
        yield f"{spec.name} / {name}", {"ratios": rounds, **slowed}


def _provider_round(provider: "Provider", inputs: "list[Case]", device: "torch.device") -> Round:
    """Rounds of one provider. Its output is checked first.

    Raises:
        DisagreementError: the output is wrong.
    """
    from harness.bench.calls import checked_runs, prepare_rounds

    runs, _ = checked_runs(provider, inputs)
    return prepare_rounds(runs, device, capturable=provider.capturable).round


def _plain_round(inputs: "list[Case]", device: "torch.device") -> Round:
    """A copy of the bytes that a decode moves, or a matrix product of the operations that a prefill needs."""
    from harness.bench.calls import copy_of, prepare_rounds, product_of

    case = inputs[0]
    runs = [product_of(case.flops, device)]
    if case.decode:
        runs = [copy_of(case.distinct_kv_bytes + case.io_bytes, device) for _ in inputs]
    return prepare_rounds(runs, device, capturable=True).round


def case_names() -> list[str]:
    """The names of the timed attention calls. Each gives one ratio for every yardstick."""
    return [spec.name for spec in gate()]


def judge(now: Measured, baseline: Baseline, settings: GateSettings | None = None) -> LayerResult:
    """Compare with a baseline of the same device and the same yardsticks, by the margins `latency`.

    Returns a single inconclusive finding if the device, or the version of torch or Triton, differs.
    """
    made_on = f"{now.made_on['device']}, {len(now.cases)} ratios"
    different = [key for key in now.made_on if now.made_on[key] != baseline.made_on.get(key)]
    if different:
        pairs = "; ".join(f"{key} {baseline.made_on.get(key)} → {now.made_on[key]}" for key in different)
        reason = f"the baseline was made elsewhere ({pairs}); a comparison says nothing about our kernels"
        return LayerResult.undecided("latency", reason, made_on, now.remarks)
    effects = compared(now, baseline)
    margins = (settings or default_settings()).latency
    judged = [Finding(case, found.verdict(margins), str(found)) for case, found in effects.items()]
    findings = (*_faults(now), *coverage(now, baseline), *judged)
    # The slowest case stands in a remark even where all pass, since no average is reported.
    worst = sorted(effects.items(), key=lambda one: -one[1].ratio)[:1]
    remarks = (f"worst case: {case}, {found}" for case, found in worst)
    return LayerResult("latency", findings, made_on, (*now.remarks, *remarks))


def unfit(now: Measured, settings: GateSettings | None = None) -> Iterator[str]:
    """The reasons why these figures cannot become a baseline: a failed case, a throttled device, or too much noise."""
    yield from (f"{finding.case}: {finding.reason}" for finding in _faults(now))
    widest = (settings or default_settings()).latency.widest
    for case, values in now.cases.items():
        if (found := effect(values["ratios"], values["ratios"])).width > widest:
            yield f"{case}: too much noise ({found})"


def _faults(now: Measured) -> Iterator[Finding]:
    """Findings on cases that failed, also those that no baseline has, and on a device that slowed down meanwhile.

    No ratio of such a device can be trusted.
    """
    for case, why in now.environment.get("failed", {}).items():
        yield Finding(case, GateVerdict.regressed, f"was not timed: {why}")
    for case, values in now.cases.items():
        if why := values.get("throttled"):
            yield Finding(case, GateVerdict.inconclusive, f"the device slowed down while it was timed: {why}")
