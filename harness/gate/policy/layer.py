"""The policy layer: CPU time of the policy's work as a multiple of a loop timed in the same rounds."""

import gc
import platform
import time
from collections.abc import Callable, Iterator

from harness.gate.baseline import Baseline
from harness.gate.effect import Margins, effect
from harness.gate.finding import Finding, LayerResult, Verdict
from harness.gate.measured import Measured, coverage
from harness.gate.settings import GateSettings, default_settings

ROUNDS, MOST_ROUNDS = 20, 80
SETTLED = 1 / 6  # bounds of a ratio so close are close enough

Work = Callable[[], object]


ATTENTION = "CPU attention: decode over paged KV"


def case_names() -> list[str]:
    """The loads, and attention on the CPU."""
    from harness.gate.policy.loads import loads

    return [*loads(), ATTENTION]


def measure() -> Measured:
    """Time every load, and attention on the CPU."""
    from harness.gate.policy.attention import attention_pair
    from harness.gate.policy.loads import loads
    from harness.gate.policy.yardstick import reference_loop

    cases = {name: {"ratios": rounds(load.run, reference_loop)} for name, load in loads().items()}
    cases[ATTENTION] = {"ratios": rounds(*attention_pair())}
    python = ".".join(platform.python_version_tuple()[:2])
    return Measured("policy", f"policy-python-{python}", {"python": python}, None, cases)


def margins_of(case: str, settings: GateSettings | None = None) -> Margins:
    """How much slower a case may be."""
    chosen = settings or default_settings()
    return chosen.attention if case == ATTENTION else chosen.policy


def rounds(work: Work, yardstick: Work) -> list[float]:
    """Ratios of CPU time, work to yardstick, one a round; as many rounds as their spread asks for.

    Each round runs both twice, in the order A B B A, and takes the faster run of each: what other processes do to the
    caches only ever costs time. CPU time, so that waiting costs nothing.
    """
    work(), yardstick()
    found: list[float] = []
    gc.collect()
    gc.freeze()  # what is there already need not be walked through again and again
    gc.disable()  # a collection that one side triggers would be paid by the other
    try:
        while len(found) < MOST_ROUNDS and not (
            len(found) >= ROUNDS and len(found) % 10 == 0 and _settled(found)
        ):
            first, second, third, fourth = (_seconds(it) for it in (work, yardstick, yardstick, work))
            found.append(round(min(first, fourth) / min(second, third), 5))
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return found


def _settled(found: list[float]) -> bool:
    """Whether more rounds would tell little more; looks at their spread alone."""
    bounds = effect(found, found)
    return bounds.upper - bounds.lower < SETTLED


def judge(now: Measured, baseline: Baseline, settings: GateSettings | None = None) -> LayerResult:
    """Compare with a baseline of the same Python; another interpreter speeds loops and calls up differently."""
    made_on = f"Python {now.made_on['python']}, {len(now.cases)} ratios"
    if baseline.made_on != now.made_on:
        reason = f"the baseline is of Python {baseline.made_on.get('python')}"
        return LayerResult("policy", (Finding("policy", Verdict.inconclusive, reason),), made_on)
    compared = (
        _compare(case, now, baseline, settings) for case in sorted(set(now.cases) & set(baseline.cases))
    )
    return LayerResult("policy", (*coverage(now, baseline), *compared), made_on)


def unfit(now: Measured, settings: GateSettings | None = None) -> Iterator[str]:
    """Why these figures must not become a baseline: rounds so far apart that no later run could pass."""
    for case, values in now.cases.items():
        found = effect(values["ratios"], values["ratios"])
        if found.upper - found.lower > margins_of(case, settings).widest:
            yield f"{case}: too much noise ({found}); try again on a quieter machine"


def _compare(case: str, now: Measured, baseline: Baseline, settings: GateSettings | None) -> Finding:
    found = effect(now.cases[case]["ratios"], baseline.cases[case]["ratios"])
    return Finding(case, found.verdict(margins_of(case, settings)), f"{found}")


def _seconds(work: Work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
