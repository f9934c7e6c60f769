"""Whatever bytes a file holds, reading gives a trace or a TraceError, and the counts of rows agree."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import tier
from trace_samples import CONTENTS, RAG, RAG_TABLES, write_ragpulse, write_servegen

from traces.arrivals import ArrivalProcess
from traces.errors import TraceError
from traces.reading import read_trace
from traces.trace import Trace

CLOCK = ArrivalProcess("poisson", 1.0)
RAG_FILES = ("0_trace.jsonl", *RAG_TABLES)
NO_CLOCK = ("lengths", "lengths_chat", "sharegpt")
SPLICES = st.binary(max_size=3) | st.sampled_from(
    [
        b"-1",
        b"0",
        b'"',
        b",",
        b"\n",
        b"\r",
        b"{",
        b"]",
        b"NaN",
        b"1e9",
        b"9" * 20,
        b"true",
        b"null",
        b"+00:00",
        b'"after": [0], ',
        b"[[",
        b"\xff",
        b"\x00",
        b"1e400",
        b"-0",
        b'"\\ud800"',
        b"18446744073709551616",
    ]
)
fuzzing = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=tier(10, 500),
)


def damaged(content: bytes, start: int, length: int, splice: bytes) -> bytes:
    start %= len(content)
    return content[:start] + splice + content[start + length :]


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def outcome(path: Path, format: str, on_error: str = "stop") -> Trace | TraceError:
    arrivals = CLOCK if format in NO_CLOCK else None
    try:
        return read_trace(path, format, on_error=on_error, arrivals=arrivals, encode=letters, limit=50)
    except TraceError as error:
        return error


@pytest.mark.parametrize("format", CONTENTS)
@given(start=st.integers(0, 2_000), length=st.integers(0, 12), splice=SPLICES)
@fuzzing
def test_damaged_files_give_whole_requests_or_an_error_with_a_place(
    format: str, start: int, length: int, splice: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "trace.data"
    path.write_bytes(damaged(CONTENTS[format].encode(), start, length, splice))
    result = outcome(path, format)
    if isinstance(result, TraceError):
        assert result.file == str(path)
        assert result.reason
    else:
        assert all(sum(s.tokens for s in r.segments) == r.prompt_tokens for r in result.requests)
        seen: set[int] = set()
        for request in result.requests:
            assert set(request.after) <= seen
            seen.add(request.request_id)


@pytest.mark.parametrize("format", [name for name in CONTENTS if name != "pagetwin"])
@given(start=st.integers(0, 2_000), length=st.integers(0, 12), splice=SPLICES)
@fuzzing
def test_skipping_counts_every_row_as_kept_or_dropped(
    format: str, start: int, length: int, splice: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "trace.data"
    path.write_bytes(damaged(CONTENTS[format].encode(), start, length, splice))
    result = outcome(path, format, "skip")
    if isinstance(result, Trace):
        header = result.header
        assert header.rows_read == header.rows_kept + sum(header.dropped.values())


@given(
    start=st.integers(0, 2_000), length=st.integers(0, 12), splice=SPLICES, name=st.sampled_from(RAG_FILES)
)
@fuzzing
def test_damaged_ragpulse_files_are_read_or_refused(
    start: int, length: int, splice: bytes, name: str, tmp_path: Path
) -> None:
    path = write_ragpulse(tmp_path, RAG)
    target = tmp_path / name
    target.write_bytes(damaged(target.read_bytes(), start, length, splice))
    result = outcome(path, "ragpulse")
    assert isinstance(result, TraceError) or result.requests


@given(start=st.integers(0, 2_000), length=st.integers(0, 12), splice=SPLICES, dataset=st.booleans())
@fuzzing
def test_damaged_servegen_clients_are_read_or_refused(
    start: int, length: int, splice: bytes, dataset: bool, tmp_path: Path
) -> None:
    folder = write_servegen(tmp_path)
    target = folder / ("chunk-1-dataset.json" if dataset else "chunk-1-trace.csv")
    target.write_bytes(damaged(target.read_bytes(), start, length, splice))
    result = outcome(folder, "servegen")
    assert isinstance(result, TraceError) or len(result.requests) <= 50


@given(content=st.binary(max_size=300))
@fuzzing
def test_any_bytes_are_read_or_refused_whatever_they_are_taken_for(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.data"
    path.write_bytes(content)
    for format in ("auto", *CONTENTS):
        assert isinstance(outcome(path, format), (Trace, TraceError))
