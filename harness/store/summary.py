"""`summary.parquet`: one row for each point, with dotted columns. It is rebuilt from the records and is never a source.

Rows become columns of Arrow a thousand at a time, so that 100,000 points take some 1 GB and not ten times that.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.store.atomic import write_files
from harness.store.commit import Layout, table_bytes
from harness.store.reading import Record

_DERIVED = ("digest", "digests")  # say nothing about a point
_SCALARS = frozenset({str, int, float, bool, type(None)})
_ROWS = 1000  # of one part


class SummaryRows:
    """The rows of a summary, added one by one."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._parts: dict[str, list[Any]] = {}  # arrays of Arrow by column
        self._count = 0  # of rows in parts

    def add(self, record: Record) -> None:
        """Add the row of a record."""
        self._rows.append(flatten(record))
        if len(self._rows) == _ROWS:
            self._pack()

    def add_part(self, table: Any) -> None:
        """Add the rows of a table of Arrow that `table` of another one gave."""
        self._pack()
        self._append({name: table[name].chunks for name in table.column_names}, table.num_rows)

    def table(self) -> Any:
        """All rows as a table of Arrow."""
        import pyarrow as pa

        self._pack()
        return pa.table({name: _joined(parts) for name, parts in self._parts.items()})

    def write(self, root: Path) -> Path:
        """Write the summary into the store at `root` and return its path.

        Raises:
            StoreError: the folder cannot be written.
        """
        path = Layout(root).summary
        write_files(root, {path.name: table_bytes(self.table())})
        return path

    def _pack(self) -> None:
        import pyarrow as pa

        rows, self._rows = self._rows, []
        names = dict.fromkeys(name for row in rows for name in row)
        self._append(
            {name: [pa.array(_column([row.get(name) for row in rows]))] for name in names}, len(rows)
        )

    def _append(self, parts: Mapping[str, list[Any]], rows: int) -> None:
        """Add rows by column; a column that they or the rows before lack is empty there."""
        import pyarrow as pa

        if not rows:
            return
        for name in parts:
            self._parts.setdefault(name, [pa.nulls(self._count)] if self._count else [])
        for name, held in self._parts.items():
            held += parts.get(name) or [pa.nulls(rows)]
        self._count += rows


def write_summary(root: Path, records: Iterable[Record]) -> Path:
    """Write the summary of some records and return its path.

    Raises:
        StoreError: the folder cannot be written.
    """
    rows = SummaryRows()
    for record in records:
        rows.add(record)
    return rows.write(root)


def _joined(parts: Sequence[Any]) -> Any:
    """One column of parts whose types may differ: whole numbers beside fractions become fractions, others text."""
    import pyarrow as pa

    kinds = {part.type for part in parts if not pa.types.is_null(part.type)}
    if len(kinds) > 1 and kinds == {pa.int64(), pa.float64()}:
        kinds = {pa.float64()}
    elif len(kinds) > 1:
        texts = [[None if value is None else str(value) for value in part.to_pylist()] for part in parts]
        return pa.chunked_array([pa.array(text, pa.string()) for text in texts])
    kind = kinds.pop() if kinds else pa.null()
    return pa.chunked_array([part.cast(kind) for part in parts], kind)


def flatten(record: Record) -> dict[str, Any]:
    """A record as one row: nested keys are joined by dots, lists of words by spaces.

    Rows of a list that name a `metric` become `section.<metric>.<field>`. Other lists (repeated runs) are left out,
    because the record also holds their median and spread.
    """
    row: dict[str, Any] = {}
    for name, value in record.items():
        if name not in _DERIVED:
            _gather(value, str(name), row)
    return row


def _gather(value: Any, name: str, row: dict[str, Any]) -> None:
    if type(value) in _SCALARS:
        row[name] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if type(item) in _SCALARS:
                row[f"{name}.{key}"] = item
            else:
                _gather(item, f"{name}.{key}", row)
    elif isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            row[name] = " ".join(value)
        for inner in value:
            if isinstance(inner, Mapping) and "metric" in inner:
                prefix = f"{name}.{inner['metric']}."
                for key, item in inner.items():
                    if type(item) in _SCALARS:
                        if key != "metric":
                            row[prefix + key] = item
                    else:
                        _gather(item, prefix + key, row)
    else:
        row[name] = value


def _column(values: Sequence[Any]) -> list[Any]:
    """One type for each column: numbers stay numbers, mixed types become text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} and float in kinds:
        return [None if value is None else float(value) for value in values]
    if len(kinds) > 1:
        return [None if value is None else str(value) for value in values]
    return list(values)
