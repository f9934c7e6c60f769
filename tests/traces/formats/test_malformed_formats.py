"""Malformed files of every other format are refused where they are wrong: file, line, field and reason."""

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from trace_samples import (
    BAILIAN,
    BURST_1,
    BURST_2,
    CANONICAL,
    CONVERSATION,
    LENGTHS,
    RAG,
    RAG_TABLES,
    SERVEGEN_TRACE,
    SERVINGSIM,
    write_ragpulse,
    write_servegen,
)

from traces.arrivals import ArrivalProcess
from traces.errors import TraceError
from traces.reading import read_trace

CLOCK = ArrivalProcess("poisson", 1.0)


class Case(NamedTuple):
    name: str
    format: str
    content: str
    line: int
    field: str
    reason: str  # a part of it


def rows(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def conversation(**changes: Any) -> str:
    return json.dumps({**CONVERSATION, **changes})


def requests(index: int, **changes: Any) -> str:
    entries = [dict(entry) for entry in CONVERSATION["requests"]]
    entries[index] |= changes
    return conversation(requests=entries)


def headed(**changes: object) -> str:
    return rows({"header": {**C0["header"], **changes}})


def canonical(index: int, **changes: Any) -> str:
    records = [dict(record) for record in CANONICAL]
    records[index] |= changes
    return rows(*records)


def without(record: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != key}


B0, B1 = BAILIAN
NESTED = CONVERSATION["requests"][1]
LENGTH_CASES = [
    Case("total", "lengths", LENGTHS.replace("992", "991"), 2, "num_total_tokens", "991 is not 74 + 918"),
    Case("ratio", "lengths", LENGTHS.replace("0.0806", "0.0906"), 2, "pd_ratio", "does not equal 74/918"),
    Case("ratio in words", "lengths", LENGTHS.replace("0.0806", "x0.08"), 2, "pd_ratio", "does not equal"),
]
BAILIAN_CASES = [
    Case(
        "unknown parent",
        "bailian",
        rows(B0, {**B1, "parent_chat_id": 999}),
        2,
        "parent_chat_id",
        "999 unknown",
    ),
    Case(
        "own parent", "bailian", rows(B0, {**B1, "parent_chat_id": 1}), 2, "parent_chat_id", "its own parent"
    ),
    Case("parent -2", "bailian", rows({**B0, "parent_chat_id": -2}), 1, "parent_chat_id", "-1 or an earlier"),
    Case("chat twice", "bailian", rows(B0, {**B1, "chat_id": 0}), 2, "chat_id", "0 already at line 1"),
    Case("turn jumps", "bailian", rows(B0, {**B1, "turn": 3}), 2, "turn", "turn 3, parent has turn 1"),
    Case("type", "bailian", rows({**B0, "type": "audio"}), 1, "type", "one of text, search, image, file"),
    Case(
        "ids",
        "bailian",
        rows({**B0, "input_length": 521}),
        1,
        "hash_ids",
        "32 (full) or 33 (with tail) expected, found 3",
    ),
    Case(
        "other rule", "bailian", rows(B0, {**B1, "hash_ids": [0, 1, 3, 4]}), 2, "hash_ids", "one rule a file"
    ),
    Case(
        "time as text",
        "bailian",
        rows({**B0, "timestamp": "0"}),
        1,
        "timestamp",
        "number of seconds expected, found string",
    ),
    Case("time back", "bailian", rows({**B0, "timestamp": 99}, B1), 2, "timestamp", "goes back"),
]
BURST_CASES = [
    Case(
        "no log type", "burstgpt", BURST_1.replace(",Log Type", ""), 1, "Log Type", "missing column Log Type"
    ),
    Case("sum", "burstgpt", BURST_1.replace("490", "491"), 2, "Total tokens", "491 is not 472 + 18"),
    Case(
        "log type",
        "burstgpt",
        BURST_1.replace("Conversation log", "Conversation"),
        2,
        "Log Type",
        '"Conversation log" or "API log"',
    ),
    Case("elapsed", "burstgpt", BURST_2.replace("2.4", "-1"), 2, "Elapsed time", "-1 is below 0"),
    Case("elapsed nan", "burstgpt", BURST_2.replace("2.4", "nan"), 2, "Elapsed time", "number of seconds"),
]
CONVERSATION_CASES = [
    Case("block 0", "agentic", conversation(block_size=0), 1, "block_size", "at least 1"),
    Case(
        "no block", "agentic", json.dumps(without(CONVERSATION, "block_size")), 1, "block_size", "missing key"
    ),
    Case("scope", "agentic", conversation(hash_id_scope="world"), 1, "hash_id_scope", "local or global"),
    Case(
        "ids",
        "agentic",
        requests(0, hash_ids=[1, 2, 3]),
        1,
        "requests[0].hash_ids",
        "floor(130/64) = 2 expected, found 3",
    ),
    Case("id twice", "agentic", requests(0, hash_ids=[1, 1]), 1, "requests[0].hash_ids", "1, was at 0 at"),
    Case("time back", "agentic", requests(2, t=1.0), 1, "requests[2].t", "goes back"),
    Case("type", "agentic", requests(0, type="x"), 1, "requests[0].type", "n, s or subagent"),
    Case("nothing nested", "agentic", requests(1, requests=[]), 1, "requests[1].requests", "is empty"),
    Case(
        "nested twice",
        "agentic",
        requests(1, requests=[NESTED]),
        1,
        "requests[1].requests[0]",
        "deeper than one level",
    ),
    Case(
        "no duration",
        "agentic",
        requests(1, duration_ms=None),
        1,
        "requests[1].duration_ms",
        "required when completed",
    ),
    Case(
        "totals",
        "agentic",
        requests(0, out=9),
        1,
        "totals",
        "parent_tokens.output states 12, the requests sum to 16",
    ),
    Case("no requests", "agentic", conversation(requests=[]), 1, "requests", "is empty"),
    Case(
        "negative think", "agentic", requests(2, think_time=-1), 1, "requests[2].think_time", "not negative"
    ),
    Case("unchained", "agentic", requests(2, hash_ids=[1, 9, 2]), 1, "requests[2].hash_ids", "not chained"),
    Case("cut", "agentic", conversation()[:-9], 1, "line", "JSON ends early"),
]
SIM = SERVINGSIM
SIM_CASES = [
    Case(
        "ids",
        "servingsim",
        rows({**SIM[0], "input_tok_ids": [1]}),
        1,
        "input_tok_ids",
        "4 token ids expected, found 1",
    ),
    Case("no calls", "servingsim", rows({**SIM[1], "sub_requests": []}), 1, "sub_requests", "is empty"),
    Case("session twice", "servingsim", rows(SIM[1], SIM[1]), 2, "session_id", "already at line 1"),
    Case("both", "servingsim", rows({**SIM[1], "input_toks": 3}), 1, "sub_requests", "not both"),
    Case("fraction", "servingsim", rows({**SIM[0], "input_toks": 13.7}), 1, "input_toks", "integer expected"),
    Case(
        "time", "servingsim", rows({**SIM[0], "arrival_time_ns": -1}), 1, "arrival_time_ns", "-1 is below 0"
    ),
    Case(
        "tool time",
        "servingsim",
        rows({**SIM[1], "sub_requests": [{**SIM[1]["sub_requests"][0], "tool_duration_ns": -1}]}),
        1,
        "sub_requests[0].tool_duration_ns",
        "-1 is below 0",
    ),
]
C0, C1, C2 = CANONICAL
CANONICAL_CASES = [
    Case("sum", "pagetwin", canonical(1, prompt_tokens=9), 2, "segments", "sum to 10, prompt_tokens 9"),
    Case(
        "empty segment",
        "pagetwin",
        canonical(1, segments=[[1, 10], [2, 0]]),
        2,
        "segments[1]",
        "0 is not from 1",
    ),
    Case(
        "no key kind",
        "pagetwin",
        rows({"header": without(C0["header"], "key_kind")}),
        1,
        "key_kind",
        "chained or content",
    ),
    Case("version", "pagetwin", headed(pagetwin_trace=9), 1, "pagetwin_trace", "version 1"),
    Case("books", "pagetwin", headed(rows_read=9), 1, "rows_read", "9 is not rows_kept"),
    Case("fit", "pagetwin", headed(calibration={"ks": None}), 1, "calibration.ks", "number expected"),
    Case("release", "pagetwin", canonical(2, after=[]), 3, "after", "release after needs at least one"),
    Case(
        "later", "pagetwin", canonical(1, after=[1], release="after"), 2, "after", "request 1 is not earlier"
    ),
    Case("unknown parent", "pagetwin", canonical(2, parent=7), 3, "parent", "request 7 is not earlier"),
    Case("id twice", "pagetwin", canonical(2, request_id=0), 3, "request_id", "0 already at line 2"),
    Case("time back", "pagetwin", canonical(1, arrival_us=9_000_000), 3, "arrival_us", "before 9000000"),
    Case("best of", "pagetwin", canonical(1, n=4, best_of=2), 2, "best_of", "2 is less than n 4"),
    Case("unknown field", "pagetwin", canonical(1, prompt=3), 2, "prompt", "unknown field"),
    Case(
        "key type", "pagetwin", canonical(1, segments=[["a", 10]]), 2, "segments[0] key", "integer expected"
    ),
]
SIMPLE_HEADER = "arrival_s,prompt_tokens,output_tokens,prefix,prefix_tokens,n,best_of\n"
SIMPLE_CASES = [
    Case("column", "simple", "arrival_s,prompt_tokens\n", 1, "output_tokens", "missing column"),
    Case("prefix alone", "simple", SIMPLE_HEADER + "0,9,1,sys,,,\n", 2, "prefix_tokens", "go together"),
    Case(
        "prefix long",
        "simple",
        SIMPLE_HEADER + "0,9,1,sys,10,,\n",
        2,
        "prefix_tokens",
        "10 is more than prompt_tokens 9",
    ),
    Case("best of", "simple", SIMPLE_HEADER + "0,9,1,,,4,2\n", 2, "best_of", "2 is less than n 4"),
    Case(
        "text",
        "simple",
        '{"arrival_s": 0, "prompt_tokens": "9", "output_tokens": 1}',
        1,
        "prompt_tokens",
        "number expected",
    ),
    Case(
        "bool",
        "simple",
        '{"arrival_s": 0, "prompt_tokens": true, "output_tokens": 1}',
        1,
        "prompt_tokens",
        "found boolean",
    ),
]
CASES = [
    *LENGTH_CASES,
    *BAILIAN_CASES,
    *BURST_CASES,
    *CONVERSATION_CASES,
    *SIM_CASES,
    *CANONICAL_CASES,
    *SIMPLE_CASES,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.name}")
def test_a_malformed_file_is_refused_where_it_is_wrong(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "trace.data"
    path.write_text(case.content)
    arrivals = CLOCK if case.format == "lengths" else None
    with pytest.raises(TraceError) as caught:
        read_trace(path, case.format, arrivals=arrivals)
    assert (caught.value.file, caught.value.line, caught.value.field) == (str(path), case.line, case.field)
    assert case.reason in caught.value.reason


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"timestamp": 82}, "timestamp", "string of digits expected, found 82"),
        ({"timestamp": "82.5"}, "timestamp", "string of digits expected"),
        ({"input_length": 3}, "input_length", "segments sum to 24, input_length 3"),
        ({"hash_ids": {"history": []}}, "hash_ids", "groups sys_prompt"),
        ({"hash_ids": {**RAG[0]["hash_ids"], "history": [99]}}, "hash_ids.history[0]", "99: no token_length"),
    ],
)
def test_a_malformed_ragpulse_row_is_refused(change: dict, field: str, reason: str, tmp_path: Path) -> None:
    path = write_ragpulse(tmp_path, [{**RAG[0], **change}])
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert (caught.value.line, caught.value.field) == (1, field)
    assert reason in caught.value.reason


