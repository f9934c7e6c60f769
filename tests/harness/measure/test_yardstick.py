"""The yardstick: the pace beside a step, from readings of a clock that the tests drive."""

from collections.abc import Iterator, Mapping
from itertools import count, repeat

import pytest

from engine.core.plan import StepPlan, StepResult
from engine.runtime.runner import StepTimes
from harness.measure.executor import (
    READ_EVERY_S,
    WINDOW,
    MeasuredExecutor,
    Reading,
    Yardstick,
    middle,
    pace_of,
)
from harness.measure.yardstick import FixedWork
from harness.replay.features import FeatureMeter

ALIKE = Reading(1e-4, 1e-4, 1e-4)
READ = READ_EVERY_S  # a step after which the yardstick is read


class Work:
    """Each part of a reading takes 0.1 ms times the next of `slowness`."""

    def __init__(self, slowness: Iterator[float]) -> None:
        self._slowness = slowness

    def __call__(self) -> Reading:
        return Reading(*(1e-4 * next(self._slowness) for _ in range(3)))


def readings(*slowness: float) -> Iterator[float]:
    """The same slowness for the three parts of each reading; the last one goes on."""
    for value in slowness:
        yield from repeat(value, 3)
    yield from repeat(slowness[-1])


def test_a_core_as_fast_as_at_the_reference_has_pace_one() -> None:
    assert Yardstick(Work(repeat(1.0)), ALIKE).pace_after(READ) == pytest.approx(1.0)


def test_a_core_at_half_its_speed_has_pace_two() -> None:
    assert Yardstick(Work(repeat(2.0)), ALIKE).pace_after(READ) == pytest.approx(2.0)


def test_parts_that_are_slowed_down_differently_count_alike() -> None:
    assert pace_of(Reading(1e-4, 2e-4, 1e-4), ALIKE) == pytest.approx(4 / 3)


def test_without_a_reference_the_pace_is_relative_to_the_first_readings() -> None:
    yardstick = Yardstick(Work(readings(*[3.0] * WINDOW, 6.0)))
    paces = [yardstick.pace_after(READ) for _ in range(2 * WINDOW)]
    assert paces[:WINDOW] == pytest.approx([1.0] * WINDOW)
    assert paces[-1] == pytest.approx(2.0)


def test_the_work_takes_time_in_each_of_its_parts() -> None:
    ticks = count()
    assert FixedWork(lambda: float(next(ticks))).seconds() == (1.0, 1.0, 1.0)


def test_one_interrupted_reading_does_not_change_the_pace() -> None:
    yardstick = Yardstick(Work(readings(*[1.0] * WINDOW, 50.0, 1.0)), ALIKE)
    paces = [yardstick.pace_after(READ) for _ in range(2 * WINDOW)]
    assert paces == pytest.approx([1.0] * (2 * WINDOW))


def test_the_pace_follows_a_lasting_change_within_its_window() -> None:
    yardstick = Yardstick(Work(readings(*[1.0] * WINDOW, 1.5)), ALIKE)
    paces = [yardstick.pace_after(READ) for _ in range(2 * WINDOW)]
    assert paces[WINDOW - 1] == pytest.approx(1.0)
    assert paces[-1] == pytest.approx(1.5)


def test_short_steps_share_a_reading() -> None:
    yardstick = Yardstick(Work(repeat(1.0)), ALIKE)
    for _ in range(11):
        yardstick.pace_after(READ / 5)
    assert len(yardstick.readings) == 3  # after the first step, and after 5 more each


def test_the_reading_of_a_run_is_the_median_of_each_part() -> None:
    assert middle([Reading(1, 5, 9), Reading(2, 4, 7), Reading(30, 6, 8)]) == Reading(2, 5, 8)


class Still:
    """An engine whose steps take as long as they say."""

    def __init__(self, clock: "Ticking", seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def execute(self, plan: object) -> tuple[StepResult, StepTimes]:
        self._clock.now += self._seconds
        return StepResult(), StepTimes(
            build_s=0.0, forward_s=self._seconds, attention_s=0.25 * self._seconds, sample_s=0.0, audit_s=0.0
        )


class Ticking:
    """A clock that only the engine moves on."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def timed(pace: float | None) -> tuple[float, float, Mapping[str, float]]:
    """Seconds, attention seconds and phases of a step of 0.5 s beside a core of this pace."""
    clock = Ticking()
    yardstick = Yardstick(Work(repeat(pace)), ALIKE) if pace else None
    executor = MeasuredExecutor(Still(clock, 0.5), clock, FeatureMeter({}, 16), yardstick)  # type: ignore[arg-type]
    executor.begin()
    executor.execute(StepPlan(0, []), None)
    timing = executor.end()
    return timing.ns[0] / 1e9, timing.attention_s[0], timing.phases


def test_all_times_of_a_step_are_divided_by_the_pace_beside_it() -> None:
    seconds, attention_s, phases = timed(1.25)
    assert seconds == pytest.approx(0.4)
    assert attention_s == pytest.approx(0.1)
    assert phases["forward_s"] == pytest.approx(0.4)
    assert phases["pace"] == pytest.approx(1.25)


def test_without_a_yardstick_times_are_the_clock_s_own() -> None:
    seconds, attention_s, phases = timed(None)
    assert seconds == pytest.approx(0.5)
    assert attention_s == pytest.approx(0.125)
    assert "pace" not in phases
