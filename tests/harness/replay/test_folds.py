"""Metrics without records: the same figures, in constant memory."""

import numpy as np
import pytest
from sim_cases import LinearCost, replay, request, stream

from engine.core.memory.paged import PagedManager
from harness.metrics.compute import BinnedSamples, ExactSamples, compute_metrics
from harness.replay.arrivals import TimedRequest
from harness.replay.folds import COLUMNS, RunFold, hull_of

COST = LinearCost(1e-3, 1e-5, 1e-7)


def busy(count: int = 500) -> list[TimedRequest]:
    draw = np.random.default_rng(11)
    at = np.cumsum(draw.exponential(0.02, count))
    sizes = draw.integers(1, 120, (count, 2))
    return [request(rid, float(at[rid]), int(p), int(o), shared=0) for rid, (p, o) in enumerate(sizes)]


def metrics(fold: RunFold, slots: int) -> dict[str, float]:
    return fold.prediction(16, slots, 1).metrics


def test_streamed_metrics_equal_those_of_the_records() -> None:
    log, _ = replay(busy(), cost=COST, manager=PagedManager(60, 16))
    exact = compute_metrics(log)
    streamed = metrics(stream(busy(), cost=COST, manager=PagedManager(60, 16)), 960)
    assert exact["preemptions"] > 0
    assert streamed.keys() == exact.keys()
    quantiles = [name for name in exact if name.endswith(("_p50", "_p90", "_p99"))]
    for name in exact.keys() - set(quantiles):
        assert streamed[name] == pytest.approx(exact[name], rel=1e-9), name
    for name in quantiles:
        assert streamed[name] == pytest.approx(exact[name], rel=0.02), name  # between order statistics


@pytest.mark.nightly
def test_fast_forward_changes_no_streamed_figure() -> None:
    one, other = (
        metrics(stream(busy(), cost=COST, fast_forward=together), 16_000) for together in (True, False)
    )
    assert one == other


def test_streamed_outcomes_count_every_request() -> None:
    requests = [*busy(50), request(50, 100.0, 900, 5)]
    outcome = stream(requests, manager=PagedManager(20, 16)).prediction(16, 320, 1).outcome
    assert outcome == {"finished": 50, "rejected": 1, "unfinished": 0}


def test_a_binned_quantile_is_right_within_a_tenth_of_a_per_cent() -> None:
    values = np.random.default_rng(0).lognormal(-3, 2, 20_001)
    binned, exact = BinnedSamples(), ExactSamples(values)
    binned.add(values[:7]), binned.add(values[7:])
    levels = np.array([0.0, 0.5, 0.9, 0.99, 1.0])
    assert binned.quantiles(levels) == pytest.approx(exact.quantiles(levels), rel=1.0e-3)
    assert binned.mean() == pytest.approx(exact.mean())


def test_binned_samples_take_zeros_and_weights() -> None:
    binned = BinnedSamples()
    binned.add(np.array([0.0, 1.0, np.nan]), np.array([3.0, 1.0, 5.0]))
    assert binned.mean() == 0.25
    assert binned.quantiles(np.array([0.5, 1.0])).tolist() == pytest.approx([0.0, 1.0], rel=1e-3)


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_binned_quantiles_of_few_samples_are_those_of_numpy(count: int) -> None:
    values = np.random.default_rng(count).lognormal(0, 2, count)
    binned, levels = BinnedSamples(), np.array([0.0, 0.5, 0.9, 0.99, 1.0])
    binned.add(values)
    assert binned.quantiles(levels) == pytest.approx(np.quantile(values, levels), rel=1e-3)


def test_steps_outside_what_was_measured_are_counted_with_their_reason() -> None:
    log, _ = replay(busy(40), cost=COST)
    hull = hull_of(log.steps)
    assert set(hull) == set(COLUMNS)
    assert stream(busy(40), cost=COST, hull=hull).prediction(16, 16_000, 1).extrapolated["steps"] == 0  # type: ignore[index]
    hull["rows"] = (2.0, 3.0)
    section = stream(busy(40), cost=COST, hull=hull).prediction(16, 16_000, 1).extrapolated
    assert section is not None
    assert section["by"] == {"rows": int((log.steps["rows"] > 3).sum() + (log.steps["rows"] < 2).sum())}
    assert (log.steps["rows"] < 2).any()
    assert section["steps"] == section["by"]["rows"] > 0
    assert 0 < section["share_of_time"] <= 1


def test_a_model_that_was_never_measured_has_nothing_to_be_outside_of() -> None:
    assert stream(busy(5)).prediction(16, 16_000, 1).extrapolated is None
