"""The contract of a format: rows, row readers and row sources, and the loop over the lines of a file.

A `RowReader` reads one line at a time. `LineRows` reads the lines of a file, gives them to the reader, and is a
`RowSource`. It reads blocks of lines if the reader can (`BlockReader`), else line by line. `RowCounts` counts what
became of each row: rows read = rows kept + rows dropped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

from traces.errors import RowError, TraceError
from traces.formats.files import SourceFile, decode
from traces.trace import Segment, TraceHeader

Encode = Callable[[str], Sequence[int]]
_BLOCK_LINES = 2048
Line = tuple[int, bytes]


class Row(NamedTuple):
    """One row of a source: time in nanoseconds since the format's own origin, lengths in tokens.

    `time_ns` is None if the source has no clock. `more` holds further fields of `TraceRequest`, by name.
    """

    time_ns: int | None
    prompt_tokens: int
    output_tokens: int
    segments: Sequence[Segment]
    more: Mapping[str, Any] | None = None


Rows = tuple[int, Iterator[Row]]
Numbered = Iterator[tuple[int, Row]]  # a row with its request_id


class RowReader(Protocol):
    """Reads one line format, row by row: `read_row`, then `accept` after the order of times was checked."""

    format: str
    source_block_tokens: int | None
    time_field: str
    has_header: bool
    has_clock: bool
    is_ordered: bool  # rows must be in order of time; if False, they are sorted stably after reading
    noted: dict[str, int]

    @property
    def key_kind(self) -> str:
        """What equal keys mean, judged by the rows read so far."""
        ...

    def read_header(self, text: str) -> None:
        """Find the columns in line 1 of a format with a header. Raises RowError."""
        ...

    def read_row(self, text: str, line: int) -> Row:
        """The row on physical line `line`. Raises RowError."""
        ...

    def accept(self, row: Row, line: int, request_id: int) -> Row:
        """Check the row against earlier rows, remember it and complete it. On RowError nothing is remembered."""
        ...

    def clock_quantum_us(self) -> int:
        """Resolution of the arrivals read so far, in microseconds."""
        ...


@runtime_checkable
class BlockReader(Protocol):
    """A line reader that can also read many lines at once."""

    def read_block(self, lines: list[bytes], first_line: int, last_ns: int | None) -> Rows | None:
        """The last time in ns and the rows of `lines`. None, with nothing remembered, if any line is doubtful."""
        ...


def note(noted: dict[str, int], name: str, count: int = 1) -> None:
    """Add to the count of a small fault that a rule repaired."""
    noted[name] = noted.get(name, 0) + count


class SessionTurns:
    """Numbers the turns of each session in the order of the file."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}  # session -> its last turn, and that turn's request

    def add(self, session: str, request_id: int) -> dict[str, Any]:
        """The fields `session`, `turn` (from 1) and `parent` of the session's next request."""
        turn, parent = self._last.get(session, (0, None))
        self._last[session] = (turn + 1, request_id)
        return {"session": session, "turn": turn + 1, "parent": parent}


@dataclass
class RowCounts:
    """Counts of the rows so far. A row is kept, dropped (by reason) or, if `on_error` is stop, refused."""

    file: str
    on_error: str = "stop"
    limit: int | None = None  # kept rows after which a source stops reading
    more_follows: bool = False  # the source stopped at the limit before its end
    read: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    noted: dict[str, int] = field(default_factory=dict)

    def limit_reached(self) -> bool:
        """Whether a source must stop. Call it when another record follows: then it also sets `more_follows`."""
        if self.limit is None or self.kept < self.limit:
            return False
        self.more_follows = True
        return True

    def refuse(self, line: int | None, error: RowError, file: str | None = None) -> None:
        """Raise TraceError, or count the row as dropped by its field if malformed rows are skipped."""
        if self.on_error == "stop":
            raise TraceError(file or self.file, line, error.field, error.reason) from error
        note(self.dropped, f"malformed {error.field}")

    def why_nothing_kept(self) -> str:
        """The reason why no row was kept."""
        if not self.read:
            return "no data rows"
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items())
        return f"none of {self.read:,} rows can be replayed: {reasons}"


