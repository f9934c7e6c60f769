"""A folder of log and settings becomes a deployment on one clock, and every malformed file is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.metrics.log import IntArray
from harness.twin.reading import EngineLogError, read_engine_log

DATA = Path(__file__).resolve().parents[2] / "data" / "deployments"
RECORDED = DATA / "servingsim-recorder"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the recorded deployment that a test may change."""
    return Path(shutil.copytree(RECORDED, tmp_path / "deployment"))


def changed(path: Path, line: int, change: Callable[[dict[str, object]], object]) -> None:
    """Change the object on a line (from 1) of a JSONL file."""
    lines = path.read_text().splitlines()
    record = json.loads(lines[line - 1])
    change(record)
    lines[line - 1] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")


def test_times_start_at_the_first_arrival() -> None:
    requests = read_engine_log(RECORDED).requests
    assert requests.arrival_s[0] == 0
    assert len(requests) == 20


def test_the_wall_clock_of_arrivals_is_shifted_by_the_least_delay_to_the_queue() -> None:
    requests = read_engine_log(RECORDED).requests
    assert requests.queued_s is not None
    delays = requests.queued_s - requests.arrival_s
    assert delays.min() == pytest.approx(0, abs=1e-6)
    assert delays.max() < 0.2


def test_the_shift_of_the_clock_is_said() -> None:
    notes = read_engine_log(RECORDED).notes
    assert any("arrival_time is a wall clock" in note for note in notes)


def test_time_to_first_token_counts_from_the_queue() -> None:
    """`first_token_ts - queued_ts` of the first row of the file."""
    requests = read_engine_log(RECORDED).requests
    assert requests.ttft_s[0] == pytest.approx(479748.510151426 - 479748.340626232, abs=1e-6)


def test_tpot_is_the_mean_gap_between_the_tokens_of_a_request() -> None:
    requests = read_engine_log(RECORDED).requests
    assert requests.tpot_s[0] == pytest.approx((479764.054028055 - 479748.510151426) / 530, abs=1e-9)


def test_the_workload_arrives_when_the_requests_entered_the_queue() -> None:
    log = read_engine_log(RECORDED)
    arrivals = [request.arrival_us for request in log.workload.requests]
    assert arrivals == [round(1e6 * at) for at in log.requests.entered_s]


def test_the_workload_keeps_the_sharing_of_its_prompts() -> None:
    requests = read_engine_log(RECORDED).workload.requests
    assert requests[4].segments[:2] == ((8, 1), (23, 1))
    assert requests[6].segments[:2] == ((8, 1), (23, 1))


def test_without_a_workload_no_prompt_is_shared_and_the_notes_say_so(folder: Path) -> None:
    (folder / "workload.jsonl").unlink()
    log = read_engine_log(folder)
    assert all(segment.key is None for row in log.workload.requests for segment in row.segments)
    assert any("none is assumed to" in note for note in log.notes)


def test_kv_use_of_zero_throughout_was_not_recorded() -> None:
    log = read_engine_log(RECORDED)
    assert log.series is not None
    assert log.series.kv_use is None
    assert any("KV use was not recorded" in note for note in log.notes)


def test_the_series_is_moved_to_the_clock_of_the_requests(folder: Path) -> None:
    """The counts of the requests themselves, logged by a clock that is 4.2 s ahead."""
    (folder / "timeseries.csv").unlink()
    requests = read_engine_log(folder).requests
    at_s = np.arange(0.5, 22, 0.5)
    running, waiting = requests.under_way(at_s)
    _write_series(folder / "timeseries.csv", at_s + 4.2, running, waiting)
    series = read_engine_log(folder).series
    assert series is not None
    assert series.at_s == pytest.approx(at_s, abs=0.011)


def _write_series(path: Path, at_s: np.ndarray, running: IntArray, waiting: IntArray) -> None:
    lines = ["t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct"]
    lines += [f"{t},0,0,{r},{w},1" for t, r, w in zip(at_s, running, waiting, strict=True)]
    path.write_text("\n".join(lines) + "\n")


