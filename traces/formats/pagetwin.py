"""PageTwin's own format, as JSONL or Parquet: a header, then one request per record. Reading returns what was written.

JSONL: `{"header": {...}}` on line 1, then one request per line without default values. Parquet: one column per
field, segments as two lists, and the header as JSON in the metadata. Both have the same fields and the same checks:
types and ranges within a record, then ids, order and links across records, then the number of records, which stands
in the header: a file that was cut at the end of a line is refused.
"""

import gzip
import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

from traces.errors import RowError, TraceError, placed
from traces.formats.files import SourceFile, decode
from traces.formats.parsing import MAX_INTEGER, as_number, check_best_of, kind, read_object, require_keys
from traces.formats.rows import Numbered, RowCounts, RowSource, TraceRow, note
from traces.trace import (
    AFTER,
    AT,
    CHAINED,
    CONTENT,
    OPEN,
    Client,
    ClientKind,
    Segment,
    Trace,
    TraceHeader,
    TraceRequest,
)

VERSION = 2
_UNCOUNTED = 1  # the version before, whose header does not say how many requests follow
REQUIRED = ("request_id", "arrival_us", "prompt_tokens", "output_tokens", "segments")
INTEGERS: dict[str, tuple[int, int]] = {  # name -> lowest and highest value
    **dict.fromkeys(("request_id", "arrival_us"), (0, MAX_INTEGER)),
    **dict.fromkeys(("prompt_tokens", "output_tokens", "turn"), (1, MAX_INTEGER)),
    **dict.fromkeys(("parent", "think_us"), (0, MAX_INTEGER)),
    "output_key": (0, 2**64 - 1),
    **dict.fromkeys(("n", "best_of", "beam_width"), (1, MAX_INTEGER)),
    "priority": (-MAX_INTEGER, MAX_INTEGER),
}
TEXTS = ("session", "salt", "model", "kind")
DEFAULTS = {field.name: field.default for field in fields(TraceRequest) if field.name not in REQUIRED}
_HEADER = {field.name for field in fields(TraceHeader)}
_HEADER_COUNTS = ("rows_read", "rows_kept", "clock_quantum_us")
MAGIC = b"PAR1"
_METADATA = b"pagetwin_trace_header"
_BATCH = 8192
_REQUESTS = "requests"
_KEYS, _TOKENS = "segment_keys", "segment_tokens"


def header_record(trace: Trace) -> dict[str, Any]:
    """The header as plain data, with the version of the format and the number of requests that follow."""
    header = trace.header
    plain = {field.name: getattr(header, field.name) for field in fields(header)}
    plain |= {name: dict(plain[name]) for name in ("dropped", "noted", "calibration")}
    if header.client == OPEN:  # so that a file is the same as before there were others
        del plain["client"]
    else:
        plain["client"] = asdict(header.client)
    stamp = {"pagetwin_trace": VERSION, _REQUESTS: len(trace.requests)}
    return {**stamp, **plain, "changes": list(header.changes)}


def read_header(record: dict[str, Any]) -> tuple[TraceHeader, int | None]:
    """The header from plain data, and how many requests follow; None where that cannot be known. Raises RowError."""
    values = dict(record)
    version = values.pop("pagetwin_trace", None)
    if type(version) is not int or version not in (_UNCOUNTED, VERSION):
        raise RowError("pagetwin_trace", f"version {_UNCOUNTED} or {VERSION} expected, found {kind(version)}")
    if version == VERSION:
        require_keys(values, (_REQUESTS,))
        _check_integer(values[_REQUESTS], _REQUESTS, 0, MAX_INTEGER)
    header = _header({name: value for name, value in values.items() if name != _REQUESTS})
    return header, values.get(_REQUESTS, None if header.changes else header.rows_kept)


