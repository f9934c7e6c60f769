"""The canonical form as JSONL: `{"header": {...}}` on line 1, then one request a line without its default values."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from traces.books import Books
from traces.canonical.fields import DEFAULTS, NEEDED, header_record, make_request, read_header
from traces.canonical.order import OrderCheck
from traces.canonical.source import CanonicalSource
from traces.errors import RowError, TraceError
from traces.jsonl import kind, read_object
from traces.rows import Numbered, Row
from traces.source import SourceFile, decode
from traces.trace import Trace, TraceHeader, TraceRequest


def write_jsonl(trace: Trace, path: str | Path) -> None:
    """Write a trace; gzip where the name ends in .gz. Raises OSError."""
    with _open_text(Path(path)) as file:
        file.write(json.dumps({"header": header_record(trace.header)}) + "\n")
        file.writelines(f"{line}\n" for line in _lines(trace.requests))


def record_of(request: TraceRequest) -> dict[str, Any]:
    """A request as plain data: the needed fields, and of the others what differs from its default."""
    record: dict[str, Any] = {name: getattr(request, name) for name in NEEDED}
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
        super().__init__(self._header())

    def rows(self, books: Books, sort: bool) -> Numbered:
        """Requests under their own ids."""
        check = OrderCheck(self.key_kind)
        for line, raw in self.file.lines():
            if line == 1 or not raw.strip():
                continue
            if books.is_full():
                return
            books.read += 1
            try:
                request = make_request(read_object(decode(raw)))
                check.add(request, line)
            except RowError as error:
                books.refuse(line, error)
                continue
            yield request.request_id, row_of(request)

    def _header(self) -> TraceHeader:
        try:
            record = read_object(self.file.first_line).get("header")
            if not isinstance(record, dict):
                raise RowError("header", f"object expected, found {kind(record)}")
            return read_header(record)
        except RowError as error:
            raise TraceError(self.file.path, 1, error.field, error.reason) from error


def row_of(request: TraceRequest) -> Row:
    """A request as the row that gives it back."""
    more = {name: getattr(request, name) for name in DEFAULTS}
    time_ns = request.arrival_us * 1000
    return Row(time_ns, request.prompt_tokens, request.output_tokens, request.segments, more)


def _lines(requests: Iterable[TraceRequest]) -> Iterable[str]:
    return (json.dumps(record_of(request), separators=(",", ":")) for request in requests)


def _open_text(path: Path) -> TextIO:
    if path.name.endswith(".gz"):
        return gzip.open(path, "wt", encoding="utf-8")
    return path.open("w", encoding="utf-8", newline="\n")
