"""The policy gate: what it times does what it says, equal work passes, more work is found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.gate.findings import GateVerdict, Measured, new_baseline
from harness.gate.policy import (
    case_names,
    judge,
    loads,
    reference_loop,
    rounds,
    unfit,
)

PYTHON = {"python": "3.11"}


class Clock:
    """CPU time as the work tells it, with noise; now and then a run is disturbed and takes half as long again."""

    def __init__(self) -> None:
        self.now, self._draw = 0.0, np.random.default_rng(0)

    def process_time(self) -> float:
        return self.now

    def work(self, amount: int) -> Callable[[], None]:
        def run() -> None:
            disturbed = 1.5 if self._draw.random() < 0.1 else 1.0
            self.now += amount * 1e-5 * disturbed * np.exp(0.01 * abs(self._draw.standard_normal()))

        return run


@pytest.fixture(name="work")
def work_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Callable[[], None]]:
    """Makes work of a given amount."""
    clock = Clock()
    monkeypatch.setattr("harness.gate.policy.time", clock)
    return clock.work


def run_of(**cases: list[float]) -> Measured:
    found = {name: {"ratios": ratios} for name, ratios in cases.items()}
    return Measured("policy", "policy-python-3.11", PYTHON, None, found)


def spread(level: float, noise: float = 0.03) -> list[float]:
    return list(level * np.exp(noise * np.random.default_rng(0).standard_normal(30)))


def test_equal_work_passes(work: Any) -> None:
    before, now = (run_of(loop=rounds(work(30), work(20))) for _ in range(2))
    assert judge(now, new_baseline(before, "test")).verdict is GateVerdict.passed


def test_twice_the_work_is_found(work: Any) -> None:
    before, now = (run_of(loop=rounds(work(amount), work(20))) for amount in (30, 60))
    assert judge(now, new_baseline(before, "test")).verdict is GateVerdict.regressed


def test_two_thirds_more_is_found_for_the_scheduler() -> None:
    before, now = (run_of(scheduler=spread(level)) for level in (1.0, 1.65))
    assert judge(now, new_baseline(before, "test")).verdict is GateVerdict.regressed


def test_another_python_is_no_comparison() -> None:
    before = run_of(loop=spread(1.0))
    now = replace(before, made_on={"python": "3.12"})
    assert judge(now, new_baseline(before, "test")).verdict is GateVerdict.inconclusive


def test_figures_that_no_later_run_could_match_become_no_baseline() -> None:
    assert list(unfit(run_of(loop=spread(1.0)))) == []
    assert len(list(unfit(run_of(loop=spread(1.0, noise=0.8))))) == 1


@pytest.mark.parametrize("name", loads())
def test_a_load_takes_the_same_steps_every_time(name: str) -> None:
    load = loads()[name]
    assert load.run() == load.run() >= 10


def test_the_yardstick_is_what_every_baseline_was_measured_by() -> None:
    assert reference_loop() == 1_260_800


def test_every_case_has_a_name_of_its_own() -> None:
    assert len(set(case_names())) == len(case_names()) == len(loads())
