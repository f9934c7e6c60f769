"""Calibration: run the plan's workloads on the engine, fit the cost model, and test it on the held-out ones."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median

import numpy as np

from harness.config.schema import RunConfig
from harness.environment import device_identity
from harness.measured.calibration import calibration_fingerprint, save_calibration
from harness.measured.engine import MeasuredRun, measure
from harness.measured.pace import probe_s
from harness.measured.plan import CASES, SEED, CalibrationCase, case_workload, probe_workload
from harness.point.clock import clock_of
from harness.sim.cost import CostSource, FloatArray, price_table
from harness.sim.fitted import FittedCost, fit_cost, held_out_error
from harness.sim.coalescence import churn_of_run

CaseProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class _Timed:
    """A case's run, and the pace of the device just before it."""

    case: CalibrationCase
    run: MeasuredRun
    probe_s: float


def calibrate(config: RunConfig, progress: CaseProgress | None = None) -> FittedCost:
    """Measure, fit, validate and store; takes some tens of seconds. Progress gets (case, done, cases)."""
    started, load = datetime.now(UTC).isoformat(timespec="seconds"), os.getloadavg()[0]
    lone = _lone_request_s(config)
    timed: list[_Timed] = []
    for number, case in enumerate(CASES):
        if progress:
            progress(case.name, number, len(CASES))
        probe = probe_s(config)
        timed.append(_Timed(case, measure(config, case_workload(config, case, lone), seed=SEED), probe))
    cost = _fit(config, timed, {"started": started, "load_average": (load, os.getloadavg()[0])})
    save_calibration(config, cost)
    return cost


def _lone_request_s(config: RunConfig) -> float:
    """How long one request takes alone: the unit of the plan's loads. The first run also warms the engine up."""
    case = CalibrationCase("alone", 2, (64, 64), (16, 16), 0)
    for _ in range(2):
        run = measure(config, probe_workload(config, case), seed=SEED)
    return run.log.span_s / case.requests


def _fit(config: RunConfig, timed: list[_Timed], provenance: dict[str, object]) -> FittedCost:
    pace = median(entry.probe_s for entry in timed)
    seen = [entry for entry in timed if not entry.case.held_out]
    unseen = [entry for entry in timed if entry.case.held_out]
    blank = CostSource("fitted", config.model.name, calibration_fingerprint(config))
    cost = fit_cost(*_columns(seen, pace), blank)
    features, seconds, attention = _columns(unseen, pace)
    predicted, predicted_attention = price_table(cost, features)
    heldout = {
        "step": held_out_error(predicted, seconds),
        "attention": held_out_error(predicted_attention, attention),
    }
    facts = {
        "what": "non-negative least squares on measured steps",
        "device": device_identity(config.engine.device),
        "clock": str(clock_of(config)),
        "steps_fitted": sum(len(entry.run.recorder.features) for entry in seen),
        "steps_held_out": len(seconds),
        "cases": [entry.case.name for entry in timed],
        "probe_s": pace,
        "pace_range": [min(e.probe_s for e in timed) / pace, max(e.probe_s for e in timed) / pace],
        **provenance,
    }
    source = replace(blank, provenance=facts, heldout=heldout, beam_churn=_churn(timed))
    return replace(cost, source=source)


def _columns(timed: list[_Timed], pace: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Features, step seconds and attention seconds, times brought to the median pace of the calibration."""
    features = np.concatenate([entry.run.recorder.features for entry in timed])
    seconds, attention = (
        np.concatenate([entry.run.log.steps[name] * (pace / entry.probe_s) for entry in timed])
        for name in ("seconds", "attention_s")
    )
    return features, seconds, attention


def _churn(timed: list[_Timed]) -> dict[int, float]:
    """Beams dropped per step by beam width, over all selections but a request's first."""
    distinct: dict[int, list[int]] = {}
    for entry in timed:
        begun: set[int] = set()
        for parents in entry.run.recorder.parents:
            for request_id, chosen in parents.items():
                if request_id in begun:
                    distinct.setdefault(entry.case.beam_width, []).append(len(set(chosen)))
                begun.add(request_id)
    return {width: churn_of_run(width, counts) for width, counts in sorted(distinct.items())}
