"""Jobs of Slurm: points shared out among them, their submission through submitit, and what each does.

A job runs the points of its group and commits them into the store. submitit pickles a `GroupOfPoints` and calls it in
the job. Shortly before the time limit, and before a preemption of which Slurm warns, it calls `checkpoint` and requeues
the job; Slurm itself requeues a job whose node was lost. Every start of the job goes on where its journal ends.

All files of a submission lie in a folder of its own under the private folder (mode 0700), outside every store: the
batch script, submitit's pickles, the logs and the journals. PageTwin unpickles none of them; a job reads its own.
"""

import hashlib
import heapq
import io
import os
import secrets
import shlex
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from harness.cluster.book import BEGAN, DONE, FAILED, LET_GO, STARTED, STOPPED, Book, Journal, Submission
from harness.config.errors import ConfigError, UserError
from harness.config.execution import split_options
from harness.config.schema import ExecuteConfig, RunConfig
from harness.console import say
from harness.store import StoreError
from harness.store.commit import Layout
from harness.sweep.execute import Done, PointRunner, Progress, run_and_commit, run_in_workers, store_failure
from harness.sweep.plan import PlannedPoint, fingerprint
from harness.sweep.progress import TimeModel, work_of

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

    from harness.point import PointResult


# `harness.point.point_identity`: what a result depends on beside the configuration.
Identity = Callable[[RunConfig], Mapping[str, Any]]


@dataclass(frozen=True)
class CheckedRunner:
    """Runs a point if this node agrees that it is the point that was planned: same code, trace and device."""

    runner: PointRunner
    identity: Identity
    expected: frozenset[str]
    journal: Journal | None = None

    def __call__(self, config: RunConfig, *, progress: Progress | None = None) -> "PointResult":
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


@dataclass(frozen=True)
class Order:
    """What all submissions of a sweep have in common."""

    out: Path
    execute: ExecuteConfig
    runner: PointRunner
    identity: Identity
    again: bool  # points are run although they have records


@dataclass
class GroupOfPoints:
    """The points of one task, run one after the other; simulation-only ones as many at once as the job has cores."""

    points: tuple[PlannedPoint, ...]
    order: Order
    folder: Path
    limit_s: float  # a checkpoint later than this is the time limit's, an earlier one a preemption's

    def __call__(self) -> int:
        """Run what is left; returns the number of points that were committed."""
        journal = Journal(self.folder, task_id())
        told = journal.read()
        journal.add(STARTED)
        told.cut_off.update(told.running)
        signal.signal(signal.SIGTERM, _LetGo(journal, self.limit_s))
        left = [point for point in self.points if point.fingerprint not in told.done | told.failed]
        try:
            self._check_store()
            for point in self._committed(left):
                journal.add(DONE, point.fingerprint)
                left.remove(point)
            attempts = self.order.execute.attempts
            for point in [each for each in left if told.cut_off[each.fingerprint] >= attempts]:
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
        if not Layout(self.order.out).manifest.exists():
            raise StoreError(
                f"{socket.gethostname()} does not see the store in {self.order.out}: all nodes must share that folder; "
                "a store on object storage has its copy there (XDG_CACHE_HOME moves it)"
            )

    def _committed(self, points: list[PlannedPoint]) -> list[PlannedPoint]:
        """Points with a record of which the journal knows nothing: an earlier start died just after the commit."""
        if self.order.again:
            return []
        return [point for point in points if Layout(self.order.out).record(point.fingerprint).exists()]

    def _give_up(self, point: PlannedPoint, journal: Journal) -> None:
        often = f"the job died or reached its time limit {self.order.execute.attempts} times"
        message = f"{often} while the point ran; give it more execute.minutes or execute.memory_gb"
        store_failure(point, self.order.out, message, [message])
        journal.add(FAILED, point.fingerprint)

    def _run(self, points: list[PlannedPoint], journal: Journal) -> "Iterator[object]":
        for point, failed in self._each(points, journal):
            journal.add(DONE if failed is None else FAILED, point.fingerprint)
            end = "done" if failed is None else f"FAILED: {failed.error}"
            say(f"{point.fingerprint} {end}  {point.label}")
            yield failed

    def _each(self, points: list[PlannedPoint], journal: Journal) -> Iterator[Done]:
        names = frozenset(point.fingerprint for point in points)
        runner = CheckedRunner(self.order.runner, self.order.identity, names, journal)
        workers = min(self.order.execute.cpus, len(points))
        if workers > 1 and not any(point.config.measure for point in points):
            yield from run_in_workers(points, self.order.out, runner, workers)
            return
        for point in points:
            say(f"{point.fingerprint} begins  {point.label}")
            yield point, run_and_commit(point, self.order.out, runner)


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


Group = tuple[PlannedPoint, ...]


