"""Execution: planned points become committed records.

Measured points run in this process, one run at a time. The runs of a point are spread over minutes: several points are
open together, and each round adds one run to each of them, so that what slows a machine down for a while does not
meet all runs of one point. Simulation-only points run in worker processes. The workers exit when their parent exits,
and they never delay an interrupt.
"""

import io
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from harness.config.errors import UserError
from harness.config.memory import point_memory, workers_that_fit
from harness.console import remark
from harness.store import StoreError
from harness.store.commit import Layout, commit_failure, commit_point
from harness.sweep.plan import PlannedPoint, SweepPlan
from harness.sweep.progress import Failed, Reporter, TimeLeft, TimeModel, at_once, reporting, time_model
from harness.workers import worker_pool

if TYPE_CHECKING:
    from harness.point import PointResult, PointSession

_AHEAD = 4  # points handed in for each worker: the next one is there when one ends

Progress = Callable[[str, int, int], None]  # phase, requests done, requests in total
Done = tuple[PlannedPoint, Failed | None]


# A function that runs one point (config, progress=...), pickled for worker processes. A point that raises has failed.
PointRunner = Callable[..., "PointResult"]
# The same in stages (also kept=FOLDER): it pauses before the first measured run and between runs. Each run is written
# to the folder as it ends, and those that lie there are not taken again.
PointStages = Callable[..., Generator[None, None, "PointResult"]]


class PointBackend(Protocol):
    """Runs points somewhere: here, or on a cluster (`harness.cluster`)."""

    def __call__(
        self, sweep: SweepPlan, todo: Sequence[PlannedPoint], runner: PointRunner, reporter: Reporter
    ) -> Iterator[Done]:
        """Run the points; yield each when it is committed or has failed."""


@dataclass(frozen=True)
class SweepOutcome:
    """The outcome of a sweep: how many points are committed, which failed, and whether the user stopped it."""

    done: int
    failed: tuple[Failed, ...]
    interrupted: bool


def execute(
    sweep: SweepPlan,
    todo: Sequence[PlannedPoint],
    session: "PointSession",
    *,
    console: Console | None = None,
    backend: PointBackend | None = None,
    times: TimeModel | None = None,
    committed: Callable[[str], None] | None = None,
) -> SweepOutcome:
    """Run the points in `todo`: measured ones here, one at a time; simulation-only ones in worker processes.

    Args:
        sweep: the whole sweep, for the folder and the number of workers.
        todo: its points without a record.
        session: runs the points, measured ones in stages, so that their runs are spread (`execute.spread_s`).
        console: where progress is shown; None takes standard error.
        backend: runs all points somewhere else; None runs them on this machine.
        times: what earlier points tell of the time; None: nothing.
        committed: called with the fingerprint of each point that is stored, or whose failure is.

    Raises:
        StoreError: the store cannot be written any more. Committed points are kept.
    """
    failed: list[Failed] = []
    finished = 0
    before = len(sweep.points) - len(todo)
    left = TimeLeft(times or time_model(()), todo, at_once(sweep))
    with reporting(len(sweep.points), before, console or _console(), left) as reporter:
        try:
            run = backend or partial(run_here, stages=session.point_stages)
            for point, failure in run(sweep, todo, session.run_point, reporter):
                if committed is not None:
                    committed(point.fingerprint)
                reporter.ends(point, failure)
                finished += failure is None
                failed += [] if failure is None else [failure]
        except KeyboardInterrupt:
            return SweepOutcome(before + finished, tuple(failed), interrupted=True)
    return SweepOutcome(before + finished, tuple(failed), interrupted=False)


def _console() -> Console:
    """Standard error. Where it was closed before this process started, nothing is shown."""
    return Console(stderr=True) if sys.stderr is not None else Console(quiet=True, file=io.StringIO())


