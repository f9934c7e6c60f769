"""The files of a store: how a point is committed, its tables first, its record last, and how it is read back.

A record names the digest of each of its tables, and its own: that of its bytes, with zeros in the place of the digest.
So a file that a disk, a copy or an editor has changed is never taken for a result. A record of an older version of
PageTwin has none, and its tables are judged by their length and ends alone. Who reads gets complete records; damaged or
foreign files are named and skipped.
"""

import hashlib
import io
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from harness.metrics.record import PointRecord
from harness.store import ForeignFileError, StoreVersionError
from harness.store.atomic import write_files

_SIZE = 16  # bytes
_EMPTY = "0" * 2 * _SIZE
_OWN = re.compile(rb'"digest": "([0-9a-f]{32})"')
_HEAD = 512  # bytes at the beginning of a record in which its digest stands
_PARQUET = b"PAR1"
_LARGEST = 2**63 - 1  # what a column of whole numbers holds


def digest_of(data: bytes) -> str:
    """The digest of a file's bytes: 32 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=_SIZE).hexdigest()


def sealed(plain: Mapping[str, Any]) -> bytes:
    """A record or manifest as indented JSON with its own digest at its beginning. `plain` holds plain JSON values."""
    first = {name: plain[name] for name in ("schema", "fingerprint") if name in plain}
    text = json.dumps({**first, "digest": _EMPTY, **plain}, indent=1, ensure_ascii=False) + "\n"
    data = text.encode()
    return data.replace(_EMPTY.encode(), digest_of(data).encode(), 1)


def read_sealed(data: bytes) -> Any:
    """The JSON value of a record or manifest.

    Raises:
        ValueError: not JSON, with a number that no table can hold, or changed after it was written; says which.
    """
    found = _OWN.search(data, 0, _HEAD)
    value = json.loads(data, parse_int=_integer, parse_constant=_no_number)
    if found is None and isinstance(value, dict) and "digests" in value:
        raise ValueError("its digest is missing, so it was changed after it was written")
    if found is not None:
        start, end = found.span(1)
        if digest_of(data[:start] + _EMPTY.encode() + data[end:]) != found[1].decode():
            raise ValueError("its content does not match its digest, so it was changed after it was written")
    return value


def _integer(text: str) -> int:
    value = int(text) if len(text) < 20 else math.inf
    if not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"a whole number beyond 64 bits: {text[:24]}")
    return int(value)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def file_fault(file: Path, digest: str | None) -> str | None:
    """Why a file beside a record is not as it was committed, or None; an older record has no digest of it."""
    kind = "table" if file.suffix == ".parquet" else "file"
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return f"its {kind} {file.name} is missing"
    except OSError as error:
        return f"its {kind} {file.name} cannot be read: {error.strerror}"
    if kind == "table" and (len(data) <= 2 * len(_PARQUET) or not data[:4] == _PARQUET == data[-4:]):
        return f"its table {file.name} is truncated"
    if digest is not None and digest_of(data) != digest:
        return f"its {kind} {file.name} does not match its digest, so it was changed after it was written"
    return None


Columns = Mapping[str, Any]  # one array or list a column, all of one length
# The folder of a store that holds what was set aside.
DAMAGED = "damaged"
# of record.json, failure.json and sweep.json; raise it when an old reader would misread a new file
SCHEMA = 1


@dataclass(frozen=True)
class Layout:
    """Paths inside the store at `root`; creates nothing."""

    root: Path

    @property
    def points(self) -> Path:
        """The folder with one folder a point."""
        return self.root / "points"

    @property
    def manifest(self) -> Path:
        """The last sweep of the store."""
        return self.root / "sweep.json"

    @property
    def summary(self) -> Path:
        """One row for each point; derived from the records."""
        return self.root / "summary.parquet"

    def point(self, fingerprint: str) -> Path:
        """The folder of a point."""
        return self.points / fingerprint

    def open_runs(self, fingerprint: str) -> Path:
        """The folder of the measured runs of a point that has not ended (`harness.point.kept_runs`)."""
        return self.root / ".open" / fingerprint

    def record(self, fingerprint: str) -> Path:
        """The record of a finished point."""
        return self.point(fingerprint) / "record.json"

    def failure(self, fingerprint: str) -> Path:
        """The failure of a point."""
        return self.point(fingerprint) / "failure.json"

    def table(self, fingerprint: str, name: str) -> Path:
        """A table of a finished point: `steps` or `requests`."""
        return self.point(fingerprint) / f"{name}.parquet"


def commit_point(
    root: Path,
    fingerprint: str,
    record: PointRecord,
    tables: Mapping[str, Columns],
    more_files: Mapping[str, bytes] | None = None,
) -> None:
    """Store a finished point, whole or not at all; an earlier failure of the point is deleted.

    `more_files` by name lie beside the tables.

    Raises:
        StoreError: the store cannot be written; its content is unchanged.
    """
    layout = Layout(root)
    files = {f"{name}.parquet": parquet_bytes(columns) for name, columns in tables.items()}
    files |= more_files or {}
    digests = {name: digest_of(data) for name, data in files.items()}
    stamped = replace(
        record, schema=SCHEMA, fingerprint=fingerprint, digest="", tables=sorted(tables), digests=digests
    )
    files["record.json"] = sealed(_plain_object(stamped.to_json()))
    write_files(layout.point(fingerprint), files, last="record.json")
    layout.failure(fingerprint).unlink(missing_ok=True)
    forget_runs(root, fingerprint)


def forget_runs(root: Path, fingerprint: str) -> None:
    """Delete the runs that were kept of a point: it is committed, has failed, or is asked for anew."""
    runs = Layout(root).open_runs(fingerprint)
    if runs.parent.exists():
        shutil.rmtree(runs, ignore_errors=True)


def commit_failure(root: Path, fingerprint: str, failure: Mapping[str, Any]) -> Path:
    """Store the failure of a point beside its other files; returns the path.

    Raises:
        StoreError: the store cannot be written.
    """
    path = Layout(root).failure(fingerprint)
    data = sealed(_plain_object({"schema": SCHEMA, "fingerprint": fingerprint, "digests": {}, **failure}))
    write_files(path.parent, {path.name: data})
    forget_runs(root, fingerprint)
    return path


def parquet_bytes(columns: Columns) -> bytes:
    """A table as Parquet. pyarrow is imported here, so that `plan` and `--help` start quickly."""
    import pyarrow as pa

    return table_bytes(pa.table(dict(columns)))


def table_bytes(table: Any) -> bytes:
    """A table of Arrow as Parquet."""
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _plain_object(value: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): _plain(item) for key, item in value.items()}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


Failure = dict[str, Any]
Keep = Callable[[PointRecord], PointRecord]


@dataclass
class StoreContent:
    """The content of a store by fingerprint, sorted by fingerprint."""

    records: dict[str, PointRecord] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # one sentence for each file that was skipped


def read_store(root: Path, keep: Keep | None = None, without: Container[str] = ()) -> StoreContent:
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
    root: Path, name: str, content: StoreContent, keep: Keep | None, *, failure_alone: bool = False
) -> None:
    """Add the record and the failure of a point to `content`, as far as they are there."""
    record, failure = Layout(root).record(name), Layout(root).failure(name)
    try:
        if not failure_alone and os.path.exists(record):
            found = finished_point(record)
            content.records[name] = keep(found) if keep else found
    except ForeignFileError as error:
        content.problems.append(f"skipped {error}")
    try:
        if os.path.exists(failure):
            content.failures[name] = read_file(failure)
    except ForeignFileError as error:
        content.problems.append(f"skipped {error}")


def essentials(record: PointRecord) -> PointRecord:
    """What says of which kind a finished point is and how long it took: its settings, requests and seconds."""
    sections: dict[str, Any] = {name: record.config[name] for name in ("measure",) if name in record.config}
    for name, keys in _KIND.items():
        section = record.config.get(name) or {}
        sections[name] = {key: section[key] for key in keys if key in section}
    requests = {name: record.trace[name] for name in ("requests",) if name in record.trace}
    seconds = {name: record.seconds[name] for name in ("point",) if name in record.seconds}
    return PointRecord(config=sections, trace=requests, seconds=seconds)


_KIND = {
    "replay": ("repeats",),
    "cache": ("policy",),
    "decoding": ("beam_width",),
    "model": ("name", "path"),
    "device": ("name",),
    "cost": ("kind",),
}


def finished_point(path: Path) -> PointRecord:
    """The record at `path`; its tables and files are compared with their digests.

    Raises:
        ForeignFileError: the point is not finished: no whole record, or a file beside it is missing or was changed.
        StoreVersionError: written with another schema.
    """
    value = read_file(path)
    try:
        record = PointRecord.from_json(value)
    except ValueError as error:
        raise ForeignFileError(f"{path}: not a record of a finished point: {error}") from None
    names = dict.fromkeys([*(f"{name}.parquet" for name in record.tables), *record.digests])
    faults = (file_fault(path.with_name(name), record.digests.get(name)) for name in names)
    if fault := next(filter(None, faults), None):
        raise ForeignFileError(f"{path}: {fault}")
    return record


def read_file(path: Path) -> dict[str, Any]:
    """One `record.json` or `failure.json` as it stands.

    Raises:
        ForeignFileError: unreadable, truncated, or not about the point whose folder it lies in.
        StoreVersionError: written with another schema.
    """
    try:
        value = read_sealed(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ForeignFileError(f"{path}: truncated or not JSON ({error})") from None
    version = value.get("schema") if isinstance(value, dict) else None
    if isinstance(version, int):
        check_version(path, version)
    if version is None or value.get("fingerprint") != path.parent.name:
        raise ForeignFileError(f"{path}: not a record of this point")
    return dict(value)


def check_version(path: Path, version: object) -> None:
    """Raise StoreVersionError for a file of another schema than ours."""
    if version != SCHEMA:
        raise StoreVersionError(
            f"{path}: written with record schema {version}, this PageTwin reads {SCHEMA}; "
            "use the version that wrote it, or another folder with out=..."
        )


def read_table(root: Path, fingerprint: str, name: str) -> dict[str, Any]:
    """Columns of a point's table (`steps` or `requests`) as NumPy arrays.

    Raises:
        ForeignFileError: absent, truncated or not Parquet.
    """
    return read_columns(Layout(root).table(fingerprint, name))


def read_columns(path: Path | BinaryIO) -> dict[str, Any]:
    """Columns of a Parquet file as NumPy arrays; raises ForeignFileError where it is absent, truncated or foreign."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ForeignFileError(f"{path}: cannot be read: {error}") from None
    return {column: table[column].to_numpy() for column in table.column_names}
