"""The yardstick: the pace beside a step, from readings of a clock that the tests drive."""

from collections.abc import Iterator, Mapping
from itertools import count, repeat

import pytest

from engine.core.plan import Row, StepPlan, StepResult
from engine.runtime.runner import StepTimes
from harness.measure.executor import (
    READ_EVERY_S,
    WINDOW,
    MeasuredExecutor,
    Reading,
    Yardstick,
    is_cold,
)
from harness.measure.yardstick import FixedWork
from harness.replay.features import FeatureMeter

ALIKE = (1e-4, 1e-4, 1e-4)
READ = READ_EVERY_S  # a step after which the yardstick is read


class Work:
    """Each part of a reading takes 0.1 ms times the next of `slowness`."""

    def __init__(self, slowness: Iterator[float]) -> None:
        self._slowness = slowness

    def __call__(self) -> Reading:
        return tuple(1e-4 * next(self._slowness) for _ in range(3))


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
    assert Yardstick(lambda: (1e-4, 2e-4, 1e-4), ALIKE).pace_after(READ) == pytest.approx(4 / 3)


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
    taken = count(1)
    yardstick = Yardstick(lambda: (1e-4 * next(taken),) * 3, ALIKE)
    paces = [yardstick.pace_after(READ / 5) for _ in range(11)]
    assert paces == pytest.approx(
        [1.0] * 5 + [1.5] * 5 + [2.0]
    )  # after the first step, and after 5 more each


def test_the_reading_of_a_run_is_the_median_of_each_part() -> None:
    found = iter([(1.0, 5.0, 9.0), (2.0, 4.0, 7.0), (30.0, 6.0, 8.0), (90.0, 91.0, 92.0)])
    yardstick = Yardstick(lambda: next(found))
    for cold in (False, False, False, True):
        yardstick.pace_after(READ, cold)
    assert yardstick.reading == (2, 5, 8, 90, 91, 92)


def test_cold_caches_after_a_large_prefill_are_no_pace() -> None:
    """The yardstick takes 1.8 times as long right after one, then 1.4 times for a while, as on a quiet machine."""
    cold = ALIKE + tuple(1.8 * part for part in ALIKE)
    for reference in (cold, ALIKE):
        slow = iter([1.0, 1.8, 1.0] * 9)
        yardstick = Yardstick(lambda slow=slow: (1e-4 * next(slow),) * 3, reference)  # type: ignore[misc]
        paces = [yardstick.pace_after(READ, state) for state in (False, True, None, None, False) * 9]
        assert paces == pytest.approx([1.0] * len(paces))


def test_a_step_is_cold_after_many_tokens_and_unread_until_caches_are_warm() -> None:
    meter = FeatureMeter({}, 16)
    large, small = (StepPlan(0, [Row(0, 0, 0, tokens, True, range(40), 0)]) for tokens in (300, 1))
    states = [is_cold(meter.single(plan, {})) for plan in (small, large, *[small] * 7)]
    assert states == [False, True, *[None] * 5, False, False]


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
