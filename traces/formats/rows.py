"""The contract of a format: rows, row sources, and the loop over the lines of a file.

A `RowSource` gives the rows of a document or a folder. A `LineSource` is one whose records are lines: it reads one line
at a time. `RowCounts` counts what became of each row: rows read = rows kept + rows dropped.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from traces.errors import RowError, TraceError, placed
from traces.formats.files import SourceFile, decode
from traces.trace import CHAINED, Segment, TraceHeader

Encode = Callable[[str], Sequence[int]]
Line = tuple[int, bytes]


class TraceRow(NamedTuple):
    """One row of a source: time in nanoseconds since the format's own origin, lengths in tokens.

    `time_ns` is None if the source has no clock. `more` holds further fields of `TraceRequest`, by name.
    """

    time_ns: int | None
    prompt_tokens: int
    output_tokens: int
    segments: Sequence[Segment]
    more: Mapping[str, Any] | None = None


Numbered = Iterator[tuple[int, TraceRow]]  # a row with its request_id


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

    def number(self, row: TraceRow, request_id: int) -> TraceRow:
        """The row as the next turn of its session, or as it is where it has none."""
        more = row.more or {}
        session = more.get("session")
        return row if session is None else row._replace(more={**more, **self.add(session, request_id)})


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


class RowSource(ABC):
    """An open source: its origin and its rows. A format states what differs from the defaults here."""

    format: str
    key_kind: str = CHAINED  # what equal keys mean; final after all rows are read
    source_block_tokens: int | None = None  # the granularity at which the source records sharing
    has_clock = True
    is_ordered = True  # rows must be in order of time; if False, they are sorted stably after reading
    takes_arrivals = False  # it has times, but an arrival process gives the start of its conversations
    embedded: TraceHeader | None = None  # header inside a file in PageTwin's own format: its times are kept

    def __init__(self, source: str, sha256: str) -> None:
        self.source = source  # file name without folders
        self.sha256 = sha256
        self.noted: dict[str, int] = {}
        self.assumed: list[str] = []  # sentences on what the source does not record

    def clock_quantum_us(self) -> int:
        """Resolution of the arrivals read so far, in microseconds."""
        return 1

    @abstractmethod
    def rows(self, counts: RowCounts, sort: bool) -> Numbered:
        """Valid rows with their request ids, until `counts.limit_reached()`. Malformed rows go to `counts.refuse()`.

        `sort` allows unordered times, which the caller then sorts.
        """


class LineSource(RowSource):
    """The rows of a file whose records are lines: `read_row`, then `accept` after the order of times was checked."""

    time_field: str
    has_header = False

    def __init__(self, file: SourceFile) -> None:
        super().__init__(file.name, file.sha256)
        self.file = file
        if file.has_byte_order_mark:
            note(self.noted, "byte_order_mark")
        self.turns = SessionTurns()
        self.last: tuple[int, int] | None = None  # line and time of the last valid row
        if self.has_header:
            with placed(file.path, 1):
                self.read_header(file.first_line)

    def read_header(self, text: str) -> None:
        """Find the columns in line 1 of a format with a header. Raises RowError."""

    @abstractmethod
    def read_row(self, text: str, line: int) -> TraceRow:
        """The row on physical line `line`. Raises RowError."""

    def accept(self, row: TraceRow, line: int, request_id: int) -> TraceRow:
        """Check the row against earlier rows, remember it and complete it. On RowError nothing is remembered."""
        return row

    def rows(self, counts: RowCounts, sort: bool) -> Numbered:
        """Accepted rows with their request ids."""
        return self.one_by_one(self.data_lines(counts), counts, sort)

    def one_by_one(self, lines: Iterable[Line], counts: RowCounts, sort: bool) -> Numbered:
        """The rows of some lines, each read, checked and accepted alone."""
        for line, raw in lines:
            if counts.limit_reached():
                return
            counts.read += 1
            try:
                row = self.read_row(decode(raw), line)
                if not sort and self.is_ordered:
                    self._check_order(row.time_ns)
                row = self.accept(row, line, counts.read - 1)
            except RowError as error:
                counts.refuse(line, error, self.file.path)  # which may lie in the folder that was named
                continue
            if row.time_ns is not None:
                self.last = line, row.time_ns
            yield counts.read - 1, row

    def _check_order(self, time_ns: int | None) -> None:
        if self.last is not None and time_ns is not None and time_ns < self.last[1]:
            back = f"goes back by {(self.last[1] - time_ns) / 1000:,.15g} us behind line {self.last[0]}"
            raise RowError(self.time_field, f"{back}; sort the file by time first, or allow it (sort)")

    def data_lines(self, counts: RowCounts) -> Iterator[Line]:
        """The lines that are not blank. Blank lines are allowed at the end only."""
        blank = None
        for line, raw in self.file.lines():
            if self.has_header and line == 1:
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
