"""Logs of load generators and engines that were cut, edited or are of another version: read, or refused by name."""

import json
from collections.abc import Iterator
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tiers import cases, tier

from harness.twin.configured import configured
from harness.twin.log import EngineLog
from harness.twin.reading import EngineLogError, read_engine_log
from traces.trace import ClientKind

DATA = Path(__file__).resolve().parents[2] / "data" / "deployments"
LOGS = {
    "guidellm": DATA / "guidellm" / "benchmarks.json",
    "aiperf": DATA / "aiperf" / "profile_export.jsonl",
    "sglang-json": DATA / "sglang" / "requests-json.log",
    "sglang-text": DATA / "sglang" / "requests-text.log",
    "vllm-bench": DATA / "vllm-bench" / "result.json",
}
WRONG: tuple[Any, ...] = (None, "text", "", -1, 0, 1e300, 10**400, True, [], {}, [None], float("nan"))


def read(folder: Path, name: str, content: bytes) -> str:
    """Read a folder with this file alone: `read`, or the refusal, which must name the file."""
    file = folder / LOGS[name].name
    file.write_bytes(content)
    try:
        read_engine_log(folder)
    except EngineLogError as error:
        said = str(error)
    else:
        return "read"
    assert file.name in said or str(folder) in said
    return said


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a document; of lists the first two items alone."""
    yield place
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*place, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 2)):
            yield from leaves(value[index], (*place, index))


def changes(document: Any) -> Iterator[Any]:
    """The document with one value replaced or taken out; each place has another wrong value."""
    for number, place in enumerate(leaves(document)):
        if not place:
            continue
        for shift in range(tier(1, 2)):
            changed = deepcopy(document)
            inside = changed
            for key in place[:-1]:
                inside = inside[key]
            inside[place[-1]] = WRONG[(5 * number + shift) % len(WRONG)]
            yield changed
        if isinstance(inside, dict):
            changed = deepcopy(changed)
            inside = changed
            for key in place[:-1]:
                inside = inside[key]
            del inside[place[-1]]
            yield changed


@cases("name", ["vllm-bench", "guidellm"], day=1)
def test_a_document_with_one_wrong_value_is_read_or_refused_by_name(tmp_path: Path, name: str) -> None:
    document = json.loads(LOGS[name].read_text())
    found = [read(tmp_path, name, json.dumps(changed).encode()) for changed in changes(document)]
    assert "read" in found
    assert any(said != "read" for said in found)


@pytest.mark.parametrize("name", ["aiperf", "sglang-json"])
def test_a_line_with_one_wrong_value_is_read_or_refused_by_name(tmp_path: Path, name: str) -> None:
    lines = LOGS[name].read_text().splitlines()
    at = 1 + next(i for i, line in enumerate(lines[1:]) if "request.finished" in line or '"metrics"' in line)
    start = lines[at].index("{")
    for changed in changes(json.loads(lines[at][start:])):
        mixed = [*lines[:at], lines[at][:start] + json.dumps(changed), *lines[at + 1 :]]
        said = read(tmp_path, name, "\n".join(mixed).encode())
        assert said == "read" or f":{at + 1}:" in said or "no finished request" in said or "clock" in said, (
            said
        )


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_was_cut_anywhere_is_read_or_refused_by_name(tmp_path: Path, name: str) -> None:
    whole = LOGS[name].read_bytes()
    found = {read(tmp_path, name, whole[:cut]) for cut in range(0, len(whole), max(1, len(whole) // 40))}
    assert any(said != "read" for said in found)


@pytest.mark.parametrize("name", LOGS)
def test_an_empty_log_is_refused_by_name(tmp_path: Path, name: str) -> None:
    assert "empty file" in read(tmp_path, name, b"")


def test_failed_requests_of_aiperf_are_counted_beside_those_that_ended(tmp_path: Path) -> None:
    lines = LOGS["aiperf"].read_text().splitlines()
    failed = json.loads(lines[1]) | {"error": {"code": 503, "message": "busy"}, "metrics": {}}
    (tmp_path / "profile_export.jsonl").write_text("\n".join([lines[0], json.dumps(failed), *lines[2:]]))
    assert read_engine_log(tmp_path).dropped["failed"] == 1


def test_failed_requests_of_guidellm_are_counted_beside_those_that_ended(tmp_path: Path) -> None:
    document = json.loads(LOGS["guidellm"].read_text())
    requests = document["benchmarks"][0]["requests"]
    requests["errored"] = [requests["successful"].pop()]
    document["benchmarks"][0].pop("metrics", None)
    (tmp_path / "benchmarks.json").write_text(json.dumps(document))
    assert read_engine_log(tmp_path).dropped["errored"] == 1


def bench(folder: Path, count: int = 40, **changes: Any) -> EngineLog:
    """A result of `vllm bench serve` of an open loop; `changes` are its lists instead of the usual ones."""
    document = {
        "input_lens": [100] * count,
        "output_lens": [3] * count,
        "ttfts": [0.05] * count,
        "itls": [[0.01, 0.01]] * count,
        "start_times": [100.0 + 0.3 * place for place in range(count)],
    }
    (folder / "result.json").write_text(json.dumps(document | changes))
    return read_engine_log(folder)


def server_log(folder: Path, *states: str) -> None:
    """What a vLLM on a CPU prints every ten seconds."""
    begin = "INFO 11-29 04:25:{:02}: Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 1.0 "
    lines = [
        f"{begin.format(4 * place)}tokens/s, Running: 1 reqs, Waiting: 0 reqs, CPU KV cache usage: 2.5%, {state}"
        for place, state in enumerate(states)
    ]
    (folder / "server.log").write_text("\n".join(lines) + "\n")


def test_a_result_in_order_has_nothing_to_warn_of(tmp_path: Path) -> None:
    assert bench(tmp_path).warnings == ()


@pytest.mark.parametrize("back_s", [10.0, 3600.0, 9.0])
def test_a_clock_that_was_set_back_or_a_second_run_in_one_file_is_said_first(
    tmp_path: Path, back_s: float
) -> None:
    starts = [100.0 + 0.3 * place - (back_s if place >= 20 else 0.0) for place in range(40)]
    (said,) = bench(tmp_path, start_times=starts).warnings
    assert "go back 1 times, first after request 20" in said
    assert "several runs" in said


def test_requests_in_another_order_are_no_clock_that_was_set_back(tmp_path: Path) -> None:
    starts = [100.0 + 0.3 * (7 * place % 40) for place in range(40)]
    assert bench(tmp_path, start_times=starts).warnings == ()


def test_answers_that_came_whole_are_said_first(tmp_path: Path) -> None:
    (said,) = bench(tmp_path, itls=[[]] * 40).warnings
    assert "40 of 40 answers came whole" in said


def test_a_cache_that_the_server_printed_and_the_log_does_not_know_is_said_first(tmp_path: Path) -> None:
    server_log(tmp_path, "Prefix cache hit rate: 10.0%", "Prefix cache hit rate: 78.4%")
    log = bench(tmp_path)
    assert log.series is not None
    assert log.series.kv_use is not None
    assert log.series.kv_use.tolist() == [0.025, 0.025]
    assert "78% of the prompt tokens were in its prefix cache" in log.warnings[0]
    assert log.warnings == configured(log, ("device=h100", "model=llama3_8b")).warnings[:1]


@pytest.mark.parametrize(
    "state", ["Prefix cache hit rate: 1.0%", "External prefix cache hit rate: 78.4%", ""]
)
def test_a_cache_without_hits_is_not_said(tmp_path: Path, state: str) -> None:
    server_log(tmp_path, state, state)
    assert bench(tmp_path).warnings == ()


def test_a_cache_is_not_said_where_the_log_knows_its_hits(tmp_path: Path) -> None:
    server_log(tmp_path, *["Prefix cache hit rate: 78.4%"] * 2)
    lines = ["arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s,cached_tokens"]
    lines += [f"{0.3 * place},100,3,{0.3 * place + 0.05},{0.3 * place + 0.07},64" for place in range(40)]
    (tmp_path / "requests.csv").write_text("\n".join(lines) + "\n")
    assert read_engine_log(tmp_path).warnings == ()


@pytest.mark.parametrize(("grows", "warned"), [(130, True), (0, False)])
def test_turns_that_repeat_their_conversation_are_said_where_the_log_has_no_hits(
    tmp_path: Path, grows: int, warned: bool
) -> None:
    lines = ["arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s,session"]
    for place in range(40):
        turn, session = divmod(place, 10)
        sent = 5.0 * turn + 0.1 * session
        lines.append(f"{sent},{100 + turn * grows},30,{sent + 0.05},{sent + 0.9},s{session}")
    (tmp_path / "requests.csv").write_text("\n".join(lines) + "\n")
    log = read_engine_log(tmp_path)
    assert log.workload.header.client.kind is ClientKind.multi_turn
    assert any("all that its conversation has said" in said for said in log.warnings) is warned


USUAL = [0, 1, 1, 1, 0, 1, 1, 0, 0]  # running requests, as a server prints them every ten seconds


def a_run_of_a_server(folder: Path, *, others: int, **facts: Any) -> EngineLog:
    """One run (USUAL) behind another one with `others` in flight, from 04:00 on the server's clock."""
    lines = []
    for place, running in enumerate([others] * 20 + [0] * 5 + USUAL):
        state = f"Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: {running} reqs"
        minute, second = divmod(10 * place, 60)
        at = f"INFO 11-29 04:{minute:02}:{second:02}: Engine 000"
        lines.append(f"{at}: {state}, Waiting: 0 reqs, GPU KV cache usage: {running}.5%")
    (folder / "server.log").write_text("\n".join(lines) + "\n")
    starts = [10.0 * place - 5.0 for place, running in enumerate(USUAL) if running]
    lists = {"start_times": starts, "ttfts": [0.1] * len(starts), "itls": [[9.0, 0.8]] * len(starts)}
    return bench(folder, len(starts), **lists, **facts)


