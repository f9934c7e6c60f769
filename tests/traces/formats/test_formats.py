"""What the other formats' rows mean: units, sharing, turns and links, each shown on the smallest file that has it."""

import gzip
import json
from pathlib import Path

import pytest
from trace_samples import (
    BAILIAN,
    BURST_1,
    CONTENTS,
    RAG,
    SERVEGEN_TRACE,
    SERVINGSIM,
    SHAREGPT,
    jsonl,
    write_ragpulse,
    write_servegen,
)

from traces.analysis.reuse import shared_prefix_tokens
from traces.arrivals import ArrivalProcess
from traces.errors import TraceError
from traces.reading import detect_format, may_be_trace, read_trace, stream_trace
from traces.trace import Segment, Trace

CLOCK = ArrivalProcess("even", 2.0)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.fixture
def read(tmp_path: Path):
    """Reads one of the samples, or other content, in a format."""

    def read_content(format: str, content: str | None = None, **options) -> Trace:
        path = tmp_path / f"{format}.data"
        path.write_text(CONTENTS[format] if content is None else content, newline="")
        return read_trace(path, format, **options)

    return read_content


@pytest.mark.parametrize("format", [name for name in CONTENTS if name != "lengths_chat"])
def test_every_format_is_recognised_by_its_content(format: str, tmp_path: Path) -> None:
    path = tmp_path / "some.data"
    path.write_text(CONTENTS[format], newline="")
    assert detect_format(path) == format


def test_folders_are_recognised_by_their_content(tmp_path: Path) -> None:
    for name in ("rag", "gen", "talk"):
        (tmp_path / name).mkdir()
    write_ragpulse(tmp_path / "rag", RAG)
    write_servegen(tmp_path / "gen")
    (tmp_path / "talk" / "a.json").write_text(CONTENTS["agentic"])
    found = [detect_format(tmp_path / name) for name in ("rag", "gen", "talk")]
    assert found == ["ragpulse", "servegen", "agentic"]


def test_a_folder_is_read_if_it_is_the_one_that_was_expected(tmp_path: Path) -> None:
    for name in ("talk", "gen"):
        (tmp_path / name).mkdir()
    (tmp_path / "talk" / "a.json").write_text(CONTENTS["agentic"])
    write_servegen(tmp_path / "gen")
    for folder in (tmp_path / "talk", tmp_path / "gen"):
        found = read_trace(folder, limit=1).header.sha256
        assert read_trace(folder, limit=1, expect_sha256=found.upper()).header.sha256 == found
        with pytest.raises(TraceError, match=f"sha256: expected 00, found {found}"):
            read_trace(folder, expect_sha256="00")


def times_us(trace: Trace) -> list[int]:
    return [request.arrival_us for request in trace.requests]


def test_bailian_and_burstgpt_count_seconds(read) -> None:
    assert times_us(read("bailian")) == [0, 9_482_000]
    assert times_us(read("burstgpt")) == [0, 40_000_000, 55_000_000]


def test_bailian_links_a_chat_to_the_one_it_continues(read) -> None:
    first, second = read("bailian").requests
    assert (second.session, second.turn, second.parent) == (first.session, 2, first.request_id)


def test_bailian_ids_that_keep_parent_and_position_are_chained(read) -> None:
    assert read("bailian").header.key_kind == "chained"


@pytest.mark.parametrize("ids", [[3, 0, 1, 4, 5], [0, 1, 3, 3, 5]])
def test_bailian_ids_behind_different_parents_are_content(ids: list[int], read) -> None:
    moved = {**BAILIAN[1], "hash_ids": ids}
    header = read("bailian", jsonl([BAILIAN[0], moved])).header
    assert header.key_kind == "content"
    assert header.noted["ids with another parent or position"] == 1


def test_bailian_partial_blocks_without_an_id_are_unique(read) -> None:
    trace = read("bailian", jsonl([{**BAILIAN[0], "hash_ids": [0, 1]}]))
    assert trace.requests[0].segments == (Segment(0, 16), Segment(1, 16), Segment(None, 8))


