"""Each format of a log is read to the times and lengths that its tool wrote, and a malformed file is named."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.twin.log import EngineLog
from harness.twin.reading import EngineLogError, read_engine_log
from traces.trace import ClientKind

DATA = Path(__file__).resolve().parents[2] / "data" / "deployments"
BENCH = DATA / "vllm-bench" / "result.json"
GUIDELLM = DATA / "guidellm" / "benchmarks.json"
AIPERF = DATA / "aiperf" / "profile_export.jsonl"
SPANS = DATA / "vllm-spans" / "spans.jsonl"
SGLANG_JSON, SGLANG_TEXT = (DATA / "sglang" / f"requests-{form}.log" for form in ("json", "text"))


def edited(source: Path, folder: Path, change: Callable[[Any], None], line: int | None = None) -> Path:
    """A copy of a JSON document, or of a JSONL file with `line` (from 1) changed."""
    text = source.read_text()
    lines = text.splitlines() if line else [text]
    record = json.loads(lines[line - 1 if line else 0])
    change(record)
    lines[line - 1 if line else 0] = json.dumps(record) if line else json.dumps(record, indent=1)
    copy = folder / source.name
    copy.write_text("\n".join(lines) + "\n")
    return copy


def refusal(path: Path) -> str:
    with pytest.raises(EngineLogError) as caught:
        read_engine_log(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "count"),
    [(BENCH, 12), (GUIDELLM, 6), (AIPERF, 6), (SPANS, 6), (SGLANG_JSON, 5), (SGLANG_TEXT, 5)],
)
def test_every_request_of_an_excerpt_is_read(path: Path, count: int) -> None:
    log = read_engine_log(path)
    assert len(log.requests) == count
    assert log.dropped == {}


# -- vllm bench serve ---------------------------------------------------------------------------------------------


def test_a_bench_result_gives_ttft_and_the_sum_of_the_gaps() -> None:
    record = json.loads(BENCH.read_text())
    requests = read_engine_log(BENCH).requests
    assert requests.ttft_s == pytest.approx(record["ttfts"], abs=1e-9)
    assert requests.latency_s == pytest.approx(
        [ttft + sum(gaps) for ttft, gaps in zip(record["ttfts"], record["itls"], strict=True)], abs=1e-9
    )
    assert requests.prompt_tokens.tolist() == record["input_lens"]
    assert requests.output_tokens.tolist() == record["output_lens"]


def test_a_bench_result_says_how_many_requests_its_client_allowed(tmp_path: Path) -> None:
    log = read_engine_log(edited(BENCH, tmp_path, lambda record: record.update(max_concurrency=2)))
    assert log.workload.header.client.max_in_flight == 2
    assert "as the log states" in log.client


def test_a_closed_loop_without_start_times_is_rebuilt_from_how_long_each_request_took(tmp_path: Path) -> None:
    def closed(record: dict[str, Any]) -> None:
        del record["start_times"]
        record.update(max_concurrency=1, request_rate="inf")

    log = read_engine_log(edited(BENCH, tmp_path, closed))
    assert log.workload.header.client.kind is ClientKind.closed
    times = log.requests
    assert times.arrival_s[1:] == pytest.approx(times.last_token_s[:-1])
    assert any("no start_times" in note for note in log.notes)


def test_a_request_of_one_token_that_ends_long_after_it_is_left_out_and_said(tmp_path: Path) -> None:
    """Its server generated more than the log counts, and had that load."""
    log = read_engine_log(edited(BENCH, tmp_path, lambda record: record["output_lens"].__setitem__(0, 1)))
    assert log.dropped == {"one token, and an end long after it: its output is counted otherwise": 1}
    assert "its output is counted otherwise" in log.lost


def test_a_bench_result_gives_the_model() -> None:
    assert read_engine_log(BENCH).settings.model == "tiny-llama"


def test_a_failed_request_of_a_bench_result_is_dropped(tmp_path: Path) -> None:
    def fail(record: Any) -> None:
        record["errors"][2], record["output_lens"][2] = "Internal Server Error", 0

    log = read_engine_log(edited(BENCH, tmp_path, fail))
    assert log.dropped == {"failed": 1}
    assert len(log.requests) == 11


def test_a_bench_result_without_start_times_is_refused(tmp_path: Path) -> None:
    said = refusal(edited(BENCH, tmp_path, lambda record: record.pop("start_times")))
    assert "result.json:1: start_times: missing, so that the arrivals are not known" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r["ttfts"].__setitem__(3, "fast"), "ttfts[3]: number expected, found string"),
        (lambda r: r["input_lens"].__setitem__(1, 0), "input_lens[1]: 0 is below 1"),
        (lambda r: r["itls"].__setitem__(0, 0.5), "itls[0]: list expected, found 0.5"),
        (lambda r: r["itls"][5].__setitem__(2, None), "itls[5][2]: number expected, found null"),
        (lambda r: r["itls"][5].__setitem__(2, -0.001), "itls[5][2]: -0.001 is below 0"),
        (lambda r: r["ttfts"].pop(), "ttfts: 11 entries, but input_lens has 12"),
    ],
)
def test_a_wrong_value_of_a_bench_result_is_named_by_its_path(
    tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    assert said in refusal(edited(BENCH, tmp_path, change))


def test_a_path_inside_a_document_has_its_line(tmp_path: Path) -> None:
    path = edited(BENCH, tmp_path, lambda record: record["ttfts"].__setitem__(3, "fast"))
    line = next(at for at, text in enumerate(path.read_text().splitlines(), 1) if "fast" in text)
    assert refusal(path).startswith(f"{path}:{line}: ttfts[3]")


# -- GuideLLM -----------------------------------------------------------------------------------------------------


def test_guidellm_gives_its_own_latencies() -> None:
    rows = json.loads(GUIDELLM.read_text())["benchmarks"][0]["requests"]["successful"]
    rows.sort(key=lambda row: row["request_start_time"])
    requests = read_engine_log(GUIDELLM).requests
    assert 1000 * requests.ttft_s == pytest.approx([row["time_to_first_token_ms"] for row in rows], abs=1e-3)
    gaps = [row["inter_token_latency_ms"] for row in rows]
    assert 1000 * requests.tpot_s == pytest.approx(gaps, abs=1e-3)


def test_guidellm_of_before_has_the_times_in_the_request(tmp_path: Path) -> None:
    """The form of GuideLLM 0.2 and 0.3."""

    def older(record: Any) -> None:
        for row in record["benchmarks"][0]["requests"]["successful"]:
            times = row.pop("info")["timings"]
            row["start_time"] = times["request_start"]
            row["first_token_time"] = times["first_token_iteration"]
            row["last_token_time"] = times["last_token_iteration"]

    old, new = read_engine_log(edited(GUIDELLM, tmp_path, older)), read_engine_log(GUIDELLM)
    assert old.requests.ttft_s.tolist() == new.requests.ttft_s.tolist()


def test_errored_requests_of_guidellm_are_counted(tmp_path: Path) -> None:
    def fail(record: Any) -> None:
        groups = record["benchmarks"][0]["requests"]
        groups["errored"] = [groups["successful"].pop()]
        record["benchmarks"][0]["metrics"]["request_totals"]["successful"] = 5

    assert read_engine_log(edited(GUIDELLM, tmp_path, fail)).dropped == {"errored": 1}


@pytest.mark.parametrize(
    ("cached", "said"), [(-5, "below 0"), (5.7, "whole number"), (10**6, "is more than")]
)
def test_cached_tokens_that_no_prompt_can_have_are_refused(tmp_path: Path, cached: float, said: str) -> None:
    log = SGLANG_JSON.read_text()
    file = tmp_path / "requests.log"
    file.write_text(re.sub(r'"cached_tokens": \d+', f'"cached_tokens": {cached}', log))
    assert re.search(f"requests.log:\\d+: cached_tokens: .*{said}", refusal(file))


def test_a_sample_of_guidellm_is_refused(tmp_path: Path) -> None:
    """The requests that are not in the file loaded the server as well."""

    def more(record: Any) -> None:
        record["benchmarks"][0]["metrics"]["request_totals"]["successful"] = 60

    assert "a sample of 6 of 60 successful requests" in refusal(edited(GUIDELLM, tmp_path, more))


def test_a_wrong_value_of_guidellm_is_named_by_its_path(tmp_path: Path) -> None:
    def wrong(record: Any) -> None:
        record["benchmarks"][0]["requests"]["successful"][2]["prompt_tokens"] = "many"

    said = refusal(edited(GUIDELLM, tmp_path, wrong))
    assert "benchmarks[0].requests.successful[2].prompt_tokens: number expected, found string" in said


# -- AIPerf -------------------------------------------------------------------------------------------------------


def test_aiperf_gives_its_own_latencies() -> None:
    rows = [json.loads(line) for line in AIPERF.read_text().splitlines()]
    rows.sort(key=lambda row: row["metadata"]["request_start_ns"])
    requests = read_engine_log(AIPERF).requests
    ttft = [row["metrics"]["time_to_first_token"]["value"] for row in rows]
    whole = [row["metrics"]["request_latency"]["value"] for row in rows]
    assert 1000 * requests.ttft_s == pytest.approx(ttft, abs=1e-3)
    assert 1000 * requests.latency_s == pytest.approx(whole, abs=1e-3)


def test_aiperf_counts_tokens_as_the_server_does() -> None:
    """The client's own count of a model that answers half characters is 92 where the server made 16."""
    first = json.loads(AIPERF.read_text().splitlines()[0])["metrics"]
    assert first["output_sequence_length"]["value"] != first["usage_completion_tokens"]["value"]
    assert first["usage_completion_tokens"]["value"] in read_engine_log(AIPERF).requests.output_tokens


