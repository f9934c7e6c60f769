"""Execution: planned points become committed records.

Measured points run in this process, one at a time. Simulation-only points run in worker processes, which end with their
parent and never delay an interrupt.
"""

import importlib
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from harness.config.errors import UserError
from harness.config.schema import RunConfig
from harness.store.commit import commit_failure, commit_point
from harness.sweep.plan import Plan, PlannedPoint
from harness.sweep.progress import Failed, Reporter, reporting

Progress = Callable[[str, int, int], None]  # phase, requests done, requests in all


class PointResult(Protocol):
    """What running a point gives."""

    @property
    def record(self) -> dict[str, Any]:
        """The sections of `record.json` but for those that say which point it is."""
        ...

    @property
    def tables(self) -> Mapping[str, Mapping[str, Any]]:
        """`steps` and `requests`, columns by name."""
        ...


class PointRunner(Protocol):
    """Runs one point; named as `module:function`, so that a worker process can find it."""

    def __call__(self, config: RunConfig, *, progress: Progress | None = None) -> PointResult:
        """Run the point; anything it raises makes the point a failed one."""
        ...


def find_runner(name: str) -> PointRunner:
    """The point runner called `module:function`. Imports it, and what it needs."""
    module, _, function = name.partition(":")
    runner: PointRunner = getattr(importlib.import_module(module), function)
    return runner


def run_and_commit(
    point: PlannedPoint, out: Path, runner: str, progress: Progress | None = None
) -> Failed | None:
    """Run a point and store its record, or store its failure and return it.

    Raises:
        StoreError: the store cannot be written, so that no further point would be kept either.
    """
    started = time.perf_counter()
    try:
        result = find_runner(runner)(point.config, progress=progress)
    except Exception as error:  # whatever a point does wrong must not take the others with it
        return _store_failure(point, out, error)
    seconds = {**result.record.get("seconds", {}), "point": time.perf_counter() - started}
    record = {**_which(point), **result.record, "seconds": seconds}
    commit_point(out, point.fingerprint, record, result.tables)
    return None


def store_failure(point: PlannedPoint, out: Path, error: str, lines: list[str]) -> Failed:
    """Store a failure that has `lines` to tell; the traceback is a list of lines so that a person can read it."""
    file = commit_failure(out, point.fingerprint, {**_which(point), "error": error, "traceback": lines})
    return Failed(point.label, error, file)


def _store_failure(point: PlannedPoint, out: Path, error: Exception) -> Failed:
    lines = "".join(traceback.format_exception(error)).splitlines()
    message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return store_failure(point, out, _one_line(message), lines)


def _one_line(message: str) -> str:
    """A message that other libraries wrote over several lines, for a list with one line a point."""
    return " ".join(message.split())


def _which(point: PlannedPoint) -> dict[str, Any]:
    return {
        "name": point.config.name,
        "label": point.label,
        "overrides": list(point.overrides),
        "config": asdict(point.config),
    }


Done = tuple[PlannedPoint, Failed | None]


def run_in_workers(points: Sequence[PlannedPoint], out: Path, runner: str, workers: int) -> Iterator[Done]:
    """Run points in `workers` processes and yield each as it is committed or has failed.

    When a worker dies (killed for memory, say), nobody can tell which of the running points did it: those that were
    left are run again one at a time, and the one that kills its worker a second time has failed.
    """
    left = {point.fingerprint: point for point in points}
    for point, failed in _run_together(points, out, runner, workers):
        del left[point.fingerprint]
        yield point, failed
    while left:
        for point, failed in _run_singly(list(left.values()), out, runner):
            del left[point.fingerprint]
            yield point, failed


def _run_together(points: Sequence[PlannedPoint], out: Path, runner: str, workers: int) -> Iterator[Done]:
    """Yields what was finished before a worker died, if one did."""
    with _pool(workers) as pool:
        futures = {pool.submit(run_and_commit, point, out, runner): point for point in points}
        for future in as_completed(futures):
            if not isinstance(future.exception(), BrokenProcessPool):
                yield futures[future], future.result()


def _run_singly(points: Sequence[PlannedPoint], out: Path, runner: str) -> Iterator[Done]:
    """One worker, one point at a time, up to the point that kills the worker."""
    with _pool(1) as pool:
        for point in points:
            future: Future[Failed | None] = pool.submit(run_and_commit, point, out, runner)
            if isinstance(future.exception(), BrokenProcessPool):
                message = "its process died; most likely it was killed for using too much memory"
                yield point, store_failure(point, out, message, [message])
                return
            yield point, future.result()


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes exit at once when the block is left early or when this process is killed.

    Each worker waits on one end of a pipe. Only this process holds the other end, so the pipe closes when the block
    ends and also when the process is gone, whatever killed it.
    """
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_live_with, initargs=(theirs,))
    try:
        yield pool
        pool.shutdown()
    finally:
        ours.close()
        theirs.close()
        pool.shutdown(cancel_futures=True)


def _live_with(lifeline: Connection) -> None:
    """Start of a worker: Ctrl-C is for the parent to handle, and no parent means no reason to go on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_wait_for_end, args=(lifeline,), daemon=True).start()


def _wait_for_end(lifeline: Connection) -> None:
    try:
        lifeline.recv()
    except EOFError:
        os._exit(1)


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