def test_a_request_without_a_first_token_is_dropped_and_counted(folder: Path) -> None:
    (folder / "workload.jsonl").unlink()
    changed(folder / "requests.jsonl", 3, lambda record: record.update(first_token_ts=None))
    log = read_engine_log(folder)
    assert len(log.requests) == 19
    assert log.dropped == {"no time of first_token_ts": 1}


def test_a_file_of_unknown_content_is_named_in_the_notes(folder: Path) -> None:
    (folder / "screen.txt").write_text("all is well\n")
    assert any(note.startswith("screen.txt: not read") for note in read_engine_log(folder).notes)


def test_kv_events_are_named_with_what_says_more(folder: Path) -> None:
    (folder / "kv.events").write_bytes(b"\x93\xcb" + bytes(5))
    assert any(
        note.startswith("kv.events: KV events, not read") and "pagetwin_probe" in note
        for note in read_engine_log(folder).notes
    )


def test_arrivals_of_another_clock_are_suspected(tmp_path: Path) -> None:
    lines = [
        "arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s",
        "0,5,2,7.5,8",
        "1,5,2,8.25,9",
    ]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    assert any(
        "no request had its first token within 7.25 s" in note for note in read_engine_log(tmp_path).notes
    )


def test_a_long_way_to_the_queue_is_said(tmp_path: Path) -> None:
    lines = ["arrival_s,queued_s,prompt_tokens,output_tokens,first_token_s,last_token_s", "0,5,5,2,5.1,8"]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    assert any("entered 5 s after the arrival" in note for note in read_engine_log(tmp_path).notes)


def test_a_file_that_is_no_text_is_named_in_the_notes(folder: Path) -> None:
    (folder / "shot.png").write_bytes(b"\x89PNG\r\n\xff\xff")
    assert any(note.startswith("shot.png: not read: not UTF-8") for note in read_engine_log(folder).notes)


def test_a_series_of_a_century_is_placed_in_bounded_time(folder: Path) -> None:
    lines = (folder / "timeseries.csv").read_text().splitlines()
    (folder / "timeseries.csv").write_text("\n".join([*lines, "3e9,0,0,0,0,0"]) + "\n")
    assert read_engine_log(folder).series is not None


@pytest.mark.parametrize(
    ("file", "line", "change", "said"),
    [
        (
            "requests.jsonl",
            4,
            {"input_toks": "many"},
            "requests.jsonl:4: input_toks: number expected, found string",
        ),
        ("requests.jsonl", 4, {"input_toks": 0}, "requests.jsonl:4: input_toks: 0 is below 1"),
        ("requests.jsonl", 4, {"output_toks": 2.5}, "requests.jsonl:4: output_toks: whole number expected"),
        ("requests.jsonl", 4, {"arrival_time": True}, "requests.jsonl:4: arrival_time: number expected"),
        (
            "requests.jsonl",
            4,
            {"last_token_ts": 1.0},
            "requests.jsonl:4: request bench-3: the last token is 479748 s before the first token",
        ),
        (
            "requests.jsonl",
            4,
            {"output_toks": 9},
            "requests.jsonl:4: request bench-3: 685 prompt and 9 output tokens, but request 3 of the workload",
        ),
    ],
)
def test_a_wrong_row_is_named_by_file_line_and_field(
    folder: Path, file: str, line: int, change: dict[str, object], said: str
) -> None:
    changed(folder / file, line, lambda record: record.update(change))
    with pytest.raises(EngineLogError) as caught:
        read_engine_log(folder)
    assert said in str(caught.value)


def test_a_missing_key_is_named(folder: Path) -> None:
    changed(folder / "requests.jsonl", 2, lambda record: record.pop("arrival_time"))
    with pytest.raises(EngineLogError, match=r"requests\.jsonl:2: arrival_time: missing key"):
        read_engine_log(folder)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("3.0,1,1,x,0,0", "timeseries.csv:4: running: finite number expected"),
        ("1.0,1,1,1,0,0", "timeseries.csv:4: t: 1 is not after 2"),
        ("3.0,1,1,1,0", "timeseries.csv:4: line: 6 fields expected, found 5"),
        ("3.0,1,1,1,0,101", "timeseries.csv:4: kv_cache_pct: 101 is above 100"),
        ("3.0,1,1,-1,0,0", "timeseries.csv:4: running: -1 is below 0"),
    ],
)
def test_a_wrong_row_of_the_series_is_named(folder: Path, row: str, said: str) -> None:
    with (folder / "timeseries.csv").open("a") as file:
        file.write(row + "\n")
    with pytest.raises(EngineLogError) as caught:
        read_engine_log(folder)
    assert said in str(caught.value)


