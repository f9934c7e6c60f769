"""Reading a store: complete records are returned; damaged or foreign files are named and skipped."""

import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.store.commit import SCHEMA, Layout
from harness.store.digests import file_fault, read_sealed
from harness.store.errors import ForeignFileError, StoreVersionError

Record = dict[str, Any]
_SECTIONS = (
    "trace",
    "pool",
    "environment",
    "cost",
    "outcome",
    "analytic",
    "simulated",
    "measured",
    "levels",
    "audit",
    "oracle",
    "pace",
    "seconds",
    "digests",
)
_TABLE, _FILE = re.compile(r"\w{1,64}"), re.compile(r"\w[\w.-]{0,80}")  # names, never paths
_ROW = ("metric", "error", "spread")  # of `comparison`
_ROW_KEYS = frozenset(_ROW)
_PLAIN = frozenset({str, int, float, bool, type(None)})


def record_fault(record: Mapping[str, Any]) -> str | None:
    """The first reason why this is no record of a finished point, in words; None where it is one."""
    if not isinstance(record.get("config"), Mapping):
        return "its section 'config' is missing"
    tables = record.get("tables") or []
    if not (
        isinstance(tables, list) and all(isinstance(name, str) and _TABLE.fullmatch(name) for name in tables)
    ):
        return "its section 'tables' is no list of names"
    for name in _SECTIONS:
        if not isinstance(record.get(name), Mapping | None):
            return f"its section '{name}' is no table of keys and values"
    words, rows = record.get("overrides") or [], record.get("comparison") or []
    if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
        return "its section 'overrides' is no list of texts"
    if not all(_FILE.fullmatch(name) for name in record.get("digests") or ()):
        return "its section 'digests' is no table of file names"
    if not (isinstance(rows, list) and all(_is_row(row) for row in rows)):
        return f"its section 'comparison' is no list of rows with {', '.join(_ROW)}"
    return None


def _is_row(row: object) -> bool:
    return type(row) is dict and row.keys() >= _ROW_KEYS and _PLAIN.issuperset(map(type, row.values()))


@dataclass
class StoreContent:
    """The content of a store by fingerprint, sorted by fingerprint."""

    records: dict[str, Record] = field(default_factory=dict)
    failures: dict[str, Record] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # one sentence for each file that was skipped


def read_store(
    root: Path, keep: Callable[[Record], Record] | None = None, without: Container[str] = ()
) -> StoreContent:
    """Everything under `root/points`; a store that does not exist yet is empty.

    `keep` says what of a record stays in memory, where 100,000 whole ones would take 10 GB; None: all. The records of
    the points in `without` are not read.

    Raises:
        StoreVersionError: a file was written by a version of PageTwin with another record schema.
    """
    content = StoreContent()
    for name in point_names(root):
        read_point(root, name, content, keep, failure_alone=name in without)
    return content


def point_names(root: Path) -> list[str]:
    """The names of the points that have a folder, sorted."""
    try:
        return sorted(os.listdir(Layout(root).points))
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_point(
    root: Path,
    name: str,
    content: StoreContent,
    keep: Callable[[Record], Record] | None,
    *,
    failure_alone: bool = False,
) -> None:
    """Add the record and the failure of a point to `content`, as far as they are there."""
    if not failure_alone:
        _collect_if_there(Layout(root).record(name), content.records, content.problems, keep)
    _collect_if_there(Layout(root).failure(name), content.failures, content.problems, keep)


def essentials(record: Record) -> Record:
    """What says of which kind a finished point is and how long it took: its settings, requests and seconds."""
    trace, seconds = record.get("trace") or {}, record.get("seconds") or {}
    known = {name: seconds[name] for name in ("point",) if name in seconds}
    requests = {name: trace[name] for name in ("requests",) if name in trace}
    config = record.get("config") or {}
    sections: dict[str, Any] = {name: config[name] for name in ("measure",) if name in config}
    for name, keys in _KIND.items():
        section = config.get(name)
        sections[name] = {key: section[key] for key in keys if key in section} if section else {}
    return {"config": sections, "trace": requests, "seconds": known}


def failed_point(failure: Record) -> Record:
    """What is said of a failed point: its settings and its error in one line."""
    return {name: failure[name] for name in ("label", "error") if name in failure}


_KIND = {
    "replay": ("repeats",),
    "cache": ("policy",),
    "decoding": ("beam_width",),
    "model": ("name", "path"),
    "device": ("name",),
    "cost": ("kind",),
}


def finished_points(root: Path, names: Iterable[str], problems: list[str]) -> Iterator[Record]:
    """The whole records of these points, one by one and in this order; what is skipped is added to `problems`.

    Raises:
        StoreVersionError: a file was written by a version of PageTwin with another record schema.
    """
    for name in names:
        found: dict[str, Record] = {}
        _collect_if_there(Layout(root).record(name), found, problems, None)
        yield from found.values()


def read_record(path: Path) -> Record:
    """One `record.json` or `failure.json`.

    Raises:
        ForeignFileError: unreadable, truncated, or not about the point whose folder it lies in.
        StoreVersionError: written with another schema.
    """
    value = _read_json(path)
    version = value.get("schema")
    if isinstance(version, int) and version != SCHEMA:
        raise StoreVersionError(
            f"{path}: written with record schema {version}, this PageTwin reads {SCHEMA}; "
            "use the version that wrote it, or another folder with out=..."
        )
    if version is None or value.get("fingerprint") != path.parent.name:
        raise ForeignFileError(f"{path}: not a record of this point")
    return value


def read_table(root: Path, fingerprint: str, name: str) -> dict[str, Any]:
    """Columns of a point's table (`steps` or `requests`) as NumPy arrays.

    Raises:
        ForeignFileError: absent, truncated or not Parquet.
    """
    return read_columns(Layout(root).table(fingerprint, name))


def read_columns(path: Path) -> dict[str, Any]:
    """Columns of a Parquet file as NumPy arrays; raises ForeignFileError where it is absent, truncated or foreign."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ForeignFileError(f"{path}: cannot be read: {error}") from None
    return {column: table[column].to_numpy() for column in table.column_names}


def _read_json(path: Path) -> Record:
    try:
        value = read_sealed(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ForeignFileError(f"{path}: truncated or not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ForeignFileError(f"{path}: not a record")
    return value


def point_fault(path: Path, value: Record) -> str | None:
    """The first reason why the point in the folder of `path` is not finished; None where it is."""
    wrong = record_fault(value)
    if wrong:
        return f"not a record of a finished point: {wrong}"
    digests = value.get("digests") or {}
    names = dict.fromkeys([*(f"{name}.parquet" for name in value.get("tables") or ()), *digests])
    faults = (file_fault(path.with_name(name), digests.get(name)) for name in names)
    return next(filter(None, faults), None)


def _collect_if_there(
    path: Path,
    found: dict[str, Record],
    problems: list[str],
    keep: Callable[[Record], Record] | None,
) -> None:
    if not os.path.exists(path):
        return
    try:
        value = read_record(path)
        wrong = point_fault(path, value) if path.name == "record.json" else None
        if wrong:
            raise ForeignFileError(f"{path}: {wrong}")
    except ForeignFileError as error:
        problems.append(f"skipped {error}")
    else:
        found[path.parent.name] = keep(value) if keep else value
