"""Statistics of a trace are plain data, right on a trace that can be counted by hand, and honest about its limits."""

import json
from dataclasses import replace

import pytest

from traces.analysis.statistics import trace_distributions, trace_statistics
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


def test_distributions_over_time_begin_with_the_first_request(mooncake_file) -> None:
    trace = read_trace(mooncake_file((0, 512, 4, [0]), (500, 600, 2, [1, 2]), (2_200, 600, 3, [3, 4])))
    later = [replace(row, arrival_us=row.arrival_us + 7_000_000) for row in trace.requests]
    found = trace_distributions(replace(trace, requests=later))
    assert found["arrivals"] == {"window_s": 1, "start_s": [0, 1], "rps": [2, 0]}
    assert found["burstiness"]["dispersion"] == {"1s": 2, "10s": None, "60s": None}  # of two whole seconds
    assert found["burstiness"]["mean_gap_s"] == pytest.approx(1.1)
    assert found["burstiness"]["gap_cv"] == pytest.approx(0.6 * 2**0.5 / 1.1)
    assert found["burstiness"]["gaps_s"]["values"][::200] == pytest.approx([0.5, 1.7])
    assert found["lengths"]["prompt_tokens"]["values"][::100] == [512, 600, 600]


def test_turns_and_pauses_of_sessions_are_counted(mooncake_file) -> None:
    trace = read_trace(mooncake_file(*((at, 512, 4, [at]) for at in range(4))))
    names, pauses = ("a", "a", "a", "b"), (None, 1_000_000, 3_000_000, None)
    rows = [
        replace(row, session=name, think_us=pause, release="after" if pause else "at")
        for row, name, pause in zip(trace.requests, names, pauses, strict=True)
    ]
    found = trace_distributions(replace(trace, requests=rows))["sessions"]
    assert (found["sessions"], found["turns_mean"], found["turns_max"]) == (2, 2, 3)
    assert (found["released_after_others"], found["think_s_p50"]) == (2, 2)


def test_burstiness_within_five_minutes_leaves_out_a_slow_drift() -> None:
    trace = generate_trace("azure_conv", num_requests=80, seed=0)
    even = [replace(row, arrival_us=1_000_000 * at) for at, row in enumerate(trace.requests[:40])]
    slow = [
        replace(row, arrival_us=300_000_000 + 5_000_000 * at) for at, row in enumerate(trace.requests[40:])
    ]
    found = trace_distributions(replace(trace, requests=[*even, *slow]))["burstiness"]
    assert found["gap_cv_median_5min"] == 0
    assert found["gap_cv"] > 1
