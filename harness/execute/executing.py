"""Running what a plan has left to do."""

import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from harness.execute.point import Failed, run_and_commit
from harness.execute.progress import Reporter, reporting
from harness.execute.workers import Done, run_in_workers
from harness.plan.planning import Plan, PlannedPoint

RUNNER = "harness.point:run_point"


@dataclass(frozen=True)
class Outcome:
    """What became of a plan's points: how many are committed, which failed, and whether the user stopped it."""

    done: int
    failed: tuple[Failed, ...]
    interrupted: bool


def execute(
    plan: Plan,
    todo: Sequence[PlannedPoint],
    *,
    runner: str = RUNNER,
    console: Console | None = None,
) -> Outcome:
    """Run the points that are left: measured ones here, one at a time; simulation-only ones in worker processes.

    Args:
        plan: the whole sweep, for the folder and the number of workers.
        todo: its points without a record.
        runner: `module:function` that runs a point.
        console: where progress is shown; standard error by default.

    Raises:
        StoreError: the store cannot be written any more; committed points are kept.
    """
    failed: list[Failed] = []
    finished = 0
    before = len(plan.points) - len(todo)
    with reporting(len(plan.points), before, console or _console()) as reporter:
        try:
            for point, failure in _run(plan, todo, runner, reporter):
                reporter.ends(point, failure)
                finished += failure is None
                failed += [] if failure is None else [failure]
        except KeyboardInterrupt:
            return Outcome(before + finished, tuple(failed), interrupted=True)
    return Outcome(before + finished, tuple(failed), interrupted=False)


def _console() -> Console:
    """Standard error; where that was closed before we started, nothing is shown."""
    return Console(stderr=True) if sys.stderr is not None else Console(quiet=True, file=io.StringIO())


def _run(plan: Plan, todo: Sequence[PlannedPoint], runner: str, reporter: Reporter) -> Iterator[Done]:
    simulated = [point for point in todo if not point.config.measure]
    workers = min(plan.workers or os.cpu_count() or 1, len(simulated))
    if workers > 1:
        yield from run_in_workers(simulated, plan.out, runner, workers)
        simulated = []
    measured = [point for point in todo if point.config.measure]
    yield from _run_here([*simulated, *measured], plan.out, runner, reporter)


def _run_here(points: Sequence[PlannedPoint], out: Path, runner: str, reporter: Reporter) -> Iterator[Done]:
    for point in points:
        reporter.starts(point)
        yield point, run_and_commit(point, out, runner, reporter.request)
