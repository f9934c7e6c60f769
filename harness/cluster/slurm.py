"""Slurm: its queue, asked with its own commands, and the driver of `execute=slurm`.

The driver submits jobs, follows them, and submits again what a job that died left. The jobs commit their points into
the store; the driver only reads. So it may die and come back: it finds its jobs by the book of the store, waits for
those that still run, and submits the points that no job has.

`squeue` tells the state of each task for as long as the controller remembers it (MinJobAge, 5 minutes by default), and
needs no accounting. A task that it does not name any more has ended.
"""

import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from harness.cluster.book import Book, Journal, Submission
from harness.cluster.job import Order, groups_of, submit
from harness.config.errors import ConfigError
from harness.console import install_hint, numbered
from harness.store import ForeignFileError, StoreError, StoreVersionError
from harness.store.commit import Layout, read_file
from harness.store.survey import survey
from harness.sweep.execute import Done, PointRunner, store_failure
from harness.sweep.plan import PlannedPoint, SweepPlan
from harness.sweep.progress import Failed, Reporter, TimeModel, time_model

if TYPE_CHECKING:
    from harness.point import PointSession

# Ends that say nothing about the points of the task.
BLAMELESS = frozenset(["BOOT_FAIL", "CANCELLED", "NODE_FAIL", "PREEMPTED", "REVOKED"])

ENDED = BLAMELESS | {"COMPLETED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "TIMEOUT"}

_TIMEOUT_S = 60  # of one command; Slurm's own MessageTimeout is 10 s
_FORM = "--format=%i|%j|%T|%r"


class QueueError(Exception):
    """Slurm does not answer, or a command of it is missing; says what it printed."""


@dataclass(frozen=True)
class Queued:
    """A task as the queue shows it."""

    name: str  # of the job
    state: str
    reason: str  # why it waits, in Slurm's words

    @property
    def lives(self) -> bool:
        """Whether the task runs, waits, is being ended or will be started again."""
        return self.state not in ENDED


def look() -> dict[str, Queued]:
    """All tasks of this user that Slurm remembers, by id (JOB, or JOB_INDEX in an array).

    Raises:
        QueueError: Slurm does not answer.
    """
    words = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", _FORM]
    found = {}
    for line in _ask(words).splitlines():
        number, _, rest = line.partition("|")
        head, _, reason = rest.rpartition("|")
        name, _, state = head.rpartition("|")
        found[number.strip()] = Queued(name, state, reason)
    return found


def cancel(name: str) -> None:
    """Cancel all jobs of a name.

    Raises:
        QueueError: Slurm does not answer.
    """
    _ask(["scancel", f"--name={name}", f"--user={os.getuid()}"])


def end_of(task: str) -> str | None:
    """How a task ended that the queue has forgotten, from the accounting; None where there is none."""
    try:
        words = ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={task}", "--format=State"]
        said = _ask(words).split()
    except QueueError:
        return None
    return said[0] if said else None


def _ask(words: list[str]) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, errors="replace")
    except FileNotFoundError:
        raise QueueError(f"'{words[0]}' is not installed here") from None
    except subprocess.TimeoutExpired:
        raise QueueError(f"{words[0]} did not answer within {_TIMEOUT_S} s") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise QueueError(f"{words[0]}: {said}")
    return done.stdout


_SBATCH_S = 20  # after this, an sbatch whose caller died has reached Slurm or never will
_PATIENCE = 10  # times execute.attempts: jobs that may be cancelled or preempted before a point has failed
_TAIL = 40  # lines of a log that a failure keeps


def check_installed() -> None:
    """Raise ConfigError where Slurm's commands or submitit are missing."""
    if find_spec("submitit") is None:
        raise ConfigError("execute", f"slurm needs submitit: {install_hint('cluster')}")
    gone = [name for name in ("sbatch", "squeue", "scancel", "srun") if which(name) is None]
    if gone:
        reason = f"slurm needs {', '.join(gone)}, not found here; run this on a login node of the cluster"
        raise ConfigError("execute", reason)