def test_burstgpt_numbers_the_turns_of_a_session_and_leaves_api_rows_alone(read) -> None:
    turns = [(r.session, r.turn, r.parent) for r in read("burstgpt").requests]
    assert turns == [("31", 1, None), (None, None, None), ("31", 2, 0)]


def test_burstgpt_failures_are_dropped_and_counted(read) -> None:
    header = read("burstgpt", BURST_1).header
    assert (header.rows_kept, header.dropped) == (1, {"output_zero": 1})


def test_lengths_take_the_arrivals_that_are_assumed_and_say_so(read) -> None:
    trace = read("lengths", arrivals=CLOCK)
    assert times_us(trace) == [0, 500_000, 1_000_000]
    assert trace.header.changes == ("arrivals assumed: even at 2 requests/s",)


def test_a_row_with_room_for_the_one_before_continues_it(read) -> None:
    trace = read("lengths_chat", arrivals=CLOCK)
    assert [(r.session, r.turn) for r in trace.requests] == [("0", 1), ("0", 2), ("2", 1)]
    first, second = trace.requests[:2]
    assert second.segments[:2] == (*first.segments, Segment(first.output_key, first.output_tokens))
    assert (second.after, second.release) == ((0,), "after")


def test_a_later_turn_has_no_arrival_of_its_own(read) -> None:
    assert times_us(read("lengths_chat", arrivals=CLOCK)) == [0, 0, 500_000]


def test_a_source_with_a_clock_takes_no_other(read) -> None:
    with pytest.raises(ValueError, match="arrivals: azure records arrivals"):
        read("azure", arrivals=CLOCK)


def test_ragpulse_prompts_are_their_segments_in_order_and_a_template(tmp_path: Path) -> None:
    request = read_trace(write_ragpulse(tmp_path, RAG)).requests[0]
    assert request.segments == tuple(Segment(*s) for s in ((0, 5), (1, 6), (3, 6), (5, 4), (9, 3), (None, 6)))


def test_ragpulse_restarts_its_clock_with_the_second_week(tmp_path: Path) -> None:
    trace = read_trace(write_ragpulse(tmp_path, RAG))
    assert times_us(trace)[2] == (604_800 + 4 - 82) * 1_000_000
    assert trace.header.noted["clock_restarts"] == 1


def test_ragpulse_content_behind_another_prefix_is_not_shared(tmp_path: Path) -> None:
    assert shared_prefix_tokens(read_trace(write_ragpulse(tmp_path, RAG)))[1] == 5


def test_a_nested_agent_starts_before_its_recorded_end_and_its_parent_waits_for_it(read) -> None:
    requests = read("agentic").requests
    assert [r.request_id for r in requests] == [0, 1, 2, 3]
    assert [r.arrival_us for r in requests] == [0, 2_500_000, 5_500_000, 12_000_000]
    assert [r.session for r in requests] == ["trace_1", "trace_1/agent_1", "trace_1/agent_1", "trace_1"]
    assert [r.after for r in requests] == [(), (0,), (1,), (0, 2)]


def test_think_times_are_from_the_end_of_what_a_turn_waits_for(read) -> None:
    assert [request.think_s for request in read("agentic").requests] == [None, 0.5, 1.0, 1.5]


def test_an_agent_that_nobody_waits_for_starts_at_its_time(read) -> None:
    record = json.loads(CONTENTS["agentic"])
    record["requests"][1] |= {"status": "async_launched", "duration_ms": None}
    requests = read("agentic", json.dumps(record)).requests
    waiting = {request.request_id: request for request in requests}
    assert waiting[1].arrival_us == 9_500_000
    assert waiting[3].after == (0,)


