"""Reading a store: complete records are returned; damaged or foreign files are named and skipped."""

import os
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from harness.metrics.record import PointRecord
from harness.store import ForeignFileError, StoreVersionError
from harness.store.commit import SCHEMA, Layout, file_fault, read_sealed

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
    if isinstance(version, int) and version != SCHEMA:
        raise StoreVersionError(
            f"{path}: written with record schema {version}, this PageTwin reads {SCHEMA}; "
            "use the version that wrote it, or another folder with out=..."
        )
    if version is None or value.get("fingerprint") != path.parent.name:
        raise ForeignFileError(f"{path}: not a record of this point")
    return dict(value)


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
