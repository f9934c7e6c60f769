"""A survey of a store: which points are finished, of which kind they are and how long they took.

To read 100,000 records takes a minute of CPU time. So what was read is kept in `.survey.parquet` beside `points/`, with
the size, the times and the number of each file of a point. A point whose files are as they were is not read again;
`doctor` reads all in any case. The file is a cache: without it everything is read, and a damaged one is written anew.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.console import remark
from harness.store.atomic import write_files
from harness.store.commit import Layout, parquet_bytes
from harness.store.errors import ForeignFileError, StoreError
from harness.store.reading import (
    Record,
    StoreContent,
    essentials,
    failed_point,
    point_names,
    read_columns,
    read_point,
)
from harness.workers import in_workers

SURVEY = ".survey.parquet"
_WORTH_KEEPING = 1000  # points that were read
_WORTH_WORKERS = 5000  # points to read
_MOST_WORKERS = 8
_PART = 500  # points that a worker reads at a time
_SETTLED_NS = 2_000_000_000  # files that are younger may change within the same tick of their clock
_FAILURE = "failure.json"
_COLUMNS = ("point", "files", "kind", "seconds")

Kept = Mapping[str, "Seen"]


@dataclass(frozen=True, slots=True)
class Seen:
    """A finished point as it was read: the state of its files, and what `essentials` keeps of its record."""

    point: str
    files: str | None  # None where a change of them may not show
    kind: str  # JSON
    seconds: float | None

    def record(self, known: dict[str, Record]) -> Record:
        """The essentials again; points of one kind share their sections, which `known` holds."""
        if self.kind not in known:
            known[self.kind] = json.loads(self.kind)
        return {**known[self.kind], "seconds": {} if self.seconds is None else {"point": self.seconds}}


def seen_point(record: Record, files: str | None) -> Seen:
    """What is kept of a record that was read after `files_state` gave `files`."""
    kept = essentials(record)
    took = kept.pop("seconds").get("point")
    text = json.dumps(kept, sort_keys=True)
    return Seen(record["fingerprint"], files, text, took if isinstance(took, float) else None)


def files_state(root: Path, name: str, now_ns: int) -> str | None:
    """A digest of names, sizes, times and numbers of a point's files.

    None where one changed so shortly before `now_ns` that a further change may not show, and where the point failed.
    """
    try:
        with os.scandir(Layout(root).points / name) as entries:
            files = sorted((entry.name, entry.stat()) for entry in entries)
    except OSError:
        return None  # reading it says why
    states = [(file, at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino) for file, at in files]
    newest = max((max(state[2:4]) for state in states), default=now_ns)
    if newest > now_ns - _SETTLED_NS or any(state[0] == _FAILURE for state in states):
        return None
    return hashlib.blake2b(repr(states).encode(), digest_size=16).hexdigest()


def survey(root: Path) -> StoreContent:
    """All points with the essentials of their records, sorted by fingerprint. Many are read in several processes.

    Raises:
        StoreVersionError: a file was written by a version of PageTwin with another record schema.
    """
    names, now_ns = point_names(root), time.time_ns()
    kept = _kept(root) if len(names) >= _WORTH_KEEPING else {}
    seen = {name: kept[name] for name in names if name in kept}
    seen = {name: one for name, one in seen.items() if files_state(root, name, now_ns) == one.files}
    left, known = [name for name in names if name not in seen], len(seen)
    parts = [_Part(root, left[first : first + _PART], now_ns) for first in range(0, len(left), _PART)]
    workers = min(os.cpu_count() or 1, _MOST_WORKERS) if len(left) >= _WORTH_WORKERS else 1
    content = StoreContent()
    for read, failures, problems in in_workers(_read_part, parts, workers):
        seen |= {one.point: one for one in read}
        content.failures |= failures
        content.problems += problems
    if len(names) >= _WORTH_KEEPING and len(seen) - known >= _WORTH_KEEPING:
        keep_survey(root, seen.values())
    shared: dict[str, Record] = {}
    content.records = {name: seen[name].record(shared) for name in names if name in seen}
    return content


def keep_survey(root: Path, seen: Iterable[Seen]) -> None:
    """Keep what was read in the store. One that cannot be written goes without, and is read anew each time."""
    settled = [one for one in seen if one.files is not None]
    columns = {name: [getattr(one, name) for one in settled] for name in _COLUMNS}
    try:
        write_files(root, {SURVEY: parquet_bytes(columns)})
    except StoreError as error:
        remark(f"the survey of the store is not kept, so the next command reads all points again: {error}")


def _kept(root: Path) -> Kept:
    """What an earlier survey kept, by point; nothing where its file is missing, damaged or of another form."""
    try:
        columns = read_columns(root / SURVEY)
        rows = zip(*(columns[name].tolist() for name in _COLUMNS), strict=True)
    except (ForeignFileError, KeyError):
        return {}
    shared: dict[str, str] = {}
    return {
        point: Seen(point, files, shared.setdefault(kind, kind), None if seconds != seconds else seconds)
        for point, files, kind, seconds in rows
    }


@dataclass(frozen=True)
class _Part:
    root: Path
    names: list[str]
    now_ns: int


def _read_part(part: _Part) -> tuple[list[Seen], dict[str, Record], list[str]]:
    """Finished points, failures and problems of some points. A task of a worker process."""
    content, seen = StoreContent(), []
    for name in part.names:
        files = files_state(part.root, name, part.now_ns)
        found = StoreContent(problems=content.problems)
        read_point(part.root, name, found, None)
        seen += [seen_point(record, files) for record in found.records.values()]
        content.failures |= {key: failed_point(record) for key, record in found.failures.items()}
    return seen, content.failures, content.problems
