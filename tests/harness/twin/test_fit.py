from collections.abc import Sequence
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest
from tiers import cases

from harness.config.errors import ConfigError, UserError
from harness.config.schema import CostKind, DeviceConfig, RunConfig
from harness.cost.roofline import FITTED, origins
from harness.cost.seen import seen_of
from harness.twin.configured import Configured
from harness.twin.fit import (
    Fit,
    doubts,
    explains_nothing,
    fit_device,
    fit_log,
    fit_schedule,
    log_of_cached_prompts,
    log_of_pauses,
    logs_of_a_fit,
    not_in,
    parts_of_others,
    requests_to_fit,
    trace_bytes,
    which,
    write_device,
)
from harness.twin.log import EngineLog, LoggedRequests
from harness.twin.prediction import (
    Errors,
    PredictedRun,
    compared,
    errors_by_part,
    errors_of,
    others,
    predictor,
)
from harness.twin.residuals import CONSTANTS, FRONT_END_CONSTANTS, TURN_CONSTANT, constants_of_log
from harness.twin.settings import EngineSettings
from harness.twin.what_ifs import WhatIf, measured_figures, what_ifs, with_draws
from traces.trace import AFTER, CHAINED, Client, ClientKind, Segment, Trace, TraceHeader, TraceRequest

GPU = DeviceConfig(
    name="some_gpu",
    memory_gb=80.0,
    bandwidth_gbs=2000.0,
    tflops=300.0,
    step_overhead_us=500.0,
    layer_overhead_us=8.0,
    attention_overhead_us=10.0,
    row_overhead_us=0.2,
    bandwidth_efficiency=0.85,
    kv_efficiency=0.85,
    compute_efficiency=0.6,
    attention_efficiency=0.5,
)
TRUE = replace(
    GPU, bandwidth_efficiency=0.7, compute_efficiency=0.45, step_overhead_us=1500.0, row_overhead_us=0.6
)


def config() -> RunConfig:
    found = RunConfig(measure=False, device=GPU)
    found.cost.kind = CostKind.roofline
    model = found.model
    model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim = 16, 2048, 32, 8, 64
    model.intermediate, model.vocab, model.max_position = 8192, 32000, 8192
    found.scheduler.max_running, found.scheduler.max_batched_tokens = 16, 512
    found.cache.pool_tokens = 65_536
    return found


def workload(count: int = 100) -> Trace:
    draw = np.random.default_rng(7)
    at = np.cumsum(draw.exponential(40_000, count)).astype(int)
    lengths = draw.integers(50, 900, count), draw.integers(8, 60, count)
    rows = tuple(
        TraceRequest(rid, int(at[rid]), int(prompt), int(output), (Segment(None, int(prompt)),))
        for rid, (prompt, output) in enumerate(zip(*lengths, strict=True))
    )
    return Trace(TraceHeader("planted", "simple", "drawn", CHAINED, None, 1, "0" * 64, count, count), rows)


def planted(
    device: DeviceConfig, count: int = 100, found: RunConfig | None = None, trace: Trace | None = None
) -> EngineLog:
    """A log that the simulator itself wrote, for a device with known constants."""
    trace = trace or workload(count)
    run = predictor(found or config(), trace)(device)
    times = LoggedRequests(
        request_id=tuple(str(row.request_id) for row in trace.requests),
        arrival_s=run.arrival_s,
        first_token_s=run.first_token_s,
        last_token_s=run.last_token_s,
        prompt_tokens=np.array([row.prompt_tokens for row in trace.requests]),
        output_tokens=np.array([row.output_tokens for row in trace.requests]),
    )
    return EngineLog("planted", EngineSettings(), times, trace)


@pytest.fixture(scope="module")
def fit() -> Fit:
    """A fit of a planted device, from a description that is 20 % off in TPOT."""
    return fit_device(planted(TRUE), config(), first=40)