def groups_of(points: Sequence[PlannedPoint], times: TimeModel, jobs: int, job_min_s: float) -> list[Group]:
    """Share points out among at most `jobs` groups of about equal cost.

    The cost of a point is its estimated seconds where earlier points tell them, else its size. With known seconds no
    group is made shorter than `job_min_s`, so there may be fewer. The largest points are dealt first, each to the group
    that has the least so far (longest processing time first, Graham 1969: at most 4/3 of the best possible longest
    group). Inside a group the points keep their order.
    """
    if not points:
        return []
    estimates = [times.seconds(point.config) for point in points]
    costs = [seconds for seconds in estimates if seconds is not None]
    known = len(costs) == len(points)
    if not known:
        costs = [float(work_of(point.config)) for point in points]
    wanted = min(jobs, len(points))
    if known and sum(costs) < wanted * job_min_s:
        wanted = max(1, ceil(sum(costs) / job_min_s))
    loads: list[tuple[float, int]] = [(0.0, number) for number in range(wanted)]
    members: list[list[int]] = [[] for _ in range(wanted)]
    for place in sorted(range(len(points)), key=lambda place: -costs[place]):
        load, number = heapq.heappop(loads)
        members[number].append(place)
        heapq.heappush(loads, (load + costs[place], number))
    return [tuple(points[place] for place in sorted(member)) for member in members]


_ENDLESS = 10**6  # requeues that submitit allows; a point that never ends is given up by its attempts
_EARLY_S = 60  # Slurm may send the warning signal this much earlier than asked for


def private_folder(execute: ExecuteConfig) -> Path:
    """The folder of job files: `execute.folder`, or that for the user's state (XDG). It is created with mode 0700.

    Raises:
        ConfigError: it cannot be created, or others may write to it.
    """
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = Path(execute.folder).expanduser() if execute.folder else state / "pagetwin" / "jobs"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        mode = folder.stat()
    except OSError as error:
        raise ConfigError("execute.folder", f"cannot use '{folder}': {error.strerror}") from None
    if mode.st_uid != os.getuid() or mode.st_mode & 0o022:
        raise ConfigError(
            "execute.folder",
            f"others may write to '{folder}', so they could put code into your jobs; take a folder of your own, or: "
            f"chmod 700 {folder}",
        )
    return folder.resolve()


def submit(groups: list[Group], order: Order, book: Book) -> Submission:
    """Submit the groups as one job or one array, noted in the book before and after.

    Raises:
        ConfigError: Slurm or the private folder refuses; nothing was submitted.
        StoreError: the book cannot be written; nothing was submitted, or the next driver finds the job by its name.
    """
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    store = hashlib.blake2b(str(order.out).encode(), digest_size=4).hexdigest()
    name = f"pagetwin-{store}-{secrets.token_hex(4)}"
    folder = private_folder(order.execute) / name
    entry = Submission(name, str(folder), [[point.fingerprint for point in group] for group in groups])
    try:
        folder.mkdir(mode=0o700)
        executor = SlurmExecutor(folder, max_num_timeout=_ENDLESS, python=order.execute.python)
        executor.update_parameters(**_parameters(name, groups, order))
        limit_s = 60 * order.execute.minutes - warning_s(order.execute.minutes) - _EARLY_S
        tasks = [GroupOfPoints(group, order, folder, limit_s) for group in groups]
        book.submissions.append(entry)
        book.write()
        with redirect_stderr(io.StringIO()):  # submitit prints sbatch's words, which our message has too
            jobs = executor.submit_array(tasks)
    except OSError as error:
        raise ConfigError("execute.folder", f"cannot write to '{folder}': {error.strerror}") from error
    except (FailedJobError, FailedSubmissionError) as error:
        book.submissions.remove(entry)
        book.write()
        raise ConfigError("execute", f"Slurm takes no such job: {_refusal(str(error))}") from None
    entry.number = str(jobs[0].job_id).partition("_")[0]
    book.write()
    return entry


def warning_s(minutes: int) -> int:
    """Seconds before the time limit at which Slurm warns the job: enough to requeue it."""
    return 30 if minutes < 10 else 90


def _parameters(name: str, groups: list[Group], order: Order) -> dict[str, Any]:
    """submitit's parameters of a submission. Measured points get a node of their own, as here."""
    execute = order.execute
    measured = any(point.config.measure for group in groups for point in group)
    further = {"requeue": True, **dict(split_options(execute.options))}
    if measured:
        further["exclusive"] = True
    found: dict[str, Any] = {
        "job_name": name,
        "time": execute.minutes,
        "cpus_per_task": execute.cpus,
        "ntasks_per_node": 1,
        "signal_delay_s": warning_s(execute.minutes),
        "partition": execute.partition,
        "gpus_per_node": execute.gpus or None,
        "mem": f"{execute.memory_gb * 1e9 / 2**20:.0f}M" if execute.memory_gb else None,
        "setup": [execute.setup] if execute.setup else None,
        # srun inherits it not
        "srun_args": [f"--cpus-per-task={execute.cpus}", *shlex.split(execute.srun or "")],
        "array_parallelism": len(groups),
        "additional_parameters": further,
    }
    return {key: value for key, value in found.items() if value is not None}


def _refusal(text: str) -> str:
    """sbatch's own words out of submitit's message."""
    lines = [line.removeprefix("sbatch: error: ").strip() for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith(("subprocess", "FAILED", "Traceback"))]
    return " ".join(said[-3:])[:500]
