"""Reading a store: complete records are returned; damaged or foreign files are named and skipped.

`summary.parquet` has one row for each point, with dotted columns. It is rebuilt from the records and is never a source.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.store.atomic import write_files
from harness.store.commit import SCHEMA, Layout, parquet_bytes
from harness.store.digests import file_fault, read_sealed
from harness.store.errors import ForeignFileError, StoreVersionError

Record = dict[str, Any]
_DERIVED = ("digest", "digests")  # say nothing about a point
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
    "pace",
    "seconds",
    "digests",
)
_TABLE, _FILE = re.compile(r"\w{1,64}"), re.compile(r"\w[\w.-]{0,80}")  # names, never paths
_ROW = ("metric", "error", "spread")  # of `comparison`


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
    return isinstance(row, Mapping) and all(key in row for key in _ROW)


@dataclass
class StoreContent:
    """The content of a store by fingerprint, sorted by fingerprint."""

    records: dict[str, Record] = field(default_factory=dict)
    failures: dict[str, Record] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # one sentence for each file that was skipped


def read_store(root: Path) -> StoreContent:
    """Everything under `root/points`; a store that does not exist yet is empty.

    Raises:
        StoreVersionError: a file was written by a version of PageTwin with another record schema.
    """
    layout, content = Layout(root), StoreContent()
    folders = sorted(layout.points.iterdir()) if layout.points.is_dir() else []
    for folder in folders:
        for path, found in (
            (layout.record(folder.name), content.records),
            (layout.failure(folder.name), content.failures),
        ):
            if path.exists():
                _collect(path, folder.name, found, content.problems)
    return content


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


def _collect(path: Path, fingerprint: str, found: dict[str, Record], problems: list[str]) -> None:
    try:
        value = read_record(path)
        wrong = point_fault(path, value) if path.name == "record.json" else None
        if wrong:
            raise ForeignFileError(f"{path}: {wrong}")
    except ForeignFileError as error:
        problems.append(f"skipped {error}")
    else:
        found[fingerprint] = value


def write_summary(root: Path, records: Iterable[Record]) -> Path:
    """Write the summary of some records and return its path.

    Raises:
        StoreError: the folder cannot be written.
    """
    path = Layout(root).summary
    rows = [flatten(record) for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    write_files(root, {path.name: parquet_bytes(columns)})
    return path


def flatten(record: Record) -> dict[str, Any]:
    """A record as one row: nested keys are joined by dots, lists of words by spaces.

    Rows of a list that name a `metric` become `section.<metric>.<field>`. Other lists (repeated runs) are left out,
    because the record also holds their median and spread.
    """
    return dict(_leaves({name: value for name, value in record.items() if name not in _DERIVED}, ""))


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            yield prefix, " ".join(value)
        for row in value:
            if isinstance(row, Mapping) and "metric" in row:
                rest = {key: item for key, item in row.items() if key != "metric"}
                yield from _leaves(rest, f"{prefix}.{row['metric']}")
    else:
        yield prefix, value


def _column(values: Sequence[Any]) -> list[Any]:
    """One type for each column: numbers stay numbers, mixed types become text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} and float in kinds:
        return [None if value is None else float(value) for value in values]
    if len(kinds) > 1:
        return [None if value is None else str(value) for value in values]
    return list(values)