def test_a_turn_without_output_hands_what_it_waited_for_to_the_next(read) -> None:
    record = json.loads(CONTENTS["agentic"])
    record["requests"][1]["requests"][1]["out"] = 0
    record.pop("totals")
    requests = read("agentic", json.dumps(record)).requests
    assert [r.request_id for r in requests] == [0, 1, 3]
    assert requests[2].after == (0, 1)


def test_a_repaired_time_is_noted_once(read) -> None:
    content = CONTENTS["agentic"].replace('"t": 3.0', '"t": 3.0000000000000004')
    assert read("agentic", content).header.noted["binary float noise rounded"] == 1


def test_nested_agents_of_one_id_are_sessions_of_their_own(read) -> None:
    record = json.loads(CONTENTS["agentic"])
    record.pop("totals")
    record["requests"].insert(2, record["requests"][1])
    trace = read("agentic", json.dumps(record))
    names = [row.session for row in trace.requests if row.turn == 1]
    assert names == ["trace_1", "trace_1/agent_1", "trace_1/agent_1/requests[2]"]
    assert trace.header.noted["agent_id of an earlier nested entry: its place added"] == 1


def test_global_ids_are_chained_over_all_files_of_a_folder(tmp_path: Path) -> None:
    record = json.loads(CONTENTS["agentic"]) | {"hash_id_scope": "global"}
    (tmp_path / "a.json").write_text(json.dumps(record))
    record["requests"][0]["hash_ids"] = [2, 1]
    (tmp_path / "b.json").write_text(json.dumps({**record, "id": "b"}))
    with pytest.raises(TraceError, match=r"id 2 at position 0, was at 1 at request 0: ids are not chained"):
        read_trace(tmp_path)


def test_a_folder_may_hold_packed_conversations(tmp_path: Path) -> None:
    (tmp_path / "plain.json").write_text(CONTENTS["agentic"])
    plain = read_trace(tmp_path)
    (tmp_path / "plain.json").unlink()
    with gzip.open(tmp_path / "trace_1.json.gz", "wt") as file:
        file.write(CONTENTS["agentic"])
    assert may_be_trace(tmp_path)
    packed = read_trace(tmp_path)
    assert packed.requests == plain.requests
    assert "id is not the file's name" in plain.header.noted
    assert "id is not the file's name" not in packed.header.noted


@pytest.mark.parametrize("scope", ["local", "global"])
def test_ids_of_two_conversations_do_not_meet(scope: str, tmp_path: Path) -> None:
    record = json.loads(CONTENTS["agentic"])
    (tmp_path / "a.json").write_text(json.dumps(record))
    record["requests"][0]["api_time"] = 3.0
    (tmp_path / "b.json").write_text(json.dumps({**record, "id": "b", "hash_id_scope": scope}))
    keys: dict[str, set[int | None]] = {"t": set(), "b": set()}
    for request in read_trace(tmp_path).requests:
        keys[str(request.session)[0]] |= {key for key, _ in request.segments}
    assert keys["t"] & keys["b"] == {None}


def test_llmservingsim_counts_nanoseconds_and_sorts_by_arrival(read) -> None:
    trace = read("servingsim")
    assert times_us(trace) == [0, 3_000, 57_167]
    assert [r.request_id for r in trace.requests] == [1, 2, 0]


def test_token_ids_are_cut_where_prompts_part(read) -> None:
    first, second, flat = read("servingsim").requests
    assert [s.tokens for s in first.segments] == [2, 3]
    assert [s.tokens for s in second.segments] == [2, 3, 2, 2]
    assert flat.segments[0] == first.segments[0]


def test_an_output_that_a_later_prompt_holds_has_its_key(read) -> None:
    first, second, flat = read("servingsim").requests
    assert first.output_key == second.segments[2].key is not None
    assert flat.output_key is None


def test_a_later_call_waits_for_the_one_before_and_its_tool(read) -> None:
    second = read("servingsim").requests[1]
    assert (second.after, second.release, second.think_us) == ((1,), "after", 3_000)


