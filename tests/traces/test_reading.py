"""What readers accept, note, drop and skip, and how a window of a file relates to the whole."""

import gzip
import pickle
from pathlib import Path

import pytest

from traces.errors import ParameterError, TraceError
from traces.reading import read_trace
from traces.trace import Segment

FIRST = "2023-11-16 18:15:46.6805900,374,44"
SECOND = "2023-11-16 18:15:50.9951690,396,109"


def test_azure_times_are_exact_microseconds_from_the_first_row(azure_file) -> None:
    trace = read_trace(azure_file(FIRST, SECOND))
    assert [request.arrival_us for request in trace.requests] == [0, 4_314_579]


def test_azure_prompts_are_unique(azure_file) -> None:
    trace = read_trace(azure_file(FIRST))
    assert trace.requests[0].segments == (Segment(None, 374),)


def test_azure_times_with_a_zone_are_compared_in_utc(azure_file) -> None:
    trace = read_trace(azure_file("2024-05-12 01:00:00+01:00,5,6", "2024-05-12 00:00:01.250000Z,5,6"))
    assert trace.requests[1].arrival_us == 1_250_000


def test_azure_crlf_and_a_missing_last_line_end_are_accepted(azure_file) -> None:
    assert len(read_trace(azure_file(FIRST, SECOND, end="\r\n")).requests) == 2


def test_azure_digits_below_a_microsecond_are_cut_and_noted(azure_file) -> None:
    trace = read_trace(azure_file(FIRST, "2023-11-16 18:15:46.6805919,5,5"))
    assert trace.requests[1].arrival_us == 1
    assert trace.header.noted["digits below 1 us cut"] == 1


def test_azure_without_fractions_has_a_clock_of_one_second(azure_file) -> None:
    trace = read_trace(azure_file("2024-05-12 00:00:00+00:00,5,6", "2024-05-12 00:00:01+00:00,5,6"))
    assert trace.header.clock_quantum_us == 1_000_000


def test_vidur_float_noise_is_rounded_and_noted(tmp_path: Path) -> None:
    path = tmp_path / "vidur.csv"
    path.write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n5.8926549999999995,396,109\n"
    )
    trace = read_trace(path)
    assert trace.requests[1].arrival_us == 5_892_655
    assert trace.header.noted == {"binary float noise rounded": 1}


def test_mooncake_times_are_milliseconds(mooncake_file) -> None:
    trace = read_trace(mooncake_file((7, 5, 1, [0]), (9, 5, 1, [0])))
    assert [request.arrival_us for request in trace.requests] == [0, 2_000]


def test_mooncake_ids_become_blocks_of_512_and_a_rest(mooncake_file) -> None:
    trace = read_trace(mooncake_file((0, 1_030, 1, [0, 1, 2])))
    assert trace.requests[0].segments == (Segment(0, 512), Segment(1, 512), Segment(2, 6))


def test_mooncake_unknown_keys_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "extra.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [3], "model": "x"}\n'
    )
    assert read_trace(path).header.noted == {"unknown key model": 1}


def test_formats_are_recognised_by_content_not_by_name(azure_file, mooncake_file, tmp_path: Path) -> None:
    azure, mooncake = tmp_path / "a.jsonl", tmp_path / "m.csv"
    azure.write_bytes(azure_file(FIRST).read_bytes())
    mooncake.write_bytes(mooncake_file((0, 5, 1, [0])).read_bytes())
    assert [read_trace(path).header.format for path in (azure, mooncake)] == ["azure", "mooncake"]


def test_an_unknown_format_name_is_refused_with_the_choices(azure_file) -> None:
    with pytest.raises(ParameterError, match="format: one of auto, azure, mooncake, vidur, burstgpt"):
        read_trace(azure_file(FIRST), "parquet")


def test_zero_outputs_are_dropped_and_counted_and_keep_the_row_numbers(mooncake_file) -> None:
    trace = read_trace(mooncake_file((0, 5, 0, [0]), (4, 5, 2, [0]), (6, 5, 2, [0])))
    assert [request.request_id for request in trace.requests] == [1, 2]
    assert trace.requests[0].arrival_us == 0
    assert (trace.header.rows_read, trace.header.rows_kept) == (3, 2)
    assert trace.header.dropped == {"output_zero": 1}


def test_ties_are_noted(mooncake_file) -> None:
    trace = read_trace(mooncake_file((0, 5, 1, [0]), (0, 5, 1, [0])))
    assert trace.header.noted == {"ties": 1}


def test_trailing_blank_lines_are_accepted(azure_file) -> None:
    assert len(read_trace(azure_file(FIRST, "", "", "")).requests) == 1


def test_a_byte_order_mark_is_noted(azure_file) -> None:
    path = azure_file(FIRST)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_trace(path).header.noted == {"byte_order_mark": 1}


def test_a_gzip_file_gives_the_same_requests(azure_file, tmp_path: Path) -> None:
    plain = azure_file(FIRST, SECOND)
    packed = tmp_path / "rows.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed).requests == read_trace(plain).requests


