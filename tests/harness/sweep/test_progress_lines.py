"""Where no line can be redrawn, each tenth of the work has a line, with what is left."""

import io
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from harness import console
from harness.config.schema import RunConfig, WorkloadConfig
from harness.sweep.progress import (
    Failed,
    LiveReporter,
    PlainReporter,
    TimeFit,
    TimeLeft,
    TimeModel,
    duration,
    reporting,
)

CONFIG = RunConfig(measure=False, workload=WorkloadConfig(num_requests=10))
POINT: Any = SimpleNamespace(label="cache.block_size=8", config=CONFIG, fingerprint="8")
UNKNOWN = TimeModel({}, 0)
FIVE_SECONDS = TimeModel({(False,): TimeFit(5.0, 0.0, None, 9, 1)}, 9)


def left(points: int, times: TimeModel = UNKNOWN, workers: int = 1, shown: Sequence[float] = ()) -> TimeLeft:
    """The time left of a sweep of `points` equal points, by a clock that shows these times."""
    clock = iter(shown).__next__ if shown else time.monotonic
    return TimeLeft(times, [POINT] * points, workers, clock)


def screen(**options: Any) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200, **options), text


def lines(points: int, ended: int, times: TimeModel = UNKNOWN, *, clock: Sequence[float] = ()) -> list[str]:
    """What a sweep of equal points prints while the first of them end."""
    where, text = screen()
    reporter = PlainReporter(points, 0, where, left(points, times, shown=clock))
    for _ in range(ended):
        reporter.starts(POINT)
        reporter.ends(POINT, None)
    return text.getvalue().splitlines()


def test_a_log_has_a_line_for_each_tenth() -> None:
    found = [line.partition(",")[0] for line in lines(200, 200)]
    assert found == [f"[{20 * tenth or 1}/200] {10 * tenth} % of the work done" for tenth in range(11)]


def test_where_earlier_points_tell_the_first_line_is_an_estimate_from_the_start() -> None:
    assert lines(100, 1, FIVE_SECONDS)[0] == "[0/100] 0 % of the work done, about 8 min left"


def test_a_calibration_has_tenths_of_its_own_an_estimate_and_no_label_of_a_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(0, 1000, 2)).__next__
    monkeypatch.setattr("harness.sweep.progress.time", SimpleNamespace(monotonic=clock))
    where, text = screen()
    reporter = PlainReporter(4, 0, where, left(4))
    for done in range(41):
        reporter.request(f"calibrating: case {done}", done, 40)
    found = text.getvalue().splitlines()
    assert found[:2] == [
        "calibrating the cost model: 0 of 40 cases, about 60 s left",
        "calibrating the cost model: 4 of 40 cases, about 18 s left",
    ]
    assert len(found) == 11


def test_a_failure_has_a_line_with_its_point() -> None:
    where, text = screen()
    PlainReporter(4, 1, where, left(3)).ends(POINT, Failed("cache.block_size=8", "no memory", Path("x")))
    assert text.getvalue().splitlines()[0] == "[2/4] cache.block_size=8  FAILED: no memory"


def test_a_run_of_an_open_point_shortens_the_time_left() -> None:
    measured: Any = SimpleNamespace(label="", fingerprint="m", config=replace(CONFIG, measure=True))
    clock = iter([0.0, 90.0, 100.0, 100.0, 120.0, 120.0]).__next__
    rest = TimeLeft(UNKNOWN, [measured, measured], 1, clock)
    rest.ran(measured)  # it is ready, after a calibration that is not taken for the speed of the runs
    assert rest.seconds() is None
    rest.ran(measured)  # one run of the three of one point of two took 10 s: five are left
    assert rest.seconds() == pytest.approx(50.0)
    rest.ended(measured)  # its three took 30 s
    assert rest.seconds() == pytest.approx(30.0)


def test_the_time_left_follows_from_the_points_that_ended() -> None:
    found = lines(31, 1, clock=[0.0, 100.0, *[100.0] * 9])
    assert found == ["[1/31] 0 % of the work done, about 50 min left"]


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    where, _ = screen(force_terminal=True)
    with reporting(2, 0, where, left(2)) as reporter:
        assert isinstance(reporter, PlainReporter)


def test_a_terminal_gets_a_line_that_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    where, _ = screen(force_terminal=True)
    with reporting(2, 0, where, left(2)) as reporter:
        assert isinstance(reporter, LiveReporter)


def test_planning_many_points_says_so_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for done in range(1, 2001):
        console.planning(done, 2000)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["planning: 1 of 2,000 points", "planning: 200 of 2,000 points"]
    assert len(lines) == 11


def test_planning_a_few_points_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    console.planning(1, 9)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("seconds", "said"), [(40, "40 s"), (300, "5 min"), (11520, "3.2 h")])
def test_a_duration_is_said_in_the_unit_that_fits(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_before_any_point_ended_the_time_left_is_what_earlier_points_took() -> None:
    assert left(10, FIVE_SECONDS, workers=2, shown=[0.0, 0.0]).seconds() == pytest.approx(25.0)


def test_the_time_left_follows_this_sweep_when_it_goes_at_another_speed() -> None:
    found = left(100, FIVE_SECONDS, shown=[0.0, *(10.0 * done for done in range(1, 51)), 500.0])
    for _ in range(50):
        found.ended(POINT)
    assert found.seconds() == pytest.approx(50 * 10, rel=0.05)


def test_the_time_left_runs_down_while_a_point_runs() -> None:
    assert left(10, FIVE_SECONDS, shown=[0.0, 20.0]).seconds() == pytest.approx(30.0)


def test_an_unknown_time_is_not_guessed() -> None:
    assert left(10).seconds() is None
