"""The book of a store, `jobs.json`: which jobs were submitted for which points.

A submission is written into it before Slurm hears of it, so a driver that dies at any moment leaves nothing unknown:
the next one finds the jobs in the queue by the name of the submission. The book is plain JSON. It names no file that is
ever unpickled: only a job reads the pickles of its submission, from the folder that its own command names.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
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
        last = {
            point: (task, each)
            for each in self.submissions
            for task, points in each.tasks.items()
            for point in points
        }
        yield from ((point, task, each) for point, (task, each) in last.items())


def _submission(entry: dict[str, Any]) -> Submission:
    made = Submission(
        name=entry["name"],
        folder=entry["folder"],
        groups=entry["groups"],
        begun=float(entry["begun"]),
        number=entry["number"],
        ended=bool(entry["ended"]),
    )
    texts = [made.name, made.folder, *(name for group in made.groups for name in group)]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a name that is no text")
    if made.number is not None and not (isinstance(made.number, str) and made.number.isdecimal()):
        raise ValueError(f"a job number {made.number!r}")
    return made
