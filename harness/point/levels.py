"""How far prediction and measurement are apart, level by level: counts, kernel, teacher-forced steps, free run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.measured.engine import MeasuredRun
from harness.metrics import compute_metrics
from harness.metrics.log import RunLog
from harness.point.attribution import attribution, divergence, suspect
from harness.point.simulate import play_back
from harness.point.workload import Workload
from harness.sim.cost import CostModel, price_table
from harness.sim.executors import RecordingEndedError
from harness.sim.fitted import held_out_error
from harness.sim.recorder import digests_differ


def error_levels(
    workload: Workload,
    runs: Sequence[MeasuredRun],
    cost: CostModel,
    comparison: Sequence[Mapping[str, Any]],
    simulated: RunLog,
) -> dict[str, Any]:
    """The record's `levels` section, from all measured runs."""
    features = np.concatenate([run.recorder.features for run in runs])
    attention = np.concatenate([run.log.steps["attention_s"] for run in runs])
    _, predicted = price_table(cost, features)
    return {
        "counts": _counts(workload, runs),
        "kernel": {
            **held_out_error(predicted, attention),
            "measured_mean_s": float(attention.mean()),
            "predicted_mean_s": float(predicted.mean()),
        },
        "teacher_forced": teacher_forced(runs, cost),
        "spread": _spread(runs, cost),
        "attribution": attribution(runs, cost, compute_metrics(simulated)),
        "divergence": divergence(runs[0].log, simulated),
        "suspect": suspect(runs, cost),
        "free_running": {row["metric"]: row["error"] for row in comparison if row["error"] is not None},
    }


def _spread(runs: Sequence[MeasuredRun], cost: CostModel) -> dict[str, float | None]:
    """How far the errors of single runs, for attention and for steps in total, lie apart; None for a single run."""
    if len(runs) < 2:
        return {"kernel": None, "teacher_forced": None}
    totals: dict[str, list[float]] = {"kernel": [], "teacher_forced": []}
    for run in runs:
        seconds, attention = price_table(cost, run.recorder.features)
        totals["kernel"].append(float(attention.sum() / run.log.steps["attention_s"].sum() - 1))
        totals["teacher_forced"].append(float(seconds.sum() / run.log.steps["seconds"].sum() - 1))
    return {level: max(errors) - min(errors) for level, errors in totals.items()}


def teacher_forced(runs: Sequence[MeasuredRun], cost: CostModel) -> dict[str, float]:
    """Errors of the cost model on the plans that the measured runs produced, step by step."""
    features = np.concatenate([run.recorder.features for run in runs])
    seconds = np.concatenate([run.log.steps["seconds"] for run in runs])
    return held_out_error(price_table(cost, features)[0], seconds)


def _counts(workload: Workload, runs: Sequence[MeasuredRun]) -> dict[str, Any]:
    """Each run's durations, fed to the simulated side, must give the run's own plans."""
    steps = 0
    for number, run in enumerate(runs):
        measured = run.recorder.digests
        steps += len(measured)
        try:
            first = digests_differ(play_back(workload, run.recorder).digests, measured)
        except RecordingEndedError:
            first = len(measured)
        if first is not None:
            return {"identical": False, "steps": steps, "first_difference": f"run {number}, step {first}"}
    return {"identical": True, "steps": steps, "first_difference": None}
