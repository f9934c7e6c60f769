"""Reading a trace file: one loop for all formats, that keeps the three outcomes of a row apart.

A row is *refused* (the file is wrong: stop, or skip and count it), *dropped* (legitimate, but it cannot be
replayed: counted by reason) or kept; quirks handled by rule are *noted*. Rows read = rows kept + rows dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from traces.catalogue import licence_of
from traces.detect import READERS, detect_format, foreign_format
from traces.errors import ParameterError, RowError, TraceError
from traces.rows import Row, RowReader, note
from traces.source import SourceFile, decode, open_source
from traces.ticks import TICKS, spread_ticks
from traces.trace import Trace, TraceHeader, TraceRequest

FORMATS = ("auto", *READERS)
_ON_ERROR = ("stop", "skip")


@dataclass
class _Tally:
    """What became of the rows read so far."""

    read: int = 0
    kept: list[tuple[int, Row]] = field(default_factory=list)  # with its row number
    dropped: dict[str, int] = field(default_factory=dict)
    noted: dict[str, int] = field(default_factory=dict)
    last: tuple[int, int] | None = None  # line and time of the last valid row
    more_follows: bool = False


def read_trace(
    path: str | Path,
    format: str = "auto",
    *,
    name: str | None = None,
    ticks: str = "keep",
    on_error: str = "stop",
    seed: int = 0,
    limit: int | None = None,
    expect_sha256: str | None = None,
) -> Trace:
    """Read a trace file; raises TraceError with file, line, field and reason.

    `ticks` (keep, even, random with `seed`) spreads arrivals that the recording clock lumps together. `on_error`
    skip drops malformed rows and counts them, by field. `limit` stops after so many kept rows: the rest of the file is
    then neither parsed nor checked, `rows_read` counts what was, and the header's changes say so. (Spreading ticks
    needs whole ticks, so the file is then read to its end, and cut afterwards.)
    """
    _check_choice("format", format, FORMATS)
    _check_choice("ticks", ticks, TICKS)
    _check_choice("on_error", on_error, _ON_ERROR)
    if limit is not None and limit < 1:
        raise ParameterError("limit", f"at least 1 expected, found {limit}")
    source = open_source(path, expect_sha256)
    reader = _make_reader(source, format)
    tally = _read_rows(source, reader, on_error, limit if ticks == "keep" else None)
    if not tally.kept:
        raise TraceError(source.path, 1, None, _nothing_kept(tally))
    return _assemble(source, reader, tally, name or Path(path).stem, ticks, seed, limit)


def _check_choice(parameter: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ParameterError(parameter, f'one of {", ".join(allowed)} expected, found "{value}"')


def _make_reader(source: SourceFile, format: str) -> RowReader:
    found = detect_format(source.first_line) if format == "auto" else format
    if found is not None:
        reader = READERS[found]()
        _read_header(source, reader)
        return reader
    title = foreign_format(source.first_line)
    reason = (
        "no known header or keys" if title is None else f"the file looks like {title}, which is not read here"
    )
    if not source.first_line.strip():
        reason = "no data rows, or blank lines before them"
    raise TraceError(source.path, 1, None, f"{reason}; formats: {', '.join(READERS)}")


def _read_header(source: SourceFile, reader: RowReader) -> None:
    if reader.has_header:
        try:
            reader.read_header(source.first_line)
        except RowError as error:
            raise TraceError(source.path, 1, error.field, error.reason) from error


def _read_rows(source: SourceFile, reader: RowReader, on_error: str, limit: int | None) -> _Tally:
    tally = _Tally()
    for line, raw in _data_lines(source, reader, on_error, tally):
        if limit is not None and len(tally.kept) >= limit:
            tally.more_follows = True
            break
        tally.read += 1
        try:
            _read_row(reader, tally, line, raw)
        except RowError as error:
            if on_error == "stop":
                raise TraceError(source.path, line, error.field, error.reason) from error
            note(tally.dropped, f"malformed {error.field}")
    return tally


def _data_lines(
    source: SourceFile, reader: RowReader, on_error: str, tally: _Tally
) -> Iterator[tuple[int, bytes]]:
    """Lines that hold something. Blank ones may only trail."""
    blank = None
    for line, raw in source.lines():
        if reader.has_header and line == 1:
            continue
        if not raw.strip():
            blank = blank or line
            continue
        if blank is not None:
            if on_error == "stop":
                raise TraceError(source.path, blank, "line", "blank line inside the data")
            note(tally.noted, "blank line skipped")
            blank = None
        yield line, raw


def _read_row(reader: RowReader, tally: _Tally, line: int, raw: bytes) -> None:
    row = reader.read_row(decode(raw), line)
    if tally.last is not None:
        last_line, last_ns = tally.last
        if row.time_ns < last_ns:
            back = (last_ns - row.time_ns) / 1000
            reason = f"goes back by {back:,.15g} us behind line {last_line}; sort the file by time first"
            raise RowError(reader.time_field, reason)
        if row.time_ns == last_ns:
            note(tally.noted, "ties")
    reader.accept(row, line)
    tally.last = line, row.time_ns
    if row.output_tokens == 0:
        note(tally.dropped, "output_zero")
    else:
        tally.kept.append((tally.read - 1, row))


def _nothing_kept(tally: _Tally) -> str:
    if not tally.read:
        return "no data rows"
    return f"none of {tally.read:,} rows can be replayed: " + ", ".join(
        f"{n:,} {r}" for r, n in tally.dropped.items()
    )


def _assemble(
    source: SourceFile, reader: RowReader, tally: _Tally, name: str, ticks: str, seed: int, limit: int | None
) -> Trace:
    times_ns = [row.time_ns for _, row in tally.kept]
    quantum_us = reader.clock_quantum_us(times_ns)
    recorded = [time // 1000 for time in times_ns]
    arrivals = spread_ticks(recorded, quantum_us, ticks, seed)
    changes = []
    if arrivals != recorded:
        changes.append(f"arrivals spread over their ticks of {quantum_us / 1e6:g} s ({ticks})")
    if tally.more_follows:
        changes.append(f"the first {limit:,} requests of the file; the rest is unread")
    elif limit is not None and limit < len(arrivals):
        changes.append(f"the first {limit:,} of {len(arrivals):,} requests")
    header = _header(source, reader, tally, name, quantum_us, tuple(changes))
    first = arrivals[0]
    pairs = zip(tally.kept[:limit], arrivals, strict=False)
    return Trace(header, tuple(_request(number, time - first, row) for (number, row), time in pairs))


def _request(number: int, arrival_us: int, row: Row) -> TraceRequest:
    return TraceRequest(number, arrival_us, row.prompt_tokens, row.output_tokens, row.segments)


def _header(
    source: SourceFile, reader: RowReader, tally: _Tally, name: str, quantum_us: int, changes: tuple[str, ...]
) -> TraceHeader:
    noted = {**reader.noted, **tally.noted, **({"byte_order_mark": 1} if source.has_byte_order_mark else {})}
    return TraceHeader(
        name=name,
        format=reader.format,
        source=Path(source.path).name,
        key_kind=reader.key_kind,
        source_block_tokens=reader.source_block_tokens,
        clock_quantum_us=quantum_us,
        sha256=source.sha256,
        rows_read=tally.read,
        rows_kept=len(tally.kept),
        dropped=tally.dropped,
        noted=noted,
        changes=changes,
        licence=licence_of(source.sha256),
    )