def test_a_ragpulse_clock_that_goes_back_without_a_restart_is_refused(tmp_path: Path) -> None:
    late = [{**RAG[0], "timestamp": "604453"}, {**RAG[1], "timestamp": "590000"}]
    with pytest.raises(
        TraceError, match=r"0_trace.jsonl:2: timestamp: goes back from 604453 to 590000 s but does not"
    ):
        read_trace(write_ragpulse(tmp_path, late))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"passage_id": 5, "token_length": 0}, "token_length: 0 is below 1"),
        ({"passage_id": 3, "token_length": 286}, "id 3 has length 286, had 6 at line 1"),
    ],
)
def test_a_malformed_ragpulse_table_is_refused_by_its_own_line(
    row: dict, reason: str, tmp_path: Path
) -> None:
    path = write_ragpulse(
        tmp_path, RAG, {**RAG_TABLES, "2_passages.jsonl": [*RAG_TABLES["2_passages.jsonl"], row]}
    )
    with pytest.raises(TraceError, match=f"2_passages.jsonl:2: .*{reason}"):
        read_trace(path)


def test_a_missing_ragpulse_table_is_named(tmp_path: Path) -> None:
    path = write_ragpulse(tmp_path, RAG)
    (tmp_path / "3_history.jsonl").unlink()
    with pytest.raises(TraceError, match=r"the table 3_history.jsonl is not beside it"):
        read_trace(path)


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        ("0,2.0,1.0,Gamma,1.0,0.5", "0,2.0,1.0,Gamma,1.0", 1, "6 fields expected, found 5"),
        ("600,1.0", "1800,1.0", 2, "1800 follows 0"),
        ("0,2.0,1.0,Gamma", "0,2.0,1.0,", 1, "Gamma or Weibull expected, found nothing"),
        ("Gamma", "Pareto", 1, "found Pareto"),
        ("Gamma,1.0", "Gamma,0", 1, "shape from 0.01"),
        ("0,2.0", "0,inf", 1, "finite, not negative"),
    ],
)
def test_a_malformed_servegen_window_is_refused(
    old: str, new: str, line: int, reason: str, tmp_path: Path
) -> None:
    folder = write_servegen(tmp_path, trace=SERVEGEN_TRACE.replace(old, new, 1))
    with pytest.raises(TraceError) as caught:
        read_trace(folder, limit=3)
    assert caught.value.line == line
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("pmf", "reason"),
    [
        ('__import__("os").system("x")', "0.input_tokens: literal dict"),
        ("{10: 0.9}", "0.input_tokens: probabilities sum to 0.9"),
        ("{}", "no length distribution for window 0"),
        ("{-3: 1.0}", "literal dict"),
    ],
)
def test_a_servegen_distribution_that_is_none_is_refused(pmf: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=reason.replace("{", r"\{")):
        read_trace(write_servegen(tmp_path, pmf=pmf), limit=3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[{"conversations": 3}]', "conversations: list expected, found 3"),
        ('[{"conversations": [{"from": "x", "value": "a"}]}]', "human, gpt or system expected, found x"),
        ('[{"conversations": [{"from": "gpt", "value": 5}]}]', "string expected, found 5"),
        ('[{"conversations": []}', "JSON ends early"),
        ('[{"conversations": []}] x', "extra data after the array"),
        ("[3]", "expected an object, found 3"),
        ('{"conversations": []}', r"[ expected, found {"),
    ],
)
def test_malformed_sharegpt_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path, "sharegpt", arrivals=CLOCK, encode=list_of_letters)
    assert reason in str(caught.value)