def test_aiperf_without_counts_of_the_server_says_so(tmp_path: Path) -> None:
    path = edited(AIPERF, tmp_path, lambda record: record["metrics"].pop("usage_completion_tokens"), line=2)
    assert any("1 records have no token counts of the server" in note for note in read_engine_log(path).notes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r.update(error={"code": 500, "message": "x"}), "failed"),
        (lambda r: r["metadata"].update(was_cancelled=True), "cancelled"),
    ],
)
def test_a_request_of_aiperf_that_did_not_end_is_dropped(
    tmp_path: Path, change: Callable[[Any], None], reason: str
) -> None:
    assert read_engine_log(edited(AIPERF, tmp_path, change, line=3)).dropped == {reason: 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda r: r["metrics"]["time_to_first_token"].update(unit="s"),
            "profile_export.jsonl:3: metrics.time_to_first_token.unit: ms expected, found s",
        ),
        (
            lambda r: r["metadata"].pop("request_start_ns"),
            "profile_export.jsonl:3: request_start_ns: missing key",
        ),
        (lambda r: r.update(metrics=[]), "profile_export.jsonl:3: metrics: object expected, found list"),
        (
            lambda r: r["metrics"]["usage_prompt_tokens"].update(value=10**30),
            "profile_export.jsonl:3: metrics.usage_prompt_tokens.value: integer too large",
        ),
        (
            lambda r: r["metrics"]["usage_prompt_tokens"].update(value=0),
            "profile_export.jsonl:3: prompt_tokens: 0 is below 1",
        ),
        (
            lambda r: r["metrics"].update(usage_prompt_cache_read_tokens={"value": 5.7, "unit": "tokens"}),
            "profile_export.jsonl:3: metrics.usage_prompt_cache_read_tokens.value: whole number",
        ),
        (
            lambda r: r["metrics"].update(usage_prompt_cache_read_tokens={"value": 5000, "unit": "tokens"}),
            "profile_export.jsonl:3: cached_tokens: 5000 is more than prompt_tokens",
        ),
        (
            lambda r: r["metrics"]["request_latency"].update(value=0.001),
            "s before the first token",
        ),
        (lambda r: r["metadata"].update(request_start_ns=1e300), "is no time in seconds"),
    ],
)
def test_a_wrong_record_of_aiperf_is_named(tmp_path: Path, change: Callable[[Any], None], said: str) -> None:
    assert said in refusal(edited(AIPERF, tmp_path, change, line=3))


