"""Where no line can be redrawn, each stage and each point has a line of its own, with what is left."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from harness import console
from harness.sweep.progress import LiveReporter, PlainReporter, duration, reporting

POINT: Any = SimpleNamespace(label="cache.block_size=8")


def screen(**options: Any) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200, **options), text


def test_each_stage_of_a_point_has_one_line() -> None:
    where, text = screen()
    reporter = PlainReporter(4, 1, where)
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


def test_the_time_left_follows_from_the_points_that_ended() -> None:
    where, text = screen()
    times = iter([0.0, 100.0])
    PlainReporter(31, 0, where, lambda: next(times)).ends(POINT, None)
    assert text.getvalue().splitlines() == ["[1/31] cache.block_size=8  done  (about 50 min left)"]


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    where, _ = screen(force_terminal=True)
    with reporting(2, 0, where) as reporter:
        assert isinstance(reporter, PlainReporter)


def test_a_terminal_gets_a_line_that_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    where, _ = screen(force_terminal=True)
    with reporting(2, 0, where) as reporter:
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
