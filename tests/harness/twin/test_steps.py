"""The steps of a probe's log are read whole, and a fit to them finds what took their time."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.config.schema import RunConfig
from harness.point.cost import cost_model
from harness.replay.features import AT
from harness.twin.configured import configured
from harness.twin.fit import doubts, fit_device
from harness.twin.log import EngineLog
from harness.twin.reading import read_engine_log
from harness.twin.step_fit import StepResiduals, steps_to_fit
from harness.twin.steps import LoggedSteps, StepLine, StepReader
from harness.workload.deployment import deployment_of

FOLDER = Path(__file__).resolve().parents[2] / "data" / "deployments" / "vllm-probe"


@pytest.fixture(scope="module")
def log() -> EngineLog:
    return read_engine_log(FOLDER)


@pytest.fixture(scope="module")
def config(log: EngineLog) -> RunConfig:
    return configured(log, ("device=l4", "model=tiny_llama")).config


def steps_of(log: EngineLog) -> LoggedSteps:
    assert log.steps is not None
    return log.steps


def test_the_rows_of_every_step_have_the_tokens_that_its_line_says(log: EngineLog) -> None:
    lines = [json.loads(line) for line in (FOLDER / "probe.jsonl").read_text().splitlines()]
    told = [line["tokens"] for line in lines if "step" in line]
    assert steps_of(log).features[:, AT.tokens].tolist() == told
    assert steps_of(log).unknown == 0


def test_a_step_counts_from_the_end_of_the_one_before_unless_nothing_was_to_do() -> None:
    reader = StepReader(16)
    reader.queued(0, 3)
    reader.step((100, 1, 10, 1), 1, 0, StepLine([(0, 0, 3)], [], [], []))
    reader.ended(0)
    reader.step((120, 1, 10, 1), 1, 0, StepLine([], [], [], []))
    reader.queued(1, 3)
    reader.step((500, 1, 10, 1), 1, 0, StepLine([(1, 0, 3)], [], [], []))
    found = reader.steps()
    assert found is not None
    assert found.seconds == pytest.approx([12e-9, 20e-9, 12e-9])
    assert found.host_s == pytest.approx([2e-9, 10e-9, 2e-9])


def test_a_step_whose_rows_are_not_known_is_left_out_and_counted() -> None:
    reader = StepReader(16)
    reader.step((100, 1, 10, 1), 2, 0, StepLine([(0, 0, 3)], [], [], []))
    assert reader.unknown == 1
    assert reader.steps() is None


def planted(log: EngineLog, config: RunConfig) -> LoggedSteps:
    """The steps with the seconds of a device that is not the one described, and noise."""
    truth = replace(config.device, step_overhead_us=900.0, row_overhead_us=0.6, compute_efficiency=0.4)
    steps = steps_of(log)
    cost = cost_model(replace(deployment_of(config), device=truth))
    seconds = np.asarray(cost.price(list(steps.features.T)).seconds)
    return replace(steps, seconds=seconds * np.random.default_rng(3).lognormal(0, 0.03, len(steps)))


def test_a_fit_to_steps_finds_their_seconds(log: EngineLog, config: RunConfig) -> None:
    made = planted(log, config)
    fit = fit_device(replace(log, steps=made), config, first=50)
    found = np.asarray(
        cost_model(replace(deployment_of(config), device=fit.device)).price(list(made.features.T)).seconds
    )
    assert found.sum() == pytest.approx(made.seconds.sum(), rel=0.01)
    assert "the host's" in fit.said


def test_a_constant_is_doubted_at_the_bounds_of_its_own_fit(log: EngineLog, config: RunConfig) -> None:
    """A slow host's are wider than those of a GPU."""
    slow = replace(config, device=replace(config.device, step_overhead_us=20_000.0))
    constants = {one.key: one for one in StepResiduals(planted(log, config), slow, None).constants}
    overhead, efficiency = constants["step_overhead_us"], constants["compute_efficiency"]
    assert [overhead.holds(value) for value in (20_000.0, 200_000.0, 30.0)] == [False, True, True]
    assert [efficiency.holds(value) for value in (0.5, 1.0, 0.15)] == [False, True, True]


def test_a_fit_to_steps_of_no_gpu_is_doubted(log: EngineLog, config: RunConfig) -> None:
    made = planted(log, config)
    fits = [
        fit_device(replace(log, steps=replace(made, seconds=made.seconds * times)), config, first=50)
        for times in (1, 100)
    ]
    assert ["lies at the end of what a GPU can do" in " ".join(doubts(fit)) for fit in fits] == [False, True]


def test_a_model_with_windows_is_fitted_by_the_simulator(log: EngineLog, config: RunConfig) -> None:
    windowed = replace(config, model=replace(config.model, window=64, windowed_layers=2))
    assert steps_to_fit(log, config, 50) is not None
    assert steps_to_fit(log, windowed, 50) is None


def test_the_error_of_a_step_is_split_between_device_and_host(log: EngineLog, config: RunConfig) -> None:
    made = planted(log, config)
    problem = StepResiduals(replace(made, host_s=1e-3 + 1e-5 * made.rows), config, None)
    said = problem.said(np.zeros(len(problem.constants)))
    assert "0.0 % the host's" in said
    assert "0.0 % the device's" not in said
