"""A calibration: run the designed workloads on the engine, fit the cost model, test it on held-out workloads.

`harness.measure.passes` says what runs and how often, `harness.measure.pace` how the device's pace is divided out.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from statistics import median
from typing import Any

import numpy as np

from engine.runtime.options import Audit
from harness.calibrate.store import calibration_fingerprint, measured_table, save_calibration
from harness.cost.fitted import FittedCost, fit_cost, held_out_error, spread_of_repeats
from harness.cost.grid import Grid
from harness.cost.table import TableCost
from harness.measure.cases import HELD_OUT, Budget, design
from harness.measure.pace import Stability, is_steady, pace_of_runs, stability_of
from harness.measure.passes import (
    MOST_PASSES,
    PASSES,
    Passes,
    TimedCase,
    Validated,
    lone_request_s,
    measure_grids,
    measure_held_out,
)
from harness.metrics import METRICS
from harness.metrics.compute import compute_metrics
from harness.metrics.log import FloatArray
from harness.metrics.record import comparison_error
from harness.replay.beams import choices_of_run, churn_of_run, evenness_of_run
from harness.replay.branches import DraftAcceptance
from harness.replay.cost_model import CostModel, CostSource, PacedCost, price_table
from harness.replay.folds import COLUMNS, hull_of
from harness.replay.recorder import MeasuredRun
from harness.workload.deployment import Deployment
from harness.workload.simulate import simulate

METRICS_VALIDATED = ("output_throughput", "tpot_mean", "ttft_p50")


def validation(
    measured: Sequence[Validated], cost: CostModel, calibrated_s: float
) -> dict[str, dict[str, dict[str, float]]]:
    """By workload and metric: the free-running error, and the spread of the repeats on the same scale.

    Predictions are scaled by the pace of the device beside the runs, as for a measured point.
    """
    return {
        entry.held_out.name: _errors(entry, PacedCost(cost, entry.probe_s / calibrated_s))
        for entry in measured
    }


def _errors(entry: Validated, cost: CostModel) -> dict[str, dict[str, float]]:
    predicted = compute_metrics(simulate(entry.point, cost))
    runs = [compute_metrics(run.log) for run in entry.runs]
    found = {}
    for name in METRICS_VALIDATED:
        values = [run[name] for run in runs if name in run]
        error = comparison_error(METRICS[name], predicted.get(name), median(values)) if values else None
        if error is not None:
            found[name] = {"error": error}
            if len(values) > 1:
                found[name]["spread"] = (max(values) - min(values)) / median(values)
    return found


_VALIDATION_REPEATS = 3
CaseProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration: the models, and whether the pace of the device was constant."""

    fitted: FittedCost
    grids: Mapping[str, Grid]  # of measured attention; empty: not asked for, or there was no time
    stability: Stability
    grid_asked: bool
    left_out: tuple[str, ...]  # cases for which there was no time

    @property
    def table(self) -> TableCost | None:
        """The `table` model, where attention was measured on its grids."""
        return measured_table(self.fitted, self.grids) if self.grids else None


