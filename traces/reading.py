"""Opening and reading a trace: a file or a folder, its format named or recognised by its content."""

from pathlib import Path
from typing import TypedDict, Unpack

from traces.arrivals import ArrivalProcess
from traces.detect import FORMATS, detect_format, open_rows
from traces.errors import ParameterError, TraceError
from traces.streaming import Encode, ReadOptions, TraceStream, stream_to_trace
from traces.trace import Trace


class ReadKeywords(TypedDict, total=False):
    """The fields of `ReadOptions`, which explains them."""

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
    """Read a trace whole; raises TraceError with file, line, field and reason, ParameterError on wrong options."""
    return stream_to_trace(stream_trace(path, format, name=name, **options))


def stream_trace(
    path: str | Path, format: str = "auto", *, name: str | None = None, **options: Unpack[ReadKeywords]
) -> TraceStream:
    """Read a trace row by row: iterate over the requests, in the order of the source, then ask for the header.

    What a row reader must remember to check a file (parents of ids, say) is all that stays in memory. Options that
    need the whole trace (`ticks`, and formats whose order is free) are for `read_trace`.
    """
    chosen = ReadOptions(**options)
    if format not in FORMATS:
        raise ParameterError("format", f'one of {", ".join(FORMATS)} expected, found "{format}"')
    found = detect_format(path) if format == "auto" else format
    source = open_rows(found, path, chosen)
    return TraceStream(source, str(path), name or _stem(path), chosen)


def _stem(path: str | Path) -> str:
    return Path(path).name.removesuffix(".gz").rpartition(".")[0] or Path(path).name


__all__ = ["FORMATS", "ReadKeywords", "TraceError", "read_trace", "stream_trace"]
