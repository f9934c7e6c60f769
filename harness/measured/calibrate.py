"""Calibration: run a plan's workloads on the engine, fit the cost model, and test it on workloads held out."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

import numpy as np

from harness.config.schema import Audit, RunConfig
from harness.environment import device_identity
from harness.measured.budget import Budget
from harness.measured.calibration import calibration_fingerprint, measured_table, save_calibration
from harness.measured.engine import MeasuredRun, measure
from harness.measured.grid import measure_grids
from harness.measured.passes import PASSES, Passes, Timed
from harness.measured.plan import LONE, SEED, design, probe_workload
from harness.measured.stability import Stability, is_steady, stability_of
from harness.measured.validate import HELD_OUT, Validated, measure_held_out, validation
from harness.metrics.log import Column
from harness.point.clock import clock_of
from harness.sim.branches import DraftAcceptance
from harness.sim.coalescence import choices_of_run, churn_of_run, evenness_of_run
from harness.sim.cost import CostSource, FloatArray, price_table
from harness.sim.fitted import FittedCost, fit_cost, held_out_error
from harness.sim.hull import COLUMNS, hull_of
from harness.sim.table import TableCost

CaseProgress = Callable[[str, int, int], None]
_VALIDATION_REPEATS = 3


@dataclass(frozen=True)
class Calibration:
    """What a calibration came to: the models, and whether the device kept its pace."""

    fitted: FittedCost
    table: TableCost | None
    stability: Stability
    grid_asked: bool
    left_out: tuple[str, ...]  # cases for which there was no time


def calibrate(
    config: RunConfig,
    progress: CaseProgress | None = None,
    *,
    budget_s: float | None = None,
    grid: bool = False,
) -> FittedCost:
    """Measure, fit, validate and store; a minute at the most without a budget. Progress gets (case, done, all).

    Without a budget held-out workloads are measured once, and so have no spread of repeats.
    """
    return full_calibration(config, progress, budget_s=budget_s, grid=grid).fitted


def full_calibration(
    config: RunConfig, progress: CaseProgress | None = None, *, budget_s: float | None, grid: bool
) -> Calibration:
    """The same with all that was found; `grid` measures attention shape by shape for the `table` model too."""
    config = replace(config, engine=replace(config.engine, audit=Audit.off))
    begun, load, clock = datetime.now(UTC), os.getloadavg()[0], Budget(budget_s)
    lone, lone_wall = _lone_request_s(config)
    cases = design(config, lone_wall, budget_s)
    report = _Counted(progress, len(cases) * PASSES + len(HELD_OUT))
    passes = Passes(config, cases, lone, report, clock)
    timed = passes.measure()
    pace = median(entry.probe_s for entry in timed)
    repeats = 1 if budget_s is None else _VALIDATION_REPEATS
    held_out = measure_held_out(config, lone, repeats, report, clock)
    grids = measure_grids(config, report, clock) if grid and clock.left() else {}
    probes = [*passes.probes, *(entry.probe_s for entry in held_out)]
    stability = stability_of(probes, load)
    facts = {
        "what": "non-negative least squares on measured steps",
        "device": device_identity(config.engine.device),
        "clock": str(clock_of(config)),
        "cases": [f"{entry.case.name}: {entry.case.requests} requests" for entry in timed],
        "probe_s": pace,
        "started": begun.isoformat(timespec="seconds"),
        "seconds": clock.spent_s,
        "stability": stability.section(),
    }
    fitted = _fitted(config, timed, held_out, pace, facts)
    save_calibration(config, fitted, grids)
    measured = {entry.case.name for entry in timed}
    left_out = tuple(case.name for case in cases if case.name not in measured)
    table = measured_table(fitted, grids) if grids else None
    return Calibration(fitted, table, stability, grid, left_out)


class _Counted:
    """Tells which case comes next."""

    def __init__(self, progress: CaseProgress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, name: str) -> None:
        if self._progress:
            self._progress(name, self._done, max(self._total, self._done + 1))
        self._done += 1


def _lone_request_s(config: RunConfig) -> tuple[float, float]:
    """How long one request takes alone, by the engine's clock, the unit of the plan's loads, and by the wall's.

    The first run also warms the engine up.
    """
    for _ in range(2):
        begun = time.perf_counter()
        run = measure(config, probe_workload(config, LONE), seed=SEED)
    return run.log.span_s / LONE.requests, (time.perf_counter() - begun) / LONE.requests


def _fitted(
    config: RunConfig,
    timed: Sequence[Timed],
    held_out: Sequence[Validated],
    pace: float,
    facts: dict[str, Any],
) -> FittedCost:
    seen = [(entry.run, pace if is_steady(entry.probe_s / pace) else entry.probe_s) for entry in timed]
    unseen = [(run, entry.probe_s) for entry in held_out for run in entry.runs]
    churn, evenness = _beams(timed)
    source = CostSource(
        "fitted",
        config.model.name,
        calibration_fingerprint(config),
        beam_churn=churn,
        beam_evenness=evenness,
        draft_acceptance=_acceptance(timed),
        hull=hull_of(_all_steps([entry.run for entry in timed])),
    )
    cost = fit_cost(*_columns(seen, pace), source)
    features, seconds, attention = _columns(unseen, pace)
    predicted, predicted_attention = price_table(cost, features)
    found = replace(
        source,
        provenance={**facts, "steps_fitted": sum(len(run.recorder.features) for run, _ in seen)},
        heldout={
            "step": held_out_error(predicted, seconds),
            "attention": held_out_error(predicted_attention, attention),
        },
        validation=validation(held_out, cost, pace),
    )
    return replace(cost, source=found)


def _columns(
    runs: Sequence[tuple[MeasuredRun, float]], pace: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Features, step seconds and attention seconds, times brought to the median pace of the calibration."""
    features = np.concatenate([run.recorder.features for run, _ in runs])
    seconds, attention = (
        np.concatenate([run.log.steps[name] * (pace / probe) for run, probe in runs])
        for name in ("seconds", "attention_s")
    )
    return features, seconds, attention


def _all_steps(runs: Sequence[MeasuredRun]) -> dict[str, Column]:
    return {name: np.concatenate([run.log.steps[name] for run in runs]) for name in COLUMNS}


def _beams(timed: Sequence[Timed]) -> tuple[dict[int, float], dict[int, float]]:
    """Churn and evenness by beam width, over all selections but a request's first."""
    chosen: dict[int, list[Sequence[int]]] = {}
    for entry in timed:
        for choices in choices_of_run(entry.run.recorder.parents):
            chosen.setdefault(entry.case.beam_width, []).extend(choices)
    widths = sorted(chosen)
    churn = {width: churn_of_run(width, [len(set(parents)) for parents in chosen[width]]) for width in widths}
    return churn, {width: evenness_of_run(chosen[width]) for width in widths}


def _acceptance(timed: Sequence[Timed]) -> float | None:
    """The share of draft tokens that are right, if all before them were; None where nothing was drafted."""
    pairs = [
        (drafts, result.accepted.get(request_id, 0))
        for entry in timed
        for drafted, result in zip(entry.run.recorder.drafted, entry.run.recorder.results, strict=True)
        for request_id, drafts in drafted.items()
    ]
    return DraftAcceptance.fitted(*zip(*pairs, strict=True)).share if pairs else None
