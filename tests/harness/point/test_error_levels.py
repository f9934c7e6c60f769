"""Errors of known cause must be laid at the right level, and the levels must add up."""

import numpy as np
import pytest
from sim_cases import LinearCost, replay, request

from harness.metrics import METRICS
from harness.metrics.compute import compute_metrics
from harness.metrics.record import PointRecord, comparison_error
from harness.point.record import ATTRIBUTED, attribution, divergence, priced, suspect, with_step_times
from harness.replay.arrivals import TimedRequest
from harness.replay.recorder import MeasuredRun
from harness.report.provenance import (
    attribution_table,
    divergence_lines,
    extrapolation_notes,
    validation_table,
)

TRUE = LinearCost(1e-3, 2e-5, 1e-6)


def requests() -> list[TimedRequest]:
    draw = np.random.default_rng(3)
    at = np.cumsum(draw.exponential(0.02, 60))
    return [request(rid, float(t), int(draw.integers(8, 90)), 20) for rid, t in enumerate(at)]


def measured_run() -> MeasuredRun:
    log, recorder = replay(requests(), cost=TRUE, fast_forward=False)
    return MeasuredRun(log, recorder, 0)


def attributed(cost: LinearCost) -> dict:
    simulated = compute_metrics(replay(requests(), cost=cost)[0])
    return attribution(priced([measured_run()], cost), simulated)


def test_a_right_model_has_no_error_on_any_level() -> None:
    for parts in attributed(TRUE).values():
        assert max(map(abs, parts["error"].values())) < 1e-6


def test_the_levels_add_up_to_the_error_of_the_free_running_prediction() -> None:
    cost = LinearCost(1.1e-3, 2e-5, 0.7e-6)
    measured = compute_metrics(measured_run().log)
    simulated = compute_metrics(replay(requests(), cost=cost)[0])
    found = attribution(priced([measured_run()], cost), simulated)
    assert set(found) == set(ATTRIBUTED)
    for name, parts in found.items():
        total = comparison_error(METRICS[name], simulated[name], measured[name])
        assert sum(parts["error"].values()) == pytest.approx(total)
        assert sum(parts["share"].values()) == pytest.approx(1)


def test_too_cheap_attention_is_the_kernel_s_error() -> None:
    parts = attributed(LinearCost(1e-3, 2e-5, 0.5e-6))["tpot_mean"]
    assert parts["error"]["kernel"] < -0.01
    assert abs(parts["error"]["rest_of_step"]) < 1e-6
    assert parts["share"]["kernel"] > 0.5


def test_a_floor_that_is_too_high_is_the_error_of_the_rest() -> None:
    parts = attributed(LinearCost(1.2e-3, 2e-5, 1e-6))["step_mean"]
    assert abs(parts["error"]["kernel"]) < 1e-6
    assert parts["error"]["rest_of_step"] > 0.1


def test_a_prediction_of_another_schedule_is_divergence() -> None:
    simulated = compute_metrics(replay(requests()[:30], cost=TRUE)[0])
    parts = attribution(priced([measured_run()], TRUE), simulated)["ttft_p50"]
    assert parts["share"]["divergence"] == 1


def test_a_run_told_again_with_its_own_times_is_the_run() -> None:
    log = measured_run().log
    again = with_step_times(log, log.steps["seconds"])
    assert again.steps["start_s"].tolist() == log.steps["start_s"].tolist()
    for name in ("first_scheduled_s", "first_token_s", "finish_s"):
        assert again.requests[name].tolist() == log.requests[name].tolist()


def test_a_run_told_slower_waits_for_no_arrival_that_has_come() -> None:
    log = measured_run().log
    slow = with_step_times(log, 3 * log.steps["seconds"])
    assert (np.diff(slow.steps["start_s"]) >= slow.steps["seconds"][:-1] - 1e-12).all()
    assert (slow.steps["start_s"] >= log.steps["start_s"]).all()
    assert (slow.requests["finish_s"] > log.requests["finish_s"]).all()


def test_equal_schedules_do_not_diverge_and_others_say_where() -> None:
    log = measured_run().log
    assert divergence(log, replay(requests(), cost=TRUE)[0])["first_step"] is None
    found = divergence(log, replay(requests(), cost=LinearCost(2e-3))[0])
    assert 0 < found["first_step"] < len(log.steps["step"])
    assert 0 < found["equal_steps"] < 1


def test_the_missing_term_is_named() -> None:
    found = suspect(priced([measured_run()], LinearCost(1e-3, 0.0, 1e-6)))
    assert found["feature"] in ("tokens", "prefill_tokens", "admitted_tokens", "tokens_beyond_128")
    assert found["explained"] > 0.9


def record(cost: LinearCost) -> PointRecord:
    run = measured_run()
    levels = {
        "attribution": attributed(cost),
        "divergence": divergence(run.log, replay(requests(), cost=cost)[0]),
        "suspect": suspect(priced([run], cost)),
    }
    outside = {"steps": 7, "share_of_time": 0.25, "by": {"rows": 7}}
    spread = {"output_throughput": {"error": 0.01, "spread": 0.002}}
    cost_section = {"name": "m", "extrapolated": outside, "validation": {"held out": spread}}
    return PointRecord(levels=levels, cost=cost_section, overrides=["a=1"])


def test_the_report_shows_levels_schedules_held_out_points_and_extrapolation() -> None:
    records = [record(LinearCost(1.1e-3, 2e-5, 0.7e-6))]
    table = attribution_table(records)
    assert table is not None
    assert len(table.rows) == len(ATTRIBUTED)
    assert {len(row) for row in table.rows} == {len(table.head)}
    assert "measured composition" in divergence_lines(records)[0]
    validation = validation_table(records)
    assert validation is not None
    assert validation.rows[0][2] == "+1.0 % (0.2 %)"
    assert "25.0 % of the predicted time, at a=1: rows (7 steps)" in extrapolation_notes(records)[0]


def test_a_simulated_point_has_nothing_to_attribute() -> None:
    assert attribution_table([PointRecord()]) is None
    assert extrapolation_notes([PointRecord()]) == []
