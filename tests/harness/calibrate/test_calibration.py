"""Calibration: a plan within its budget, a device that moved is noticed, and what is stored comes back."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from point_cases import small_config
from sim_cases import replay

from harness.calibrate.store import (
    CalibrationError,
    calibration_path,
    has_grid,
    is_calibrated,
    load_calibration,
    load_table,
    save_calibration,
    set_aside_damaged,
)
from harness.cli.main import main
from harness.config.schema import EngineDevice
from harness.cost.fitted import ATTENTION, REST, FittedCost
from harness.cost.grid import grid_of
from harness.measure.cases import (
    CASES,
    HELD_OUT,
    LONE_REQUEST,
    SEED,
    Budget,
    case_point,
    case_trace,
    design,
    held_out_point,
)
from harness.measure.engine import measure
from harness.measure.executor import Reading
from harness.measure.pace import PROBE, off_pace, stability_of
from harness.measure.passes import Passes
from harness.metrics.log import Outcome
from harness.point.run import point_identity
from harness.replay.cost_model import CostSource
from harness.replay.features import AT, FEATURES
from harness.replay.recorder import MeasuredRun
from harness.workload.deployment import deployment_of
from harness.workload.point import Point
from paged_kernels import native as compiling


def test_a_smaller_budget_asks_for_fewer_requests_of_every_case(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    small, large = (design(deployment_of(config), 0.05, budget) for budget in (5, 30))
    assert [case.name for case in small] == [case.name for case in CASES]
    assert all(few.requests <= many.requests for few, many in zip(small, large, strict=True))
    assert sum(case.requests for case in small) < sum(case.requests for case in large)
    assert min(case.requests for case in small) >= 6


def test_the_plan_follows_the_scheduler_s_largest_batch(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.scheduler.max_running = 128
    assert design(deployment_of(config), 0.05, None)[0].requests == 128


def test_no_case_but_those_that_swap_is_preempted_for_want_of_blocks(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.cache.pool_tokens = 65_536
    for case in (case for case in design(deployment_of(config), 0.05, None) if not case.swaps):
        workload = case_point(deployment_of(config), case, 0.05)
        needed = sum(row.prompt_tokens + row.output_tokens for row in workload.trace.requests)
        assert case.contiguous or needed <= workload.pool.tokens, case.name


def test_swaps_are_measured_with_blocks_of_two_sizes(tmp_path: Path) -> None:
    """Blocks of one size could not tell the price of a transfer from that of its bytes."""
    config = small_config(tmp_path)
    moved = {}
    for case in (case for case in design(deployment_of(config), 0.05, None) if case.swaps):
        workload = case_point(deployment_of(config), case, 0.05)
        log, recorder = replay(
            workload.requests(),
            manager=workload.scheduler().manager,
            limits=workload.limits,
            fast_forward=False,
        )
        assert (log.requests["outcome"] == Outcome.FINISHED).all()
        moved[case.block_size] = recorder.features[:, AT.swapped_blocks].sum()
    assert len(moved) == 2
    assert min(moved.values()) > 20


def test_drafts_are_measured_where_a_draft_model_is_configured(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    assert not any(case.drafts for case in design(deployment_of(config), 0.05, None))
    config.decoding.draft_tokens = 4
    assert sum(case.drafts > 0 for case in design(deployment_of(config), 0.05, None)) == 2


def test_a_draft_model_makes_another_calibration_and_the_number_of_its_tokens_does_not(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path)
    plain = calibration_path(deployment_of(config))
    config.decoding.draft_tokens = 4
    drafting = calibration_path(deployment_of(config))
    config.decoding.draft_tokens = 2
    assert plain != drafting == calibration_path(deployment_of(config))


def test_held_out_points_are_not_those_of_the_plan(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    fitted = {case_trace(case, seed=SEED, lone_request_s=0.05, longest=512).digest for case in CASES}
    held_out = [held_out_point(deployment_of(config), entry, 0.05) for entry in HELD_OUT]
    assert {workload.trace.digest for workload in held_out}.isdisjoint(fitted)
    assert {workload.trace.header.name for workload in held_out}.isdisjoint({case.name for case in CASES})
    for workload in held_out:
        longest = max(row.prompt_tokens + row.output_tokens for row in workload.trace.requests)
        assert longest <= workload.pool.max_model_len


def test_a_device_that_kept_its_pace_is_not_accused() -> None:
    found = stability_of([1.0, 1.02, 0.99, 1.01], load_before=0.0)
    assert not found.moved
    assert off_pace([1.0, 1.02, 0.99, 1.01]) == []


def test_clocks_that_moved_are_noticed_and_their_cases_named() -> None:
    probes = [1.0, 1.01, 1.3, 0.99]
    found = replace(stability_of(probes, load_before=0.0), load_after=0.0)
    assert found.moved
    assert off_pace(probes) == [2]
    assert "changed its pace" in found.warnings()[0]


def test_a_crowded_machine_is_noticed() -> None:
    found = stability_of([1.0, 1.0], load_before=1000.0)
    assert any("crowded" in warning for warning in found.warnings())


def test_a_budget_without_seconds_never_ends_and_one_of_none_has_ended() -> None:
    assert Budget(None).left()
    assert not Budget(0).left()


def fitted_cost() -> FittedCost:
    values = np.arange(1.0, len(FEATURES) + 1) * 1e-6
    source = CostSource(
        kind="fitted",
        name="test",
        fingerprint="f",
        provenance={"device": "here"},
        heldout={"step": {"n": 3.0, "mape": 0.01}},
        beam_churn={4: 0.3},
        beam_evenness={4: 0.5},
        draft_acceptance=0.7,
        hull={"rows": (1.0, 64.0)},
        validation={"held out": {"tpot_mean": {"error": 0.01, "spread": 0.002}}},
    )
    return FittedCost(values[ATTENTION], values[REST], source)


def test_a_calibration_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    grid = grid_of([(1, 16, 1e-5), (1, 64, 2e-5), (4, 16, 3e-5)])
    save_calibration(deployment_of(config), fitted_cost(), {"decode": grid, "prefill": grid})
    found = load_calibration(deployment_of(config))
    assert found.source == fitted_cost().source
    assert found.coefficients() == fitted_cost().coefficients()
    table = load_table(deployment_of(config))
    assert table.source.kind == "table"
    assert np.isnan(table.decode.seconds[1][1])
    assert table.decode.seconds[0].tolist() == [1e-5, 2e-5]


@pytest.mark.parametrize("damage", [lambda text: text[:100], lambda text: "[]", lambda text: "null"])
def test_a_damaged_calibration_is_set_aside_so_that_it_is_made_anew(
    tmp_path: Path, damage: Callable[[str], str]
) -> None:
    config = small_config(tmp_path)
    file = save_calibration(deployment_of(config), fitted_cost(), {})
    file.write_text(damage(file.read_text()))
    told = set_aside_damaged(deployment_of(config))
    assert told is not None
    assert "damaged calibration" in told
    assert not is_calibrated(deployment_of(config))
    assert file.with_name(f"{file.name}.damaged").exists()


def test_a_calibration_with_a_negative_coefficient_is_damaged(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    file = save_calibration(deployment_of(config), fitted_cost(), {})
    document = json.loads(file.read_text())
    name = next(iter(document["coefficients_s"]))
    document["coefficients_s"][name] = -1.0
    file.write_text(json.dumps(document))
    with pytest.raises(CalibrationError, match="a coefficient is negative or no number"):
        load_calibration(deployment_of(config))


@pytest.mark.parametrize(("repeats", "error"), [(float("nan"), 0.1), ("wide", 0.1), (0.1, -1.0), (0.1, None)])
def test_a_calibration_whose_repeatability_is_no_number_is_damaged(
    tmp_path: Path, repeats: object, error: object
) -> None:
    config = small_config(tmp_path)
    file = save_calibration(deployment_of(config), fitted_cost(), {})
    document = json.loads(file.read_text())
    document["provenance"]["repeatability"] = repeats
    document["validation"] = {"chat": {"tpot_mean": {"error": error}}}
    file.write_text(json.dumps(document))
    with pytest.raises(CalibrationError, match="damaged calibration"):
        load_calibration(deployment_of(config))


def test_a_whole_calibration_is_not_set_aside(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    save_calibration(deployment_of(config), fitted_cost(), {})
    assert set_aside_damaged(deployment_of(config)) is None
    assert is_calibrated(deployment_of(config))


def test_a_calibration_without_grid_makes_no_table(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    save_calibration(deployment_of(config), fitted_cost(), {})
    assert not has_grid(deployment_of(config))
    with pytest.raises(CalibrationError, match="no grid"):
        load_table(deployment_of(config))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["calibrate", "--budget", "0"], "must be at least 1 second"),
        (["calibrate", "--budget", "nan"], "must be at least 1 second"),
        (["calibrate", "--from-log", "log", "--budget", "9"], "--budget: --from-log measures nothing here"),
        (["calibrate", "--from-log", "log", "--no-grid"], "--no-grid: --from-log measures nothing here"),
        (["calibrate", "--first", "9"], "--first: --from-log is needed"),
        (["calibrate", "--out", "d.yaml"], "--out: --from-log is needed"),
        (
            ["calibrate", "engine.device=cpu", "model.layers=100000", "model.intermediate=1000000"],
            "its weights take",
        ),
        (["calibrate", "cache.block_size=8,16"], "takes one configuration"),
        (["calibrate", "model.heads=0"], "model.heads"),
    ],
)
def test_the_command_refuses_what_it_cannot_calibrate(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_the_lone_request_is_the_unit_of_all_loads() -> None:
    assert LONE_REQUEST.load == 0
    assert LONE_REQUEST.requests == 2


@pytest.mark.nightly
def test_the_probe_takes_the_same_steps_however_long_they_are(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    workload = case_point(deployment_of(config), PROBE, 0.05)
    runs = [measure(workload, seed=0, step_ns=(ns,) * 1000) for ns in (3_000_000, 3_000_000)]
    assert runs[0].recording.digests == runs[1].recording.digests
    other = measure(workload, seed=0, step_ns=(50_000_000,) * 1000)
    assert other.recording.digests != runs[0].recording.digests  # requests meet others where steps are longer


@pytest.mark.nightly
def test_a_run_by_a_given_clock_keeps_the_engine_s_own_seconds(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    workload = case_point(deployment_of(config), CASES[4], 0.01)
    first = measure(workload, seed=0)
    again = measure(workload, seed=0, step_ns=first.recording.step_ns)
    assert again.recording.digests == first.recording.digests
    assert again.log.steps["start_s"].tolist() == first.log.steps["start_s"].tolist()
    assert again.log.steps["seconds"].tolist() != first.log.steps["seconds"].tolist()


def test_a_clock_that_ends_early_leaves_the_rest_to_the_engine(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    log = measure(case_point(deployment_of(config), CASES[0], 0.01), seed=0, step_ns=[7_000_000]).log
    assert log.steps["start_s"][1] == 0.007
    assert len(log.steps["step"]) > 5
    assert (log.requests["outcome"] == Outcome.FINISHED).all()


class Paces:
    """Runs whose steps take as long as they are told, in place of the engine's."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = iter(seconds)
        self.asked: list[Sequence[int] | None] = []

    def __call__(
        self, workload: Point, *, seed: int, step_ns: Any = None, reference: Any = None
    ) -> MeasuredRun:
        self.asked.append(step_ns)
        log, recorder = replay(workload.requests(), limits=workload.limits, fast_forward=False)
        found = np.full(len(log.steps["step"]), next(self.seconds))
        steps = {**log.steps, "seconds": found, "pace": np.ones(len(found))}
        return MeasuredRun(replace(log, steps=steps), recorder, 0, reference)


