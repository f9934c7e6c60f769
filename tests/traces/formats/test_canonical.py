"""Our own form keeps every field of every request and the header, in JSONL and in Parquet."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_samples import CANONICAL, CONTENTS, jsonl

from traces.analysis.reuse import shared_prefix_tokens
from traces.formats.mooncake import write_mooncake
from traces.formats.pagetwin import write_jsonl, write_parquet
from traces.reading import read_trace
from traces.reshape import drop_oversize, take
from traces.synth.generator import generate_trace
from traces.synth.sharing import Sharing
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


@pytest.mark.parametrize("end", WRITERS)
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
        pytest.importorskip("trace_samples").write_ragpulse(
            tmp_path, pytest.importorskip("trace_samples").RAG
        )
        source = tmp_path / "0_trace.jsonl"
    else:
        source = tmp_path / "source.data"
        source.write_text(CONTENTS[format], newline="")
    trace = read_trace(source, format)
    path = tmp_path / f"trace{end}"
    WRITERS[end](trace, path)
    assert read_trace(path) == trace


def test_a_window_that_does_not_start_at_zero_keeps_its_times(tmp_path: Path) -> None:
    trace = drop_oversize(
        generate_trace("azure_conv", num_requests=9, seed=0), lambda r: "x" if r.request_id < 3 else None
    )
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


def test_a_mooncake_export_keeps_sharing_to_whole_blocks(tmp_path: Path) -> None:
    trace = take(
        generate_trace("azure_conv", num_requests=200, seed=0, sharing=Sharing("system", 0.9, 3)), 200
    )
    write_mooncake(trace, tmp_path / "export.jsonl")
    exported = shared_prefix_tokens(read_trace(tmp_path / "export.jsonl"))
    exact = shared_prefix_tokens(trace)
    assert exported == [tokens // 512 * 512 for tokens in exact]
    assert any(exported)