def _header(values: dict[str, Any]) -> TraceHeader:
    if values.get("key_kind") not in (CHAINED, CONTENT):
        raise RowError("key_kind", f"{CHAINED} or {CONTENT} expected, found {kind(values.get('key_kind'))}")
    unknown = values.keys() - _HEADER
    if unknown:
        raise RowError(sorted(unknown)[0], f"unknown header field; allowed are {', '.join(sorted(_HEADER))}")
    require_keys(values, ("name", "format", "source", "sha256", "source_block_tokens", *_HEADER_COUNTS))
    for name in _HEADER_COUNTS:
        _check_integer(values[name], name, 0, MAX_INTEGER)
    if values["source_block_tokens"] is not None:
        _check_integer(values["source_block_tokens"], "source_block_tokens", 1, MAX_INTEGER)
    for name in ("name", "format", "source", "sha256", "licence"):
        if not isinstance(values.get(name, ""), str):
            raise RowError(name, f"string expected, found {kind(values[name])}")
    for name in ("dropped", "noted", "calibration"):
        mapping = values.get(name, {})
        if not isinstance(mapping, dict):
            raise RowError(name, f"object expected, found {kind(mapping)}")
        for key, count in mapping.items() if name != "calibration" else ():
            _check_integer(count, f"{name}.{key}", 0, MAX_INTEGER)
    changes = values.get("changes", [])
    if not (isinstance(changes, list) and all(isinstance(change, str) for change in changes)):
        raise RowError("changes", "list of strings expected")
    dropped = sum(values.get("dropped", {}).values())
    if values["rows_read"] != values["rows_kept"] + dropped:
        reason = f"{values['rows_read']} is not rows_kept {values['rows_kept']} + dropped {dropped}"
        raise RowError("rows_read", reason)
    calibration = {  # decimal numbers as floats again
        name: value if isinstance(value, (str, int, float)) else as_number(value, f"calibration.{name}")
        for name, value in values.get("calibration", {}).items()
    }
    client = _client(values.get("client", {}))
    return TraceHeader(**{**values, "changes": tuple(changes), "calibration": calibration, "client": client})


def _client(record: Any) -> Client:
    if not isinstance(record, dict) or record.keys() - {field.name for field in fields(Client)}:
        raise RowError("client", "object of kind, max_in_flight and pause_us expected")
    found = record.get("kind", ClientKind.open)
    if found not in list(ClientKind):
        raise RowError("client.kind", f"one of {', '.join(ClientKind)} expected, found {kind(found)}")
    most = record.get("max_in_flight")
    if most is not None:
        _check_integer(most, "client.max_in_flight", 1, MAX_INTEGER)
    elif found in (ClientKind.capped, ClientKind.closed):
        raise RowError("client.max_in_flight", f"a {found} client has one")
    _check_integer(record.get("pause_us", 0), "client.pause_us", 0, MAX_INTEGER)
    return Client(ClientKind(found), most, record.get("pause_us", 0))


def make_request(record: dict[str, Any]) -> TraceRequest:
    """A request from plain data, with every field checked. Raises RowError."""
    require_keys(record, REQUIRED)
    unknown = record.keys() - DEFAULTS.keys() - set(REQUIRED)
    if unknown:
        raise RowError(sorted(unknown)[0], f"unknown field; allowed are {', '.join((*REQUIRED, *DEFAULTS))}")
    for name, (lowest, highest) in INTEGERS.items():
        if record.get(name) is not None or name in REQUIRED:
            _check_integer(record[name], name, lowest, highest)
    for name in TEXTS:
        if record.get(name) is not None and not isinstance(record[name], str):
            raise RowError(name, f"string expected, found {kind(record[name])}")
    segments = _segments(record["segments"], record["prompt_tokens"])
    more = {name: record[name] for name in DEFAULTS if record.get(name) is not None}
    after = record.get("after", ())
    if not isinstance(after, (list, tuple)):
        raise RowError("after", f"list of request ids expected, found {kind(after)}")
    for index, item in enumerate(after):
        _check_integer(item, f"after[{index}]", 0, MAX_INTEGER)
    more["after"], release = tuple(after), more.get("release", AT)
    if release not in (AT, AFTER):
        raise RowError("release", f"{AT} or {AFTER} expected, found {kind(release)}")
    if release == AFTER and not after:
        raise RowError("after", "release after needs at least one request in after")
    check_best_of(record)
    return TraceRequest(**{name: record[name] for name in REQUIRED[:4]}, segments=segments, **more)


def _segments(value: Any, prompt_tokens: int) -> tuple[Segment, ...]:
    if not isinstance(value, list):
        raise RowError("segments", f"list of [key, tokens] expected, found {kind(value)}")
    segments = []
    for index, pair in enumerate(value):
        place = f"segments[{index}]"
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RowError(place, f"[key, tokens] expected, found {kind(pair)}")
        if pair[0] is not None:
            _check_integer(pair[0], f"{place} key", 0, 2**64 - 1)
        _check_integer(pair[1], place, 1, MAX_INTEGER)
        segments.append(Segment(*pair))
    total = sum(tokens for _, tokens in segments)
    if total != prompt_tokens:
        raise RowError("segments", f"sum to {total}, prompt_tokens {prompt_tokens}")
    return tuple(segments)