def test_a_chain_without_ids_shares_nothing(read) -> None:
    bare = {key: value for key, value in SERVINGSIM[0].items() if not key.endswith("ids")}
    assert read("servingsim", jsonl([bare])).requests[0].segments == (Segment(None, 4),)


def test_unknown_keys_of_a_session_and_of_its_calls_are_noted(read) -> None:
    call = {"input_toks": 4, "output_toks": 1, "tool_duration_ns": 0, "output_ids": [1]}
    session = {"session_id": "s", "arrival_time_ns": 0, "sub_requests": [call, call], "user": 1}
    noted = read("servingsim", jsonl([session])).header.noted
    assert noted == {"unknown key user": 1, "unknown key output_ids": 2, "ties": 1}


def test_sharegpt_answers_are_requests_whose_prompt_is_the_conversation_so_far(read) -> None:
    rows = read("sharegpt", arrivals=CLOCK, encode=letters).requests
    assert [(r.prompt_tokens, r.output_tokens, r.turn) for r in rows] == [(5, 3, 1), (11, 2, 2), (4, 3, 1)]


def test_sharegpt_shares_what_its_texts_share(read) -> None:
    assert shared_prefix_tokens(read("sharegpt", arrivals=CLOCK, encode=letters)) == [0, 5, 3]


def test_sharegpt_stops_reading_at_its_limit(read) -> None:
    trace = read("sharegpt", arrivals=CLOCK, encode=letters, limit=2)
    assert len(trace.requests) == 2
    assert trace.header.changes[-1] == "the first 2 requests of the file; the rest is unread"


def test_sharegpt_limits_count_answers_and_may_end_inside_a_conversation(read) -> None:
    silent = {"conversations": [{"from": "gpt", "value": "hi"}]}
    header = read(
        "sharegpt", json.dumps([silent, silent, *SHAREGPT]), arrivals=CLOCK, encode=letters, limit=1
    ).header
    assert (header.rows_read, header.rows_kept, sum(header.dropped.values())) == (3, 1, 2)


def test_sharegpt_conversations_of_one_id_stay_apart_and_what_is_not_shared_is_noted(read) -> None:
    other = {**json.loads(json.dumps(SHAREGPT[0]).replace("yes", "yet")), "id": None}
    content = json.dumps([SHAREGPT[0], other, SHAREGPT[0]])
    trace = read("sharegpt", content, arrivals=CLOCK, encode=letters)
    assert [request.session for request in trace.requests] == ["x", "x", "2", "2", "x/4", "x/4"]
    assert list(trace.header.noted.values()) == [1, 3]


def test_servegen_draws_at_the_rate_of_each_window(tmp_path: Path) -> None:
    trace = read_trace(write_servegen(tmp_path))
    first = sum(request.arrival_us < 600e6 for request in trace.requests)
    assert first == pytest.approx(1200, abs=4 * 1200**0.5)
    assert len(trace.requests) - first == pytest.approx(600, abs=4 * 600**0.5)


def test_servegen_clients_of_several_models_draw_their_own_requests(tmp_path: Path) -> None:
    for model in ("one", "two"):
        (tmp_path / model).mkdir()
        write_servegen(tmp_path / model)
    both = read_trace(tmp_path, "servegen")
    names = {request.kind for request in both.requests}
    times = [{request.arrival_us for request in both.requests if request.kind == name} for name in names]
    assert len(names) == 2
    assert len(times[0] & times[1]) < 0.1 * len(times[0])


def test_servegen_clients_that_begin_later_stay_in_order(tmp_path: Path) -> None:
    for model, trace in (("one", SERVEGEN_TRACE), ("two", SERVEGEN_TRACE.partition("\r\n")[2])):
        (tmp_path / model).mkdir()
        write_servegen(tmp_path / model, trace)
    at_us = [request.arrival_us for request in stream_trace(tmp_path, "servegen")]
    assert at_us == sorted(at_us)