def list_of_letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_sharegpt_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text('[{"conversations": []}]')
    with pytest.raises(TraceError, match="text must be tokenised: give a tokenizer"):
        read_trace(path, arrivals=CLOCK)


def test_lengths_without_arrivals_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(LENGTHS)
    with pytest.raises(TraceError, match=r"lengths.csv:1: no timestamps: an arrival process is required"):
        read_trace(path)


def test_a_conversation_that_was_loaded_before_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(conversation(id="a"))
    (tmp_path / "b.json").write_text(conversation(id="b"))
    with pytest.raises(TraceError, match=r"b.json:1: id: b already loaded from a.json"):
        read_trace(tmp_path)


def test_a_token_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sim.jsonl"
    path.write_text(rows(SIM[0]))
    with pytest.raises(TraceError, match=r"input_tok_ids\[3\]: 8: the vocabulary has 8"):
        read_trace(path, vocab_size=8)


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("traces.formats.files.MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "endless.csv.gz"
    path.write_bytes(gzip.compress(b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + bytes(1 << 24)))
    with pytest.raises(TraceError, match=r"endless.csv.gz:2: line: longer than 1 MiB"):
        read_trace(path)


def test_a_first_line_without_end_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("traces.formats.files.MAX_LINE_BYTES", 1 << 16)
    path = tmp_path / "endless.json"
    path.write_bytes(b"7" * (1 << 17))
    with pytest.raises(TraceError, match=r"endless.json:1: longer than 0 MiB"):
        read_trace(path)


def test_utf16_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    path.write_bytes("TIMESTAMP,ContextTokens,GeneratedTokens\n".encode("utf-16"))
    with pytest.raises(TraceError, match=r"wide.csv:1: UTF-16 text: convert the file to UTF-8"):
        read_trace(path)


def test_a_gzip_file_cut_in_its_middle_names_the_line(tmp_path: Path) -> None:
    lines = "".join(f"2023-11-16 18:15:{n % 60:02d}.{n:07d},5,{n}\n" for n in range(1, 60))
    packed = gzip.compress(("TIMESTAMP,ContextTokens,GeneratedTokens\n" + lines).encode())
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"cannot be read on: Compressed file ended"):
        read_trace(path)


def test_a_parquet_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "other.parquet"
    parquet.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(TraceError, match="a Parquet file, but not a trace of ours"):
        read_trace(path)


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.parquet"
    path.write_bytes(b"PAR1" + bytes(40))
    with pytest.raises(TraceError, match="not a readable Parquet file"):
        read_trace(path)


def test_a_folder_that_holds_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="a folder without conversation files"):
        read_trace(tmp_path)


def test_skip_leaves_out_a_malformed_conversation_and_counts_it(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(conversation(id="a"))
    (tmp_path / "b.json").write_text(conversation(id="b", block_size=0))
    trace = read_trace(tmp_path, "agentic", on_error="skip")
    assert trace.header.dropped == {"malformed block_size": 1}
    assert trace.header.rows_read == trace.header.rows_kept + 1


def test_an_error_in_a_ragpulse_folder_names_the_file_in_it(tmp_path: Path) -> None:
    path = write_ragpulse(tmp_path, [RAG[0], {**RAG[1], "input_length": -1}])
    with pytest.raises(TraceError) as caught:
        read_trace(tmp_path)
    assert (caught.value.file, caught.value.line) == (str(path), 2)
