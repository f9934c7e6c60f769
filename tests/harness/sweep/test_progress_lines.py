"""Where no line can be redrawn, each stage and each point has a line of its own, with what is left."""

import io
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from harness import console
from harness.config.schema import RunConfig, WorkloadConfig
from harness.sweep.progress import (
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


def test_each_stage_of_a_point_has_one_line() -> None:
    where, text = screen()
    reporter = PlainReporter(4, 1, where, left(3))
    reporter.starts(POINT)
    for done in range(3):
        reporter.request("calibrating: lone requests", done, 40)
    for done in range(3):
        reporter.request("measuring, run 1 of 3", done, 64)
    reporter.ends(POINT, None)
    assert text.getvalue().splitlines() == [
        "[2/4] cache.block_size=8  calibrating: lone requests, 0 of 40",
        "[2/4] cache.block_size=8  measuring, run 1 of 3, 0 of 64",
        "[2/4] cache.block_size=8  done",
    ]


def test_a_point_that_goes_on_after_others_keeps_its_number() -> None:
    other: Any = SimpleNamespace(label="cache.block_size=16", config=CONFIG, fingerprint="16")
    where, text = screen()
    reporter = PlainReporter(4, 1, where, left(3))
    for number in (1, 2):
        for point in (POINT, other):
            reporter.starts(point)
            reporter.request(f"measuring, run {number} of 2", 0, 64)
            reporter.ran(point)
    assert text.getvalue().splitlines() == [
        "[2/4] cache.block_size=8  measuring, run 1 of 2, 0 of 64",
        "[3/4] cache.block_size=16  measuring, run 1 of 2, 0 of 64",
        "[2/4] cache.block_size=8  measuring, run 2 of 2, 0 of 64",
        "[3/4] cache.block_size=16  measuring, run 2 of 2, 0 of 64",
    ]


def test_a_run_of_an_open_point_shortens_the_time_left() -> None:
    measured: Any = SimpleNamespace(label="", fingerprint="m", config=replace(CONFIG, measure=True))
    clock = iter([0.0, 10.0, 10.0, 30.0, 30.0]).__next__
    rest = TimeLeft(UNKNOWN, [measured, measured], 1, clock)
    rest.ran(measured)  # it is ready
    assert rest.seconds() is None
    rest.ran(measured)  # one run of the three of one point of two took 10 s: five are left
    assert rest.seconds() == pytest.approx(50.0)
    rest.ended(measured)  # its three took 30 s
    assert rest.seconds() == pytest.approx(30.0)


def test_the_time_left_follows_from_the_points_that_ended() -> None:
    where, text = screen()
    PlainReporter(31, 0, where, left(31, shown=[0.0, 100.0, 100.0])).ends(POINT, None)
    assert text.getvalue().splitlines() == ["[1/31] cache.block_size=8  done  (about 50 min left)"]


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