def test_a_fit_predicts_the_requests_of_a_planted_device_that_it_has_not_seen(fit: Fit) -> None:
    assert abs(fit.before.tpot_p50) > 0.15
    unseen = errors_of(fit.prediction, planted(TRUE), slice(40, None))
    assert abs(unseen.tpot_p50) < 0.01
    assert abs(unseen.ttft_p50) < 0.04
    assert fit.held_out == errors_of(fit.prediction, planted(TRUE), fit.others)


def test_errors_are_weighed_by_all_their_medians_and_means_and_not_by_the_largest_alone() -> None:
    described = Errors(35, 0.218, nan, -0.111, nan, ttft_mean=0.136, tpot_mean=-0.111)
    fitted = Errors(35, 0.227, nan, -0.006, nan, ttft_mean=0.134, tpot_mean=-0.006)
    assert fitted.size < described.size
    assert Errors(1, 0.03, nan, nan, nan, ttft_mean=-0.03).size == pytest.approx(1)


@pytest.mark.nightly
def test_a_fit_that_is_worse_than_the_description_is_not_the_result_and_no_stated_error_had_a_part_in_that() -> (
    None
):
    slow, usual = planted(TRUE).requests, planted(GPU).requests
    choosing, others = parts_of_others(np.arange(40), len(usual))
    chosen_by = np.isin(np.arange(len(usual)), choosing)
    times = {
        name: np.where(chosen_by, getattr(usual, name), getattr(slow, name))
        for name in ("first_token_s", "last_token_s")
    }
    log = planted(GPU)
    found = fit_device(replace(log, requests=replace(usual, **times)), config(), first=40)
    assert not found.kept
    assert found.device == GPU
    assert "description is kept" in doubts(found)[0]
    assert found.held_out.requests == len(others) == 30
    assert found.held_out.tpot_p50 < -0.15
    assert "30 others (by 30 more" in found.others_are