class LineRows:
    """The rows of a file whose records are lines."""

    embedded: TraceHeader | None = None
    takes_arrivals = False

    def __init__(self, file: SourceFile, reader: RowReader) -> None:
        self.file = file
        self.reader = reader
        self.source = file.name
        self.sha256 = file.sha256
        self.format = reader.format
        self.is_ordered = reader.is_ordered
        self.has_clock = reader.has_clock
        self.assumed: list[str] = []
        self.noted = reader.noted
        if file.has_byte_order_mark:
            note(self.noted, "byte_order_mark")
        self._last: tuple[int, int] | None = None  # line and time of the last valid row
        if reader.has_header:
            self._read_header()

    @property
    def key_kind(self) -> str:
        """What equal keys mean, judged by the rows read so far."""
        return self.reader.key_kind

    @property
    def source_block_tokens(self) -> int | None:
        """The granularity at which the source records sharing."""
        return self.reader.source_block_tokens

    def clock_quantum_us(self) -> int:
        """Resolution of the arrivals read so far."""
        return self.reader.clock_quantum_us()

    def rows(self, counts: RowCounts, sort: bool) -> Numbered:
        """Accepted rows with their request ids. `sort` allows unordered times, which the caller then sorts."""
        lines = self._data_lines(counts)
        blocks = self.reader if isinstance(self.reader, BlockReader) and not sort else None
        if blocks is None or (counts.limit is not None and counts.limit < _BLOCK_LINES):
            yield from self._one_by_one(lines, counts, sort)
            return
        while block := list(islice(lines, _BLOCK_LINES)):
            rows = self._block(blocks, block)
            if rows is None:
                yield from self._one_by_one(block, counts, sort)
                continue
            for row in rows:
                if counts.limit_reached():
                    return
                counts.read += 1
                yield counts.read - 1, row

    def _read_header(self) -> None:
        try:
            self.reader.read_header(self.file.first_line)
        except RowError as error:
            raise TraceError(self.file.path, 1, error.field, error.reason) from error

    def _block(self, reader: BlockReader, block: list[Line]) -> Iterator[Row] | None:
        first, last = block[0][0], block[-1][0]
        if last - first + 1 != len(block):  # a blank line was skipped
            return None
        last_ns = None if self._last is None else self._last[1]
        rows = reader.read_block([raw for _, raw in block], first, last_ns)
        if rows is None:
            return None
        self._last = last, rows[0]
        return rows[1]

    def _one_by_one(self, lines: Iterator[Line] | list[Line], counts: RowCounts, sort: bool) -> Numbered:
        for line, raw in lines:
            if counts.limit_reached():
                return
            counts.read += 1
            try:
                row = self.reader.read_row(decode(raw), line)
                self._check_order(row, sort)
                row = self.reader.accept(row, line, counts.read - 1)
            except RowError as error:
                counts.refuse(line, error, self.file.path)  # which may lie in the folder that was named
                continue
            if row.time_ns is not None:
                self._last = line, row.time_ns
            yield counts.read - 1, row

    def _check_order(self, row: Row, sort: bool) -> None:
        if self._last is None or sort or not self.is_ordered or row.time_ns is None:
            return
        line, last_ns = self._last
        if row.time_ns < last_ns:
            back = (last_ns - row.time_ns) / 1000
            raise RowError(
                self.reader.time_field,
                f"goes back by {back:,.15g} us behind line {line}; sort the file by time first, or allow it (sort)",
            )

    def _data_lines(self, counts: RowCounts) -> Iterator[Line]:
        """The lines that are not blank. Blank lines are allowed at the end only."""
        blank = None
        for line, raw in self.file.lines():
            if self.reader.has_header and line == 1:
                continue
            if not raw.strip():
                blank = blank or line
                continue
            if blank is not None:
                if counts.on_error == "stop":
                    raise TraceError(self.file.path, blank, "line", "blank line inside the data")
                note(counts.noted, "blank line skipped")
                blank = None
            yield line, raw


class RowSource(Protocol):
    """An open source: its origin and its rows."""

    format: str
    source: str  # file name without folders
    sha256: str
    has_clock: bool
    is_ordered: bool
    noted: dict[str, int]
    assumed: list[str]  # sentences on what the source does not record
    takes_arrivals: bool  # it has times, but an arrival process gives the start of its conversations
    embedded: TraceHeader | None  # header inside a file in PageTwin's own format, whose times are not shifted

    @property
    def key_kind(self) -> str:
        """What equal keys mean. Final after all rows are read."""
        ...

    @property
    def source_block_tokens(self) -> int | None:
        """The granularity at which the source records sharing."""
        ...

    def clock_quantum_us(self) -> int:
        """Resolution of the arrivals read so far."""
        ...

    def rows(self, counts: RowCounts, sort: bool) -> Numbered:
        """Valid rows with their request ids, until `counts.limit_reached()`. Malformed rows go to `counts.refuse()`."""
        ...
