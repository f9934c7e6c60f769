"""Check a point before anything runs, and run it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.config.errors import ConfigError
from harness.config.schema import RunConfig
from harness.point.cost import check_cost, cost_model
from harness.point.record import make_record, tables_of
from harness.point.simulate import simulate
from harness.point.workload import Workload, build_workload
from harness.sim.cost import CostModel

if TYPE_CHECKING:
    from harness.measured.engine import MeasuredRun

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PointResult:
    """A finished point: the record, and its tables `steps` and `requests` as columns."""

    record: dict[str, Any]
    tables: dict[str, dict[str, np.ndarray[Any, np.dtype[Any]]]]


def check_point(config: RunConfig) -> None:
    """Raises ConfigError for a point that cannot run: trace, sizes, model, cost model. Imports no torch."""
    build_workload(config)
    check_cost(config)
    if config.measure:
        _check_model(config)


def _check_model(config: RunConfig) -> None:
    from engine.runtime.errors import ModelError
    from engine.runtime.model import check_model
    from harness.measured.spec import model_spec

    try:
        check_model(model_spec(config.model))
    except ModelError as error:
        raise ConfigError("model.path" if config.model.path else "model.family", str(error)) from error


def run_point(config: RunConfig, *, progress: Progress | None = None) -> PointResult:
    """Predict the point and, unless `measure` is off, measure it `replay.repeats` times.

    `progress(stage, done, total)` tells the stage and the requests finished in it.
    """
    started = time.perf_counter()
    workload = build_workload(config)
    cost = _cost(config, progress)
    predicted_from = time.perf_counter()
    simulated = simulate(workload, cost, config.decoding.beam_churn)
    seconds = {"simulate": time.perf_counter() - predicted_from}
    runs = _measure(config, workload, progress) if config.measure else []
    seconds["all"] = time.perf_counter() - started
    record = make_record(config, workload, cost, simulated, runs, seconds)
    return PointResult(record, tables_of(simulated, runs))


def _cost(config: RunConfig, progress: Progress | None) -> CostModel:
    """The point's cost model; a measured point calibrates its device first, once."""
    from harness.measured.calibration import is_calibrated
    from harness.point.cost import resolve_cost_kind

    if (
        config.measure
        and resolve_cost_kind(config) == "fitted"
        and _must_calibrate(config, is_calibrated(config))
    ):
        from harness.measured.calibrate import calibrate

        def stage(case: str, done: int, total: int) -> None:
            if progress:
                progress(f"calibrating: {case}", done, total)

        _RECALIBRATED.add(_calibration_key(config))
        return calibrate(config, stage)
    return cost_model(config)


_RECALIBRATED: set[str] = (
    set()
)  # in this process: `cost.recalibrate` asks for one new calibration, not one per point


def _calibration_key(config: RunConfig) -> str:
    from harness.measured.calibration import calibration_fingerprint

    return calibration_fingerprint(config)


def _must_calibrate(config: RunConfig, calibrated: bool) -> bool:
    return not calibrated or (config.cost.recalibrate and _calibration_key(config) not in _RECALIBRATED)


def _measure(config: RunConfig, workload: Workload, progress: Progress | None) -> "list[MeasuredRun]":
    from harness.measured.engine import measure, warm_up

    warm_up(config, workload)
    runs = []
    for number in range(config.replay.repeats):

        def stage(done: int, total: int, run: int = number) -> None:
            if progress:
                progress(f"measuring, run {run + 1} of {config.replay.repeats}", done, total)

        runs.append(measure(config, workload, seed=config.workload.seed, progress=stage))
    return runs
