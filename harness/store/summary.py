"""`summary.parquet`: one row a point with dotted columns, rebuilt from the records and never a source itself."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.store.atomic import write_files
from harness.store.commit import parquet_bytes
from harness.store.layout import Layout
from harness.store.reading import Record


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

    Rows of a list that name a `metric` become `section.<metric>.<field>`; other lists (repeated runs) are left out,
    since their median and spread are in the record as well.
    """
    return dict(_leaves(record, ""))


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
    """One type a column: numbers stay numbers, a mixture becomes text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} and float in kinds:
        return [None if value is None else float(value) for value in values]
    if len(kinds) > 1:
        return [None if value is None else str(value) for value in values]
    return list(values)
