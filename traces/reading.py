"""Reading a trace: find the format of a file or folder, open it, and turn its rows into requests.

`read_trace` returns a whole trace, `stream_trace` gives one request after the other in constant memory. The user names
the format, or it is found from the content (header names, JSON keys), never from the file name.

A row has one of three results. It is kept. It is dropped: it is correct but cannot be replayed, and is counted by
reason. Or it is refused: it is wrong, so reading stops, or the row is skipped and counted as dropped. So rows read =
rows kept + rows dropped. Small faults that a rule repairs are noted in the header.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypedDict, Unpack

from traces.arrivals import TICKS, ArrivalProcess, spread_ticks
from traces.catalogue import licence_of
from traces.errors import ParameterError, TraceError
from traces.formats.conversations import AgenticSource, ServingSimSource, ShareGptSource, conversation_files
from traces.formats.files import SourceFile, open_source
from traces.formats.hash_ids import TRACE_FILE, BailianSource, MooncakeSource, RagPulseSource
from traces.formats.kv_events import KvEventSource, is_events
from traces.formats.pagetwin import MAGIC, CanonicalParquet, CanonicalRows
from traces.formats.rows import Encode, LineSource, RowCounts, RowSource, TraceRow, note
from traces.formats.servegen import ServeGenSource, has_clients
from traces.formats.tables import (
    AzureSource,
    BurstGptSource,
    ChatLengthsSource,
    LengthsSource,
    SimpleSource,
    VidurSource,
)
from traces.reshape import Links
from traces.trace import Trace, TraceHeader, TraceRequest

ON_ERROR = ("stop", "skip")

_LINE_SOURCES: dict[str, type[LineSource]] = {
    source.format: source
    for source in (
        *(AzureSource, MooncakeSource, VidurSource, BurstGptSource, BailianSource, RagPulseSource),
        *(LengthsSource, ChatLengthsSource, SimpleSource),
    )
}
_DOCUMENTS = ("agentic", "sharegpt", "servegen", "servingsim", "kv_events", "pagetwin")
READERS = (*_LINE_SOURCES, *_DOCUMENTS)
FORMATS = ("auto", *READERS)

_BY_COLUMN = {  # columns that only one format has
    **dict.fromkeys(("TIMESTAMP", "ContextTokens"), "azure"),
    "arrived_at": "vidur",
    **dict.fromkeys(("Log Type", "Request tokens"), "burstgpt"),
    **dict.fromkeys(("pd_ratio", "num_total_tokens"), "lengths"),
    "arrival_s": "simple",
}
_BY_KEY = {  # keys that only one format has; the first one that is there decides
    **dict.fromkeys(("header", "pagetwin_trace"), "pagetwin"),
    **dict.fromkeys(("hash_id_scope", "block_size"), "agentic"),
    **dict.fromkeys(("parent_chat_id", "chat_id"), "bailian"),
    **dict.fromkeys(("sub_requests", "input_toks"), "servingsim"),
    "arrival_s": "simple",
}
_LOOK = 1 << 16  # characters that are searched in a first line that is not complete JSON


@dataclass(frozen=True)
class ReadOptions:
    """Options of reading.

    `ticks` (keep, even, random with `seed`) spreads arrivals that a coarse recording clock gave the same time.
    `on_error` skip drops malformed rows and counts them by field. `limit` stops after so many kept rows: the rest of
    the file is neither parsed nor checked, and the header's changes say so. (Spreading ticks and sorting need the
    whole file, which is then read to its end and cut afterwards.) `sort` allows rows out of order and sorts them by
    time, stably. `arrivals` gives arrival times to requests (in conversation files: to conversations) without a clock.
    `encode` is the tokenizer for formats that hold text; `vocab_size` bounds the ids of formats that hold ids.
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
        for name, value, allowed in (("ticks", self.ticks, TICKS), ("on_error", self.on_error, ON_ERROR)):
            if value not in allowed:
                raise ParameterError(name, f'one of {", ".join(allowed)} expected, found "{value}"')
        if self.limit is not None and self.limit < 1:
            raise ParameterError("limit", f"at least 1 expected, found {self.limit}")


