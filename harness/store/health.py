"""The health of a store: every record and every file beside it compared with its digest, and damage set aside.

Nothing is deleted: the folder of a damaged point moves to `damaged/`, where people can look at it, and the point counts
as not run. Reading (`harness.store.reading`) never moves anything.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.store.commit import Layout
from harness.store.errors import ForeignFileError, StoreVersionError, write_failed
from harness.store.reading import point_fault, point_names, read_record
from harness.workers import in_workers

DAMAGED = "damaged"
"""The folder of a store that holds what was set aside."""
_WORTH_WORKERS = 5000  # points
_PART = 500  # points that a process examines at a time
_MOST_WORKERS = 8


@dataclass
class Health:
    """What an examination found."""

    records: int = 0  # whole, with all files beside them
    files: int = 0  # beside these records
    undigested: int = 0  # records of an older version, judged by their form alone
    damage: dict[str, str] = field(default_factory=dict)  # folder of the point -> what is wrong, in words
    foreign: list[str] = field(default_factory=list)  # files of another version, which are left alone

    def add(self, other: "Health") -> None:
        """Add what was found at other points."""
        self.records += other.records
        self.files += other.files
        self.undigested += other.undigested
        self.damage |= other.damage
        self.foreign += other.foreign


def examine(root: Path) -> Health:
    """Compare everything under `root/points` with its digest, in several processes if it is much. Changes nothing."""
    names, health = point_names(root), Health()
    parts = [(root, names[first : first + _PART]) for first in range(0, len(names), _PART)]
    workers = min(os.cpu_count() or 1, _MOST_WORKERS) if len(names) >= _WORTH_WORKERS else 1
    for found in in_workers(_examine_part, parts, workers):
        health.add(found)
    return health


def _examine_part(part: tuple[Path, list[str]]) -> Health:
    """The health of these points. A task of a worker process."""
    root, names = part
    health, layout = Health(), Layout(root)
    for name in names:
        try:
            if layout.point(name).is_dir():
                _examine_point(layout, name, health)
        except ForeignFileError as error:
            health.damage[name] = str(error)
        except StoreVersionError as error:
            health.foreign.append(str(error))
    return health


def _examine_point(layout: Layout, name: str, health: Health) -> None:
    record, failure = layout.record(name), layout.failure(name)
    if failure.exists():
        read_record(failure)
    if not record.exists():
        tables = sorted(file.name for file in layout.point(name).glob("*.parquet"))
        if tables and not failure.exists():
            raise ForeignFileError(f"{layout.point(name)}: {tables[0]} lies there without a record")
        return
    value = read_record(record)
    fault = point_fault(record, value)
    if fault:
        raise ForeignFileError(f"{record}: {fault}")
    health.records += 1
    health.files += len(value.get("digests") or value.get("tables") or ())
    health.undigested += "digest" not in value


def set_aside(root: Path, names: Sequence[str]) -> Path:
    """Move the folders of points to `root/damaged`; returns that folder.

    Raises:
        StoreError: the store cannot be written.
    """
    aside = root / DAMAGED
    try:
        aside.mkdir(exist_ok=True)
        for name in names:
            Layout(root).point(name).rename(_free(aside, name))
    except OSError as error:
        raise write_failed(aside, error) from error
    return aside


def _free(folder: Path, name: str) -> Path:
    """A name in `folder` that is not taken: the same point may have been damaged before."""
    taken = (folder / f"{name}-{number}" if number else folder / name for number in range(10**6))
    return next(path for path in taken if not path.exists())
