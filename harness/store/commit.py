"""The files of a store, and how a point is committed: its tables first, its record last."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.store.atomic import write_files
from harness.store.digests import digest_of, sealed

Columns = Mapping[str, Any]  # one array or list a column, all of one length
SCHEMA = (
    1  # of record.json, failure.json and sweep.json; raise it when an old reader would misread a new file
)


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
    record: Mapping[str, Any],
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
    stamp = {
        "schema": SCHEMA,
        "fingerprint": fingerprint,
        "tables": sorted(tables),
        "digests": {name: digest_of(data) for name, data in files.items()},
    }
    files["record.json"] = sealed(_plain_object({**stamp, **record, **stamp}))
    write_files(layout.point(fingerprint), files, last="record.json")
    layout.failure(fingerprint).unlink(missing_ok=True)


def commit_failure(root: Path, fingerprint: str, failure: Mapping[str, Any]) -> Path:
    """Store the failure of a point beside its other files; returns the path.

    Raises:
        StoreError: the store cannot be written.
    """
    path = Layout(root).failure(fingerprint)
    data = sealed(_plain_object({"schema": SCHEMA, "fingerprint": fingerprint, **failure}))
    write_files(path.parent, {path.name: data})
    return path


def json_bytes(value: object) -> bytes:
    """Indented UTF-8 JSON; NumPy values become plain ones, NaN and infinities null (JSON has neither)."""
    return (json.dumps(_plain(value), indent=1, ensure_ascii=False) + "\n").encode()


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
