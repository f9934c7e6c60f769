"""Excerpts of published traces read to what a few lines of csv and json find in the same files."""

import ast
import csv
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from traces.analysis.reuse import reuse_profile, shared_prefix_tokens
from traces.analysis.statistics import trace_statistics
from traces.arrivals import ArrivalProcess
from traces.reading import detect_format, read_trace
from traces.reshape import take
from traces.trace import Trace

Find = Callable[[str], Path]
Counts = tuple[int, int]
UNLIMITED = float("inf")
FOLDERS = sorted(path for path in (Path(__file__).parents[1] / "data" / "traces").iterdir() if path.is_dir())
CLOCK = ArrivalProcess("poisson", 1.0)
GROUPS = {  # the segments of a RAGPulse prompt, in order: the table of their lengths, the name of the id
    "sys_prompt": ("1_sys_prompt.jsonl", "sys_prompt_id"),
    "passages_ids": ("2_passages.jsonl", "passage_id"),
    "history": ("3_history.jsonl", "history_id"),
    "web_search": ("5_web_search.jsonl", "web_search_id"),
    "user_input": ("4_user_input.jsonl", "user_input_id"),
}


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def lengths(trace: Trace) -> list[Counts]:
    return [(request.prompt_tokens, request.output_tokens) for request in trace.requests]


def times_us(trace: Trace) -> list[int]:
    return [request.arrival_us for request in trace.requests]


def run_of(keys: Iterable[int], seen: Iterable[int]) -> int:
    """How many of the first keys were all seen."""
    keys = list(keys)
    return next((n for n, key in enumerate(keys) if key not in seen), len(keys))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_readme_names_source_licence_attribution_cut_and_the_bytes_of_every_file(folder: Path) -> None:
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert all(f"\n{word}:" in text for word in ("Source", "Licence", "Attribution", "Cut"))
    named = dict(re.findall(r"^\| `(.+?)` \| .*`(\w{64})` \|$", text, re.M))
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "README.md"]
    assert named == {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
    assert any(name.startswith("LICENSE") for name in named)


def test_all_excerpts_together_stay_small() -> None:
    sizes = [path.stat().st_size for folder in FOLDERS for path in folder.rglob("*") if path.is_file()]
    assert sum(sizes) < 300_000


@pytest.mark.parametrize("name", ["conv", "code"])
def test_azure_rows(name: str, excerpt: Find) -> None:
    path = excerpt(f"azure-llm-2023/{name}.head400.csv")
    rows = table(path)
    clock = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]  # the seventh digit is always 0
    trace = read_trace(path)
    assert times_us(trace) == [
        (time - clock[0]).seconds * 1_000_000 + (time - clock[0]).microseconds for time in clock
    ]
    assert lengths(trace) == [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
    assert (detect_format(path), len(trace.requests), trace.header.dropped) == ("azure", 400, {})


def test_vidur_rows(excerpt: Find) -> None:
    path = excerpt("vidur-lengths/splitwise_conv.head400.csv")
    rows = table(path)
    trace = read_trace(path)
    assert times_us(trace) == [round(Decimal(row["arrived_at"]) * 1_000_000) for row in rows]
    assert lengths(trace) == [(int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])) for row in rows]
    assert detect_format(path) == "vidur"


def test_vidur_and_azure_publish_the_same_requests(excerpt: Find) -> None:
    azure = read_trace(excerpt("azure-llm-2023/conv.head400.csv"))
    assert read_trace(excerpt("vidur-lengths/splitwise_conv.head400.csv")).requests == azure.requests


TABLES = {  # rows
    "etalon-lengths/sharegpt_8k.head300.csv": 300,
    "etalon-lengths/bwb.head100.csv": 100,
    "vidur-lengths/arxiv.head100.csv": 100,
}


def length_rows(path: Path) -> list[Counts]:
    return [(int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])) for row in table(path)]


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_lengths(name: str, excerpt: Find) -> None:
    trace = read_trace(excerpt(name), arrivals=CLOCK)
    assert lengths(trace) == length_rows(excerpt(name))
    assert (trace.header.format, len(trace.requests)) == ("lengths", TABLES[name])