def _check_integer(value: Any, name: str, lowest: int, highest: int) -> None:
    if type(value) is not int:
        raise RowError(name, f"integer expected, found {kind(value)}")
    if not lowest <= value <= highest:
        raise RowError(name, f"{value} is not from {lowest} to {highest}")


class OrderCheck:
    """Checks ids, order and links of requests that are added in the order of the file."""

    def __init__(self, key_kind: str) -> None:
        self._is_chained = key_kind == CHAINED
        self._lines: dict[int, int] = {}  # request id -> line
        self._last_us = 0
        self._parents: dict[int, tuple[int | None, int, int]] = {}  # key -> parent, start in tokens, line

    def add(self, request: TraceRequest, line: int) -> None:
        """Check a request against all before it, and remember it. Raises RowError and then remembers nothing."""
        if request.request_id in self._lines:
            known = self._lines[request.request_id]
            raise RowError("request_id", f"{request.request_id} already at line {known}")
        if request.arrival_us < self._last_us:
            raise RowError("arrival_us", f"{request.arrival_us} before {self._last_us} of the line before")
        links = [*(("after", earlier) for earlier in request.after), ("parent", request.parent)]
        for name, earlier in links:
            if earlier is not None and earlier not in self._lines:
                raise RowError(name, f"request {earlier} is not earlier")
        if self._is_chained:
            self._check_chain(request, line)
        self._lines[request.request_id] = line
        self._last_us = request.arrival_us

    def _check_chain(self, request: TraceRequest, line: int) -> None:
        parent, start = None, 0
        fresh: dict[int, tuple[int | None, int, int]] = {}
        for key, tokens in request.segments:
            if key is None:
                break
            known = self._parents.get(key) or fresh.get(key)
            if known is None:
                fresh[key] = (parent, start, line)
            elif known[:2] != (parent, start):
                where = f"behind key {parent} at token {start}, was behind {known[0]} at {known[1]} at line {known[2]}"
                raise RowError("segments", f"key {key} {where}: keys are not chained")
            parent, start = key, start + tokens
        self._parents |= fresh


class CanonicalSource(RowSource):
    """The rows of a canonical file. The attributes are those of the header in the file."""

    def __init__(self, header: TraceHeader, requests: int | None) -> None:
        super().__init__(header.source, header.sha256)
        self.embedded = header
        self.format, self.key_kind = header.format, header.key_kind
        self.source_block_tokens = header.source_block_tokens
        self._requests = requests

    def clock_quantum_us(self) -> int:
        """The value in the header."""
        assert self.embedded is not None  # set at once
        return self.embedded.clock_quantum_us

    def rows(self, counts: RowCounts, sort: bool) -> Numbered:
        """Requests under their own ids."""
        check = OrderCheck(self.key_kind)
        for line, record in self.records():
            if counts.limit_reached():
                return
            counts.read += 1
            try:
                request = make_request(self.plain(record))
                check.add(request, line)
            except RowError as error:
                counts.refuse(line, error)
                continue
            more = {name: getattr(request, name) for name in DEFAULTS}
            time_ns, prompt, output = request.arrival_us * 1000, request.prompt_tokens, request.output_tokens
            yield request.request_id, TraceRow(time_ns, prompt, output, request.segments, more)
        self.check_count(counts)

    @abstractmethod
    def records(self) -> Iterator[tuple[int, Any]]:
        """The records of the file with their lines. Raises TraceError where it cannot be read on."""

    @abstractmethod
    def plain(self, record: Any) -> dict[str, Any]:
        """A record as plain data. Raises RowError."""

    def check_count(self, counts: RowCounts) -> None:
        """Compare the records of the whole file with the header. Raises TraceError, or counts what is missing."""
        found, expected = counts.read, self._requests
        if expected is None:
            note(self.noted, "an older file, whose header does not count its requests")
        elif found < expected and counts.on_error == "skip":
            note(counts.dropped, "missing from the file", expected - found)
        elif found != expected:
            happened = "is cut off" if found < expected else "has more than was written"
            reason = f"{expected:,} by the header, but {found:,} follow: the file {happened}; make it again"
            raise TraceError(counts.file, found + 1, _REQUESTS, reason)


def write_jsonl(trace: Trace, path: str | Path) -> None:
    """Write a trace as JSONL, with gzip if the name ends in .gz. Raises OSError."""
    with _open_text(Path(path)) as file:
        file.write(json.dumps({"header": header_record(trace)}) + "\n")
        for request in trace.requests:
            file.write(json.dumps(record_of(request), separators=(",", ":")) + "\n")


def _open_text(path: Path) -> TextIO:
    if path.name.endswith(".gz"):
        return gzip.open(path, "wt", encoding="utf-8")
    return path.open("w", encoding="utf-8", newline="\n")


