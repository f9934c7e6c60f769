"""The resource layer: every kernel configuration, compiled for every architecture that it is meant for."""

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from harness.gate.baseline import Baseline
from harness.gate.finding import Finding, LayerResult, Verdict
from harness.gate.kernels import kernel_digest
from harness.gate.measured import Measured, coverage
from harness.gate.resource.compiling import Resources, refuse_interpreter, resources
from harness.gate.resource.rules import broken
from harness.gate.resource.rules import judge as judge_one
from harness.gate.settings import GateSettings, default_settings

if TYPE_CHECKING:
    from paged_kernels.triton.configurations import KernelConfiguration

_UNCOMPILED = "error"  # the key under which a case keeps the compiler's refusal


def case_names() -> list[str]:
    """Every configuration with every architecture that it is meant for."""
    return [_name(key, arch) for key, arch in _pairs()]


def measure() -> Measured:
    """Compile all configurations of `paged_kernels`, several at a time, and read their resources.

    Raises:
        UserError: kernels were asked to run in the interpreter.
    """
    refuse_interpreter()
    pairs = _pairs()
    # spawned, so that every compiler starts afresh: a fork would share what torch and Triton keep open
    with ProcessPoolExecutor(os.cpu_count() or 1, multiprocessing.get_context("spawn")) as pool:
        return measured(dict(pool.map(_measure, pairs, chunksize=4)))


def measured(cases: dict[str, dict[str, Any]]) -> Measured:
    """The layer's value for resources by case."""
    from importlib.metadata import version

    triton = version("triton")
    return Measured("resource", f"resource-triton-{triton}", {"triton": triton}, kernel_digest(), cases)


def case_of(configuration: "KernelConfiguration", capability: int) -> tuple[str, dict[str, Any]]:
    """(name, resources or the compiler's refusal) of one compiled kernel."""
    name = _name(configuration.key, capability)
    try:
        return name, asdict(resources(configuration, capability))
    except (
        Exception
    ) as error:  # whatever the compiler raises is this case's finding, and no end of the others
        return name, {_UNCOMPILED: _in_one_line(error)}


def judge(now: Measured, baseline: Baseline, settings: GateSettings | None = None) -> LayerResult:
    """Compare with a baseline of the same Triton version; another version compiles other code.

    Returns a single inconclusive finding for a baseline of another version.
    """
    made_on = f"Triton {now.made_on['triton']}, {len(now.cases)} compiled kernels; nothing was timed"
    if baseline.made_on != now.made_on:
        reason = (
            f"the baseline is of Triton {baseline.made_on.get('triton')}: other compilers make other code"
        )
        return LayerResult("resource", (Finding("resource", Verdict.inconclusive, reason),), made_on)
    more = (settings or default_settings()).resource.more_instructions
    return LayerResult("resource", (*coverage(now, baseline), *_compared(now, baseline, more)), made_on)


def unfit(now: Measured, settings: GateSettings | None = None) -> Iterator[str]:
    """Why these figures must not become a baseline: what does not compile, spills or cannot launch."""
    del settings  # no margin excuses these
    for name, values in now.cases.items():
        if _UNCOMPILED in values:
            yield f"{name} does not compile: {values[_UNCOMPILED]}"
        else:
            yield from (f"{name}: {wrong}" for wrong in broken(_capability(name), Resources(**values)))


def _compared(now: Measured, baseline: Baseline, more: float) -> Iterable[Finding]:
    for name in sorted(set(now.cases) & set(baseline.cases)):
        values = now.cases[name]
        if _UNCOMPILED in values:
            yield Finding(name, Verdict.regressed, f"does not compile: {values[_UNCOMPILED]}")
        else:
            before = Resources(**baseline.cases[name])
            yield judge_one(name, _capability(name), Resources(**values), before, more)


def _capability(name: str) -> int:
    return int(name.rpartition("sm_")[2])


def _in_one_line(error: BaseException) -> str:
    """The compiler's message; what caused it says more than the excerpt of the source that it points into."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"


def _pairs() -> list[tuple[str, int]]:
    return [(one.key, arch) for one in _configurations() for arch in one.capabilities]


def _name(key: str, capability: int) -> str:
    return f"{key} sm_{capability}"


def _measure(pair: tuple[str, int]) -> tuple[str, dict[str, Any]]:
    key, capability = pair
    found = next(one for one in _configurations() if one.key == key)
    return case_of(found, capability)


def _configurations() -> "list[KernelConfiguration]":
    from paged_kernels.triton.configurations import kernel_configurations

    return list(kernel_configurations())