@pytest.mark.parametrize("count", [42, 50, 100, 6000])
def test_fit_choice_and_stated_errors_have_requests_of_their_own(count: int) -> None:
    parts = [np.arange(40), *parts_of_others(np.arange(40), count)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    assert len(parts[1]) - len(parts[2]) in range(5)
    assert parts[2][-1] == count - 1


def test_the_bands_of_a_fit_hold_what_was_measured_and_are_narrow(fit: Fit) -> None:
    log = planted(TRUE)
    found = with_draws(log, replace(config(), device=fit.device), log.workload, fit.prediction).bands
    measured = measured_figures(log)
    assert sum(band.holds(measured[name]) for name, band in found.items()) >= 6
    assert all(found[name].high < 1.2 * found[name].low for name in ("tpot_p50", "tpot_mean"))


def test_the_errors_of_a_trusted_deployment_are_said_by_load_and_by_length(fit: Fit) -> None:
    said = errors_by_part(fit.prediction, planted(TRUE), fit.others)
    assert ["in flight" in line for line in said] == [True, True, False, False]
    assert said[2].startswith("15 requests with at most")


@pytest.mark.nightly
def test_a_log_that_the_device_s_description_explains_moves_no_constant() -> None:
    fit = fit_device(planted(GPU), config(), first=40)
    for constant in fit.constants:
        assert constant.value == pytest.approx(constant.prior, rel=0.02, abs=0.002 * 5000 * constant.linear)


def test_a_front_end_before_the_queue_is_found_and_priced_in_the_time_to_first_token() -> None:
    slow = replace(TRUE, frontend_request_us=9000.0)
    fit = fit_device(planted(slow), config(), first=40)
    known = {constant.key: constant for constant in fit.constants}
    per_token = known["frontend_token_us"].value
    assert known["frontend_request_us"].value + 475 * per_token == pytest.approx(9000, rel=0.15)
    assert fit.before.ttft_p50 < -0.3
    assert abs(fit.held_out.ttft_p50) < 0.04


def test_the_log_of_an_engine_s_queue_says_nothing_about_the_front_end() -> None:
    log = planted(TRUE, 50)
    queued = replace(log, requests=replace(log.requests, queued_s=log.requests.arrival_s))
    assert {one.key for one in constants_of_log(queued, config())} == {one.key for one in CONSTANTS}


@cases("client", [Client(ClientKind.capped, 6, 300), Client(ClientKind.closed, 6, 300)], day=1)
def test_a_log_of_a_capped_client_is_fitted_as_its_client_sent_it(client: Client) -> None:
    crowd = workload()
    rows = crowd.columns
    if client.kind is ClientKind.closed:
        rows = replace(rows, arrival_us=np.zeros_like(rows.arrival_us))
    log = planted(TRUE, trace=crowd.changed(rows, "sent by another client", client=client))
    fit = fit_device(log, config(), first=40)
    assert abs(fit.before.tpot_p50) > 0.15
    assert abs(fit.held_out.tpot_p50) < 0.03
    assert abs(fit.held_out.ttft_mean) < 0.05


def test_a_constant_that_the_log_does_not_show_keeps_its_prior(fit: Fit) -> None:
    """Prompts of at most 900 tokens spend next to nothing in attention's products."""
    known = {constant.key: constant for constant in fit.constants}
    assert not known["attention_efficiency"].learned
    assert known["attention_efficiency"].value == pytest.approx(GPU.attention_efficiency, rel=0.1)
    assert known["compute_efficiency"].learned


@pytest.mark.nightly
def test_the_times_of_requests_that_are_held_out_do_not_change_the_fit(fit: Fit) -> None:
    honest = planted(TRUE)
    times = honest.requests
    later = np.where(np.arange(100) >= 40, 5.0, 0.0)
    moved = replace(times, first_token_s=times.first_token_s + later, last_token_s=times.last_token_s + later)
    other = fit_device(replace(honest, requests=moved), config(), first=40)
    assert fit.device == other.device
    assert other.held_out.ttft_p50 < -0.9


def test_the_record_calls_fitted_what_the_fit_moves_and_nothing_else() -> None:
    assert set(FITTED) == {constant.key for constant in (*CONSTANTS, *FRONT_END_CONSTANTS, TURN_CONSTANT)}
    moved = origins(replace(GPU, fitted_from="my log"))
    assert {key for key, words in moved.items() if "my log" in words} == set(FITTED)


@pytest.mark.nightly
def test_only_a_log_of_several_devices_says_anything_about_their_link() -> None:
    alone = fit_device(planted(GPU, 50), config(), first=40)
    pair = config()
    pair.device = replace(GPU, tensor_parallel=2)
    both = fit_device(planted(GPU, 50), pair, first=40)
    keys = [{constant.key for constant in fit.constants} for fit in (alone, both)]
    assert keys[1] - keys[0] == {"link_efficiency", "link_round_us"}


@pytest.mark.nightly
@pytest.mark.parametrize("ahead", [True, False])
def test_a_schedule_that_a_log_does_not_name_is_found_by_fitting_both(ahead: bool) -> None:
    usual = Configured(
        config(),
        EngineSettings(),
        ("The log does not say whether the engine scheduled ahead of its results; off",),
        (),
    )
    # near the description: priors of what is far from it cost more than the schedule
    near = replace(GPU, bandwidth_efficiency=0.8, step_overhead_us=900.0)
    log = planted(near, 120, usual.scheduled(ahead).config)
    found, _ = fit_schedule(log, usual, first=75)
    assert found.config.scheduler.async_scheduling is ahead
    assert "on: TPOT p50" in found.notes[-1]
    assert "off: TPOT p50" in found.notes[-1]


KNOWN = Configured(config(), EngineSettings(), (), ())


@pytest.mark.nightly
def test_a_schedule_that_the_user_names_is_fitted_alone() -> None:
    found, fit = fit_schedule(planted(TRUE, 42), KNOWN, first=30)
    assert found is KNOWN
    assert len(fit.fitted_on) == 30


@pytest.mark.nightly
@pytest.mark.parametrize("cached", [True, False])
def test_prompts_that_an_earlier_run_had_cached_are_told_from_new_ones(cached: bool) -> None:
    new = planted(TRUE, 60)
    truth = log_of_cached_prompts(new, KNOWN)
    assert truth is not None
    times = planted(TRUE, trace=truth.workload).requests if cached else new.requests
    log, found, _ = fit_log(replace(new, requests=times), KNOWN, first=40)
    assert (log.workload == truth.workload) is cached
    assert any("in the prefix cache before it began" in warning for warning in found.warnings) is cached


def test_without_a_fit_some_of_what_may_be_has_prompts_of_an_earlier_run() -> None:
    run = predictor(config(), workload(12))(config().device)
    found = [one.log.requests["hit_tokens"].sum() for one in others(config(), workload(12), run)]
    assert [hits > 0 for hits in found] == 4 * [True, False, False]


def test_a_fit_keeps_what_it_has_seen(fit: Fit) -> None:
    known = seen_of(fit.device.seen or "")
    first = planted(TRUE).requests.take(slice(0, 40))
    assert known.largest["longest"] == (first.prompt_tokens + first.output_tokens).max()
    assert 1 < known.largest["rows"] <= 40
    assert known.step[2] > 0


def test_a_name_in_a_log_adds_no_line_to_the_file_of_its_device(fit: Fit, tmp_path: Path) -> None:
    """A model that calls itself by two lines would set a constant of the device."""
    settings = EngineSettings(model="shop\nactivation_gb: 9\n/llama")
    log = replace(planted(TRUE), settings=settings)
    write_device(fit, log, Configured(config(), settings, (), ()), "made", tmp_path / "device.yaml")
    lines = (tmp_path / "device.yaml").read_text().splitlines()
    assert "activation_gb: 9" not in lines
    assert any("model shop\\nactivation_gb: 9" in line for line in lines if line.startswith("# Log: "))


def asked(fit: Fit, question: str) -> WhatIf:
    """The answer to a question about the planted log, by the kept fit."""
    fitted = replace(config(), device=fit.device)
    return what_ifs(planted(TRUE), fitted, fit.prediction, [question])[-1]


@pytest.mark.nightly
def test_an_unseen_model_is_said_beside_the_figures_of_a_question_and_its_band_is_wide(fit: Fit) -> None:
    other, same = asked(fit, "model.layers=8"), asked(fit, "scheduler.max_running=2")
    assert str(other).endswith("the fit has not seen this model shape: layers 8 (it saw 16)")
    assert "model shape" not in same.unseen
    width = [one.bands["tpot_p50"].high / one.bands["tpot_p50"].low for one in (other, same)]
    assert width[0] > 1.5 > 1.3 > width[1]


def test_prompts_are_not_taken_as_cached_where_the_pool_cannot_hold_them_or_their_sharing_is_known() -> None:
    log = planted(TRUE, 42)
    cached = log_of_cached_prompts(log, KNOWN)
    assert cached is not None
    assert log_of_cached_prompts(cached, KNOWN) is None
    small = config()
    small.cache.pool_tokens = 4096
    assert log_of_cached_prompts(log, replace(KNOWN, config=small)) is None


def test_a_request_that_could_not_have_been_served_is_an_error_of_the_settings() -> None:
    wrong = config()
    wrong.cache.max_model_len = 500
    with pytest.raises(ConfigError, match="can never"):
        fit_device(planted(GPU, 50), wrong, first=40)


def test_a_pause_that_a_log_does_not_tell_is_found_by_the_first_tokens_of_its_requests() -> None:
    trace = workload(60)
    rows = tuple(
        replace(row, after=(row.request_id - 3,), release=AFTER, think_us=pause)
        for row, pause in zip(trace.requests[3:], [3_000] * 57, strict=True)
    )
    true = trace.changed(
        (*trace.requests[:3], *rows), "three conversations", client=Client(ClientKind.multi_turn)
    )
    assumed = tuple(replace(row, think_us=1_000) for row in rows)
    log = planted(TRUE, trace=true)
    told = log.workload.changed((*trace.requests[:3], *assumed), "pauses of 1 ms are assumed")
    more_s, found = log_of_pauses(replace(log, workload=told), replace(config(), device=TRUE), np.arange(60))
    assert more_s == 0.002
    assert found.workload.requests == log.workload.requests
    fitted = logs_of_a_fit(replace(log, workload=told, assumes_pauses=True), KNOWN)
    assert any(trace_bytes(one.workload) == trace_bytes(found.workload) for one in fitted)


def logged(running: Sequence[int]) -> EngineLog:
    """A log of so many requests that run together, one group after the other; a group takes a second."""
    starts = np.concatenate([np.full(count, float(at)) for at, count in enumerate(running)])
    one = planted(TRUE, 1)
    lengths = np.ones(len(starts), dtype=np.int64)
    names = tuple(map(str, range(len(starts))))
    times = LoggedRequests(names, starts, starts + 0.1, starts + 0.9, 50 * lengths, 8 * lengths)
    return replace(one, requests=times)


@pytest.mark.parametrize(("requests", "first"), [(300, 75), (50, 30), (10_000, 400), (41, 30)])
def test_a_quarter_of_the_log_is_fitted_within_bounds(requests: int, first: int) -> None:
    assert requests_to_fit(logged([1] * requests)).tolist() == list(range(first))


def test_a_log_whose_load_grows_is_fitted_in_windows_over_all_of_it() -> None:
    log = logged([1] * 50 + [4] * 25 + [8] * 50)
    chosen = requests_to_fit(log)
    assert len(chosen) == 136 == len(set(chosen))
    assert chosen[0] == 0
    assert chosen[-1] == len(log.requests) - 1
    assert which(chosen, len(log.requests)) == "136 of 550 requests in 8 windows"
    assert len(not_in(chosen, 550)) == 414


def test_a_log_without_the_order_of_sending_is_fitted_from_all_over_it() -> None:
    log = replace(logged([4] * 75), assumes_pauses=True)
    chosen = requests_to_fit(log)
    assert len(chosen) == 75 == len(set(chosen))
    assert (chosen[0], chosen[-1]) == (0, 299)
    assert np.diff(chosen).max() <= 5
    assert which(chosen, 300) == "75 of 300 requests from all over the log"


@pytest.mark.parametrize(("swapped", "same"), [((0, 3), True), ((5, 6), True), ((3, 4), False)])
def test_those_that_ran_together_are_compared_by_rank_where_their_order_is_not_known(
    swapped: tuple[int, int], same: bool
) -> None:
    log = logged([4, 4])
    order, entered = np.arange(8), log.requests.entered_s
    order[list(swapped)] = swapped[::-1]
    ttft = 0.1 + 0.05 * np.arange(8)
    requests = replace(log.requests, first_token_s=entered + ttft, last_token_s=entered + ttft + 0.4)
    first_s = entered + ttft[order]
    run = PredictedRun(entered, entered, first_s, first_s + 0.4, requests.output_tokens * 1.0, None)  # type: ignore[arg-type]
    found = [compared(run, requests, ordered=ordered)[0] for ordered in (True, False)]
    assert found[0].tolist() == pytest.approx(ttft[order].tolist())
    assert (found[1].tolist() == pytest.approx(ttft.tolist())) is same
    told, untold = (replace(log, requests=requests, assumes_pauses=each) for each in (False, True))
    first = np.array([swapped[0]])
    assert abs(errors_of(run, told, first).ttft_p50) > 0.05
    assert (abs(errors_of(run, untold, first).ttft_p50) < 1e-9) is same


@pytest.mark.nightly
def test_turns_of_a_front_end_are_found_in_a_closed_loop() -> None:
    rows = tuple(replace(row, arrival_us=row.arrival_us // 40) for row in workload(160).requests)
    closed = workload(160).changed(rows, "a closed loop", client=Client(ClientKind.closed, 16))
    true = replace(TRUE, frontend_request_us=3000.0, frontend_turn_us=1500.0)
    found = fit_device(planted(true, trace=closed), replace(config(), device=TRUE))
    known = {constant.key: constant.value for constant in found.constants}
    assert known["frontend_turn_us"] == pytest.approx(1500.0, rel=0.3)
    assert abs(found.held_out.ttft_mean) < 0.05


def test_a_log_of_a_few_requests_is_refused() -> None:
    with pytest.raises(UserError, match="has 39 finished requests"):
        requests_to_fit(logged([1] * 39))


def test_errors_are_signed_and_of_the_chosen_requests() -> None:
    log = planted(GPU, 50)
    slow = predictor(config(), log.workload)(replace(GPU, step_overhead_us=50_000.0))
    errors = errors_of(slow, log, slice(10, None))
    assert errors.requests == 40
    assert errors.tpot_p50 > 1
    same = errors_of(predictor(config(), log.workload)(GPU), log, slice(0, 50))
    assert (same.ttft_p50, same.tpot_p50) == (0, 0)


def test_the_series_of_a_prediction_counts_as_the_times_of_its_requests_do() -> None:
    log = planted(GPU, 50)
    at_s = np.arange(0.0, 3.0, 0.37)
    series = predictor(config(), log.workload)(GPU).series(at_s)
    ran, waited = log.requests.under_way(at_s)
    assert np.abs(series.running + series.waiting - (ran + waited)).max() <= 1
    assert series.kv_use is not None
    assert 0 < series.kv_use.max() < 1


@pytest.mark.nightly
def test_requests_whose_tokens_came_at_once_do_not_stop_the_fit() -> None:
    """Their time between tokens is 0, which has no logarithm."""
    found = planted(TRUE, 44)
    ends = found.requests.last_token_s.copy()
    ends[3] = found.requests.first_token_s[3]
    fit = fit_device(replace(found, requests=replace(found.requests, last_token_s=ends)), config(), first=30)
    assert np.isfinite(fit.held_out.tpot_p50)


def test_a_log_without_any_duration_is_refused() -> None:
    found = planted(TRUE, 44)
    requests = found.requests
    instant = replace(requests, first_token_s=requests.entered_s, last_token_s=requests.entered_s)
    with pytest.raises(UserError, match="no durations"):
        fit_device(replace(found, requests=instant), config(), first=30)


# -- what speaks against a fit ------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_log_without_times_between_tokens_is_fitted_by_its_first_tokens() -> None:
    log = planted(TRUE, 40)
    whole = replace(log.requests, last_token_s=log.requests.first_token_s)
    found = fit_device(replace(log, requests=whole), config(), first=20)
    assert found.device.step_spread == 0.0
    assert np.isfinite(found.held_out.ttft_p50)


def test_a_fit_that_explains_its_log_has_no_doubts(fit: Fit) -> None:
    assert doubts(fit) == []
    assert not explains_nothing(fit)


def test_a_constant_at_its_bound_is_a_doubt(fit: Fit) -> None:
    first, *others = fit.constants
    found = doubts(replace(fit, constants=(replace(first, at_end=True), *others)))
    assert len(found) == 1
    assert first.key in found[0]
    assert "units of time" in found[0]


def test_a_fit_that_misses_what_it_was_fitted_to_is_doubted(fit: Fit) -> None:
    far = replace(fit, fitted=replace(fit.fitted, tpot_p50=-0.2))
    assert "TPOT -20 %" in doubts(far)[0]
    assert not explains_nothing(far)


@pytest.mark.parametrize("error", [-0.6, 1.5])
def test_a_fit_that_is_off_by_more_than_a_factor_of_two_explains_nothing(fit: Fit, error: float) -> None:
    assert explains_nothing(replace(fit, fitted=replace(fit.fitted, ttft_p50=error)))
