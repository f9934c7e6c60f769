"""Every figure of merit on logs small enough to check by hand, and laws that hold on any log."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from harness.metrics import METRICS
from harness.metrics.compute import OTHERS, by_tenant, compute_metrics
from harness.metrics.log import SLOT_STATES, RunLog, RunLogError

ONE_REQUEST = {
    "arrival_s": [1.0],
    "first_scheduled_s": [1.5],
    "first_token_s": [2.0],
    "finish_s": [4.0],
    "prompt_tokens": [10],
    "output_tokens": [5],
    "width": [2],
}


def test_latencies_of_one_request(make_log):
    figures = compute_metrics(make_log(requests=ONE_REQUEST))
    assert figures["ttft_p50"] == 1.0
    assert figures["tpot_p99"] == 0.5
    assert figures["e2e_mean"] == 3.0
    assert figures["norm_latency_mean"] == pytest.approx(0.6)
    assert figures["queue_p90"] == 0.5


def test_throughput_counts_the_tokens_of_every_sequence(make_log):
    figures = compute_metrics(make_log(requests=ONE_REQUEST, span=4.0))
    assert figures["request_throughput"] == 0.25
    assert figures["generated_throughput"] == 2.5
    assert figures["total_throughput"] == 5.0


def test_output_throughput_counts_only_the_tokens_that_are_returned(make_log):
    log = make_log(requests=ONE_REQUEST, span=4.0)
    beam = dataclasses.replace(log, requests={**log.requests, "returned": np.array([5.0])})
    figures = compute_metrics(beam)
    assert figures["output_throughput"] == 1.25
    assert figures["generated_throughput"] == 2.5
    assert figures["total_throughput"] == 5.0  # of prompts and of all that was generated


def test_load_of_attention_is_the_slots_read_per_step_that_only_decodes(make_log):
    steps = {"decode_rows": [2, 2, 2], "prefill_tokens": [0, 7, 0], "kv_read_tokens": [30, 99, 50]}
    assert compute_metrics(make_log(steps=steps))["kv_read_per_decode_step"] == 40.0


def test_quantiles_lie_between_order_statistics(make_log):
    requests = {"arrival_s": [0.0] * 5, "first_token_s": [5, 1, 4, 2, 3], "output_tokens": [1] * 5}
    figures = compute_metrics(make_log(requests=requests))
    assert figures["ttft_p50"] == 3.0
    assert figures["ttft_p90"] == pytest.approx(4.6)


def test_tpot_is_absent_where_every_output_is_one_token(make_log):
    figures = compute_metrics(make_log(requests=ONE_REQUEST | {"output_tokens": [1]}))
    assert "tpot_mean" not in figures
    assert "ttft_mean" in figures


def test_zero_output_tokens_do_not_divide(make_log):
    figures = compute_metrics(make_log(requests=ONE_REQUEST | {"output_tokens": [0]}))
    assert "norm_latency_mean" not in figures
    assert figures["output_throughput"] == 0.0


def test_requests_that_did_not_finish_have_no_latency(make_log):
    rejected = ONE_REQUEST | {"outcome": [1], "finish_s": [math.nan], "first_token_s": [math.nan]}
    figures = compute_metrics(make_log(requests=rejected))
    assert figures["finished"] == 0.0
    assert "ttft_mean" not in figures
    assert figures["output_throughput"] == 0.0


def test_an_empty_log_has_counts_of_zero_and_no_latency(make_log):
    figures = compute_metrics(make_log(span=0.0))
    assert figures["steps"] == 0.0
    assert figures["finished"] == 0.0
    assert not any(name.startswith(("ttft", "token_share", "request_throughput")) for name in figures)


def test_inter_token_gaps_count_with_their_weight(make_log):
    figures = compute_metrics(make_log(itl=([1.0, 9.0], [3, 1])))
    assert figures["itl_mean"] == 3.0
    assert figures["itl_p50"] == 1.0


def test_slot_shares_are_weighted_by_the_seconds_of_their_step(make_log):
    steps = {"seconds": [1.0, 3.0], "token": [80, 40], "internal": [0, 20], "free": [20, 40]}
    figures = compute_metrics(make_log(steps=steps))
    assert figures["token_share"] == pytest.approx(0.5)
    assert figures["internal_share"] == pytest.approx(0.15)
    assert figures["utilisation"] == pytest.approx(200 / 260)


def test_sharing_saving_is_one_minus_physical_over_logical(make_log):
    steps = {"seconds": [1.0, 1.0], "logical_blocks": [20, 20], "physical_blocks": [8, 12]}
    assert compute_metrics(make_log(steps=steps))["sharing_saving"] == pytest.approx(0.5)


def test_tail_waste_and_decode_attention_leave_prefill_steps_out(make_log):
    steps = {
        "seconds": [1.0, 1.0, 1.0],
        "prefill_tokens": [64, 0, 0],
        "decode_rows": [0, 2, 2],
        "rows": [1, 2, 2],
        "reserved": [50, 3, 1],
        "internal": [50, 2, 2],
        "attention_s": [9.0, 0.2, 0.4],
        "kv_read_tokens": [64, 100, 200],
    }
    figures = compute_metrics(make_log(steps=steps))
    assert figures["tail_waste"] == 2.0
    assert figures["attention_per_decode_step"] == pytest.approx(0.3)
    assert figures["attention_per_kv_token"] == pytest.approx(0.6 / 300)
    assert figures["attention_per_step"] == pytest.approx(3.2)


def test_peak_kv_is_in_bytes(make_log):
    steps = {
        "seconds": [1.0, 1.0],
        "token": [10, 30],
        "reserved": [5, 5],
        "internal": [0, 5],
        "cached": [9, 9],
    }
    assert compute_metrics(make_log(steps=steps))["peak_kv"] == 40 * 8


def test_hit_ratio_leaves_out_prompts_that_never_ran(make_log):
    requests = {"first_scheduled_s": [0.0, math.nan], "prompt_tokens": [40, 1000], "hit_tokens": [10, 0]}
    assert compute_metrics(make_log(requests=requests | {"outcome": [0, 1]}))["hit_ratio"] == 0.25


def test_copies_are_counted_per_generated_token(make_log):
    steps = {"seconds": [1.0], "copies": [4]}
    assert compute_metrics(make_log(steps=steps, requests=ONE_REQUEST))["copies_per_token"] == 0.4


def test_every_figure_has_a_definition(make_log):
    steps = {
        name: [1.0, 1.0]
        for name in ("seconds", "token", "rows", "decode_rows", "attention_s", "logical_blocks")
    }
    figures = compute_metrics(make_log(steps=steps, requests=ONE_REQUEST, itl=([1.0], [1])))
    assert set(figures) <= set(METRICS)
    assert {"itl_p99", "tpot_p50", "token_share", "busy_share"} <= set(figures)


def test_a_missing_column_is_named():
    with pytest.raises(RunLogError, match=r"steps: missing columns step, start_s"):
        RunLog({}, {}, np.array([]), np.array([]), 1, 1, 1, 0.0)


def test_columns_of_unequal_length_are_refused(make_log):
    with pytest.raises(RunLogError, match="differ in length"):
        make_log(steps={"seconds": [1.0, 1.0], "token": [1]})


@given(
    parts=hnp.arrays(np.int64, st.tuples(st.integers(1, 20), st.just(6)), elements=st.integers(0, 1000)),
    data=st.data(),
)
def test_slot_shares_sum_to_one_on_any_log(make_log, parts, data):
    parts[:, -1] += 6001 - parts.sum(axis=1)
    seconds = data.draw(st.lists(st.floats(1e-6, 1e3), min_size=len(parts), max_size=len(parts)))
    steps = {"seconds": seconds} | {state: parts[:, i] for i, state in enumerate(SLOT_STATES)}
    figures = compute_metrics(make_log(steps=steps, capacity=6001))
    assert sum(figures[f"{state}_share"] for state in SLOT_STATES) == pytest.approx(1.0)


@given(stays=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), min_size=1, max_size=20))
def test_littles_law_holds_where_arrivals_fall_on_steps(make_log, stays):
    """Mean number in the system, over the busy time, is the arrival rate times the mean time in the system."""
    arrival, stay = np.array(stays).T
    end = int((arrival + stay).max())
    present = np.array([int(((arrival <= t) & (t < arrival + stay)).sum()) for t in range(end)])
    steps = {
        "seconds": (present > 0).astype(float),
        "running": present // 2,
        "waiting": present - present // 2,
    }
    requests = {
        "arrival_s": arrival,
        "finish_s": arrival + stay,
        "first_token_s": arrival,
        "output_tokens": stay,
    }
    figures = compute_metrics(make_log(steps=steps, requests=requests, span=float(end)))
    names = ("running_mean", "waiting_mean")
    assert all("idle time is left out" in METRICS[name].definition for name in names)
    in_system = sum(figures[name] for name in names) * figures["busy_share"]
    assert in_system == pytest.approx(figures["request_throughput"] * figures["e2e_mean"])


def test_tenants_are_told_apart_and_one_alone_is_not(make_log):
    requests = {
        "request_id": [0, 1, 2, 3],
        "arrival_s": [0, 0, 1, 1],
        "first_scheduled_s": [1, 0, 2, math.nan],
        "finish_s": [3, 2, 4, math.nan],
        "prompt_tokens": [20, 50, 20, 30],
        "output_tokens": [4, 4, 4, 4],
        "width": [1, 1, 1, 1],
        "hit_tokens": [0, 5, 16, 0],
    }
    log = make_log(requests=requests)
    found = by_tenant(log, {0: "b", 1: "a", 2: "b", 3: "a"})
    assert list(found) == ["a", "b"]
    assert found["a"]["hit_ratio"] == 0.1
    assert found["b"] == {
        "requests": 2.0,
        "prompt_tokens": 40.0,
        "hit_ratio": 0.4,
        "waiting_mean": 1.0,
        "occupancy": pytest.approx(2 * (20 + 2) * 2.0 / (100 * 10)),
    }
    assert by_tenant(log, {}) == {}
    # what nobody could find, or nobody was scheduled to ask for, is no ratio of 0
    uncached = by_tenant(log, {0: "b", 1: "a", 2: "b", 3: "a"}, cached=False)
    assert [set(found[name]) - set(each) for name, each in uncached.items()] == [{"hit_ratio"}] * 2
    assert "hit_ratio" not in by_tenant(log, {0: "b", 1: "b", 2: "b", 3: "a"})["a"]
    halves = by_tenant(log, {0: "b", 1: "a", 2: "b", 3: "a"}, 50)  # two slots a token
    assert halves["b"]["occupancy"] == pytest.approx(2 * found["b"]["occupancy"])


def test_the_smallest_of_many_tenants_are_taken_together(make_log):
    requests = {"request_id": list(range(25)), "prompt_tokens": [100 - rid for rid in range(25)]}
    found = by_tenant(make_log(requests=requests), {rid: f"t{rid}" for rid in range(25)})
    assert list(found) == [*(f"t{rid}" for rid in range(20)), OTHERS]
    assert (found[OTHERS]["requests"], found[OTHERS]["prompt_tokens"]) == (5, 80 + 79 + 78 + 77 + 76)
