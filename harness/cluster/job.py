"""What a job of Slurm does: run the points of its group and commit them into the store.

submitit pickles a `GroupOfPoints` and calls it in the job. Shortly before the time limit, and before a preemption of
which Slurm warns, it calls `checkpoint` and requeues the job; Slurm itself requeues a job whose node was lost. Every
start of the job goes on where its journal ends.
"""

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from harness.cluster.journal import BEGAN, DONE, FAILED, LET_GO, STARTED, STOPPED, Journal
from harness.config.errors import UserError
from harness.config.schema import RunConfig
from harness.console import say
from harness.store.commit import Layout
from harness.store.errors import StoreError
from harness.sweep.execute import (
    Done,
    PointResult,
    PointRunner,
    Progress,
    run_and_commit,
    run_in_workers,
    store_failure,
)
from harness.sweep.fingerprint import fingerprint
from harness.sweep.plan import PlannedPoint

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

Identity = Callable[[RunConfig], Mapping[str, Any]]
"""`harness.point.point_identity`: what a result depends on beside the configuration."""


@dataclass(frozen=True)
class CheckedRunner:
    """Runs a point if this node agrees that it is the point that was planned: same code, trace and device."""

    runner: PointRunner
    identity: Identity
    expected: frozenset[str]
    journal: Journal | None = None

    def __call__(self, config: RunConfig, *, progress: Progress | None = None) -> PointResult:
        """Check, note the beginning, run. Raises UserError where the node sees another point."""
        name = fingerprint(config, self.identity(config))
        if name not in self.expected:
            raise UserError(
                f"{socket.gethostname()} does not see the point that was planned: its code of PageTwin, its copy of a "
                "trace or model, or for a measured point its device is another. Install the same version on all nodes; "
                "plan measured points on a node of the kind that measures them"
            )
        if self.journal is not None:
            self.journal.add(BEGAN, name)
        return self.runner(config, progress=progress)


@dataclass
class GroupOfPoints:
    """The points of one task, run one after the other, or `workers` at once if they are simulation-only."""

    points: tuple[PlannedPoint, ...]
    out: Path
    folder: Path
    runner: PointRunner
    identity: Identity
    workers: int
    attempts: int
    limit_s: float  # a checkpoint later than this is the time limit's, an earlier one a preemption's
    again: bool  # points are run although they have records

    def __call__(self) -> int:
        """Run what is left; returns the number of points that were committed."""
        journal = Journal(self.folder, task_id())
        told = journal.read()
        journal.add(STARTED)
        told.cut_off.update(told.running)
        signal.signal(signal.SIGTERM, _LetGo(journal, self.limit_s))
        ended = told.done | told.failed
        left = [point for point in self.points if point.fingerprint not in ended]
        try:
            self._check_store()
            for point in self._committed(left):
                journal.add(DONE, point.fingerprint)
                left.remove(point)
            for point in [each for each in left if told.cut_off[each.fingerprint] >= self.attempts]:
                self._give_up(point, journal)
                left.remove(point)
            return sum(failed is None for failed in self._run(left, journal))
        except StoreError as error:
            journal.add(STOPPED, str(error))
            raise

    def checkpoint(self) -> "DelayedSubmission":
        """Called by submitit before it requeues the job. Only the time limit counts against the running points."""
        from submitit.core.job_environment import JobEnvironment
        from submitit.helpers import DelayedSubmission

        journal = Journal(self.folder, task_id())
        if is_early(self.limit_s):
            journal.add(LET_GO)
        say(f"requeued: {JobEnvironment()}")
        return DelayedSubmission(self)

    def _check_store(self) -> None:
        """Raise StoreError where this node has not the folder of the store that the command has written into."""
        if not Layout(self.out).manifest.exists():
            raise StoreError(
                f"{socket.gethostname()} does not see the store in {self.out}: all nodes must share that folder; a "
                "store on object storage has its copy there (XDG_CACHE_HOME moves it)"
            )

    def _committed(self, points: list[PlannedPoint]) -> list[PlannedPoint]:
        """Points with a record of which the journal knows nothing: an earlier start died just after the commit."""
        if self.again:
            return []
        return [point for point in points if Layout(self.out).record(point.fingerprint).exists()]

    def _give_up(self, point: PlannedPoint, journal: Journal) -> None:
        message = (
            f"the job died or reached its time limit {self.attempts} times while the point ran; give it more "
            "execute.minutes or execute.memory_gb"
        )
        store_failure(point, self.out, message, [message])
        journal.add(FAILED, point.fingerprint)

    def _run(self, points: list[PlannedPoint], journal: Journal) -> "Iterator[object]":
        for point, failed in self._each(points, journal):
            journal.add(DONE if failed is None else FAILED, point.fingerprint)
            say(
                f"{point.fingerprint} {'done' if failed is None else 'FAILED: ' + failed.error}  {point.label}"
            )
            yield failed

    def _each(self, points: list[PlannedPoint], journal: Journal) -> Iterator[Done]:
        names = frozenset(point.fingerprint for point in points)
        runner = CheckedRunner(self.runner, self.identity, names, journal)
        workers = min(self.workers, len(points))
        if workers > 1 and not any(point.config.measure for point in points):
            yield from run_in_workers(points, self.out, runner, workers)
            return
        for point in points:
            say(f"{point.fingerprint} begins  {point.label}")
            yield point, run_and_commit(point, self.out, runner)


class _LetGo:
    """A handler of SIGTERM: before the time limit somebody ends this job, which is not the fault of its points."""

    def __init__(self, journal: Journal, limit_s: float) -> None:
        self._journal, self._limit_s = journal, limit_s

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if is_early(self._limit_s):
            self._journal.add(LET_GO)


def task_id() -> str:
    """The id of the task that this process belongs to: JOB_INDEX in an array, else JOB."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def is_early(limit_s: float) -> bool:
    """Whether this process is younger than `limit_s` seconds."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK") < limit_s
