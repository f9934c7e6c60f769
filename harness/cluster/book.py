"""What is known of jobs: the book of a store, `jobs.json`, with the points of each, and the journal of each task.

A submission is written into the book before Slurm hears of it, so a driver that dies at any moment leaves nothing
unknown: the next one finds the jobs in the queue by the name of the submission. The book is plain JSON. It names no
file that is ever unpickled: only a job reads the pickles of its submission, from the folder that its own command names.

A journal has one line of JSON for what happens to each point of a task, in the private folder. The job appends, the
driver reads. A point that began and neither ended nor was let go was cut off when its job died.
"""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from harness.config.errors import UserError
from harness.store.atomic import write_files

_FILE = "jobs.json"
_SCHEMA = 1


@dataclass
class Submission:
    """One call of sbatch: a job, or an array with a task for each group of points."""

    name: str  # of the job in Slurm, and of its folder
    folder: str  # holds the logs, the journals and submitit's files of this submission
    groups: list[list[str]]  # fingerprints
    begun: float = field(default_factory=time.time)  # Unix time just before sbatch
    number: str | None = None  # the id that Slurm gave; None: the driver died before it was noted
    ended: bool = False  # all its tasks have ended and have been taken account of

    @property
    def tasks(self) -> dict[str, list[str]]:
        """Fingerprints by the task's id: that of the job where there is one group, else JOB_INDEX."""
        if self.number is None:
            return {}
        if len(self.groups) == 1:
            return {self.number: self.groups[0]}
        return {f"{self.number}_{index}": names for index, names in enumerate(self.groups)}


class Book:
    """The submissions of a store, the oldest first."""

    def __init__(self, path: Path, submissions: list[Submission]) -> None:
        self.path = path
        self.submissions = submissions

    @classmethod
    def read(cls, out: Path) -> "Book":
        """The book of the store at `out`; an empty one where there is none.

        Raises:
            UserError: the file is not a book. Then it is not known which jobs work on the store.
        """
        path = out / _FILE
        try:
            value = json.loads(path.read_bytes())
            if value["schema"] != _SCHEMA:
                raise ValueError(f"its schema is {value['schema']!r}, this PageTwin reads {_SCHEMA}")
            return cls(path, [_submission(entry) for entry in value["submissions"]])
        except FileNotFoundError:
            return cls(path, [])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path}: cannot be read as the list of jobs of this store ({error}), so jobs of an earlier run may be "
                "at work unseen; delete it if no such job is in Slurm's queue"
            ) from None

    def write(self) -> None:
        """Replace the file.

        Raises:
            StoreError: the store cannot be written.
        """
        value = {"schema": _SCHEMA, "submissions": [asdict(each) for each in self.submissions]}
        write_files(self.path.parent, {_FILE: (json.dumps(value, indent=1) + "\n").encode()})

    def open_submissions(self) -> dict[str, Submission]:
        """Submissions that may still have jobs, by name."""
        return {each.name: each for each in self.submissions if not each.ended}

    def newest_of_points(self) -> Iterator[tuple[str, str, Submission]]:
        """(fingerprint, task id, submission) of each point's last task."""
        last: dict[str, tuple[str, Submission]] = {}
        for each in self.submissions:
            for task, points in each.tasks.items():
                last |= dict.fromkeys(points, (task, each))
        yield from ((point, task, each) for point, (task, each) in last.items())


def _submission(entry: dict[str, Any]) -> Submission:
    made = Submission(**{one.name: entry[one.name] for one in fields(Submission)})
    made.begun, made.ended = float(made.begun), bool(made.ended)
    texts = [made.name, made.folder, *(name for group in made.groups for name in group)]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a name that is no text")
    if not re.fullmatch(r"pagetwin-[\w-]+", made.name):  # it is cancelled by this name, and said to be
        raise ValueError(f"a job name {made.name!r}")
    if made.number is not None and not (isinstance(made.number, str) and made.number.isdecimal()):
        raise ValueError(f"a job number {made.number!r}")
    return made


STARTED, BEGAN, DONE, FAILED, LET_GO, STOPPED = "started", "began", "done", "failed", "let_go", "stopped"


@dataclass
class Told:
    """What a journal tells, all starts of the task together."""

    starts: int = 0
    done: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)  # began in the last start, and not ended
    cut_off: Counter[str] = field(default_factory=Counter)  # how often a job ended with the point
    stopped: str | None = None  # why the task could not go on at all


class Journal:
    """The journal of one task. Several processes of a job may append to it."""

    def __init__(self, folder: Path, task: str) -> None:
        self.path = folder / f"{task}.jsonl"

    def add(self, what: str, value: str | bool = True) -> None:
        """Append a line, in one call of the system so that lines of several processes do not mix.

        Raises:
            OSError: the private folder cannot be written.
        """
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, json.dumps({what: value}).encode() + b"\n")
        finally:
            os.close(handle)

    def size(self) -> int:
        """Bytes; 0 where the task has not started."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def read(self) -> Told:
        """What the journal tells so far. A line that is not whole yet is left for later."""
        told = Told()
        try:
            lines = self.path.read_bytes().split(b"\n")[:-1]
        except OSError:
            return told
        for line in lines:
            _take(told, line)
        return told


def _take(told: Told, line: bytes) -> None:
    try:
        entry: Any = json.loads(line)
        ((what, value),) = entry.items()
    except (ValueError, AttributeError):
        return  # cut off by a crash of the node
    name = str(value)
    if what == STARTED:
        told.cut_off.update(told.running)
        told.running.clear()
        told.starts += 1
    elif what == BEGAN:
        told.running.add(name)
    elif what in (DONE, FAILED):
        told.running.discard(name)
        (told.done if what == DONE else told.failed).add(name)
    elif what == LET_GO:
        told.running.clear()
    elif what == STOPPED:
        told.stopped = name
