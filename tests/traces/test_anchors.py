"""Published files, whole and in excerpts, read to the exact integers that were counted from them independently."""

from collections.abc import Callable
from pathlib import Path

import pytest

from traces.analysis.statistics import trace_statistics
from traces.reading import read_trace
from traces.reshape import take

Find = Callable[[str], Path]

# rows, prompt tokens, output tokens, last arrival in us
HEADS = {
    "azure-llm-2023/conv.head400.csv": (400, 371_046, 104_009, 106_330_212),
    "azure-llm-2023/code.head400.csv": (400, 855_018, 9_820, 225_106_049),
    "vidur-lengths/splitwise_conv.head400.csv": (400, 371_046, 104_009, 106_330_212),
}
AZURE = {
    "azure-llm-2023/AzureLLMInferenceTrace_conv.csv": (19_366, 22_361_870, 4_088_665, 3_501_721_937),
    "azure-llm-2023/AzureLLMInferenceTrace_code.first4000.csv": (4_000, 8_171_220, 109_683, 1_365_357_816),
}
# the same, then id accesses, distinct ids, hit tokens of an infinite cache (with the partial tail), clock quantum in us
MOONCAKE = {
    "mooncake-fast25/conversation_trace.jsonl": (
        (12_031, 144_793_823, 4_122_048, 3_536_999_000),
        (288_500, 182_790, 54_098_411),
        3_000_000,
    ),
    "mooncake-fast25/synthetic_trace.first1900.jsonl": (
        (1_900, 23_060_051, 366_556, 504_438_000),
        (46_255, 31_828, 7_374_246),
        1_000,
    ),
}


def totals(statistics: dict) -> tuple[int, int, int, int]:
    last_us = round(statistics["arrivals"]["span_s"] * 1e6)
    return (
        statistics["requests"],
        statistics["prompt_tokens"]["total"],
        statistics["output_tokens"]["total"],
        last_us,
    )


@pytest.mark.parametrize("name", HEADS)
def test_excerpts_read_to_their_totals(name: str, excerpt: Find) -> None:
    assert totals(trace_statistics(read_trace(excerpt(name)))) == HEADS[name]


@pytest.mark.parametrize("name", AZURE)
def test_time_and_length_files_read_to_their_totals(name: str, published: Find) -> None:
    assert totals(trace_statistics(read_trace(published(name)))) == AZURE[name]


@pytest.mark.parametrize("name", MOONCAKE)
def test_mooncake_files_read_to_their_totals_and_reuse(name: str, published: Find) -> None:
    statistics = trace_statistics(read_trace(published(name)))
    sharing = statistics["sharing"]
    reuse = (sharing["key_accesses"], sharing["distinct_keys"], sharing["ideal_hit_tokens"])
    assert (totals(statistics), reuse, statistics["clock_quantum_us"]) == MOONCAKE[name]


@pytest.mark.nightly
def test_mooncake_conversation_matches_its_published_statistics(published: Find) -> None:
    statistics = trace_statistics(read_trace(published("mooncake-fast25/conversation_trace.jsonl")))
    assert statistics["arrivals"]["gap_cv"] == pytest.approx(3.03386, abs=1e-5)
    assert statistics["arrivals"]["zero_gap_share"] == pytest.approx(0.901995, abs=1e-6)
    assert statistics["sharing"]["mean_shared_prefix_tokens"] == pytest.approx(4496.58, abs=0.01)
    assert statistics["prompt_output_spearman"] == pytest.approx(0.071692, abs=1e-6)


@pytest.mark.nightly  # by day `test_reading.py` spreads the ticks of a small file
@pytest.mark.parametrize(("ticks", "gap_cv"), [("random", 1.01), ("even", 0.36)])
def test_spread_ticks_remove_the_bursts_of_the_recording_clock(
    ticks: str, gap_cv: float, published: Find
) -> None:
    trace = read_trace(published("mooncake-fast25/conversation_trace.jsonl"), ticks=ticks)
    assert trace_statistics(trace)["arrivals"]["gap_cv"] == pytest.approx(gap_cv, abs=0.02)


def test_the_licence_is_known_by_the_checksum(published: Find) -> None:
    trace = read_trace(published("azure-llm-2023/AzureLLMInferenceTrace_conv.csv"), limit=1)
    assert trace.header.licence.startswith("CC BY 4.0")


def test_a_head_of_the_file_reads_to_the_same_requests_as_the_whole(excerpt: Find, published: Find) -> None:
    head = read_trace(excerpt("azure-llm-2023/conv.head400.csv"))
    whole = read_trace(published("azure-llm-2023/AzureLLMInferenceTrace_conv.csv"))
    assert head.requests == take(whole, 400).requests
