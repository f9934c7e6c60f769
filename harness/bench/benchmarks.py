"""The benchmarks of `bench kernels`: the device's ceilings first, then every case with every provider.

pytest-benchmark runs this file. If a provider cannot serve a case, or its output is wrong, the reason is noted and only
this case is left out: on a rented GPU the other figures are worth keeping.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.bench import calls
from harness.bench.cases import KernelCase
from harness.bench.results import Problem, ProblemKind, kind_of, note, read_problems, read_settings, shortened
from harness.cost.timings import OURS
from paged_kernels.case import exact_output
from paged_kernels.providers import Case, find_providers

MOST_FAILURES = 2  # of one provider, after which it is not tried again in this run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each ceiling, and one for each case and provider. Tests of the same case are neighbours."""
    chosen = read_settings()
    if "ceiling" in metafunc.fixturenames:
        metafunc.parametrize("ceiling", ["copy", "read", "matmul"])
    if "provider" in metafunc.fixturenames:
        specs = [KernelCase(**values) for values in chosen["cases"]]
        pairs = [(spec, name) for spec in specs for name in chosen["providers"]]
        metafunc.parametrize(("spec", "provider"), pairs, ids=[f"{spec.name}|{name}" for spec, name in pairs])


@pytest.fixture(scope="session")
def settings() -> dict[str, Any]:
    """The caller's settings."""
    return read_settings()


@pytest.fixture(scope="session")
def device(settings: dict[str, Any]) -> torch.device:
    """The device of the session."""
    if settings["device"] == "cpu":
        torch.set_num_threads(settings["threads"])
    return torch.device(settings["device"])


@pytest.fixture(scope="session")
def built(device: torch.device) -> "Inputs":
    """The inputs of the present case. Those of the last case are freed first."""
    return Inputs(device)


class Inputs:
    """Input sets of one case, and its exact output."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spec: KernelCase | None = None
        self.cases: list[Case] = []
        self.exact: torch.Tensor | None = None

    def of(self, spec: KernelCase) -> list[Case]:
        """The input sets of a case: enough that together they exceed the cache."""
        if spec != self._spec:
            self._spec, self.cases, self.exact = spec, [], None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # what the last case's graphs held
            count = calls.copies_past_cache(spec.distinct_kv_bytes, calls.cache_bytes(self.device))
            self.cases = [calls.build(spec, self.device, seed) for seed in range(count)]
            self.exact = exact_output(self.cases[0])
        return self.cases


def test_ceiling(benchmark: Any, settings: dict[str, Any], device: torch.device, ceiling: str) -> None:
    """Time one ceiling: the most that the device can do, measured in the same run."""
    one = next(found for found in calls.ceilings(device) if found.name == ceiling)
    rounds = calls.prepare_rounds([one.run], device, capturable=True)
    benchmark.group = "ceiling"
    benchmark.extra_info.update(bytes=one.moved_bytes, flops=one.flops, how=rounds.how)
    benchmark.pedantic(
        lambda: calls.CLOCK.advance(rounds.round()), rounds=settings["rounds"], warmup_rounds=2
    )


def test_attention(
    benchmark: Any,
    settings: dict[str, Any],
    device: torch.device,
    built: Inputs,
    spec: KernelCase,
    provider: str,
) -> None:
    """One case by one provider. Its output is checked first, then its time is measured."""
    found = find_providers(settings["user_function"])[provider]
    sys.stderr.write(f"\r\x1b[K{spec.name} {provider}" if sys.stderr.isatty() else "")
    _skip_if_late(spec.name, provider, settings["until"], Path(settings["problems"]))
    _skip_if_hopeless(spec.name, provider, Path(settings["problems"]))
    with _noting(spec.name, provider, Path(settings["problems"])):
        cases = built.of(spec)
        runs, error = calls.checked_runs(found, cases, built.exact)
        rounds = calls.prepare_rounds(runs, device, capturable=found.capturable)
        case = cases[0]
        benchmark.group = spec.name
        benchmark.extra_info.update(
            case=spec.values(),
            provider=provider,
            error=error,
            how=rounds.how,
            input_sets=len(cases),
            bytes=case.distinct_kv_bytes + case.io_bytes,
            flat_bytes=case.kv_bytes + case.io_bytes,
            flops=case.flops,
        )
        benchmark.pedantic(
            lambda: calls.CLOCK.advance(rounds.round()), rounds=settings["rounds"], warmup_rounds=2
        )


def _skip_if_late(case: str, provider: str, until: float | None, file: Path) -> None:
    """Skip the rest of the grid once the time is over. Cases that were timed stay."""
    if until is not None and time.time() > until:
        note(file, Problem(case, provider, ProblemKind.unsupported, "the time was over (--seconds)"))
        pytest.skip("the time was over")


def _skip_if_hopeless(case: str, provider: str, file: Path) -> None:
    """Skip a provider that failed several times, and note it: each attempt may compile for seconds.

    Our own provider is never skipped: the run is about it, and its other cases are still useful.
    """
    mine = [one.kind for one in read_problems(file) if one.provider == provider]
    if provider != OURS and (failed := mine.count(ProblemKind.failed)) >= MOST_FAILURES:
        reason = f"not tried, since it failed {failed} times"
        note(file, Problem(case, provider, ProblemKind.unsupported, reason))
        pytest.skip(reason)


@contextmanager
def _noting(case: str, provider: str, file: Path) -> Iterator[None]:
    """Turn any error of a provider into a note and a skipped benchmark."""
    try:
        yield
    except Exception as error:
        kind = kind_of(error)
        note(file, Problem(case, provider, kind, f"{type(error).__name__}: {shortened(str(error))}"))
        pytest.skip(f"{kind}: {error}")