@pytest.mark.parametrize("name", TABLES)
def test_a_turn_shares_the_prompt_of_the_turn_before(name: str, excerpt: Find) -> None:
    rows = length_rows(excerpt(name))
    continued = [prompt >= before + said for (before, said), (prompt, _) in pairwise(rows)]
    trace = read_trace(excerpt(name), "lengths_chat", arrivals=CLOCK)
    linked = {request.request_id: request.parent for request in trace.requests}
    assert [linked[n + 1] == n for n in range(len(rows) - 1)] == continued
    hits = sum(before for (before, _), is_next in zip(rows, continued, strict=False) if is_next)
    assert reuse_profile(trace, 1, spare_last_token=True).hit_tokens(UNLIMITED) == hits


MOONCAKE = {  # rows, clock quantum in us
    "mooncake-fast25/conversation.head250.jsonl": (250, 3_000_000),
    "mooncake-fast25/synthetic.head60.jsonl": (60, 1_000),
}


def lru_hits(rows: list[dict], blocks: float) -> int:
    """Hit tokens of full blocks: an LRU cache of the ids, those of a request touched from last to first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for row in rows:
        hits += min(run_of(row["hash_ids"], cache), row["input_length"] // 512) * 512
        for key in reversed(row["hash_ids"]):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("name", MOONCAKE)
def test_mooncake_rows(name: str, excerpt: Find) -> None:
    rows = json_lines(excerpt(name))
    trace = read_trace(excerpt(name))
    assert times_us(trace) == [row["timestamp"] * 1000 for row in rows]
    assert lengths(trace) == [(row["input_length"], row["output_length"]) for row in rows]
    keys = [[segment.key for segment in request.segments] for request in trace.requests]
    assert keys == [row["hash_ids"] for row in rows]
    assert (len(rows), trace.header.clock_quantum_us) == MOONCAKE[name]


@pytest.mark.parametrize("name", MOONCAKE)
def test_mooncake_prefixes_are_shared_as_the_ids_say(name: str, excerpt: Find) -> None:
    seen: set[int] = set()
    expected = []
    for row in json_lines(excerpt(name)):
        expected.append(min(run_of(row["hash_ids"], seen) * 512, row["input_length"]))
        seen.update(row["hash_ids"])
    trace = read_trace(excerpt(name))
    assert shared_prefix_tokens(trace) == expected
    sharing = trace_statistics(trace)["sharing"]
    assert (sharing["distinct_keys"], sharing["ideal_hit_tokens"]) == (len(seen), sum(expected))


@pytest.mark.parametrize("name", MOONCAKE)
@pytest.mark.parametrize("blocks", [300, 1_000, UNLIMITED])
def test_mooncake_lru_hits(name: str, blocks: float, excerpt: Find) -> None:
    profile = reuse_profile(read_trace(excerpt(name)), 512, partial_blocks=True)
    assert profile.hit_tokens(blocks) == lru_hits(json_lines(excerpt(name)), blocks)


@pytest.mark.parametrize(("ticks", "highest"), [("keep", 5.0), ("random", 1.5), ("even", 0.6)])
def test_spread_ticks_remove_the_bursts_of_the_recording_clock(
    ticks: str, highest: float, excerpt: Find
) -> None:
    trace = read_trace(excerpt("mooncake-fast25/conversation.head250.jsonl"), ticks=ticks)
    gaps = np.diff(times_us(trace))
    assert highest / 2 < gaps.std() / gaps.mean() < highest


def test_limit_gives_the_digest_of_the_same_rows_taken_from_the_whole(excerpt: Find) -> None:
    path = excerpt("mooncake-fast25/conversation.head250.jsonl")
    assert read_trace(path, limit=100).digest == take(read_trace(path), 100).digest


def rag_segments(path: Path) -> list[list[Counts]]:
    """(id, tokens) of every prompt's segments."""
    tables = {
        group: {row[key]: row["token_length"] for row in json_lines(path.with_name(name))}
        for group, (name, key) in GROUPS.items()
    }
    return [
        [(key, tables[group][key]) for group in GROUPS for key in row["hash_ids"][group]]
        for row in json_lines(path)
    ]