def test_servegen_lengths_follow_the_distribution(tmp_path: Path) -> None:
    prompts = [request.prompt_tokens for request in read_trace(write_servegen(tmp_path)).requests]
    assert set(prompts) == {10, 20}
    assert prompts.count(10) / len(prompts) == pytest.approx(0.25, abs=0.05)


def test_servegen_draws_the_same_requests_again_and_others_from_another_seed(tmp_path: Path) -> None:
    folder = write_servegen(tmp_path)
    once, again, other = (read_trace(folder, seed=seed).digest for seed in (1, 1, 2))
    assert once == again != other


def test_our_own_rows_share_the_prefixes_that_they_name(read) -> None:
    assert shared_prefix_tokens(read("simple")) == [0, 20, 0]
    assert [request.turn for request in read("simple").requests] == [1, None, 2]


def test_our_own_rows_may_be_json(read) -> None:
    rows = [{"arrival_s": 0.25, "prompt_tokens": 9, "output_tokens": 1, "n": 2, "salt": "t", "priority": -1}]
    request = read("simple", jsonl(rows)).requests[0]
    assert (request.n, request.salt, request.priority) == (2, "t", -1)


def test_rows_out_of_order_are_sorted_on_request_and_it_is_said(read) -> None:
    content = "arrival_s,prompt_tokens,output_tokens\n5,9,1\n2,8,1\n"
    trace = read("simple", content, sort=True)
    assert [request.prompt_tokens for request in trace.requests] == [8, 9]
    assert trace.header.changes == ("sorted by arrival; rows of equal times keep their order",)


@pytest.mark.parametrize("format", ["azure", "mooncake", "bailian", "simple"])
def test_a_stream_gives_the_requests_of_the_trace(format: str, tmp_path: Path) -> None:
    path = tmp_path / "t.data"
    path.write_text(CONTENTS[format], newline="")
    stream = stream_trace(path)
    assert tuple(stream) == read_trace(path).requests
    assert stream.header() == read_trace(path).header


def test_many_mooncake_rows_are_read_in_blocks_to_what_single_rows_give(tmp_path: Path) -> None:
    rows = [
        {
            "timestamp": 3000 * (n // 9),
            "input_length": 512 * (n % 5) + 7,
            "output_length": n % 4,
            "hash_ids": ids(n),
        }
        for n in range(5000)
    ]
    path = tmp_path / "many.jsonl"
    path.write_text(jsonl(rows))
    whole = read_trace(path)
    limited = read_trace(path, limit=2000)  # below the size of a block: row by row
    assert whole.requests[:2000] == limited.requests
    assert (whole.header.rows_kept, whole.header.dropped) == (3750, {"output_zero": 1250})
    assert whole.header.clock_quantum_us == 3_000_000


def ids(n: int) -> list[int]:
    """A common beginning, then blocks of the row's own."""
    return [0, *range(1000 + n * 8, 1000 + n * 8 + n % 5)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hash_ids": [3, 0]}, "id 3 at position 0, was at 1 at line 3"),
        ({"input_length": 5}, "ceil(5/512) = 1 ids expected, found 2"),
        ({"output_length": -1}, "-1 is below 0"),
        ({"timestamp": 1}, "goes back"),
        ({"timestamp": 9999.0}, "integer milliseconds expected"),
        ({"hash_ids": [0, 2**63]}, "does not fit 64 bits"),
    ],
)
def test_a_wrong_row_inside_a_block_is_refused_by_its_line(change: dict, reason: str, tmp_path: Path) -> None:
    rows = [
        {"timestamp": n, "input_length": 600, "output_length": 1, "hash_ids": [0, n + 1]} for n in range(4000)
    ]
    rows[3210] |= change
    path = tmp_path / "many.jsonl"
    path.write_text(jsonl(rows))
    with pytest.raises(ValueError, match=r"many.jsonl:3211: ") as caught:
        read_trace(path)
    assert reason in str(caught.value)