class TraceStream:
    """The requests of a source, in its order and in constant memory. `header()` describes what was read so far.

    Times are relative to the first kept row, as in a trace.
    """

    def __init__(self, source: RowSource, path: str, name: str, options: ReadOptions) -> None:
        self.source = source
        self.path = path
        self.name = name
        self.options = options
        needs_all = options.ticks != "keep" or options.sort or not source.is_ordered
        self.counts = RowCounts(path, options.on_error, None if needs_all else options.limit)
        self.changes: list[str] = []

    def __iter__(self) -> Iterator[TraceRequest]:
        """Requests as they are read; raises TraceError."""
        first = None if self.source.embedded is None else 0
        for number, time_us, row in self.timed():
            first = time_us if first is None else first
            yield _request(number, time_us - first, row)

    def timed(self) -> Iterator[tuple[int, int, TraceRow]]:
        """Kept rows: request id, recorded time in microseconds, row."""
        clock, links = self._clock(), Links()
        last: int | None = None
        for number, row in self.source.rows(self.counts, self.options.sort):
            if clock is not None:  # a later turn is released after the row before, and takes its time
                is_later_turn = last is not None and ((row.more or {}).get("turn") or 1) > 1
                row = row._replace(time_ns=last if is_later_turn else next(clock) * 1000)
            elif row.time_ns == last:
                note(self.counts.noted, "ties")
            assert row.time_ns is not None  # from the source or from the assumed clock
            last = row.time_ns
            if not row.output_tokens or not row.prompt_tokens:
                note(self.counts.dropped, "prompt_zero" if row.output_tokens else "output_zero")
                links.drop(number, row.more or {})
                continue
            self.counts.kept += 1
            yield number, row.time_ns // 1000, links.relink(row)
        if self.counts.more_follows:
            self.changes.append(f"the first {self.counts.kept:,} requests of the file; the rest is unread")
        if not self.counts.kept:
            raise TraceError(self.path, 1, None, self.counts.why_nothing_kept())

    def header(self) -> TraceHeader:
        """The header after the rows read so far."""
        source, counts = self.source, self.counts
        if source.embedded is not None:  # with the drops and changes of this reading
            return replace(
                source.embedded,
                rows_kept=source.embedded.rows_kept - sum(counts.dropped.values()),
                dropped=dict(Counter(source.embedded.dropped) + Counter(counts.dropped)),
                noted={**source.embedded.noted, **source.noted},
                changes=(*source.embedded.changes, *self.changes),
            )
        return TraceHeader(
            name=self.name,
            format=source.format,
            source=source.source,
            key_kind=source.key_kind,
            source_block_tokens=source.source_block_tokens,
            clock_quantum_us=source.clock_quantum_us(),
            sha256=source.sha256,
            rows_read=counts.read,
            rows_kept=counts.kept,
            dropped=dict(counts.dropped),
            noted={**source.noted, **counts.noted},
            changes=(*source.assumed, *self.changes),
            licence=licence_of(source.sha256),
        )

    def _clock(self) -> Iterator[int] | None:
        if self.source.has_clock:
            if self.options.arrivals is not None and not self.source.takes_arrivals:
                reason = f"{self.source.format} records arrivals; change their rate instead"
                raise ParameterError("arrivals", reason)
            return None
        if self.options.arrivals is None:
            reason = "no timestamps: an arrival process is required (trace.arrivals and trace.arrival_rate)"
            raise TraceError(self.path, 1, None, reason)
        self.changes.append(f"arrivals assumed: {self.options.arrivals.describe()}")
        return self.options.arrivals.stream_us(self.options.seed)


def stream_to_trace(stream: TraceStream) -> Trace:
    """All requests of a stream as a trace: sorted by arrival, ticks spread and cut as the options say."""
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


def _request(number: int, arrival_us: int, row: TraceRow) -> TraceRequest:
    _, prompt, output, segments, more = row
    return TraceRequest(number, arrival_us, prompt, output, segments, **(more or {}))


def open_rows(format: str, path: str | Path, options: ReadOptions) -> RowSource:
    """Open a source in a format of `READERS`. Raises TraceError."""
    place = Path(path)
    if format == "agentic":
        return _expected(AgenticSource(place, options.arrivals, options.seed), place, options)
    if format == "servegen":
        return _expected(ServeGenSource(place, options.seed), place, options)
    if format == "kv_events":
        return _expected(KvEventSource(place), place, options)
    if format == "pagetwin" and _is_parquet(place):
        return CanonicalParquet(place, options.expect_sha256)
    is_folder = format == "ragpulse" and place.is_dir()
    file = open_source(place / TRACE_FILE if is_folder else path, options.expect_sha256)
    if format in ("mooncake", "bailian", "servingsim", "simple") and not file.first_line.strip():
        _refuse_blank(file)
    if format == "servingsim":
        return ServingSimSource(file, options.vocab_size)
    if format == "sharegpt":
        return ShareGptSource(file, options.encode)
    return CanonicalRows(file) if format == "pagetwin" else _LINE_SOURCES[format](file)


