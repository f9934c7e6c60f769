"""Statistics of a trace are plain data, right on a trace that can be counted by hand, and honest about its limits."""

import json

import pytest

from traces.analysis.statistics import trace_statistics
from traces.reading import read_trace
from traces.reshape import take
from traces.synth.generator import generate_trace


@pytest.fixture
def counted(mooncake_file) -> dict:
    rows = [(0, 512, 4, [0]), (1_000, 1_000, 2, [0, 1]), (3_000, 600, 3, [0, 2])]
    return trace_statistics(read_trace(mooncake_file(*rows)))


def test_statistics_are_json(counted: dict) -> None:
    assert json.loads(json.dumps(counted)) == counted


def test_lengths_are_counted(counted: dict) -> None:
    prompt = counted["prompt_tokens"]
    assert [prompt[name] for name in ("total", "min", "p50", "max")] == [2_112, 512, 600, 1_000]


def test_arrival_rate_and_variation_are_those_of_the_gaps(counted: dict) -> None:
    assert counted["arrivals"]["rate_rps"] == pytest.approx(2 / 3)
    assert counted["arrivals"]["gap_cv"] == pytest.approx(0.5**0.5 / 1.5)


def test_ideal_share_counts_leading_tokens_seen_before(counted: dict) -> None:
    assert counted["sharing"]["ideal_hit_tokens"] == 1_024
    assert counted["sharing"]["ideal_prefix_share"] == pytest.approx(1_024 / 2_112)
    assert counted["sharing"]["distinct_keys"] == 3


def test_rank_correlation_is_exact_on_three_rows(counted: dict) -> None:
    assert counted["prompt_output_spearman"] == pytest.approx(-1)


def test_coarse_sharing_is_remarked(counted: dict) -> None:
    assert any("blocks of 512 tokens" in remark for remark in counted["remarks"])


def test_missing_sharing_is_remarked() -> None:
    remarks = trace_statistics(generate_trace("azure_conv", num_requests=5, seed=0))["remarks"]
    assert remarks == ["no sharing is recorded: add it with workload.prefix_share"]


def test_changes_are_part_of_the_statistics() -> None:
    trace = take(generate_trace("azure_conv", num_requests=5, seed=0), 2)
    assert trace_statistics(trace)["changes"] == ["the first 2 of 5 requests"]


def test_one_request_has_lengths_and_no_rate() -> None:
    statistics = trace_statistics(generate_trace("azure_conv", num_requests=1, seed=0))
    assert statistics["prompt_tokens"]["std"] == 0
    assert statistics["arrivals"] == {"span_s": 0.0}
