"""Our own form keeps every field of every request and the header, in JSONL and in Parquet."""

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tiers import cases
from trace_samples import CANONICAL, CONTENTS, RAG, jsonl, write_ragpulse

from traces.analysis.reuse import shared_prefix_tokens
from traces.errors import TraceError
from traces.formats.hash_ids import write_mooncake
from traces.formats.pagetwin import write_jsonl, write_parquet
from traces.reading import read_trace
from traces.reshape import drop_oversize, take
from traces.synth.generator import PrefixSharing, generate_trace
from traces.trace import Segment, Trace, TraceHeader, TraceRequest

WRITERS = {".jsonl": write_jsonl, ".jsonl.gz": write_jsonl, ".parquet": write_parquet}
keys = st.none() | st.integers(0, 2**64 - 1)
segments = st.lists(st.tuples(keys, st.integers(1, 9_000)), min_size=1, max_size=5)
counts = st.none() | st.integers(1, 50)
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    requests = []
    at = 0
    for number in range(draw(st.integers(1, 5))):
        pieces = tuple(Segment(*piece) for piece in draw(segments))
        at += draw(st.integers(0, 10**12))
        earlier = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set()
        waits = draw(st.booleans()) and bool(earlier)
        requests.append(
            TraceRequest(
                request_id=number,
                arrival_us=at,
                prompt_tokens=sum(piece.tokens for piece in pieces),
                output_tokens=draw(st.integers(1, 999)),
                segments=pieces,
                session=draw(st.none() | words),
                turn=draw(counts),
                parent=draw(st.sampled_from([None, *earlier])),
                after=tuple(sorted(earlier)),
                think_us=draw(st.none() | st.integers(0, 10**9)),
                release="after" if waits else "at",
                output_key=draw(keys),
                beam_width=draw(counts),
                salt=draw(words),
                priority=draw(st.integers(-5, 5)),
                model=draw(st.none() | words),
                kind=draw(st.none() | words),
            )
        )
    header = TraceHeader(
        draw(words),
        "made",
        "test",
        "content",
        draw(counts),
        7,
        "00",
        len(requests) + 3,
        len(requests),
        dropped={"output_zero": 3},
        noted={"ties": 2},
        changes=("one", "two"),
        calibration={"ks": 0.25, "on": "x"},
    )
    return Trace(header, tuple(requests))


