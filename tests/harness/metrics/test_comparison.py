"""One point: which figure stands beside which, and what an error is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.metrics import METRICS
from harness.metrics.record import compare, comparison_error

TIME, SHARE = METRICS["ttft_p50"], METRICS["internal_share"]


def row(metric, **sides):
    rows = compare(sides.get("analytic", {}), sides.get("simulated", {}), sides.get("runs", []))
    return next(r for r in rows if r["metric"] == metric)


def test_measured_is_the_median_of_the_runs_and_their_range_stands_beside_it():
    found = row("ttft_p50", simulated={"ttft_p50": 1.1}, runs=[{"ttft_p50": v} for v in (1.0, 0.8, 1.05)])
    assert (found["measured"], found["low"], found["high"]) == (1.0, 0.8, 1.05)
    assert found["error"] == pytest.approx(0.1)
    assert found["spread"] == pytest.approx(0.2)


def test_shares_are_compared_by_difference():
    runs = [{"internal_share": 0.02}, {"internal_share": 0.04}]
    found = row("internal_share", simulated={"internal_share": 0.05}, runs=runs)
    assert found["error"] == pytest.approx(0.02)
    assert found["spread"] == pytest.approx(0.01)


def test_a_single_run_has_no_spread():
    assert row("ttft_p50", runs=[{"ttft_p50": 1.0}])["spread"] is None


def test_without_measurement_the_prediction_stands_alone():
    found = row("hit_tokens", analytic={"hit_tokens": 32.0}, simulated={"hit_tokens": 16.0})
    assert (found["analytic"], found["simulated"]) == (32.0, 16.0)
    assert found["measured"] is found["error"] is found["spread"] is None


def test_a_metric_that_one_run_lacks_is_taken_from_the_others():
    assert row("tpot_p50", runs=[{}, {"tpot_p50": 2.0}])["measured"] == 2.0


def test_rows_follow_the_order_of_the_definitions():
    names = [r["metric"] for r in compare({}, dict.fromkeys(reversed(METRICS), 1.0), [])]
    assert names == list(METRICS)


@pytest.mark.parametrize(("predicted", "expected"), [(0.0, 0.0), (1.0, None)])
def test_nothing_measured_gives_no_infinite_ratio(predicted, expected):
    assert comparison_error(TIME, predicted, 0.0) == expected


@given(st.floats(1e-6, 1e6), st.sampled_from([TIME, SHARE]))
def test_a_perfect_prediction_has_no_error(value, metric):
    assert comparison_error(metric, value, value) == 0.0


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=7))
def test_no_run_lies_outside_the_spread(values):
    found = row("ttft_p50", runs=[{"ttft_p50": value} for value in values])
    errors = [comparison_error(TIME, value, found["measured"]) for value in values]
    assert max(map(abs, errors)) <= found["spread"]