def test_the_quietest_pass_of_a_case_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Paces([1.0, 2.0, 3.0, 4.0, 1.5, 0.5])
    monkeypatch.setattr("harness.measure.passes.measure", runs)
    monkeypatch.setattr("harness.measure.passes.probe_s", lambda config: 1.0)
    cases = CASES[1:4]
    found = Passes(
        deployment_of(small_config(tmp_path)), cases, 0.05, lambda name: None, Budget(None), None
    ).measure()
    assert [entry.case for entry in found] == list(cases)
    kept = [entry.runs[0].log.steps["seconds"][0] for entry in found]
    assert kept == [0.5, 1.5, 3.0]  # the second pass runs backwards
    assert [clock is None for clock in runs.asked] == [True] * 3 + [False] * 3


def test_with_a_yardstick_all_passes_but_the_first_are_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Paces([9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    monkeypatch.setattr("harness.measure.passes.measure", runs)
    passes = Passes(
        deployment_of(small_config(tmp_path)),
        CASES[1:4],
        0.05,
        lambda name: None,
        Budget(None),
        Reading(1.0, 1.0, 1.0),
    )
    found = passes.measure()
    kept = [[run.log.steps["seconds"][0] for run in entry.runs] for entry in found]
    assert kept == [[3.0, 4.0, 9.0], [2.0, 5.0, 8.0], [1.0, 6.0, 7.0]]  # every other pass runs backwards
    assert passes.probes == [1.0] * 12  # the paces of the runs


def test_a_case_beside_an_odd_probe_is_measured_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Paces([1.0] * 6 + [0.7])
    probes = iter([1.0, 1.0, 1.0, 2.2, 1.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr("harness.measure.passes.measure", runs)
    monkeypatch.setattr("harness.measure.passes.probe_s", lambda config: next(probes))
    found = Passes(
        deployment_of(small_config(tmp_path)), CASES[1:4], 0.05, lambda name: None, Budget(None), None
    ).measure()
    assert len(runs.asked) == 7
    assert [entry.runs[0].log.steps["seconds"][0] for entry in found] == [1.0, 1.0, 0.7]


def test_without_compiled_kernels_neither_calibration_nor_point_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiling.why_unavailable():
        pytest.skip("no C compiler: the engine runs torch")
    config = small_config(tmp_path)
    config.engine.device = EngineDevice.cpu
    before = calibration_path(deployment_of(config)), point_identity(config)
    monkeypatch.setenv(compiling.SWITCH, "0")
    compiling.load_library.cache_clear()
    try:
        after = calibration_path(deployment_of(config)), point_identity(config)
    finally:
        compiling.load_library.cache_clear()
    assert before[0] != after[0]
    assert before[1] != after[1]