@cases("end", WRITERS, day=1)
@given(trace=traces())
@settings(
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_round_trip_gives_an_equal_trace(end: str, trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / f"trace{end}"
    WRITERS[end](trace, path)
    again = read_trace(path)
    assert again == trace
    assert again.digest == trace.digest


@pytest.mark.parametrize("end", WRITERS)
@pytest.mark.parametrize("format", ["azure", "mooncake", "bailian", "ragpulse", "agentic", "servingsim"])
def test_a_round_trip_keeps_what_a_public_format_says(format: str, end: str, tmp_path: Path) -> None:
    if format == "ragpulse":
        source = write_ragpulse(tmp_path, RAG)
    else:
        source = tmp_path / "source.data"
        source.write_text(CONTENTS[format], newline="")
    trace = read_trace(source, format)
    path = tmp_path / f"trace{end}"
    WRITERS[end](trace, path)
    assert read_trace(path) == trace


def test_a_window_that_does_not_start_at_zero_keeps_its_times(tmp_path: Path) -> None:
    trace = drop_oversize(generate_trace("azure_conv", num_requests=9, seed=0), dict.fromkeys(range(3), "x"))
    write_jsonl(trace, tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl").requests[0].arrival_us == trace.requests[0].arrival_us > 0


def test_skipped_records_are_counted_beside_what_the_source_dropped(tmp_path: Path) -> None:
    bad = {**CANONICAL[2], "output_tokens": 0}
    path = tmp_path / "t.jsonl"
    path.write_text(jsonl([CANONICAL[0], CANONICAL[1], bad]))
    header = read_trace(path, on_error="skip").header
    assert header.dropped == {"output_zero": 1, "malformed output_tokens": 1}
    assert header.rows_read == header.rows_kept + 2


def test_a_mooncake_export_keeps_every_field_that_mooncake_has(tmp_path: Path) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text(CONTENTS["mooncake"])
    trace = read_trace(source)
    write_mooncake(trace, tmp_path / "export.jsonl")
    again = read_trace(tmp_path / "export.jsonl")
    assert [replace(r, segments=()) for r in again.requests] == [
        replace(r, segments=()) for r in trace.requests
    ]
    assert shared_prefix_tokens(again) == shared_prefix_tokens(trace)


def test_a_mooncake_export_keeps_sharing_to_whole_blocks_of_one_tenant(tmp_path: Path) -> None:
    made = generate_trace("azure_conv", num_requests=200, seed=0, sharing=PrefixSharing("system", 0.9, 3))
    trace = Trace(made.header, [replace(row, salt="ab"[row.request_id % 2]) for row in made.requests])
    write_mooncake(trace, tmp_path / "export.jsonl")
    exported = shared_prefix_tokens(read_trace(tmp_path / "export.jsonl"))
    exact = shared_prefix_tokens(trace)
    assert exported == [tokens // 512 * 512 for tokens in exact]
    assert any(exported)


def cut_short(trace: Trace, end: str, path: Path, records: int) -> None:
    """Write a file whose header is that of `trace`, with its first `records` requests."""
    if end == ".parquet":
        write_parquet(trace, path)
        table = parquet.read_table(path)
        parquet.write_table(table.slice(0, records), path)
        return
    write_jsonl(trace, path)
    packed = path.name.endswith(".gz")
    lines = (gzip.decompress(path.read_bytes()) if packed else path.read_bytes()).splitlines(keepends=True)
    kept = b"".join(lines[: 1 + records])
    path.write_bytes(gzip.compress(kept) if packed else kept)


@pytest.mark.parametrize("end", WRITERS)
def test_a_file_cut_at_the_end_of_a_line_is_refused(end: str, tmp_path: Path) -> None:
    path = tmp_path / f"t{end}"
    cut_short(generate_trace("azure_conv", num_requests=50, seed=0), end, path, 30)
    with pytest.raises(TraceError, match="requests: 50 by the header, but 30 follow: the file is cut off"):
        read_trace(path)


@pytest.mark.parametrize("end", WRITERS)
def test_a_cut_file_is_counted_where_faults_are_skipped(end: str, tmp_path: Path) -> None:
    path = tmp_path / f"t{end}"
    cut_short(generate_trace("azure_conv", num_requests=50, seed=0), end, path, 30)
    header = read_trace(path, on_error="skip").header
    assert (header.rows_read, header.rows_kept, header.dropped) == (50, 30, {"missing from the file": 20})


def test_a_file_with_more_requests_than_its_header_counts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(jsonl([*CANONICAL, {**CANONICAL[1], "request_id": 2, "arrival_us": 9}]))
    with pytest.raises(TraceError, match="has more than was written"):
        read_trace(path)


def test_the_first_requests_of_a_cut_file_can_still_be_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    cut_short(generate_trace("azure_conv", num_requests=50, seed=0), ".jsonl", path, 30)
    assert len(read_trace(path, limit=10).requests) == 10


def test_a_window_is_complete_with_fewer_requests_than_the_source_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_jsonl(take(generate_trace("azure_conv", num_requests=50, seed=0), 7), path)
    assert len(read_trace(path).requests) == 7


def test_an_older_window_says_that_it_cannot_be_counted(tmp_path: Path) -> None:
    header = {**CANONICAL[0]["header"], "changes": ["requests 0 to 2: 2 of 3 requests"]}
    path = tmp_path / "t.jsonl"
    path.write_text(jsonl([{"header": header}, *CANONICAL[1:]]))
    assert read_trace(path).header.noted == {"an older file, whose header does not count its requests": 1}


def test_a_parquet_file_that_is_zeroed_inside_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_parquet(generate_trace("azure_conv", num_requests=500, seed=0), path)
    content = bytearray(path.read_bytes())
    content[1000:1040] = bytes(40)
    path.write_bytes(content)
    with pytest.raises(TraceError, match="cannot be read on"):
        read_trace(path)