def test_two_logs_of_requests_in_a_folder_are_refused(folder: Path) -> None:
    shutil.copy(folder / "requests.jsonl", folder / "requests2.jsonl")
    with pytest.raises(
        EngineLogError, match=r"more than one log of requests: requests\.jsonl, requests2\.jsonl"
    ):
        read_engine_log(folder)


def test_a_folder_without_a_log_of_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineLogError, match="no log of requests"):
        read_engine_log(tmp_path)


def test_a_workload_of_another_length_is_refused(folder: Path) -> None:
    lines = (folder / "requests.jsonl").read_text().splitlines()
    (folder / "requests.jsonl").write_text("\n".join(lines[:19]) + "\n")
    with pytest.raises(EngineLogError, match=r"20 requests, but requests\.jsonl has 19"):
        read_engine_log(folder)


def test_a_slice_of_the_requests_keeps_their_clock() -> None:
    requests = read_engine_log(RECORDED).requests
    later = requests.take(slice(15, None))
    assert later.request_id == requests.request_id[15:]
    assert later.arrival_s[0] == requests.arrival_s[15]
    assert later.cached_tokens is None


_PLAIN = "request_id,arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n"


def test_a_row_that_is_written_twice_counts_once(tmp_path: Path) -> None:
    row = "a,0.0,10,5,0.1,0.5\n"
    (tmp_path / "log.csv").write_text(_PLAIN + row + "b,0.2,10,5,0.3,0.7\n" + row)
    found = read_engine_log(tmp_path)
    assert (len(found.requests), dict(found.dropped)) == (2, {"written twice, with the same times": 1})


def test_two_requests_of_one_name_at_other_times_both_count(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(_PLAIN + "a,0.0,10,5,0.1,0.5\na,0.2,10,5,0.3,0.7\n")
    assert len(read_engine_log(tmp_path).requests) == 2


def test_times_of_two_clocks_in_a_row_are_refused(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(_PLAIN + "a,0.0,10,5,1700000000.1,1700000000.5\n")
    with pytest.raises(EngineLogError, match=r"log\.csv:2: request a: .*more than a day"):
        read_engine_log(tmp_path)


def test_a_wall_clock_in_milliseconds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(_PLAIN + "a,1700000000000,10,5,1700000000100,1700000000500\n")
    with pytest.raises(EngineLogError, match=r"log\.csv:2: request a: .*no time in seconds"):
        read_engine_log(tmp_path)


def test_a_time_beyond_every_float_is_named(folder: Path) -> None:
    changed(folder / "requests.jsonl", 3, lambda record: record.update(last_token_ts=10**400))
    with pytest.raises(EngineLogError, match=r"requests\.jsonl:3: last_token_ts: finite number expected"):
        read_engine_log(folder)


def test_a_file_that_was_not_read_is_named_where_there_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("\n" + _PLAIN)
    with pytest.raises(EngineLogError, match=r"log\.csv: not read, its content is of no known kind"):
        read_engine_log(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("engine.json", "max_num_seqs: 128\n", 1),
        ("engine.json", "[\n  1,\n  oops\n]\n", 3),
        ("extra.jsonl", '{"a": 1}\n\n{"b": \n', 3),
    ],
)
def test_a_json_file_that_is_none_is_named(folder: Path, name: str, text: str, line: int) -> None:
    (folder / name).write_text(text)
    with pytest.raises(EngineLogError, match=rf"{name}:{line}: is no JSON"):
        read_engine_log(folder)


def test_an_empty_json_file_is_named(folder: Path) -> None:
    (folder / "engine.json").write_text("")
    with pytest.raises(EngineLogError, match=r"engine\.json:1: empty file"):
        read_engine_log(folder)


def test_a_json_file_of_another_kind_is_a_note(folder: Path) -> None:
    (folder / "prices.json").write_text('{"usd": 3}\n')
    assert any("prices.json: not read" in note for note in read_engine_log(folder).notes)