def run_here(
    sweep: SweepPlan,
    todo: Sequence[PlannedPoint],
    runner: PointRunner,
    reporter: Reporter,
    *,
    stages: PointStages,
) -> Iterator[Done]:
    """The backend of this machine."""
    simulated = [point for point in todo if not point.config.measure]
    workers = min(_workers(sweep, simulated), len(simulated))
    if workers > 1:
        yield from run_in_workers(simulated, sweep.out, runner, workers)
        simulated = []
    yield from _run_in_turn(simulated, sweep.out, runner, reporter)
    measured = [point for point in todo if point.config.measure]
    yield from _Rounds(sweep.out, stages, reporter).run(measured)


def _workers(sweep: SweepPlan, simulated: Sequence[PlannedPoint]) -> int:
    """The worker processes that were asked for (0: one a core), and no more than the largest point lets fit."""
    wanted = sweep.workers or os.cpu_count() or 1
    if wanted == 1 or not simulated:
        return wanted
    largest = max((point.config for point in simulated), key=point_memory)
    fitting = workers_that_fit(largest, wanted)
    if fitting < wanted:
        remark(
            f"{fitting} of {wanted} worker processes: a point takes about {point_memory(largest) / 1e9:,.1f} GB"
        )
    return fitting


def _run_in_turn(
    points: Sequence[PlannedPoint], out: Path, runner: PointRunner, reporter: Reporter
) -> Iterator[Done]:
    for point in points:
        reporter.starts(point)
        yield point, run_and_commit(point, out, runner, reporter.request)


def run_and_commit(
    point: PlannedPoint, out: Path, runner: PointRunner, progress: Progress | None = None
) -> Failed | None:
    """Run a point and store its record. If the point fails, store the failure and return it.

    Raises:
        StoreError: the store cannot be written, so no further point could be kept either.
    """
    started = time.perf_counter()
    try:
        result = runner(point.config, progress=progress)
    except Exception as error:  # a failing point must not stop the others
        return store_failure(point, out, *described(error))
    commit_result(point, out, result, time.perf_counter() - started)
    return None


@dataclass
class _Begun:
    """A point that has begun, with the seconds that it has used itself."""

    point: PlannedPoint
    stages: Generator[None, None, "PointResult"]
    used_s: float = 0.0
    done: Done | None = None

    def go_on(self, out: Path) -> Done | None:
        """Run to the next pause, or to the end and store the record or the failure; None at a pause.

        Raises:
            StoreError: the store cannot be written.
        """
        begun, result = time.perf_counter(), None
        try:
            next(self.stages)
        except StopIteration as end:
            result = end.value
        except StoreError:  # a run could not be kept
            raise
        except Exception as error:  # a failing point must not stop the others
            self.done = self.point, store_failure(self.point, out, *described(error))
        self.used_s += time.perf_counter() - begun
        if result is not None:
            commit_result(self.point, out, result, self.used_s)
            self.done = self.point, None
        return self.done


@dataclass(frozen=True)
class _Rounds:
    """Runs measured points in rounds. Points are open together until their runs are expected to take `spread_s`.

    Open points have the same model, which stays loaded. Their runs are kept as they end, so an interrupt loses one.
    """

    out: Path
    make: PointStages
    reporter: Reporter

    def run(self, points: Sequence[PlannedPoint]) -> Iterator[Done]:
        """Yields each point when it is committed or has failed."""
        waiting = deque(points)
        while waiting:
            together: list[_Begun] = []
            expected_s = 0.0
            while waiting and self._joins(waiting[0], together, expected_s):
                point = waiting.popleft()
                kept = Layout(self.out).open_runs(point.fingerprint)
                stages = self.make(point.config, progress=self.reporter.request, kept=kept)
                entry = _Begun(point, stages)
                together.append(entry)
                yield from self._advance([entry])  # to its first run: a calibration is no part of the round
                before_s = entry.used_s
                yield from self._advance([entry])
                expected_s += (entry.used_s - before_s) * point.config.replay.repeats
            while any(entry.done is None for entry in together):
                yield from self._advance(together)

    @staticmethod
    def _joins(point: PlannedPoint, together: Sequence[_Begun], expected_s: float) -> bool:
        """Whether the point is opened beside those that are."""
        if not together:
            return True
        config = point.config
        return expected_s < config.execute.spread_s and config.model == together[0].point.config.model

    def _advance(self, together: Sequence[_Begun]) -> Iterator[Done]:
        """Run the next stage of each point that is not done."""
        for entry in together:
            if entry.done is not None:
                continue
            self.reporter.starts(entry.point)
            done = entry.go_on(self.out)
            if done is None:
                self.reporter.ran(entry.point)
            else:
                yield done


