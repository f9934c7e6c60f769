"""Slurm's queue, asked with its own commands.

`squeue` tells the state of each task for as long as the controller remembers it (MinJobAge, 5 minutes by default), and
needs no accounting. A task that it does not name any more has ended.
"""

import getpass
import os
import subprocess
from dataclasses import dataclass

ENDED = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    ]
)
BLAMELESS = frozenset(["BOOT_FAIL", "CANCELLED", "NODE_FAIL", "PREEMPTED", "REVOKED"])
"""Ends that say nothing about the points of the task."""

_TIMEOUT_S = 60  # of one command; Slurm's own MessageTimeout is 10 s
_FIELDS = "%i|%j|%T|%r"


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
    words = ["squeue", "--noheader", "--array", "--states=all", f"--user={_user()}", f"--format={_FIELDS}"]
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
    _ask(["scancel", f"--name={name}", f"--user={_user()}"])


def end_of(task: str) -> str | None:
    """How a task ended that the queue has forgotten, from the accounting; None where there is none."""
    try:
        said = _ask(
            ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={task}", "--format=State"]
        )
    except QueueError:
        return None
    words = said.split()
    return words[0] if words else None


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()


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