# -- OpenTelemetry ------------------------------------------------------------------------------------------------


def test_spans_give_queue_schedule_and_tokens_back() -> None:
    """The times that went into vLLM's do_tracing, see tests/data/deployments/README.md."""
    requests = read_engine_log(SPANS).requests
    assert requests.queued_s is not None
    assert requests.scheduled_s is not None
    queue = requests.scheduled_s - requests.queued_s
    assert queue == pytest.approx([0.0003, 0.0003, 0.0003, 0.0503, 0.0003, 0.0003], abs=1e-5)
    assert requests.tpot_s == pytest.approx(np.full(6, 0.012), abs=1e-5)
    assert requests.queued_s - requests.arrival_s == pytest.approx(np.full(6, 0.0046), abs=1e-5)


def jaeger(path: Path) -> Path:
    """The same spans in the form that Jaeger's page exports."""
    spans = []
    for line in SPANS.read_text().splitlines():
        span = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
        tags = [
            {"key": one["key"], "value": json.loads(next(iter(one["value"].values()), "null"))}
            if "stringValue" not in one["value"] and isinstance(next(iter(one["value"].values())), str)
            else {"key": one["key"], "value": next(iter(one["value"].values()))}
            for one in span["attributes"]
        ]
        start = int(span["startTimeUnixNano"]) // 1000
        spans.append(
            {"spanID": span["spanId"], "startTime": start, "operationName": span["name"], "tags": tags}
        )
    path.write_text(json.dumps({"data": [{"traceID": "1", "spans": spans}]}, indent=1))
    return path