def test_skip_counts_malformed_rows_by_field_and_keeps_the_others(azure_file) -> None:
    path = azure_file(FIRST, "2023-11-16 18:15:47.0,x,5", "2023-11-16 18:15:48.0,5", SECOND)
    trace = read_trace(path, on_error="skip")
    assert [request.prompt_tokens for request in trace.requests] == [374, 396]
    assert trace.header.dropped == {"malformed ContextTokens": 1, "malformed line": 1}
    assert trace.header.rows_read == 4


def test_skip_does_not_remember_the_ids_of_a_refused_row(mooncake_file) -> None:
    early, late = (5, 600, 1, [0, 1]), (6, 600, 1, [9, 1])
    path = mooncake_file((5, 5, 1, [7]), (4, 600, 1, [9, 1]), early, late)
    trace = read_trace(path, on_error="skip")
    assert [request.request_id for request in trace.requests] == [0, 2]


def test_skip_still_refuses_a_file_of_which_nothing_is_left(azure_file) -> None:
    with pytest.raises(TraceError, match=r"none of 1 rows can be replayed: 1 malformed TIMESTAMP"):
        read_trace(azure_file("yesterday,5,5"), on_error="skip")


def test_skip_still_refuses_a_wrong_header(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("TIMESTAMP,GeneratedTokens\n1,2\n")
    with pytest.raises(TraceError, match="missing column ContextTokens"):
        read_trace(path, on_error="skip")


def test_limit_stops_before_a_malformed_rest_and_says_so(azure_file) -> None:
    trace = read_trace(azure_file(FIRST, SECOND, "garbage"), limit=2)
    assert (trace.header.rows_read, len(trace.requests)) == (2, 2)
    assert trace.header.changes == ("the first 2 requests of the file; the rest is unread",)


def test_limit_beyond_the_file_changes_nothing(azure_file) -> None:
    path = azure_file(FIRST, SECOND)
    assert read_trace(path, limit=3) == read_trace(path)


def test_limit_below_one_is_refused(azure_file) -> None:
    with pytest.raises(ParameterError, match="limit: at least 1 expected, found 0"):
        read_trace(azure_file(FIRST), limit=0)


def ticking(count: int = 40) -> list[tuple[int, int, int, list[int]]]:
    """Five arrivals on each tick of 3 s, one of them 2 ms early."""
    return [(max(0, 3000 * (n // 5) - 2 * (n % 5 == 0)), 5, 1, [0]) for n in range(count)]


def test_ticks_are_found_behind_their_jitter(mooncake_file) -> None:
    assert read_trace(mooncake_file(*ticking())).header.clock_quantum_us == 3_000_000


def test_ticks_even_spreads_arrivals_over_their_tick_in_file_order(mooncake_file) -> None:
    trace = read_trace(mooncake_file(*ticking()), ticks="even")
    assert [request.arrival_us for request in trace.requests] == [600_000 * n for n in range(40)]
    assert trace.header.changes == ("arrivals spread over their ticks of 3 s (even)",)


def test_ticks_random_stays_inside_the_tick_and_in_order(mooncake_file) -> None:
    trace = read_trace(mooncake_file(*ticking()), ticks="random", seed=3)
    arrivals = [request.arrival_us for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert max(arrivals[n] - arrivals[n - n % 5] for n in range(40)) < 3_000_000


def test_ticks_random_depends_on_the_seed(mooncake_file) -> None:
    path = mooncake_file(*ticking())
    first, again, other = (read_trace(path, ticks="random", seed=seed).digest for seed in (1, 1, 2))
    assert first == again != other


def test_spread_ticks_are_the_same_in_a_window(mooncake_file) -> None:
    path = mooncake_file(*ticking())
    assert (
        read_trace(path, ticks="random", limit=13).requests == read_trace(path, ticks="random").requests[:13]
    )


def test_ticks_do_nothing_to_a_fine_clock(azure_file) -> None:
    path = azure_file(FIRST, SECOND)
    assert read_trace(path, ticks="even") == read_trace(path)


def test_the_digest_is_that_of_the_requests_not_of_the_file_name(azure_file, tmp_path: Path) -> None:
    path = azure_file(FIRST)
    other = tmp_path / "renamed.csv"
    other.write_bytes(path.read_bytes())
    assert read_trace(path).digest == read_trace(other).digest


def test_the_digest_tells_a_unique_segment_from_key_zero(mooncake_file) -> None:
    trace = read_trace(mooncake_file((0, 5, 1, [0])))
    unique = trace.changed(
        tuple(type(r)(r.request_id, 0, 5, 1, (Segment(None, 5),)) for r in trace.requests), "made unique"
    )
    assert trace.digest != unique.digest


def test_errors_survive_a_process_boundary() -> None:
    error = TraceError("f.csv", 3, "TIMESTAMP", "no such date")
    assert str(pickle.loads(pickle.dumps(error))) == "f.csv:3: TIMESTAMP: no such date"
