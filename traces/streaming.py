"""Reading as a stream: rows of any open source become requests, in constant memory.

A row is *refused* (the file is wrong: stop, or skip and count it), *dropped* (legitimate, but it cannot be
replayed: counted by reason) or kept; quirks handled by rule are *noted*. Rows read = rows kept + rows dropped.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from traces.arrivals import ArrivalProcess
from traces.books import Books
from traces.catalogue import licence_of
from traces.errors import ParameterError, TraceError
from traces.links import Links
from traces.rows import Numbered, Row, note
from traces.ticks import TICKS, spread_ticks
from traces.trace import Trace, TraceHeader, TraceRequest

ON_ERROR = ("stop", "skip")
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class ReadOptions:
    """How to read.

    `ticks` (keep, even, random with `seed`) spreads arrivals that the recording clock lumps together. `on_error`
    skip drops malformed rows and counts them, by field. `limit` stops after so many kept rows: the rest of the file
    is then neither parsed nor checked, and the header's changes say so. (Spreading ticks and sorting need the whole
    file, which is then read to its end, and cut afterwards.) `sort` allows rows out of order and sorts them by time,
    stably. `arrivals` says when requests (for conversation files: conversations) arrive that have no clock.
    `encode` is the tokenizer of formats that hold text; `vocab_size` bounds the ids of those that hold ids.
    """

    ticks: str = "keep"
    on_error: str = "stop"
    seed: int = 0
    limit: int | None = None
    expect_sha256: str | None = None
    sort: bool = False
    arrivals: ArrivalProcess | None = None
    encode: Encode | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        _check_choice("ticks", self.ticks, TICKS)
        _check_choice("on_error", self.on_error, ON_ERROR)
        if self.limit is not None and self.limit < 1:
            raise ParameterError("limit", f"at least 1 expected, found {self.limit}")


class RowSource(Protocol):
    """A source that is open: where it comes from, and its rows."""

    format: str
    source: str  # file name without folders
    sha256: str
    has_clock: bool
    is_ordered: bool
    noted: dict[str, int]
    assumed: list[str]  # sentences on what the source does not record
    takes_arrivals: bool  # has times, but an arrival process says when its conversations start
    embedded: TraceHeader | None  # of a trace of our own: it brings its header, and its times are not moved

    @property
    def key_kind(self) -> str:
        """What equal keys mean; final when all rows are read."""
        ...

    @property
    def source_block_tokens(self) -> int | None:
        """The granularity at which the source records sharing."""
        ...

    def clock_quantum_us(self) -> int:
        """Resolution of the arrivals read so far."""
        ...

    def rows(self, books: Books, sort: bool) -> Numbered:
        """Valid rows with their request ids, until the books are full; malformed ones go to the books."""
        ...


class TraceStream:
    """The requests of a source in constant memory; `header()` describes what was read so far.

    Order is the source's. Times are relative to the first kept row, as in a trace.
    """

    def __init__(self, source: RowSource, path: str, name: str, options: ReadOptions) -> None:
        self.source = source
        self.path = path
        self.name = name
        self.options = options
        self.books = Books(path, options.on_error, self._row_limit())
        self.changes: list[str] = []

    def __iter__(self) -> Iterator[TraceRequest]:
        """Requests as they are read; raises TraceError."""
        first = None if self.source.embedded is None else 0
        for number, time_us, row in self.timed():
            first = time_us if first is None else first
            yield _request(number, time_us - first, row)

    def timed(self) -> Iterator[tuple[int, int, Row]]:
        """Kept rows: request id, recorded time in microseconds, row."""
        clock, links = self._clock(), Links()
        last: int | None = None
        for number, row in self.source.rows(self.books, self.options.sort):
            if clock is not None:
                row = row._replace(time_ns=_assumed_ns(clock, row, last))
            elif row.time_ns == last:
                note(self.books.noted, "ties")
            assert row.time_ns is not None  # from the source or from the assumed clock
            last = row.time_ns
            reason = _not_replayable(row)
            if reason is not None:
                note(self.books.dropped, reason)
                links.drop(number, row.more)
                continue
            self.books.kept += 1
            yield number, row.time_ns // 1000, links.mend(row)
        if self.books.more_follows:
            self.changes.append(f"the first {self.books.kept:,} requests of the file; the rest is unread")
        if not self.books.kept:
            raise TraceError(self.path, 1, None, self.books.nothing_kept())

    def header(self) -> TraceHeader:
        """What is known of the source after the rows read so far."""
        source, books = self.source, self.books
        if source.embedded is not None:
            return self._continued(source.embedded)
        return TraceHeader(
            name=self.name,
            format=source.format,
            source=source.source,
            key_kind=source.key_kind,
            source_block_tokens=source.source_block_tokens,
            clock_quantum_us=source.clock_quantum_us(),
            sha256=source.sha256,
            rows_read=books.read,
            rows_kept=books.kept,
            dropped=dict(books.dropped),
            noted={**source.noted, **books.noted},
            changes=(*source.assumed, *self.changes),
            licence=licence_of(source.sha256),
        )

    def _continued(self, embedded: TraceHeader) -> TraceHeader:
        """The header that the source brings, with what was done on the way in."""
        dropped = Counter(embedded.dropped) + Counter(self.books.dropped)
        return replace(
            embedded,
            rows_kept=embedded.rows_kept - sum(self.books.dropped.values()),
            dropped=dict(dropped),
            changes=(*embedded.changes, *self.changes),
        )

    def _row_limit(self) -> int | None:
        needs_all = self.options.ticks != "keep" or self.options.sort or not self.source.is_ordered
        return None if needs_all else self.options.limit

    def _clock(self) -> Iterator[int] | None:
        if self.source.has_clock:
            if self.options.arrivals is not None and not self.source.takes_arrivals:
                raise ParameterError(
                    "arrivals", f"{self.source.format} records arrivals; change their rate instead"
                )
            return None
        if self.options.arrivals is None:
            reason = "no timestamps: an arrival process is required (trace.arrivals and trace.arrival_rate)"
            raise TraceError(self.path, 1, None, reason)
        self.changes.append(f"arrivals assumed: {self.options.arrivals.describe()}")
        return self.options.arrivals.stream_us(self.options.seed)


def stream_to_trace(stream: TraceStream) -> Trace:
    """All requests of a stream, in order of arrival, their ticks spread as the options say."""
    rows = list(stream.timed())
    options, quantum_us = stream.options, stream.source.clock_quantum_us()
    recorded = [time_us for _, time_us, _ in rows]
    if any(later < earlier for earlier, later in pairwise(recorded)):
        rows.sort(key=lambda row: row[1])
        recorded.sort()
        stream.changes.append("sorted by arrival; rows of equal times keep their order")
    arrivals = spread_ticks(recorded, quantum_us, options.ticks, options.seed)
    if arrivals != recorded:
        stream.changes.append(f"arrivals spread over their ticks of {quantum_us / 1e6:g} s ({options.ticks})")
    if options.limit is not None and options.limit < len(rows):
        stream.changes.append(f"the first {options.limit:,} of {len(rows):,} requests")
    kept = rows[: options.limit]
    first = 0 if stream.source.embedded is not None else arrivals[0]
    requests = (_request(row[0], time - first, row[2]) for row, time in zip(kept, arrivals, strict=False))
    return Trace(stream.header(), tuple(requests))


def _check_choice(parameter: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ParameterError(parameter, f'one of {", ".join(allowed)} expected, found "{value}"')


def _assumed_ns(clock: Iterator[int], row: Row, last: int | None) -> int:
    """A later turn has no arrival of its own: it stands at the one before it, and is released after it."""
    is_later_turn = row.more is not None and (row.more.get("turn") or 1) > 1
    return last if is_later_turn and last is not None else next(clock) * 1000


def _not_replayable(row: Row) -> str | None:
    if row.output_tokens == 0:
        return "output_zero"
    return "prompt_zero" if row.prompt_tokens == 0 else None


def _request(number: int, arrival_us: int, row: Row) -> TraceRequest:
    more = row.more
    if more is None:
        return TraceRequest(number, arrival_us, row.prompt_tokens, row.output_tokens, row.segments)
    return TraceRequest(number, arrival_us, row.prompt_tokens, row.output_tokens, row.segments, **more)
