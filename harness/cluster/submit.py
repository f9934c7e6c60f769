"""Submission of groups of points to Slurm, through submitit.

All files of a submission lie in a folder of its own under the private folder (mode 0700), outside every store: the
batch script, submitit's pickles, the logs and the journals. PageTwin unpickles none of them; a job reads its own.
"""

import hashlib
import io
import os
import secrets
import shlex
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cluster.book import Book, Submission
from harness.cluster.grouping import Group
from harness.cluster.job import GroupOfPoints, Identity
from harness.config.errors import ConfigError
from harness.config.execution import split_options
from harness.config.schema import ExecuteConfig
from harness.sweep.execute import PointRunner

_ENDLESS = 10**6  # requeues that submitit allows; a point that never ends is given up by its attempts
_EARLY_S = 60  # Slurm may send the warning signal this much earlier than asked for


@dataclass(frozen=True)
class Order:
    """What all submissions of a sweep have in common."""

    out: Path
    execute: ExecuteConfig
    runner: PointRunner
    identity: Identity
    again: bool  # points are run although they have records


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

    name = f"pagetwin-{_digest(order.out)}-{secrets.token_hex(4)}"
    folder = private_folder(order.execute) / name
    entry = Submission(name, str(folder), [[point.fingerprint for point in group] for group in groups])
    try:
        folder.mkdir(mode=0o700)
        executor = SlurmExecutor(folder, max_num_timeout=_ENDLESS, python=order.execute.python)
        executor.update_parameters(**_parameters(name, groups, order))
        tasks = [_task(group, folder, order) for group in groups]
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


def _task(group: Group, folder: Path, order: Order) -> GroupOfPoints:
    execute = order.execute
    return GroupOfPoints(
        points=group,
        out=order.out,
        folder=folder,
        runner=order.runner,
        identity=order.identity,
        workers=execute.cpus,
        attempts=execute.attempts,
        limit_s=60 * execute.minutes - warning_s(execute.minutes) - _EARLY_S,
        again=order.again,
    )


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
        "srun_args": [
            f"--cpus-per-task={execute.cpus}",
            *shlex.split(execute.srun or ""),
        ],  # srun inherits it not
        "array_parallelism": len(groups),
        "additional_parameters": further,
    }
    return {key: value for key, value in found.items() if value is not None}


def _digest(out: Path) -> str:
    return hashlib.blake2b(str(out).encode(), digest_size=4).hexdigest()


def _refusal(text: str) -> str:
    """sbatch's own words out of submitit's message."""
    lines = [line.removeprefix("sbatch: error: ").strip() for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith(("subprocess", "FAILED", "Traceback"))]
    return " ".join(said[-3:])[:500]