@pytest.mark.parametrize("others", [4, 0])
def test_a_server_log_of_several_runs_is_said_first(tmp_path: Path, others: int) -> None:
    log = a_run_of_a_server(tmp_path, others=others)
    assert any("served others too" in said for said in log.warnings) is (others > 0)


# the last answer ends 04:05:14.9 by the server's clock
@pytest.mark.parametrize("date", ["20261129-040515", "20261129-040517", "20261129-093515", "20261128-200515"])
def test_the_date_of_a_result_finds_its_run_in_a_server_log_of_several(tmp_path: Path, date: str) -> None:
    log = a_run_of_a_server(tmp_path, others=1, date=date)
    assert log.series is not None
    assert log.series.at_s[0] == pytest.approx(5, abs=4.9)
    assert log.series.running.tolist() == [1, 1, 1, 0, 1, 1]
    assert log.warnings == ()
    assert any("20 states of other requests are left out" in note for note in log.notes)


def test_requests_in_unix_time_find_their_run_in_a_server_log_of_several(tmp_path: Path) -> None:
    a_run_of_a_server(tmp_path, others=1)
    (tmp_path / "result.json").unlink()
    began = datetime(2026, 11, 29, 4, 4, 15, tzinfo=UTC).timestamp()
    lines = ["arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s"]
    for place, running in enumerate(USUAL):
        sent = began + 10.0 * place - 10.0
        lines += [f"{sent},100,3,{sent + 0.1},{sent + 9.9}"] * running
    (tmp_path / "requests.csv").write_text("\n".join(lines) + "\n")
    log = read_engine_log(tmp_path)
    assert log.series is not None
    assert log.series.running.tolist() == [1, 1, 1, 0, 1, 1]


