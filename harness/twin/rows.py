"""The contract of a log format: the requests of a file on one clock, and strict reading of numbers.

A reader makes a `RequestLog`. A wrong row raises `traces.errors.RowError` inside the reader, which `placed` turns into
a `TraceError` with file and line, and `JsonDocument.placed` with line and path. A request that failed is dropped and
counted, never repaired.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from traces.errors import RowError, TraceError
from traces.formats.files import SourceFile, decode, read_document
from traces.formats.parsing import Columns, kind, read_object, read_value

LATEST_S = 1e11  # the year 5138 of a wall clock in seconds; a wall clock in milliseconds is beyond
_ROUNDING_S = 1e-6  # of a wall clock in a double, and of the sums of its parts
_SPACE = " \t\r\n"
Row = TypeVar("Row")
# Of a value inside a JSON document.
Path = tuple[str | int, ...]


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
    answer_ids: tuple[str, ...] = ()  # of the blocks behind those of the prompt that its output filled
    prefix: str | None = None  # name of the text that the prompt begins with, with `prefix_tokens` of it
    prefix_tokens: int | None = None
    session: str | None = None  # the conversation of which it is a turn
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
    assumes_pauses: bool = False  # the log does not tell when a request was sent after the answer before it
    in_order: bool = False  # its rows stand in the order in which they were sent

    def add(self, row: LoggedRequest | str) -> None:
        """Keep a request, or count a row that is no finished request under its reason."""
        if not isinstance(row, str) and not row.output_tokens:
            row = "no output token"
        if isinstance(row, str):
            self.dropped[row] = self.dropped.get(row, 0) + 1
        else:
            self.rows.append(row)

    def add_each(
        self, lines: Iterable[tuple[int | None, Row]], read: Callable[[Row, int | None], LoggedRequest | str]
    ) -> None:
        """Add what `read` makes of each line and its number. Raises TraceError."""
        for line, row in lines:
            with placed(self.file, line):
                self.add(read(row, line))

    @property
    def read(self) -> int:
        """Rows read: those kept and those dropped."""
        return len(self.rows) + sum(self.dropped.values())


@contextmanager
def placed(file: SourceFile, line: int | None) -> Iterator[None]:
    """Turns the error of a row into one with file and line."""
    try:
        yield
    except RowError as error:
        raise TraceError(file.path, line, error.field, error.reason) from error


def json_lines(file: SourceFile) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their lines; blank lines may stand at the end only. Raises TraceError."""
    blank = None
    for line, raw in file.lines():
        if not raw.strip():
            blank = blank or line
            continue
        if blank is not None:
            raise TraceError(file.path, blank, "line", "blank line inside the data")
        with placed(file, line):
            record = read_object(decode(raw))
        yield line, record


def csv_rows(file: SourceFile, wanted: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a CSV file as text by column, those of `wanted`, with their lines. Raises TraceError."""
    columns: Columns | None = None
    for line, raw in file.lines():
        with placed(file, line):
            if columns is None:
                columns = Columns(wanted, decode(raw))
                continue
            fields = columns.pick(decode(raw)) if raw.strip() else None
        if fields is not None:
            yield line, dict(zip(wanted, fields, strict=True))


def not_before(time_s: float, earlier_s: float) -> float:
    """A time without the rounding that puts it before an earlier one; more than that stays, and refuses its row."""
    return max(time_s, earlier_s) if time_s > earlier_s - _ROUNDING_S else time_s


class JsonDocument:
    """The value of a file that is one JSON document. Errors name a place inside it by line and path.

    Raises:
        TraceError: the file is no JSON.
    """

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self._text = read_document(file)
        try:
            self.value: Any = read_value(self._text)
        except RowError as error:
            raise TraceError(file.path, error.text_line, error.field, error.reason) from error

    @contextmanager
    def placed(self, path: Path) -> Iterator[None]:
        """Turns the error of a value at `path`, or of its member that the error names, into one with its place."""
        try:
            yield
        except RowError as error:
            place = (*path, error.field) if error.field is not None else path
            line = self._line(place if self._find(place)[0] == len(place) else path)
            name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
            raise TraceError(self.file.path, line, name.removeprefix("."), error.reason) from error

    def object(self, path: Path) -> dict[str, Any]:
        """The object at `path`. Raises TraceError."""
        value = self.at(path)
        with self.placed(path):
            if not isinstance(value, dict):
                raise RowError(None, f"object expected, found {kind(value)}")
        return value

    def items(self, path: Path) -> list[Any]:
        """The list at `path`. Raises TraceError."""
        value = self.at(path)
        with self.placed(path):
            if not isinstance(value, list):
                raise RowError(None, f"list expected, found {kind(value)}")
        return value

    def at(self, path: Path) -> Any:
        """The value at `path`. Raises TraceError if there is none."""
        depth, value = self._find(path)
        with self.placed(path[:depth]):
            if depth < len(path):
                raise RowError(str(path[depth]), "missing")
        return value

    def _find(self, path: Path) -> tuple[int, Any]:
        """How many steps of a path exist, and the value at the last of these."""
        value = self.value
        for depth, step in enumerate(path):
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return depth, value
        return len(path), value

    def _line(self, path: Path) -> int:
        place = self._skip(0)
        for step in path:
            place = self._member(place, step)
        return self._text.count("\n", 0, place) + 1

    def _member(self, place: int, step: str | int) -> int:
        """Where the value of a member of the object or list at `place` begins."""
        decode = json.JSONDecoder().raw_decode
        place, index = self._skip(place + 1), 0
        while True:
            name: str | int = index
            if self._text[place] == '"' and isinstance(step, str):
                name, place = decode(self._text, place)
                place = self._skip(self._skip(place) + 1)
            if name == step:
                return place
            place = self._skip(self._skip(decode(self._text, place)[1]) + 1)
            index += 1

    def _skip(self, place: int) -> int:
        while self._text[place] in _SPACE:
            place += 1
        return place
