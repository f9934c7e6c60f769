"""A survey of a store: which points are finished, of which kind they are and how long they took; and its health.

To read 100,000 records takes a minute of CPU time. So what was read is kept in `.survey.parquet` beside `points/`, with
the size, the times and the number of each file of a point. A point whose files are as they were is not read again. The
file is a cache: without it everything is read, and a damaged one is written anew.

An examination reads all in any case and compares every file with its digest. Damage is set aside and never deleted: the
folder of a damaged point moves to `damaged/`, where people can look at it, and the point counts as not run.
"""

import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from harness.console import remark
from harness.metrics.record import PointRecord
from harness.store import ForeignFileError, StoreError, StoreVersionError, commit, write_failed
from harness.store.atomic import write_files
from harness.workers import in_workers

SURVEY = ".survey.parquet"
_WORTH_KEEPING = 1000  # points that were read
_WORTH_WORKERS = 5000  # points to read
_MOST_WORKERS = 8
_PART = 500  # points that a worker reads at a time
_SETTLED_NS = 2_000_000_000  # files that are younger may change within the same tick of their clock
_FAILURE = "failure.json"
_DIGITS = 32  # of the digest before the table
_COLUMNS = ("point", "files", "kind", "seconds")

T = TypeVar("T")
Kept = Mapping[str, "Seen"]


@dataclass(frozen=True, slots=True)
class Seen:
    """A finished point as it was read: the state of its files, and what `essentials` keeps of its record."""

    point: str
    files: str | None  # None where a change of them may not show
    kind: str  # JSON
    seconds: float | None

    def record(self, known: dict[str, PointRecord]) -> PointRecord:
        """The essentials again; points of one kind share their sections, which `known` holds."""
        if self.kind not in known:
            known[self.kind] = PointRecord(**json.loads(self.kind))
        return replace(known[self.kind], seconds={} if self.seconds is None else {"point": self.seconds})


def seen_point(record: PointRecord, files: str | None) -> Seen:
    """What is kept of a record that was read after `files_state` gave `files`."""
    kept = commit.essentials(record)
    took = kept.seconds.get("point")
    text = json.dumps({"config": kept.config, "trace": kept.trace}, sort_keys=True)
    return Seen(record.fingerprint, files, text, took if isinstance(took, float) else None)


def files_state(root: Path, name: str, now_ns: int) -> str | None:
    """A digest of names, sizes, times and numbers of a point's files.

    None where one changed so shortly before `now_ns` that a further change may not show, and where the point failed.
    """
    try:
        with os.scandir(commit.Layout(root).points / name) as entries:
            files = sorted((entry.name, entry.stat()) for entry in entries)
    except OSError:
        return None  # reading it says why
    states = [(file, at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino) for file, at in files]
    newest = max((max(state[2:4]) for state in states), default=now_ns)
    if newest > now_ns - _SETTLED_NS or any(state[0] == _FAILURE for state in states):
        return None
    return hashlib.blake2b(repr(states).encode(), digest_size=16).hexdigest()


def survey(root: Path) -> commit.StoreContent:
    """All points with the essentials of their records, sorted by fingerprint. Many are read in several processes.

    Raises:
        StoreVersionError: a file was written by a version of PageTwin with another record schema.
    """
    names, now_ns = commit.point_names(root), time.time_ns()
    kept = _kept(root) if len(names) >= _WORTH_KEEPING else {}
    seen = {name: kept[name] for name in names if name in kept}
    seen = {name: one for name, one in seen.items() if files_state(root, name, now_ns) == one.files}
    left, known = [name for name in names if name not in seen], len(seen)
    content = commit.StoreContent()
    for read, failures, problems in _by_parts(_read_part, root, left, now_ns):
        seen |= {one.point: one for one in read}
        content.failures |= failures
        content.problems += problems
    if len(names) >= _WORTH_KEEPING and len(seen) - known >= _WORTH_KEEPING:
        keep_survey(root, seen.values())
    shared: dict[str, PointRecord] = {}
    content.records = {name: seen[name].record(shared) for name in names if name in seen}
    return content