def _expected(source: RowSource, place: Path, options: ReadOptions) -> RowSource:
    """A source whose checksum, of all its files, is the one that was asked for. Raises TraceError."""
    wanted = options.expect_sha256
    if wanted is not None and wanted.lower() != source.sha256:
        raise TraceError(str(place), None, "sha256", f"expected {wanted}, found {source.sha256}")
    return source


def detect_format(path: str | Path) -> str:
    """The format's name. Raises TraceError if the content fits no known format."""
    place = Path(path)
    if place.is_dir():
        return _folder_format(place)
    if _is_parquet(place):
        return "pagetwin"
    if is_events(place):
        return "kv_events"
    file = open_source(path)
    known = line_format(file.first_line)
    if known is None and file.first_line.strip() == "[":  # an array spread over lines
        head = b""
        for _, raw in file.lines():
            head += raw
            if len(head) > _LOOK:
                break
        known = "sharegpt" if b'"conversations"' in head else "mooncake"
    if known is not None:
        return known
    if not file.first_line.strip():
        _refuse_blank(file)
    raise TraceError(file.path, 1, None, f"no known header or keys; formats: {', '.join(READERS)}")


def line_format(first_line: str) -> str | None:
    """The format of a file with this first line, or None."""
    text = first_line.strip()
    if text.startswith("{"):
        return _object_format(text)
    if text.startswith("["):
        return _text_format(text[:_LOOK]) if text != "[" else None
    names = {name.strip().strip('"') for name in text[:_LOOK].replace(";", ",").split(",")}
    if "session_id" in names and names & {"input_tok_ids"}:
        return "servingsim"
    return next((form for column, form in _BY_COLUMN.items() if column in names), None)


def _object_format(text: str) -> str | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return _text_format(text[:_LOOK])
    if not isinstance(record, dict):
        return None
    if isinstance(record.get("hash_ids"), dict):
        return "ragpulse"
    return next((form for key, form in _BY_KEY.items() if key in record), "mooncake")


def _text_format(text: str) -> str:
    """The format by the keys that occur in a text that is not complete JSON."""
    if '"conversations"' in text:
        return "sharegpt"
    if '"sys_prompt"' in text:
        return "ragpulse"
    return next((form for key, form in _BY_KEY.items() if f'"{key}"' in text), "mooncake")


def _folder_format(folder: Path) -> str:
    if (folder / TRACE_FILE).is_file():
        return "ragpulse"
    if has_clients(folder):
        return "servegen"
    first = next(iter(conversation_files(folder)), None)
    if first is not None and line_format(open_source(first).first_line) == "agentic":
        return "agentic"
    reason = "a folder without conversation files, ServeGen clients or a RAGPulse trace; name a file"
    raise TraceError(str(folder), None, None, f"cannot be read: Is a directory ({reason})")


def may_be_trace(folder: Path) -> bool:
    """Whether a folder has files of a trace, by their names: nothing is opened, and nothing far below is looked at."""
    return (folder / TRACE_FILE).is_file() or bool(conversation_files(folder)) or has_clients(folder)


def _is_parquet(place: Path) -> bool:
    try:
        with place.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False  # open_source reports the reason


def _refuse_blank(file: SourceFile) -> None:
    raise TraceError(file.path, 1, None, "no data rows, or blank lines before them")


class ReadKeywords(TypedDict, total=False):
    """The fields of `ReadOptions`; see there."""

    ticks: str
    on_error: str
    seed: int
    limit: int | None
    expect_sha256: str | None
    sort: bool
    arrivals: ArrivalProcess | None
    encode: Encode | None
    vocab_size: int | None


def read_trace(
    path: str | Path, format: str = "auto", *, name: str | None = None, **options: Unpack[ReadKeywords]
) -> Trace:
    """Read a whole trace. Raises TraceError with file, line, field and reason, and ParameterError on wrong options."""
    return stream_to_trace(stream_trace(path, format, name=name, **options))


def stream_trace(
    path: str | Path, format: str = "auto", *, name: str | None = None, **options: Unpack[ReadKeywords]
) -> TraceStream:
    """Read a trace row by row: iterate over the requests in the order of the source, then call `header()`.

    Only what a row reader needs to check the file (such as parents of ids) stays in memory. `ticks`, and formats
    whose rows may be unordered, need the whole trace and work with `read_trace` only.
    """
    chosen = ReadOptions(**options)
    if format not in FORMATS:
        raise ParameterError("format", f'one of {", ".join(FORMATS)} expected, found "{format}"')
    source = open_rows(detect_format(path) if format == "auto" else format, path, chosen)
    stem = Path(path).name.removesuffix(".gz").rpartition(".")[0] or Path(path).name
    return TraceStream(source, str(path), name or stem, chosen)