def calibrate(
    deployment: Deployment,
    progress: CaseProgress | None = None,
    *,
    budget_s: float | None = None,
    grid: bool = False,
) -> Calibration:
    """Measure, fit, validate and store; at most a minute without a budget. `progress` gets (case, done, all).

    Without a budget held-out workloads are measured once, so that there is no spread of repeats. `grid` also measures
    attention shape by shape for the `table` model.
    """
    deployment = replace(deployment, engine=replace(deployment.engine, audit=Audit.off))
    begun, load, budget = datetime.now(UTC), os.getloadavg()[0], Budget(budget_s)
    lone, lone_wall, reference = lone_request_s(deployment)
    cases = design(deployment, lone_wall, budget_s)
    ahead, done = len(cases) * (MOST_PASSES if reference else PASSES) + len(HELD_OUT), count()

    def report(name: str) -> None:
        """Report the next case and how many are done."""
        number = next(done)
        if progress:
            progress(name, number, max(ahead, number + 1))

    passes = Passes(deployment, cases, lone, report, budget, reference)
    timed = passes.measure()
    pace = median(entry.probe_s for entry in timed)
    repeats = 1 if budget_s is None else _VALIDATION_REPEATS
    held_out = measure_held_out(deployment, lone, repeats, report, budget, reference)
    grids = measure_grids(deployment, report, budget, reference) if grid and budget.left() else {}
    beside = [entry.probe_s for entry in held_out]
    if reference:
        beside = [pace_of_runs([run]).ratio for entry in held_out for run in entry.runs]
    stability = stability_of([*passes.probes, *beside], load)
    facts = {
        "what": "non-negative least squares on measured steps",
        "device": deployment.device_at_hand,
        "clock": str(deployment.clock_used),
        "cases": [f"{entry.case.name}: {entry.case.requests} requests" for entry in timed],
        **({"yardstick_s": list(reference)} if reference else {"probe_s": pace}),
        "started": begun.isoformat(timespec="seconds"),
        "seconds": budget.spent_s,
        "stability": stability.section(),
        **({"repeatability": spread_of_repeats(passes.levels)} if passes.levels else {}),
    }
    fitted = _fitted(deployment, timed, held_out, pace, facts)
    save_calibration(deployment, fitted, grids)
    measured = {entry.case.name for entry in timed}
    left_out = tuple(case.name for case in cases if case.name not in measured)
    return Calibration(fitted, grids, stability, grid, left_out)


def _fitted(
    deployment: Deployment,
    timed: Sequence[TimedCase],
    held_out: Sequence[Validated],
    pace: float,
    facts: dict[str, Any],
) -> FittedCost:
    seen = [
        (run, pace if is_steady(entry.probe_s / pace) else entry.probe_s)
        for entry in timed
        for run in entry.runs
    ]
    unseen = [(run, entry.probe_s) for entry in held_out for run in entry.runs]
    churn, evenness = _beams(timed)
    steps = {name: np.concatenate([run.log.steps[name] for run, _ in seen]) for name in COLUMNS}
    source = CostSource(
        "fitted",
        deployment.model.name,
        calibration_fingerprint(deployment),
        beam_churn=churn,
        beam_evenness=evenness,
        draft_acceptance=_acceptance(timed),
        hull=hull_of(steps),
    )
    cost = fit_cost(*_columns(seen, pace), source)
    features, seconds, attention = _columns(unseen, pace)
    predicted, predicted_attention = price_table(cost, features)
    found = replace(
        source,
        provenance={**facts, "steps_fitted": sum(len(run.recording.features) for run, _ in seen)},
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
    """Features, step seconds and attention seconds; times are scaled to the median pace of the calibration."""
    features = np.concatenate([run.recording.features for run, _ in runs])
    seconds, attention = (
        np.concatenate([run.log.steps[name] * (pace / probe) for run, probe in runs])
        for name in ("seconds", "attention_s")
    )
    return features, seconds, attention


def _beams(timed: Sequence[TimedCase]) -> tuple[dict[int, float], dict[int, float]]:
    """Churn and evenness by beam width, over all selections except the first of each request."""
    chosen: dict[int, list[Sequence[int]]] = {}
    for entry in timed:
        for choices in choices_of_run(entry.runs[0].recording.parents):
            chosen.setdefault(entry.case.beam_width, []).extend(choices)
    widths = sorted(chosen)
    churn = {width: churn_of_run(width, [len(set(parents)) for parents in chosen[width]]) for width in widths}
    return churn, {width: evenness_of_run(chosen[width]) for width in widths}


def _acceptance(timed: Sequence[TimedCase]) -> float | None:
    """The share of draft tokens that are right, given that all before them were; None without drafts."""
    pairs = [
        (drafts, result.accepted.get(request_id, 0))
        for entry in timed
        for drafted, result in zip(
            entry.runs[0].recording.drafted, entry.runs[0].recording.results, strict=True
        )
        for request_id, drafts in drafted.items()
    ]
    return DraftAcceptance.fitted(*zip(*pairs, strict=True)).share if pairs else None
