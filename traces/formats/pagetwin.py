"""PageTwin's own format, as JSONL or Parquet: a header, then one request per record. Reading returns what was written.

JSONL: `{"header": {...}}` on line 1, then one request per line without default values. Parquet: one column per
field, segments as two lists, and the header as JSON in the metadata. Both have the same fields and the same checks:
types and ranges within a record, then ids, order and links across records, then the number of records, which stands
in the header: a file that was cut at the end of a line is refused.
"""

import gzip
import hashlib
import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from traces.errors import RowError, TraceError
from traces.formats.files import SourceFile, decode
from traces.formats.parsing import MAX_INTEGER, check_best_of, kind, read_object, require_keys
from traces.formats.rows import Numbered, Row, RowCounts, note
from traces.trace import AFTER, AT, CHAINED, CONTENT, Segment, Trace, TraceHeader, TraceRequest

VERSION = 2
_UNCOUNTED = 1  # the version before, whose header does not say how many requests follow
REQUIRED = ("request_id", "arrival_us", "prompt_tokens", "output_tokens", "segments")
INTEGERS: dict[str, tuple[int, int]] = {  # name -> lowest and highest value
    "request_id": (0, MAX_INTEGER),
    "arrival_us": (0, MAX_INTEGER),
    "prompt_tokens": (1, MAX_INTEGER),
    "output_tokens": (1, MAX_INTEGER),
    "turn": (1, MAX_INTEGER),
    "parent": (0, MAX_INTEGER),
    "think_us": (0, MAX_INTEGER),
    "output_key": (0, 2**64 - 1),
    "n": (1, MAX_INTEGER),
    "best_of": (1, MAX_INTEGER),
    "beam_width": (1, MAX_INTEGER),
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
        _check_mapping(values.get(name, {}), name)
    changes = values.get("changes", [])
    if not (isinstance(changes, list) and all(isinstance(change, str) for change in changes)):
        raise RowError("changes", "list of strings expected")
    _check_counts(values)
    calibration = {name: plain_number(value) for name, value in values.get("calibration", {}).items()}
    return TraceHeader(**{**values, "changes": tuple(changes), "calibration": calibration})


def plain_number(value: Any) -> Any:
    """Decimal numbers of a header as floats again."""
    return value if isinstance(value, (str, int)) else float(value)


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
    more["after"] = _after(record.get("after", ()))
    _check_release(more)
    check_best_of(record)
    lengths = {name: record[name] for name in REQUIRED[:4]}
    return TraceRequest(**lengths, segments=segments, **more)


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


def _after(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise RowError("after", f"list of request ids expected, found {kind(value)}")
    for index, item in enumerate(value):
        _check_integer(item, f"after[{index}]", 0, MAX_INTEGER)
    return tuple(value)


def _check_release(more: dict[str, Any]) -> None:
    release = more.get("release", AT)
    if release not in (AT, AFTER):
        raise RowError("release", f"{AT} or {AFTER} expected, found {kind(release)}")
    if release == AFTER and not more["after"]:
        raise RowError("after", "release after needs at least one request in after")


def _check_integer(value: Any, name: str, lowest: int, highest: int) -> None:
    if type(value) is not int:
        raise RowError(name, f"integer expected, found {kind(value)}")
    if not lowest <= value <= highest:
        raise RowError(name, f"{value} is not from {lowest} to {highest}")


def _check_mapping(value: Any, name: str) -> None:
    if not isinstance(value, dict):
        raise RowError(name, f"object expected, found {kind(value)}")
    if name != "calibration":
        for key, count in value.items():
            _check_integer(count, f"{name}.{key}", 0, MAX_INTEGER)


def _check_counts(values: dict[str, Any]) -> None:
    dropped = sum(values.get("dropped", {}).values())
    if values["rows_read"] != values["rows_kept"] + dropped:
        reason = f"{values['rows_read']} is not rows_kept {values['rows_kept']} + dropped {dropped}"
        raise RowError("rows_read", reason)


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
            raise RowError(
                "request_id", f"{request.request_id} already at line {self._lines[request.request_id]}"
            )
        if request.arrival_us < self._last_us:
            raise RowError("arrival_us", f"{request.arrival_us} before {self._last_us} of the line before")
        links = [("after", earlier) for earlier in request.after]
        if request.parent is not None:
            links.append(("parent", request.parent))
        for name, earlier in links:
            if earlier not in self._lines:
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


class CanonicalSource:
    """The attributes of a row source, taken from the header in the file."""

    has_clock = True
    is_ordered = True
    takes_arrivals = False

    def __init__(self, header: TraceHeader, requests: int | None) -> None:
        self.embedded: TraceHeader | None = header
        self.format = header.format
        self.source = header.source
        self.sha256 = header.sha256
        self.key_kind = header.key_kind
        self.source_block_tokens = header.source_block_tokens
        self.noted: dict[str, int] = {}
        self.assumed: list[str] = []
        self._quantum_us = header.clock_quantum_us
        self._requests = requests

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

    def clock_quantum_us(self) -> int:
        """The value in the header."""
        return self._quantum_us


def write_jsonl(trace: Trace, path: str | Path) -> None:
    """Write a trace as JSONL, with gzip if the name ends in .gz. Raises OSError."""
    with _open_text(Path(path)) as file:
        file.write(json.dumps({"header": header_record(trace)}) + "\n")
        file.writelines(f"{line}\n" for line in _lines(trace.requests))


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
        super().__init__(*self._header())

    def rows(self, counts: RowCounts, sort: bool) -> Numbered:
        """Requests under their own ids."""
        check = OrderCheck(self.key_kind)
        for line, raw in self.file.lines():
            if line == 1 or not raw.strip():
                continue
            if counts.limit_reached():
                return
            counts.read += 1
            try:
                request = make_request(read_object(decode(raw)))
                check.add(request, line)
            except RowError as error:
                counts.refuse(line, error)
                continue
            yield request.request_id, row_of(request)
        self.check_count(counts)

    def _header(self) -> tuple[TraceHeader, int | None]:
        try:
            record = read_object(self.file.first_line).get("header")
            if not isinstance(record, dict):
                raise RowError("header", f"object expected, found {kind(record)}")
            return read_header(record)
        except RowError as error:
            raise TraceError(self.file.path, 1, error.field, error.reason) from error


def row_of(request: TraceRequest) -> Row:
    """The row that becomes this request again."""
    more = {name: getattr(request, name) for name in DEFAULTS}
    time_ns = request.arrival_us * 1000
    return Row(time_ns, request.prompt_tokens, request.output_tokens, request.segments, more)


def _lines(requests: Iterable[TraceRequest]) -> Iterable[str]:
    return (json.dumps(record_of(request), separators=(",", ":")) for request in requests)


def _open_text(path: Path) -> TextIO:
    if path.name.endswith(".gz"):
        return gzip.open(path, "wt", encoding="utf-8")
    return path.open("w", encoding="utf-8", newline="\n")


def write_parquet(trace: Trace, path: str | Path) -> None:
    """Write a trace as Parquet with Zstandard compression. Raises OSError."""
    import pyarrow as pa
    from pyarrow import parquet

    header = json.dumps(header_record(trace)).encode()
    schema = _schema().with_metadata({_METADATA: header})
    with parquet.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True) as writer:
        for start in range(0, len(trace.requests), _BATCH):
            writer.write_table(pa.table(_columns(trace, start), schema=schema))


def _columns(trace: Trace, start: int) -> dict[str, list[Any]]:
    requests = trace.requests[start : start + _BATCH]
    columns: dict[str, list[Any]] = {
        name: [getattr(request, name) for request in requests] for name in (*REQUIRED[:4], *DEFAULTS)
    }
    columns[_KEYS] = [[key for key, _ in request.segments] for request in requests]
    columns[_TOKENS] = [[tokens for _, tokens in request.segments] for request in requests]
    return columns


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
        super().__init__(*self._header())

    def rows(self, counts: RowCounts, sort: bool) -> Numbered:
        """Requests under their own ids."""
        import pyarrow as pa

        check = OrderCheck(self.key_kind)
        try:
            for batch in self._file.iter_batches(_BATCH):
                for record in batch.to_pylist():
                    if counts.limit_reached():
                        return
                    counts.read += 1
                    try:
                        request = make_request(_plain(record))
                        check.add(request, counts.read)
                    except RowError as error:
                        counts.refuse(counts.read, error)
                        continue
                    yield request.request_id, row_of(request)
            self.check_count(counts)
        except (pa.ArrowException, OSError) as error:
            raise TraceError(self.path, counts.read + 1, None, f"cannot be read on: {error}") from error

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

    def _header(self) -> tuple[TraceHeader, int | None]:
        text = (self._file.schema_arrow.metadata or {}).get(_METADATA)
        if text is None:
            reason = (
                "a Parquet file, but not a trace of ours: make one with `python -m harness trace convert`"
            )
            raise TraceError(self.path, 1, "header", reason)
        if not self._file.schema_arrow.remove_metadata().equals(_schema()):
            raise TraceError(self.path, 1, "header", "columns are not those of a trace")
        try:
            return read_header(read_object(text.decode()))
        except (RowError, UnicodeDecodeError) as error:
            raise TraceError(self.path, 1, getattr(error, "field", "header"), str(error)) from error


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    keys, tokens = record.pop(_KEYS) or [], record.pop(_TOKENS) or []
    if len(keys) != len(tokens):
        raise RowError("segments", f"{len(keys)} keys but {len(tokens)} lengths")
    return {**record, "segments": list(map(list, zip(keys, tokens, strict=True)))}
