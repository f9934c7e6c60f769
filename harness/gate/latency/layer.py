"""The latency layer: our kernels on a GPU, as ratios to yardsticks timed in the same rounds.

Two yardsticks: a copy of as many bytes as the call has to move, which says how close to the memory's speed it is, and
contiguous attention of the same shape, which says what paging costs. Each has its own finding for every case.
"""

from collections.abc import Iterator
from typing import Any

from harness.gate.baseline import Baseline
from harness.gate.effect import Effect, effect
from harness.gate.finding import Finding, LayerResult, Verdict
from harness.gate.measured import Measured, coverage
from harness.gate.settings import GateSettings, default_settings


def case_names() -> list[str]:
    """The attention calls that are timed; each gives a ratio to every yardstick."""
    from harness.bench.kernels.presets import gate

    return [spec.name for spec in gate()]


def measure() -> Measured:
    """Time the gate's cases on this machine's GPU.

    Raises:
        UserError: there is none.
    """
    from harness.gate.latency.measuring import measure_on_gpu

    return measure_on_gpu()


def judge(now: Measured, baseline: Baseline, settings: GateSettings | None = None) -> LayerResult:
    """Compare with a baseline of the same device and the same yardsticks, by the margins `latency`.

    Returns a single inconclusive finding where they differ: another device, or another version of what the yardsticks
    are made of.
    """
    made_on = f"{now.made_on['device']}, {len(now.cases)} ratios"
    different = [key for key in now.made_on if now.made_on[key] != baseline.made_on.get(key)]
    if different:
        pairs = "; ".join(f"{key} {baseline.made_on.get(key)} → {now.made_on[key]}" for key in different)
        reason = f"the baseline was made elsewhere ({pairs}); ratios of the two say nothing about our kernels"
        return LayerResult(
            "latency", (Finding("latency", Verdict.inconclusive, reason),), made_on, now.remarks
        )
    effects = {case: _effect(now, baseline, case) for case in sorted(set(now.cases) & set(baseline.cases))}
    margins = (settings or default_settings()).latency
    compared = [Finding(case, found.verdict(margins), str(found)) for case, found in effects.items()]
    findings = (*_throttled(now), *coverage(now, baseline), *compared)
    return LayerResult("latency", findings, made_on, (*now.remarks, *_worst(effects)))


def unfit(now: Measured, settings: GateSettings | None = None) -> Iterator[str]:
    """Why these figures must not become a baseline: skipped cases, a throttled device, or too much noise."""
    yield from (finding.reason for finding in _throttled(now))
    widest = (settings or default_settings()).latency.widest
    for case, values in now.cases.items():
        found = effect(values["ratios"], values["ratios"])
        if found.upper - found.lower > widest:
            yield f"{case}: too much noise ({found})"


def _effect(now: Measured, baseline: Baseline, case: str) -> Effect:
    return effect(now.cases[case]["ratios"], baseline.cases[case]["ratios"])


def _throttled(now: Measured) -> Iterator[Finding]:
    """A device that slowed down under the measurement makes every ratio doubtful, a good one too."""
    for case, values in now.cases.items():
        if values.get("throttled"):
            reason = f"the device slowed down while this was timed: {values['throttled']}"
            yield Finding(case, Verdict.inconclusive, reason)


def _worst(effects: dict[str, Any]) -> Iterator[str]:
    """The case that lost most, named even where all pass; nothing is averaged away."""
    if effects:
        case = max(effects, key=lambda name: effects[name].ratio)
        yield f"worst case: {case}, {effects[case]}"
