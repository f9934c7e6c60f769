"""The contract of a log format: the requests of a file on one clock, and strict reading of numbers.

A reader makes a `RequestLog`. A wrong row raises `traces.errors.RowError` inside the reader, which `json_lines` and
`csv_rows` turn into a `TraceError` with file and line. A request that failed is dropped and counted, never repaired.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from math import isfinite
from typing import Any

from traces.errors import RowError, TraceError
from traces.formats.files import SourceFile, decode
from traces.formats.parsing import Columns, in_range, kind, read_object


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One finished request: seconds on the clock of its file, and the line where it stands (None: one document)."""

    request_id: str
    arrival_s: float
    first_token_s: float
    last_token_s: float
    prompt_tokens: int
    output_tokens: int
    queued_s: float | None = None
    scheduled_s: float | None = None
    cached_tokens: int | None = None
    prompt_ids: tuple[int, ...] | None = None
    hash_ids: tuple[int | str, ...] | None = None  # of the prompt's blocks, each chained to those before it
    prefix: str | None = None  # name of the text that the prompt begins with, with `prefix_tokens` of it
    prefix_tokens: int | None = None
    line: int | None = None


@dataclass
class RequestLog:
    """The requests of one file. `facts` are settings that the log mentions by the engine's names, e.g. `model`."""

    format: str
    file: SourceFile
    rows: list[LoggedRequest] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    block_tokens: int | None = None  # of an id of `hash_ids`, where the log says it

    def drop(self, reason: str) -> None:
        """Count a row that is no finished request."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    @property
    def read(self) -> int:
        """Rows read: those kept and those dropped."""
        return len(self.rows) + sum(self.dropped.values())


def json_lines(file: SourceFile) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their lines; blank lines may stand at the end only. Raises TraceError."""
    blank = None
    for line, raw in file.lines():
        if not raw.strip():
            blank = blank or line
            continue
        if blank is not None:
            raise TraceError(file.path, blank, "line", "blank line inside the data")
        try:
            yield line, read_object(decode(raw))
        except RowError as error:
            raise located(file, line, error) from error


def csv_rows(file: SourceFile, wanted: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a CSV file as text by column, those of `wanted`, with their lines. Raises TraceError."""
    columns: Columns | None = None
    for line, raw in file.lines():
        try:
            if columns is None:
                columns = Columns(wanted, decode(raw))
            elif raw.strip():
                yield line, dict(zip(wanted, columns.pick(decode(raw)), strict=True))
        except RowError as error:
            raise located(file, line, error) from error


def located(file: SourceFile, line: int | None, error: RowError) -> TraceError:
    """The error of a row, with its file and line."""
    return TraceError(file.path, line, error.field, error.reason)


def number(record: Mapping[str, Any], key: str) -> float:
    """A finite JSON number. Raises RowError that names the key if it is missing or no number."""
    if key not in record:
        raise RowError(key, f"missing key {key}; found {', '.join(map(str, record))[:200]}")
    return as_number(record[key], key)


def as_number(value: object, key: str) -> float:
    """A finite number from a JSON value. Raises RowError."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise RowError(key, f"number expected, found {kind(value)}")
    try:
        found = float(value)
    except OverflowError:  # a whole number of more than 308 digits
        found = float("inf")
    if not isfinite(found):
        raise RowError(key, f"finite number expected, found {str(value)[:40]}")
    return found


def maybe_number(record: Mapping[str, Any], key: str) -> float | None:
    """The same; None where the key is absent or null."""
    return None if record.get(key) is None else number(record, key)


def whole(record: Mapping[str, Any], key: str, lowest: int = 0) -> int:
    """A whole JSON number of at least `lowest`; 5.0 counts as 5. Raises RowError."""
    found = number(record, key)
    if found != int(found):
        raise RowError(key, f"whole number expected, found {found:g}")
    return in_range(int(found), key, lowest)


def maybe_whole(record: Mapping[str, Any], key: str, lowest: int = 0) -> int | None:
    """The same; None where the key is absent or null."""
    return None if record.get(key) is None else whole(record, key, lowest)


def text_number(fields: Mapping[str, str], key: str) -> float:
    """A finite number in the field of a CSV row. Raises RowError."""
    text = fields[key].strip()
    if not text:
        raise RowError(key, "is empty")
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if not isfinite(found) or "_" in text or not text.isascii():
        raise RowError(key, f'finite number expected, found "{text[:40]}"')
    return found