def record_of(request: TraceRequest) -> dict[str, Any]:
    """A request as plain data: the required fields, and others that differ from their default."""
    record: dict[str, Any] = {name: getattr(request, name) for name in REQUIRED}
    record["segments"] = tuple(request.segments)
    for name, default in DEFAULTS.items():
        value = getattr(request, name)
        if value != default:
            record[name] = value
    return record


class CanonicalRows(CanonicalSource):
    """The records of a canonical JSONL file."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        with placed(file.path, 1):
            record = read_object(file.first_line).get("header")
            if not isinstance(record, dict):
                raise RowError("header", f"object expected, found {kind(record)}")
            super().__init__(*read_header(record))

    def records(self) -> Iterator[tuple[int, bytes]]:
        """The lines after the header that are not blank."""
        return ((line, raw) for line, raw in self.file.lines() if line > 1 and raw.strip())

    def plain(self, record: bytes) -> dict[str, Any]:
        """The object on a line."""
        return read_object(decode(record))


def write_parquet(trace: Trace, path: str | Path) -> None:
    """Write a trace as Parquet with Zstandard compression. Raises OSError."""
    import pyarrow as pa
    from pyarrow import parquet

    header = json.dumps(header_record(trace)).encode()
    schema = _schema().with_metadata({_METADATA: header})
    with parquet.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True) as writer:
        for start in range(0, len(trace.requests), _BATCH):
            requests = trace.requests[start : start + _BATCH]
            columns: dict[str, list[Any]] = {
                name: [getattr(request, name) for request in requests] for name in (*REQUIRED[:4], *DEFAULTS)
            }
            columns[_KEYS] = [[key for key, _ in request.segments] for request in requests]
            columns[_TOKENS] = [[tokens for _, tokens in request.segments] for request in requests]
            writer.write_table(pa.table(columns, schema=schema))


def _schema() -> Any:
    import pyarrow as pa

    types = {name: pa.uint64() if high >= 2**63 else pa.int64() for name, (_, high) in INTEGERS.items()}
    types |= dict.fromkeys((*TEXTS, "release"), pa.string())
    types |= {"after": pa.list_(pa.int64()), _KEYS: pa.list_(pa.uint64()), _TOKENS: pa.list_(pa.int64())}
    return pa.schema([(name, types[name]) for name in (*REQUIRED[:4], *DEFAULTS, _KEYS, _TOKENS)])


class CanonicalParquet(CanonicalSource):
    """The records of a canonical Parquet file, read batch by batch. Errors give the record's number as the line."""

    def __init__(self, path: Path, expect_sha256: str | None = None) -> None:
        self.path = str(path)
        self._file = self._open(path, expect_sha256)
        text = (self._file.schema_arrow.metadata or {}).get(_METADATA)
        if text is None:
            hint = "make one with `python -m harness trace convert`"
            raise TraceError(self.path, 1, "header", f"a Parquet file, but not a trace of ours: {hint}")
        if not self._file.schema_arrow.remove_metadata().equals(_schema()):
            raise TraceError(self.path, 1, "header", "columns are not those of a trace")
        try:
            super().__init__(*read_header(read_object(text.decode())))
        except (RowError, UnicodeDecodeError) as error:
            raise TraceError(self.path, 1, getattr(error, "field", "header"), str(error)) from error

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The records with their numbers, from 1."""
        import pyarrow as pa

        number = 0
        try:
            for batch in self._file.iter_batches(_BATCH):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
        except (pa.ArrowException, OSError) as error:
            raise TraceError(self.path, number + 1, None, f"cannot be read on: {error}") from error

    def plain(self, record: dict[str, Any]) -> dict[str, Any]:
        """A record with its segments in pairs."""
        keys, tokens = record.pop(_KEYS) or [], record.pop(_TOKENS) or []
        if len(keys) != len(tokens):
            raise RowError("segments", f"{len(keys)} keys but {len(tokens)} lengths")
        return {**record, "segments": list(map(list, zip(keys, tokens, strict=True)))}

    def _open(self, path: Path, expect_sha256: str | None) -> Any:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            found = hashlib.file_digest(path.open("rb"), "sha256").hexdigest() if expect_sha256 else None
            file = parquet.ParquetFile(path, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise TraceError(self.path, None, None, f"not a readable Parquet file: {error}") from error
        if expect_sha256 is not None and found != expect_sha256.lower():
            raise TraceError(self.path, 1, "sha256", f"expected {expect_sha256}, found {found}")
        return file
