"""Whatever bytes a file holds, reading gives a trace or a TraceError, and the books of rows balance."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traces.errors import TraceError
from traces.reading import read_trace
from traces.trace import Trace

AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
    b"2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 18:15:51.2225670,879,55"
)
MOONCAKE = (
    b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    b'{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 2]}\n'
    b'{"timestamp": 9, "input_length": 30, "output_length": 0, "hash_ids": [3]}\n'
)
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
    ]
)
fuzzing = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300
)


def damaged(content: bytes, start: int, length: int, splice: bytes) -> bytes:
    start %= len(content)
    return content[:start] + splice + content[start + length :]


def outcome(path: Path, on_error: str = "stop") -> Trace | TraceError:
    try:
        return read_trace(path, on_error=on_error)
    except TraceError as error:
        return error


@pytest.mark.parametrize("content", [AZURE, MOONCAKE], ids=["azure", "mooncake"])
@given(start=st.integers(0, 300), length=st.integers(0, 12), splice=SPLICES)
@fuzzing
def test_damaged_files_give_whole_requests_or_an_error_with_a_line(
    content: bytes, start: int, length: int, splice: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "trace.data"
    path.write_bytes(damaged(content, start, length, splice))
    result = outcome(path)
    if isinstance(result, TraceError):
        assert result.line in range(1, 6)
    else:
        assert all(sum(s.tokens for s in r.segments) == r.prompt_tokens for r in result.requests)


@pytest.mark.parametrize("content", [AZURE, MOONCAKE], ids=["azure", "mooncake"])
@given(start=st.integers(0, 300), length=st.integers(0, 12), splice=SPLICES)
@fuzzing
def test_skipping_counts_every_row_as_kept_or_dropped(
    content: bytes, start: int, length: int, splice: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "trace.data"
    path.write_bytes(damaged(content, start, length, splice))
    result = outcome(path, "skip")
    if isinstance(result, Trace):
        header = result.header
        assert header.rows_read == header.rows_kept + sum(header.dropped.values())