def commit_result(point: PlannedPoint, out: Path, result: "PointResult", took_s: float) -> None:
    """Store the record of a point that has run, for `took_s` seconds.

    Raises:
        StoreError: the store cannot be written.
    """
    seconds = {**result.record.seconds, "point": took_s}
    record = replace(result.record, **_identifying(point), seconds=seconds)
    commit_point(out, point.fingerprint, record, result.tables, result.files)


def store_failure(point: PlannedPoint, out: Path, error: str, lines: list[str]) -> Failed:
    """Store a failure. `lines` is the traceback, kept as a list of lines so that people can read the JSON file."""
    file = commit_failure(out, point.fingerprint, {**_identifying(point), "error": error, "traceback": lines})
    return Failed(point.label, error, file)


def described(error: Exception) -> tuple[str, list[str]]:
    """An exception of a point as one line, since a list of failures has one line for each, and its traceback."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return " ".join(message.split()), lines


def _identifying(point: PlannedPoint) -> dict[str, Any]:
    """The sections of a record that say which point it is. Where it ran says nothing about it."""
    config = asdict(point.config)
    del config["execute"]
    return {
        "name": point.config.name,
        "label": point.label,
        "overrides": list(point.overrides),
        "config": config,
    }


def run_in_workers(
    points: Sequence[PlannedPoint], out: Path, runner: PointRunner, workers: int
) -> Iterator[Done]:
    """Run points in `workers` processes. Yields each point when it is committed or has failed.

    When a worker process dies (for example killed for memory), it is unknown which of the running points caused it. All
    points that are left then run again one at a time. A point whose worker dies again has failed.
    """
    left = {point.fingerprint: point for point in points}
    for point, failed in _run_together(points, out, runner, workers):
        del left[point.fingerprint]
        yield point, failed
    while left:
        for point, failed in _run_singly(list(left.values()), out, runner):
            del left[point.fingerprint]
            yield point, failed


def _run_together(
    points: Sequence[PlannedPoint], out: Path, runner: PointRunner, workers: int
) -> Iterator[Done]:
    """Yields every point, or those that finished before a worker died. A few are handed in ahead, and not all."""
    waiting = iter(points)
    running: dict[Future[Failed | None], PlannedPoint] = {}
    with worker_pool(workers) as pool:
        sound = _hand_in(pool, islice(waiting, _AHEAD * workers), running, out, runner)
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                point = running.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    sound = False
                    continue
                sound = sound and _hand_in(pool, islice(waiting, 1), running, out, runner)
                yield point, future.result()


def _hand_in(
    pool: ProcessPoolExecutor,
    points: Iterable[PlannedPoint],
    running: dict[Future[Failed | None], PlannedPoint],
    out: Path,
    runner: PointRunner,
) -> bool:
    """Hand points in, noted in `running`; False where a worker has died and the pool takes no more."""
    try:
        for point in points:
            running[pool.submit(run_and_commit, point, out, runner)] = point
    except BrokenProcessPool:
        return False
    return True


def _run_singly(points: Sequence[PlannedPoint], out: Path, runner: PointRunner) -> Iterator[Done]:
    """One worker, one point at a time. Ends after a point whose worker died."""
    with worker_pool(1) as pool:
        for point in points:
            future: Future[Failed | None] = pool.submit(run_and_commit, point, out, runner)
            if isinstance(future.exception(), BrokenProcessPool):
                message = "its process died; most likely it was killed for using too much memory"
                yield point, store_failure(point, out, message, [message])
                return
            yield point, future.result()