def test_an_export_of_jaeger_gives_the_same(tmp_path: Path) -> None:
    found, expected = read_engine_log(jaeger(tmp_path / "traces.json")), read_engine_log(SPANS)
    assert found.requests.ttft_s == pytest.approx(expected.requests.ttft_s, abs=2e-6)
    assert found.requests.prompt_tokens.tolist() == expected.requests.prompt_tokens.tolist()


def test_an_export_of_jaeger_without_a_list_of_spans_is_named(tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    file.write_text('{"data": [{"spans": 5}]}')
    assert "traces.json:1: data[0].spans: list expected, found 5" in refusal(file)


def test_a_span_that_ends_before_its_first_token_is_refused(tmp_path: Path) -> None:
    def earlier(record: Any) -> None:
        for one in record["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["attributes"]:
            if one["key"] == "gen_ai.latency.time_in_model_decode":
                one["value"] = {"doubleValue": -0.01}

    assert "time_in_model_decode: -0.01 is below 0" in refusal(edited(SPANS, tmp_path, earlier, line=4))


def test_spans_that_are_not_of_requests_are_counted(tmp_path: Path) -> None:
    def other(record: Any) -> None:
        record["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["attributes"] = []

    log = read_engine_log(edited(SPANS, tmp_path, other, line=1))
    assert any("1 spans are not of requests" in note for note in log.notes)
    assert len(log.requests) == 5


def test_a_wrong_span_is_named_by_its_line(tmp_path: Path) -> None:
    def wrong(record: Any) -> None:
        record["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["startTimeUnixNano"] = "soon"

    said = refusal(edited(SPANS, tmp_path, wrong, line=4))
    assert "spans.jsonl:4: startTimeUnixNano: whole number expected" in said


# -- SGLang -------------------------------------------------------------------------------------------------------


def test_the_text_and_the_json_of_sglang_are_read_alike(tmp_path: Path) -> None:
    """Both logs hold 11 ms a token, and 30 ms + 0.1 ms a prompt token to the first."""
    for path in (SGLANG_JSON, SGLANG_TEXT):
        requests = read_engine_log(path).requests
        assert requests.tpot_s == pytest.approx(np.full(5, 0.011), abs=1e-5)
        assert requests.ttft_s == pytest.approx(0.03 + 1e-4 * requests.prompt_tokens, abs=1e-5)


def test_sglang_without_a_first_token_latency_has_it_from_the_decode_throughput(tmp_path: Path) -> None:
    """Versions before 0.5.23 log the throughput alone."""
    text = SGLANG_JSON.read_text().splitlines()
    records = [line.partition("] ") for line in text]
    lines = []
    for stamp, sign, body in records:
        record = json.loads(body)
        record.get("out", {}).get("meta_info", {}).pop("first_token_latency", None)
        lines.append(stamp + sign + json.dumps(record))
    path = tmp_path / "older.log"
    path.write_text("\n".join(lines) + "\n")
    expected = read_engine_log(SGLANG_JSON).requests.ttft_s
    assert read_engine_log(path).requests.ttft_s == pytest.approx(expected, abs=1e-5)


def test_a_request_that_sglang_aborted_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "aborted.log"
    path.write_text(SGLANG_JSON.read_text().replace('"type": "length"', '"type": "abort"', 1))
    assert read_engine_log(path).dropped == {"aborted": 1}


def test_a_cut_line_of_sglang_is_named(tmp_path: Path) -> None:
    lines = SGLANG_TEXT.read_text().splitlines()
    lines[3] = lines[3][:-30]
    path = tmp_path / "cut.log"
    path.write_text("\n".join(lines) + "\n")
    assert "cut.log:4: meta_info: no readable dictionary" in refusal(path)


# -- plain CSV ----------------------------------------------------------------------------------------------------


def plain(folder: Path, text: str) -> EngineLog:
    (folder / "requests.csv").write_text(text)
    return read_engine_log(folder)


def test_a_plain_csv_is_read(tmp_path: Path) -> None:
    found = plain(
        tmp_path,
        "request_id,arrival_s,queued_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n"
        "a,10.0,10.5,100,3,11.0,13.0\nb,12.0,12.0,50,1,12.25,12.25\n",
    )
    assert found.requests.request_id == ("a", "b")
    assert found.requests.ttft_s.tolist() == [0.5, 0.25]
    assert found.requests.tpot_s[0] == 1.0
    assert np.isnan(found.requests.tpot_s[1])


def test_a_row_of_a_plain_csv_without_a_first_token_is_dropped(tmp_path: Path) -> None:
    found = plain(
        tmp_path,
        "arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n0,5,2,1,2\n1,5,2,,\n",
    )
    assert found.dropped == {"no output token": 1}


def test_a_column_of_a_plain_csv_that_is_not_read_is_named(tmp_path: Path) -> None:
    found = plain(
        tmp_path,
        "arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s,user\n0,5,2,1,2,ann\n",
    )
    assert any("columns that are not read: user" in note for note in found.notes)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("0,5,2,1,soon", "requests.csv:2: last_token_s: finite number expected"),
        ("0,5.5,2,1,2", "requests.csv:2: prompt_tokens:"),
        ("0,99999999999999999,2,1,2", "requests.csv:2: prompt_tokens: integer too large"),
        ("0,5,2,3,2", "requests.csv:2: request 0: the last token is 1 s before the first token"),
        ("0,5,2,1", "requests.csv:2: line: 5 fields expected, found 4"),
    ],
)
def test_a_wrong_row_of_a_plain_csv_is_named(tmp_path: Path, row: str, said: str) -> None:
    (tmp_path / "requests.csv").write_text(
        f"arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n{row}\n"
    )
    assert said in refusal(tmp_path)


# -- vLLM's request log -------------------------------------------------------------------------------------------


def chat(name: str, at: str, ids: list[int], chunks: list[str]) -> str:
    """The lines of a streamed chat, after the format strings of `vllm/entrypoints/logger.py` of vLLM 0.19.0."""
    stamp = "(APIServer pid=7) DEBUG 11-20 14:02:{} [logger.py:53] "
    lines = [
        stamp.format(at)
        + f"Request {name} details: prompt: 'prompt_token_ids: [1]', prompt_token_ids: {ids}, "
        "prompt_embeds shape: None."
    ]
    lines += [
        f"(APIServer pid=7) INFO 11-20 14:02:{chunk} [logger.py:98] Generated response {name} (streaming delta): "
        "output: 'a, b', output_token_ids: [5, 6], finish_reason: None"
        for chunk in chunks
    ]
    return "\n".join(lines) + "\n"


def test_the_chunks_of_a_chat_give_its_times(tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text(chat("chatcmpl-a", "01.5", [7, 8, 9], ["02.0", "02.25", "04.0"]))
    requests = read_engine_log(tmp_path).requests
    assert requests.ttft_s.tolist() == [0.5]
    assert requests.latency_s.tolist() == [2.5]
    assert (requests.prompt_tokens[0], requests.output_tokens[0]) == (3, 6)


def test_token_ids_of_prompts_give_what_they_share(tmp_path: Path) -> None:
    one, other = [1, 2, 3, 4], [1, 2, 9]
    text = chat("chatcmpl-a", "01.5", one, ["02.0"]) + chat("chatcmpl-b", "03.5", other, ["04.0"])
    (tmp_path / "vllm.log").write_text(text)
    first, second = (row.segments for row in read_engine_log(tmp_path).workload.requests)
    assert first[0] == second[0]
    assert first[0].tokens == 2
    assert first[0].key is not None


def test_whole_seconds_of_a_log_are_said(tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text(chat("chatcmpl-a", "01", [7], ["02", "03"]))
    assert any("its clock has whole seconds" in note for note in read_engine_log(tmp_path).notes)


def test_prompts_of_a_server_log_join_the_times_of_spans(tmp_path: Path) -> None:
    """Ids of a prompt that the log cut short are its beginning."""
    (tmp_path / "spans.jsonl").write_text(SPANS.read_text())
    lines = [chat(f"cmpl-{i:08x}-0", "01.5", [1, 2, 3], []) for i in range(4)]
    (tmp_path / "vllm.log").write_text("".join(lines))
    log = read_engine_log(tmp_path)
    shared = [row.segments[0] for row in log.workload.requests[:4]]
    assert len(set(shared)) == 1
    assert shared[0].tokens == 3
    assert any("known of 4 of 6 requests" in note for note in log.notes)


@pytest.mark.parametrize("ids", ["[1,, 2]", "[1 2]", "[99999999999999999999]"])
def test_wrong_token_ids_are_named(tmp_path: Path, ids: str) -> None:
    text = chat("chatcmpl-a", "01.5", [1], ["02.0"]).replace(
        "prompt_token_ids: [1], prompt_e", f"prompt_token_ids: {ids}, prompt_e"
    )
    (tmp_path / "vllm.log").write_text(text)
    assert "vllm.log:1: prompt_token_ids" in refusal(tmp_path)


def test_a_request_without_chunks_is_dropped(tmp_path: Path) -> None:
    text = chat("chatcmpl-a", "01.5", [1], ["02.0"]) + chat("chatcmpl-b", "03.5", [2], [])
    (tmp_path / "vllm.log").write_text(text)
    reasons = read_engine_log(tmp_path).dropped
    assert list(reasons.values()) == [1]
    assert "no times of its tokens" in next(iter(reasons))


# -- damage of any format -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [BENCH, GUIDELLM, AIPERF, SPANS, SGLANG_JSON], ids=lambda path: path.parent.name
)
def test_a_cut_file_is_refused_with_its_name(tmp_path: Path, path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes()[:-200])
    assert path.name in refusal(copy)


@pytest.mark.parametrize(
    "path", [BENCH, GUIDELLM, AIPERF, SPANS, SGLANG_JSON], ids=lambda path: path.parent.name
)
def test_a_byte_that_is_no_text_is_named_by_its_line(tmp_path: Path, path: Path) -> None:
    copy = tmp_path / path.name
    raw = path.read_bytes()
    middle = len(raw) // 2
    copy.write_bytes(raw[:middle] + b"\xff" + raw[middle + 1 :])
    assert f"{copy}:{raw[:middle].count(10) + 1}: line: not UTF-8" in refusal(copy)


def test_a_chat_over_the_end_of_a_year_is_one_of_seconds(tmp_path: Path) -> None:
    text = chat("a", "12-31 23:59:59.5", [1, 2], ["12-31 23:59:59.9", "01-01 00:00:00.5"])
    text += chat("b", "01-01 00:00:01.0", [1, 2, 3], ["01-01 00:00:01.5", "01-01 00:00:02.0"])
    (tmp_path / "requests.log").write_text(text.replace("11-20 14:02:", ""))
    times = read_engine_log(tmp_path).requests
    assert times.prompt_tokens.tolist() == [2, 3]
    assert times.arrival_s.tolist() == pytest.approx([0.0, 1.5])
    assert times.last_token_s.tolist() == pytest.approx([1.0, 2.5])
