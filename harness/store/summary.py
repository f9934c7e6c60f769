"""`summary.parquet`: one row for each point, with dotted columns. It is rebuilt from the records and is never a source.

Records become columns of Arrow some hundred at a time, and wait compressed. The file is written piece by piece. So
100,000 points with 800 columns each take some 0.3 GB and not ten times that.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any

from harness.metrics.record import PointRecord
from harness.store.atomic import write_files
from harness.store.commit import Layout

_DERIVED = ("digest", "digests")  # say nothing about a point
_SCALARS = frozenset({str, int, float, bool, NoneType})
_ROWS = 500  # of one part
_WRITTEN = 10_000  # rows of a piece of the file


class SummaryRows:
    """The rows of a summary, added one by one."""

    def __init__(self) -> None:
        self._records: list[PointRecord] = []  # that are no part yet
        self._parts: list[bytes] = []  # tables in Arrow's format, compressed
        self._kinds: dict[str, dict[Any, None]] = {}  # the types of each column, in the order of the columns

    def add(self, record: PointRecord) -> None:
        """Add the row of a record."""
        self._records.append(record)
        if len(self._records) == _ROWS:
            self._pack()

    def add_part(self, part: bytes) -> None:
        """Add rows that `parts` of another one gave."""
        import pyarrow as pa

        self._pack()
        self._append(part, pa.ipc.open_stream(part).schema)

    def parts(self) -> list[bytes]:
        """All rows, for `add_part` in another process."""
        self._pack()
        return self._parts

    def tables(self) -> Iterator[Any]:
        """All rows as tables of Arrow, part by part and all of one schema.

        Whole numbers beside fractions become fractions, other mixtures text.
        """
        import pyarrow as pa

        self._pack()
        schema = self._schema()
        for part in self._parts:
            table = pa.ipc.open_stream(part).read_all()
            found = dict(zip(table.column_names, table.columns, strict=True))
            empty = pa.nulls(table.num_rows)
            yield pa.table(
                [_cast(found.get(field.name, empty), field.type) for field in schema], schema=schema
            )

    def table(self) -> Any:
        """All rows as a table of Arrow."""
        import pyarrow as pa

        return pa.concat_tables([self._schema().empty_table(), *self.tables()])

    def write(self, root: Path) -> Path:
        """Write the summary into the store at `root` and return its path.

        Raises:
            StoreError: the folder cannot be written.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        path, sink = Layout(root).summary, io.BytesIO()
        self._pack()
        with pq.ParquetWriter(sink, self._schema(), compression="zstd") as file:
            held: list[Any] = []
            for table in self.tables():
                held.append(table)
                if sum(each.num_rows for each in held) >= _WRITTEN:
                    file.write_table(pa.concat_tables(held))
                    held = []
            file.write_table(pa.concat_tables([self._schema().empty_table(), *held]))
        write_files(root, {path.name: sink.getvalue()})
        return path

    def _schema(self) -> Any:
        import pyarrow as pa

        return pa.schema([(name, _common(kinds)) for name, kinds in self._kinds.items()])

    def _pack(self) -> None:
        import pyarrow as pa

        if not self._records:
            return
        records, self._records = self._records, []
        table = pa.table({name: _array(values) for name, values in columns_of(records).items()})
        sink = io.BytesIO()
        with pa.ipc.new_stream(
            sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
        ) as stream:
            stream.write_table(table)
        self._append(sink.getvalue(), table.schema)

    def _append(self, part: bytes, schema: Any) -> None:
        self._parts.append(part)
        for field in schema:
            self._kinds.setdefault(field.name, {})[field.type] = None


def write_summary(root: Path, records: Iterable[PointRecord]) -> Path:
    """Write the summary of some records and return its path.

    Raises:
        StoreError: the folder cannot be written.
    """
    rows = SummaryRows()
    for record in records:
        rows.add(record)
    return rows.write(root)


def columns_of(records: Sequence[PointRecord]) -> dict[str, Sequence[Any]]:
    """The rows of `flatten` as columns.

    Records of a sweep are mostly built alike. Then whole columns are taken of them, in a third of the time.
    """
    plain = [
        {name: value for name, value in record.to_json().items() if name not in _DERIVED}
        for record in records
    ]
    columns: dict[str, Sequence[Any]] = {}
    if _gather_columns(plain, "", columns):
        return columns
    rows = [flatten(record) for record in plain]
    names = dict.fromkeys(chain.from_iterable(rows))
    return {name: [row.get(name) for row in rows] for name in names}


def _gather_columns(values: Sequence[Any], name: str, columns: dict[str, Sequence[Any]]) -> bool:
    """Add the columns of values that are built alike; False where they are not."""
    kinds = set(map(type, values))
    if kinds <= _SCALARS:
        columns[name] = values
        return True
    if kinds == {dict}:
        keys, dot = list(values[0]), f"{name}." if name else ""
        return list(map(list, values)).count(keys) == len(values) and all(
            _gather_columns(column, f"{dot}{key}", columns)
            for key, column in zip(keys, zip(*map(dict.values, values), strict=True), strict=True)
        )
    if kinds != {list}:
        columns[name] = values
        return len(kinds) == 1
    if len(set(map(len, values))) > 1:
        return False
    if all(isinstance(item, str) for value in values for item in value):
        columns[name] = [" ".join(value) for value in values]
        return True
    if not any(isinstance(item, dict) and "metric" in item for value in values for item in value):
        return True
    for items in zip(*values, strict=True):
        named = [item.get("metric") if isinstance(item, dict) else None for item in items]
        metric = named[0]
        if named.count(metric) < len(named):
            return False
        if metric is None:
            continue
        if not _gather_columns(items, f"{name}.{metric}", columns):
            return False
        del columns[f"{name}.{metric}.metric"]
    return True


def _array(values: Sequence[Any]) -> Any:
    """One type for each column: numbers stay numbers, mixed types become text."""
    import pyarrow as pa

    kinds = set(map(type, values)) - {NoneType}
    if kinds == {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    if len(kinds) > 1:
        return pa.array([None if value is None else str(value) for value in values], pa.string())
    known = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_(), None: pa.null()}
    kind = next(iter(kinds), None)
    return pa.array(values, known[kind]) if kind in known else pa.array(list(values))


def _common(kinds: Iterable[Any]) -> Any:
    """The type of a column whose parts have these types."""
    import pyarrow as pa

    some = {kind for kind in kinds if not pa.types.is_null(kind)}
    if len(some) < 2:
        return some.pop() if some else pa.null()
    return pa.float64() if some == {pa.int64(), pa.float64()} else pa.string()


def _cast(part: Any, kind: Any) -> Any:
    import pyarrow as pa

    if part.type == kind or not pa.types.is_string(kind) or pa.types.is_null(part.type):
        return part.cast(kind, safe=False)  # a whole number beside fractions may be rounded
    return pa.array([None if value is None else str(value) for value in part.to_pylist()], kind)


def flatten(record: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a record as one row: nested keys are joined by dots, lists of words by spaces.

    Rows of a list that name a `metric` become `section.<metric>.<field>`. Other lists (repeated runs) are left out,
    because the record also holds their median and spread.
    """
    columns: dict[str, Sequence[Any]] = {}
    _gather_columns([dict(record)], "", columns)
    return {name: values[0] for name, values in columns.items()}
