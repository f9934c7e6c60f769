"""Measure the latency layer's cases on the GPU of this machine."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from harness.bench.kernels.grid import CaseSpec
from harness.config.errors import UserError
from harness.gate.kernels import kernel_digest
from harness.gate.latency.clocks import clock_state
from harness.gate.latency.interleaving import Round, interleaved
from harness.gate.latency.record import latency_name
from harness.gate.measured import Measured

if TYPE_CHECKING:
    import torch

    from paged_kernels.providers import Case, Provider

Say = Callable[[str], None]


def measure_on_gpu(say: Say = lambda line: None) -> Measured:
    """Time every case of the preset `gate`; a case that fails is left out, which the coverage rule turns into a fail.

    Raises:
        UserError: this machine has no CUDA device that torch can use.
    """
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "the latency layer needs a CUDA device; judge a recorded run with gate --record FILE, "
            "or run the layers that need none: gate --layer resource --layer policy"
        )
    from harness.bench.kernels.presets import gate

    return measure(gate(), torch.device("cuda"), torch.cuda.get_device_name(), say)


def measure(specs: list[CaseSpec], device: "torch.device", device_name: str, say: Say) -> Measured:
    """Time cases on any device, one after the other."""
    cases: dict[str, Any] = {}
    remarks = []
    for spec in specs:
        say(spec.name)
        try:
            cases |= dict(_timed(spec, device))
        except (
            Exception
        ) as error:  # its absence from the cases fails the gate; the others are still worth having
            remarks.append(f"{spec.name} was not timed: {type(error).__name__}: {str(error)[:300]}")
    return Measured(
        layer="latency",
        name=latency_name(device_name),
        made_on={"device": device_name, **_versions("torch", "triton")},
        kernels=kernel_digest(),
        cases=cases,
        environment={"clocks": asdict(clock_state())},
        remarks=tuple(remarks),
    )


def _timed(spec: CaseSpec, device: "torch.device") -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, ratios by round) of one case for every yardstick."""
    from harness.bench.kernels.clock import cache_bytes, copies_past_cache
    from harness.bench.kernels.inputs import build
    from harness.bench.kernels.names import CONTIGUOUS, OURS, SDPA
    from paged_kernels.providers import find_providers

    count = copies_past_cache(spec.kv_bytes, cache_bytes(device))
    inputs = [build(spec, device, seed) for seed in range(count)]
    known = find_providers()
    kernel = _provider_round(known[OURS], inputs, device)
    whole = CONTIGUOUS if spec.queries == 1 else SDPA  # the twin is of the decode kernel
    plain = "copy" if spec.queries == 1 else "matmul"
    yardsticks = {whole: _provider_round(known[whole], inputs, device), plain: _plain_round(inputs, device)}
    before = clock_state()
    ratios = interleaved(kernel, yardsticks)
    doubts = sorted({*before.doubtful, *clock_state().doubtful})
    for name, rounds in ratios.items():
        yield (
            f"{spec.name} / {name}",
            {"ratios": rounds} | ({"throttled": ", ".join(doubts)} if doubts else {}),
        )


def _provider_round(provider: "Provider", inputs: "list[Case]", device: "torch.device") -> Round:
    """Rounds of one provider, whose output must be right first.

    Raises:
        DisagreementError: it is not.
    """
    from harness.bench.kernels.agreement import checked_runs
    from harness.bench.kernels.clock import prepare_rounds

    runs, _ = checked_runs(provider, inputs)
    return prepare_rounds(runs, device, capturable=provider.capturable).round


def _plain_round(inputs: "list[Case]", device: "torch.device") -> Round:
    """A copy of the bytes that a decode moves, or a matrix product of the operations that a prefill needs."""
    from harness.bench.kernels.ceilings import copy_of, product_of
    from harness.bench.kernels.clock import prepare_rounds

    case = inputs[0]
    if case.decode:
        runs = [copy_of(case.distinct_kv_bytes + case.io_bytes, device) for _ in inputs]
    else:
        runs = [product_of(case.flops, device)]
    return prepare_rounds(runs, device, capturable=True).round


def _versions(*packages: str) -> dict[str, str]:
    from importlib.metadata import version

    return {package: version(package) for package in packages}