def run_on_slurm(
    sweep: SweepPlan, todo: Sequence[PlannedPoint], runner: PointRunner, reporter: Reporter, *, session: "PointSession",
    force: bool,
) -> Iterator[Done]:  # fmt: skip
    """Run points in jobs; yields each when it is committed or has failed. A backend of `harness.sweep.execute`.

    Raises:
        ConfigError: Slurm or the private folder refuses the jobs.
        StoreError: the store cannot be written any more; the jobs were cancelled.
    """
    out, execute = sweep.out.absolute(), sweep.points[0].config.execute
    order = Order(out, execute, runner, session.point_identity, force)
    driver = _SlurmDriver(order, {point.fingerprint: point for point in todo}, Book.read(sweep.out), reporter)
    try:
        yield from driver.run()
    except StoreError:
        driver.cancel_all()
        raise
    except (KeyboardInterrupt, GeneratorExit):
        driver.say_what_goes_on()
        raise


@dataclass
class _Watched:
    """A task that this driver waits for."""

    submission: Submission
    journal: Journal
    points: dict[str, PlannedPoint]  # of those that are waited for
    size: int = -1  # of the journal when it was last read
    gone: int = 0  # looks at the queue in which the task had ended


@dataclass
class _SlurmDriver:
    order: Order
    waiting: dict[str, PlannedPoint]  # by fingerprint: neither committed nor failed
    book: Book
    reporter: Reporter
    tasks: dict[str, _Watched] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)  # by fingerprint: jobs that died with the point
    losses: Counter[str] = field(default_factory=Counter)  # by fingerprint: jobs that ended without it
    times: TimeModel | None = None
    said: str = ""

    def run(self) -> Iterator[Done]:
        yield from self._adopt(self._first_look())
        watched = self._watched()
        self._submit([point for name, point in self.waiting.items() if name not in watched])
        pause = self.order.execute.poll_s
        while self.waiting:
            time.sleep(pause)
            begun = time.monotonic()
            yield from self._look_again()
            pause = max(self.order.execute.poll_s, 5 * (time.monotonic() - begun))
        self._close_ended()

    def _first_look(self) -> dict[str, Queued]:
        """The queue, after the last sbatch of a driver that died has had time to reach it."""
        unknown = [each.begun for each in self.book.open_submissions().values() if each.number is None]
        if unknown:
            time.sleep(min(_SBATCH_S, max(0.0, max(unknown) + _SBATCH_S - time.time())))
        try:
            return self._mine(look())
        except QueueError as error:
            raise ConfigError("execute", f"Slurm does not answer: {error}") from None

    def _mine(self, queue: dict[str, Queued]) -> dict[str, Queued]:
        """The jobs of this store: where Slurm's numbers began again, another job may have the id of one that ended."""
        names = {each.name for each in self.book.submissions}
        return {task: job for task, job in queue.items() if job.name in names}

    def _adopt(self, queue: dict[str, Queued]) -> Iterator[Done]:
        """Wait for the tasks of earlier drivers that live; take what those that ended meanwhile have left."""
        for submission in self.book.open_submissions().values():
            if submission.number is None:
                found = [task for task, job in queue.items() if job.name == submission.name]
                submission.number = found[0].partition("_")[0] if found else None
            alive = [task for task in submission.tasks if task in queue and queue[task].lives]
            self._watch(submission, alive)
            submission.ended = not alive
        if self.tasks:
            self.reporter.says(
                f"{numbered(len(self.tasks), 'job')} of an earlier run still in Slurm with "
                f"{numbered(len(self._watched()), 'point')} of this sweep: waiting for them"
            )
        for task in list(self.tasks.values()):
            yield from self._take(task)
        watched = self._watched()
        yield from self._committed([name for name in self.waiting if name not in watched])

    def _watch(self, submission: Submission, tasks: Sequence[str]) -> None:
        for task in tasks:
            points = {name: self.waiting[name] for name in submission.tasks[task] if name in self.waiting}
            if points:
                self.tasks[task] = _Watched(submission, Journal(Path(submission.folder), task), points)

    def _watched(self) -> set[str]:
        return {name for watched in self.tasks.values() for name in watched.points}

    def _submit(self, points: Sequence[PlannedPoint]) -> None:
        """Submit points: simulation-only ones in groups, measured ones in one job, since they share a calibration.

        A point with which a job died gets a job of its own, so that it takes no other along again.
        """
        if not points:
            return
        execute = self.order.execute
        alone = [point for point in points if self.deaths[point.fingerprint]]
        rest = [point for point in points if not self.deaths[point.fingerprint]]
        simulated = [point for point in rest if not point.config.measure]
        measured = [point for point in rest if point.config.measure]
        if self.times is None:
            self.times = time_model(survey(self.order.out).records.values())
        groups = groups_of(simulated, self.times, execute.jobs, execute.job_min_s)
        groups += [*((point,) for point in alone), *([tuple(measured)] if measured else [])]
        for measure in (False, True):
            batch = [group for group in groups if group[0].config.measure is measure]
            if batch:
                submission = submit(batch, self.order, self.book)
                self._watch(submission, list(submission.tasks))
                self.reporter.says(
                    f"{numbered(sum(map(len, batch)), 'point')} in {numbered(len(batch), 'job')} of Slurm: "
                    f"{submission.number}, logs in {submission.folder}"
                )

    def _look_again(self) -> Iterator[Done]:
        """Take what the journals tell, and settle the tasks that have ended."""
        queue = look_or_none()
        for watched in list(self.tasks.values()):
            yield from self._take(watched)
        if queue is None:
            self._says("Slurm does not answer; its jobs go on, asking again")
            return
        queue = self._mine(queue)
        self._say_state(queue)
        left: list[PlannedPoint] = []
        for task, watched in list(self.tasks.items()):
            if task in queue and queue[task].lives:
                watched.gone = 0
                continue
            watched.gone += 1
            if watched.gone > 1:  # at the second look the last lines of its journal are there
                yield from self._settle(task, queue, left)
        self._submit(left)

    def _take(self, watched: _Watched) -> Iterator[Done]:
        """Yield the points that the journal says have ended."""
        size = watched.journal.size()
        if size == watched.size:
            return
        told = watched.journal.read()
        watched.size = size
        for name in told.done & watched.points.keys():
            yield self._ended(watched, name), None
        for name in told.failed & watched.points.keys():
            failure = self._failure(watched, name)
            yield self._ended(watched, name), failure

    def _ended(self, watched: _Watched, name: str) -> PlannedPoint:
        del self.waiting[name]
        return watched.points.pop(name)

    def _failure(self, watched: _Watched, name: str) -> Failed:
        point, file = watched.points[name], Layout(self.order.out).failure(name)
        try:
            error = str(read_file(file).get("error"))
        except (ForeignFileError, StoreVersionError) as reason:
            error = str(reason)
        log = log_of(watched.submission, watched.journal.path.stem)
        return Failed(point.label, f"{error} (log: {log})", file)

    def _committed(self, names: Sequence[str]) -> Iterator[Done]:
        """Yield points whose record is there, though no journal of a living task says so."""
        if self.order.again:
            return
        for name in names:
            if Layout(self.order.out).record(name).exists():
                yield self.waiting.pop(name), None

    def _settle(self, task: str, queue: dict[str, Queued], left: list[PlannedPoint]) -> Iterator[Done]:
        """Take account of a task that has ended: its last points, and what it left over."""
        watched = self.tasks[task]
        watched.size = -1
        yield from self._take(watched)
        for name in list(watched.points):
            if not self.order.again and Layout(self.order.out).record(name).exists():
                yield self._ended(watched, name), None
        del self.tasks[task]
        told = watched.journal.read()
        if told.stopped:
            raise StoreError(told.stopped)
        if not watched.points:
            return
        state = queue[task].state if task in queue else (end_of(task) or "ended")
        log = log_of(watched.submission, task)
        # a job that died before it came to any point makes all of them suspect
        idle = not (told.running or told.done or told.failed)
        hit = set(watched.points) if idle else told.running
        attempts = self.order.execute.attempts
        for name, point in watched.points.items():
            self.losses[name] += 1
            self.deaths[name] += name in hit and state not in BLAMELESS
            if self.deaths[name] >= attempts or self.losses[name] >= _PATIENCE * attempts:
                del self.waiting[name]
                yield point, self._give_up(point, state, log)
            else:
                left.append(point)
        again = [name for name in watched.points if name in self.waiting]
        if again:
            self.reporter.says(
                f"job {task} ended ({state}) before {numbered(len(again), 'point')}; submitting again (log: {log})"
            )

    def _give_up(self, point: PlannedPoint, state: str, log: Path) -> Failed:
        lost = numbered(self.losses[point.fingerprint], "job")
        error = f"{lost} ended without a result of it, the last one as {state} (log: {log})"
        return store_failure(point, self.order.out, error, [error, *_tail(log)])

    def _say_state(self, queue: dict[str, Queued]) -> None:
        """Say what waits and why, when that changes."""
        jobs = [queue[task] for task in self.tasks if task in queue]
        waiting = [job for job in jobs if job.state == "PENDING"]
        if not waiting:
            self.said = ""
            return
        running = sum(job.lives for job in jobs) - len(waiting)
        reasons = "; ".join(sorted({job.reason for job in waiting}))
        if running and reasons in ("Resources", "Priority", "Priority; Resources"):
            return  # the usual: there is less room than jobs
        self._says(
            f"{numbered(len(waiting), 'job')} of {len(jobs)} waiting in Slurm: {reasons}. They start when they can; "
            "this command may be stopped and given again"
        )

    def _says(self, text: str) -> None:
        if text != self.said:
            self.reporter.says(text)
            self.said = text

    def cancel_all(self) -> None:
        """Cancel the jobs of this sweep: they could not store anything."""
        for name in {watched.submission.name for watched in self.tasks.values()}:
            try:
                cancel(name)
            except QueueError as error:
                self.reporter.says(f"the jobs could not be cancelled: {error}")

    def say_what_goes_on(self) -> None:
        """Say that the jobs outlive this process, and how to stop them."""
        names = sorted({watched.submission.name for watched in self.tasks.values()})
        if names:
            self.reporter.says(
                f"{numbered(len(self.tasks), 'job')} stay in Slurm and go on; the same command waits for them. To stop "
                f"them: scancel --name={','.join(names)}"
            )

    def _close_ended(self) -> None:
        """Note in the book the submissions that have no living task any more."""
        queue = look_or_none()
        if queue is None:
            return
        living = {job.name for job in queue.values() if job.lives}
        for submission in self.book.submissions:
            submission.ended = submission.ended or submission.name not in living
        self.book.write()


def look_or_none() -> dict[str, Queued] | None:
    """The queue, or None while Slurm does not answer."""
    try:
        return look()
    except QueueError:
        return None


def log_of(submission: Submission, task: str) -> Path:
    """The log of a task: what it printed. Its errors stand beside it, in `..._log.err`."""
    return Path(submission.folder) / f"{task}_0_log.out"


def _tail(log: Path) -> list[str]:
    """The last lines of a log and of its errors."""
    lines: list[str] = []
    for file in (log, log.with_suffix(".err")):
        try:
            lines += file.read_text(errors="replace").splitlines()[-_TAIL:]
        except OSError as error:
            lines.append(f"{file}: {error.strerror}")
    return lines