def keep_survey(root: Path, seen: Iterable[Seen]) -> None:
    """Keep what was read in the store. One that cannot be written goes without, and is read anew each time."""
    settled = [one for one in seen if one.files is not None]
    columns = {name: [getattr(one, name) for one in settled] for name in _COLUMNS}
    try:
        data = commit.parquet_bytes(columns)
        write_files(root, {SURVEY: commit.digest_of(data).encode() + data})
    except StoreError as error:
        remark(f"the survey of the store is not kept, so the next command reads all points again: {error}")


def is_survey_damaged(root: Path) -> bool:
    """Whether there is a survey that cannot be used; it is written anew by the next command that reads the store."""
    return (root / SURVEY).exists() and not _kept(root)


def _kept(root: Path) -> Kept:
    """What an earlier survey kept, by point; nothing where its file is missing, damaged or of another form."""
    try:
        data = (root / SURVEY).read_bytes()
        if commit.digest_of(data[_DIGITS:]).encode() != data[:_DIGITS]:
            return {}
        columns = commit.read_columns(io.BytesIO(data[_DIGITS:]))
        rows = zip(*(columns[name].tolist() for name in _COLUMNS), strict=True)
    except (OSError, ForeignFileError, KeyError):
        return {}
    shared: dict[str, str] = {}
    return {
        point: Seen(point, files, shared.setdefault(kind, kind), None if seconds != seconds else seconds)
        for point, files, kind, seconds in rows
    }


@dataclass(frozen=True)
class _Part:
    root: Path
    names: Sequence[str]
    now_ns: int


def _by_parts(task: Callable[[_Part], T], root: Path, names: Sequence[str], now_ns: int = 0) -> Iterator[T]:
    """What the task finds at parts of the points; many are read in several processes."""
    parts = [_Part(root, names[first : first + _PART], now_ns) for first in range(0, len(names), _PART)]
    workers = min(os.cpu_count() or 1, _MOST_WORKERS) if len(names) >= _WORTH_WORKERS else 1
    return in_workers(task, parts, workers)


def _read_part(part: _Part) -> tuple[list[Seen], dict[str, commit.Failure], list[str]]:
    """Finished points, failures and problems of some points. A task of a worker process."""
    content, seen = commit.StoreContent(), []
    for name in part.names:
        files = files_state(part.root, name, part.now_ns)
        found = commit.StoreContent(problems=content.problems)
        commit.read_point(part.root, name, found, None)
        seen += [seen_point(record, files) for record in found.records.values()]
        content.failures |= {
            key: {name: failure[name] for name in ("label", "error") if name in failure}
            for key, failure in found.failures.items()
        }
    return seen, content.failures, content.problems


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
    health = Health()
    for found in _by_parts(_examine_part, root, commit.point_names(root)):
        health.add(found)
    return health


def _examine_part(part: _Part) -> Health:
    """The health of these points. A task of a worker process."""
    health, layout = Health(), commit.Layout(part.root)
    for name in part.names:
        try:
            if layout.point(name).is_dir():
                _examine_point(layout, name, health)
        except ForeignFileError as error:
            health.damage[name] = str(error)
        except StoreVersionError as error:
            health.foreign.append(str(error))
    return health


def _examine_point(layout: commit.Layout, name: str, health: Health) -> None:
    record, failure = layout.record(name), layout.failure(name)
    if failure.exists():
        commit.read_file(failure)
    if not record.exists():
        tables = sorted(file.name for file in layout.point(name).glob("*.parquet"))
        if tables and not failure.exists():
            raise ForeignFileError(f"{layout.point(name)}: {tables[0]} lies there without a record")
        return
    found = commit.finished_point(record)
    health.records += 1
    health.files += len(found.digests or found.tables)
    health.undigested += not found.digest


def set_aside(root: Path, names: Sequence[str]) -> Path:
    """Move the folders of points to `root/damaged`; returns that folder.

    Raises:
        StoreError: the store cannot be written.
    """
    aside = root / commit.DAMAGED
    try:
        aside.mkdir(exist_ok=True)
        for name in names:
            commit.Layout(root).point(name).rename(_free(aside, name))
    except OSError as error:
        raise write_failed(aside, error) from error
    return aside


def _free(folder: Path, name: str) -> Path:
    """A name in `folder` that is not taken: the same point may have been damaged before."""
    taken = (folder / f"{name}-{number}" if number else folder / name for number in range(10**6))
    return next(path for path in taken if not path.exists())
