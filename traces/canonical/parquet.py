"""The canonical form as Parquet: one column a field, segments as two lists, the header as JSON in the metadata."""

import hashlib
import json
from pathlib import Path
from typing import Any

from traces.books import Books
from traces.canonical.fields import (
    DEFAULTS,
    INTEGERS,
    NEEDED,
    TEXTS,
    header_record,
    make_request,
    read_header,
)
from traces.canonical.jsonl import row_of
from traces.canonical.order import OrderCheck
from traces.canonical.source import CanonicalSource
from traces.errors import RowError, TraceError
from traces.jsonl import read_object
from traces.rows import Numbered
from traces.trace import Trace, TraceHeader

MAGIC = b"PAR1"
_METADATA = b"pagetwin_trace_header"
_BATCH = 8192
_KEYS, _TOKENS = "segment_keys", "segment_tokens"


def write_parquet(trace: Trace, path: str | Path) -> None:
    """Write a trace, Zstandard compressed. Raises OSError."""
    import pyarrow as pa
    from pyarrow import parquet

    header = json.dumps(header_record(trace.header)).encode()
    schema = _schema().with_metadata({_METADATA: header})
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, len(trace.requests), _BATCH):
            writer.write_table(pa.table(_columns(trace, start), schema=schema))


def _columns(trace: Trace, start: int) -> dict[str, list[Any]]:
    requests = trace.requests[start : start + _BATCH]
    columns: dict[str, list[Any]] = {
        name: [getattr(request, name) for request in requests] for name in (*NEEDED[:4], *DEFAULTS)
    }
    columns[_KEYS] = [[key for key, _ in request.segments] for request in requests]
    columns[_TOKENS] = [[tokens for _, tokens in request.segments] for request in requests]
    return columns


def _schema() -> Any:
    import pyarrow as pa

    types = {name: pa.uint64() if high >= 2**63 else pa.int64() for name, (_, high) in INTEGERS.items()}
    types |= dict.fromkeys((*TEXTS, "release"), pa.string())
    types |= {"after": pa.list_(pa.int64()), _KEYS: pa.list_(pa.uint64()), _TOKENS: pa.list_(pa.int64())}
    return pa.schema([(name, types[name]) for name in (*NEEDED[:4], *DEFAULTS, _KEYS, _TOKENS)])


class CanonicalParquet(CanonicalSource):
    """The records of a canonical Parquet file, read batch by batch. Errors give the record's number as the line."""

    def __init__(self, path: Path, expect_sha256: str | None = None) -> None:
        self.path = str(path)
        self._file = self._open(path, expect_sha256)
        super().__init__(self._header())

    def rows(self, books: Books, sort: bool) -> Numbered:
        """Requests under their own ids."""
        import pyarrow as pa

        check = OrderCheck(self.key_kind)
        try:
            for batch in self._file.iter_batches(_BATCH):
                for record in batch.to_pylist():
                    if books.is_full():
                        return
                    books.read += 1
                    try:
                        request = make_request(_plain(record))
                        check.add(request, books.read)
                    except RowError as error:
                        books.refuse(books.read, error)
                        continue
                    yield request.request_id, row_of(request)
        except (pa.ArrowException, OSError) as error:
            raise TraceError(self.path, books.read + 1, None, f"cannot be read on: {error}") from error

    def _open(self, path: Path, expect_sha256: str | None) -> Any:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            found = hashlib.file_digest(path.open("rb"), "sha256").hexdigest() if expect_sha256 else None
            file = parquet.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            raise TraceError(self.path, None, None, f"not a readable Parquet file: {error}") from error
        if expect_sha256 is not None and found != expect_sha256.lower():
            raise TraceError(self.path, 1, "sha256", f"expected {expect_sha256}, found {found}")
        return file

    def _header(self) -> TraceHeader:
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