def test_ragpulse_rows_over_the_restart_of_the_clock(excerpt: Find) -> None:
    path = excerpt("ragpulse/0_trace.jsonl")
    rows = json_lines(path)
    clock = [int(row["timestamp"]) for row in rows]
    (restart,) = (n for n, (before, after) in enumerate(pairwise(clock), 1) if after < before)
    weeks = [time + 604_800 * (n >= restart) for n, time in enumerate(clock)]
    trace = read_trace(path)
    assert times_us(trace) == [(time - weeks[0]) * 1_000_000 for time in weeks]
    assert lengths(trace) == [(row["input_length"], row["output_length"]) for row in rows]
    assert [request.session for request in trace.requests] == [row["session_id"] for row in rows]
    assert (detect_format(path), len(rows), trace.header.dropped) == ("ragpulse", 80, {})
    assert trace.header.noted["clock_restarts"] == 1


def test_ragpulse_segments_and_what_they_share(excerpt: Find) -> None:
    path = excerpt("ragpulse/0_trace.jsonl")
    trace = read_trace(path)
    expected = rag_segments(path)
    keyed = [
        [tuple(segment) for segment in request.segments if segment.key is not None]
        for request in trace.requests
    ]
    assert keyed == expected
    seen: set[tuple[Counts, ...]] = set()
    shared = []
    for segments in expected:
        prefixes = [tuple(segments[: n + 1]) for n in range(len(segments))]
        shared.append(sum(tokens for _, tokens in segments[: run_of(prefixes, seen)]))  # type: ignore[arg-type]
        seen.update(prefixes)
    assert shared_prefix_tokens(trace) == shared


def test_agentic_conversations(excerpt: Find) -> None:
    folder = excerpt("kv-cache-tester-agentic/traces")
    trace = read_trace(folder)
    accesses = distinct = 0
    for path in folder.iterdir():
        record = json.loads(path.read_text())
        rows = [row for entry in record["requests"] for row in entry.get("requests", [entry])]
        found = [r for r in trace.requests if r.session and r.session.partition("/")[0] == record["id"]]
        assert sorted(lengths(Trace(trace.header, tuple(found)))) == sorted(
            (row["in"], row["out"]) for row in rows
        )
        accesses += sum(len(row["hash_ids"]) for row in rows)
        distinct += len({key for row in rows for key in row["hash_ids"]})
    assert trace.header.rows_read == trace.header.rows_kept == 15
    # an id stands for its whole prefix, so every access but the first is a hit of 64 tokens
    assert reuse_profile(trace, 64).hit_tokens(UNLIMITED) == (accesses - distinct) * 64


def test_a_nested_agent_is_waited_for_by_the_next_turn(excerpt: Find) -> None:
    path = excerpt("kv-cache-tester-agentic/traces/trace_0277.json")
    turn, agent, later = json.loads(path.read_text())["requests"]
    requests = read_trace(path).requests
    by_prompt = {request.prompt_tokens: request for request in requests}
    first, last = by_prompt[turn["in"]], by_prompt[later["in"]]
    nested = [by_prompt[row["in"]] for row in agent["requests"]]
    assert last.after == (first.request_id, nested[-1].request_id)
    assert nested[0].after == (first.request_id,)
    assert [after for request in nested[1:] for after in request.after] == [r.request_id for r in nested[:-1]]


def test_servegen_draws_what_the_client_s_windows_say(excerpt: Find) -> None:
    folder = excerpt("servegen")
    with (folder / "chunk-118-trace.csv").open(newline="") as file:
        windows = [(int(row[0]), float(row[1]) * 600, float(row[2])) for row in csv.reader(file)]
    active = [window for window in windows if window[1]]
    assert (len(windows), len(active)) == (5, 3)
    trace = read_trace(folder)
    # the first request, at time 0, arrives soon after the start of the first active window
    places = np.array(times_us(trace)) // 600_000_000
    pmfs = json.loads((folder / "chunk-118-dataset.json").read_text())
    for place, (start, count, variation) in enumerate(active):
        drawn = np.array(lengths(trace))[places == place]
        assert len(drawn) == pytest.approx(count, abs=4 * variation * count**0.5)
        for side, values in zip(("input_tokens", "output_tokens"), drawn.T, strict=True):
            pmf = ast.literal_eval(pmfs[str(start // 21_600 * 21_600)][side])
            mean = sum(length * share for length, share in pmf.items())
            spread = sum((length - mean) ** 2 * share for length, share in pmf.items()) ** 0.5
            assert set(values.tolist()) <= {length for length, share in pmf.items() if share}
            assert values.mean() == pytest.approx(mean, abs=5 * spread / len(values) ** 0.5)