def test_a_server_log_of_another_day_is_left_out_and_said_first(tmp_path: Path) -> None:
    log = a_run_of_a_server(tmp_path, others=1, date="20261127-040515")
    assert log.series is None
    assert "another time than that of these requests" in log.warnings[0]


@pytest.mark.parametrize("date", ["20261129-043117", "today", 5, None])
def test_a_date_at_which_nothing_fits_leaves_the_counts_and_what_is_said_of_them(
    tmp_path: Path, date: object
) -> None:
    log = a_run_of_a_server(tmp_path, others=4, date=date)
    assert "served others too" in log.warnings[0]


def test_a_server_that_was_started_with_other_arguments_is_said_first(tmp_path: Path) -> None:
    server_log(tmp_path, "Prefix cache hit rate: 0.0%")
    printed = (tmp_path / "server.log").read_text()
    starts = [f"INFO 11-29 04:00:00 non-default args: {{'max_num_seqs': {size}}}\n" for size in (8, 8, 16)]
    (tmp_path / "server.log").write_text("".join(starts[:2]) + printed)
    assert bench(tmp_path).warnings == ()
    (tmp_path / "server.log").write_text("".join(starts) + printed)
    assert "was started 2 times with different arguments" in bench(tmp_path).warnings[0]


def test_several_results_in_one_file_are_refused_by_what_is_expected(tmp_path: Path) -> None:
    bench(tmp_path)
    whole = (tmp_path / "result.json").read_text()
    (tmp_path / "result.json").write_text(f"{whole}\n{whole}\n")
    with pytest.raises(EngineLogError, match="extra data after the object \\(one is expected\\)"):
        read_engine_log(tmp_path)
