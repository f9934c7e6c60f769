"""A calibration: run the designed workloads on the engine, fit the cost model, test it on held-out workloads.

Each case is measured in several passes. Where a yardstick divides the pace out of all times, the runs of all passes but
the first are fitted; else the fastest run is.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

import numpy as np

from engine.runtime.options import Audit
from harness.calibrate.attention_grid import measure_grids
from harness.calibrate.design import (
    LONE_REQUEST,
    SEED,
    Budget,
    CalibrationCase,
    case_workload,
    design,
    probe_workload,
)
from harness.calibrate.pace import Stability, is_steady, off_pace, pace_of_runs, probe_s, stability_of
from harness.calibrate.store import calibration_fingerprint, measured_table, save_calibration
from harness.calibrate.validate import HELD_OUT, Validated, measure_held_out, validation
from harness.config.schema import RunConfig
from harness.cost.fitted import FittedCost, fit_cost, held_out_error
from harness.cost.table import TableCost
from harness.environment import device_identity
from harness.measure.engine import measure
from harness.measure.yardstick import Reading
from harness.metrics.log import Column, FloatArray
from harness.replay.beams import choices_of_run, churn_of_run, evenness_of_run
from harness.replay.branches import DraftAcceptance
from harness.replay.cost_model import CostSource, price_table
from harness.replay.recorder import MeasuredRun
from harness.replay.streaming import COLUMNS, hull_of
from harness.workload.devices import clock_of

PASSES, MOST_PASSES = 2, 4
"""Passes over the cases without a budget: PASSES where the quietest counts, MOST_PASSES where a yardstick lets all but
the first count, which is for the code that libraries compile for new shapes. With a budget there are as many as its
share allows, up to MOST_PASSES."""

FITTING = 0.5
"""Share of the budget after which no further case is started."""

_FEWEST_CASES = 3
_VALIDATION_REPEATS = 3
CaseProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TimedCase:
    """The runs of a case that are fitted, which have equal step plans, and the fastest probe of the device beside any
    run of it (1 with a yardstick).
    """

    case: CalibrationCase
    runs: tuple[MeasuredRun, ...]
    probe_s: float

    @property
    def seconds(self) -> float:
        """Seconds of all steps of its runs."""
        return sum(float(run.log.steps["seconds"].sum()) for run in self.runs)


class Passes:
    """Measures the cases in several passes while the budget lasts: call `measure()` once.

    Without a yardstick a probe of the pace runs before and after each case. `probes` holds their seconds; with a
    yardstick, whose `reference` is given, the paces of all runs.
    """

    def __init__(
        self,
        config: RunConfig,
        cases: Sequence[CalibrationCase],
        lone_request_s: float,
        report: Callable[[str], None],
        budget: Budget,
        reference: Reading | None,
    ) -> None:
        self._config = config
        self._cases = cases
        self._lone = lone_request_s
        self._report = report
        self._budget = budget
        self._reference = reference
        self._probe = probe_s(config)
        self.probes = [] if reference else [self._probe]
        self._kept: dict[CalibrationCase, TimedCase] = {}

    def measure(self) -> list[TimedCase]:
        """The runs to fit of every case for which there was time; the first few cases always run."""
        most = MOST_PASSES if self._budget.limited or self._reference else PASSES
        for number in range(most):
            for case in self._cases if number % 2 == 0 else reversed(self._cases):
                if len(self._kept) >= _FEWEST_CASES and not self._budget.left(FITTING):
                    break
                self._run(case, number)
        found = self._found()
        for place in off_pace([entry.probe_s for entry in found]):
            if self._budget.left(FITTING):
                self._run(found[place].case, MOST_PASSES)
        return self._found()

    def _run(self, case: CalibrationCase, number: int) -> None:
        self._report(case.name if number == 0 else f"{case.name}, pass {number + 1}")
        before, known = self._probe, self._kept.get(case)
        workload = case_workload(self._config, case, self._lone)
        run = measure(
            self._config,
            workload,
            seed=SEED,
            step_ns=known.runs[0].recorder.step_ns if known else None,
            reference=self._reference,
        )
        self._probe = probe_s(self._config)
        self.probes.append(pace_of_runs([run]).ratio if self._reference else self._probe)
        found = TimedCase(case, (run,), (before + self._probe) / 2)
        if known is not None and self._reference:
            found = replace(found, runs=(*known.runs, run) if number > 1 else (run,))
        elif known is not None:
            quietest = min(known, found, key=lambda timed: timed.seconds)
            found = replace(quietest, probe_s=min(known.probe_s, found.probe_s))
        self._kept[case] = found

    def _found(self) -> list[TimedCase]:
        """The runs so far, in the order of the cases."""
        return [self._kept[case] for case in self._cases if case in self._kept]


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration: the models, and whether the pace of the device was constant."""

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
    """Measure, fit, validate and store; at most a minute without a budget. `progress` gets (case, done, all).

    Without a budget held-out workloads are measured once, so that there is no spread of repeats.
    """
    return full_calibration(config, progress, budget_s=budget_s, grid=grid).fitted


def full_calibration(
    config: RunConfig, progress: CaseProgress | None = None, *, budget_s: float | None, grid: bool
) -> Calibration:
    """The same, with all results; `grid` also measures attention shape by shape for the `table` model."""
    config = replace(config, engine=replace(config.engine, audit=Audit.off))
    begun, load, budget = datetime.now(UTC), os.getloadavg()[0], Budget(budget_s)
    lone, lone_wall, reference = _lone_request_s(config)
    cases = design(config, lone_wall, budget_s)
    passes_ahead = MOST_PASSES if reference else PASSES
    report = _CaseCounter(progress, len(cases) * passes_ahead + len(HELD_OUT))
    passes = Passes(config, cases, lone, report, budget, reference)
    timed = passes.measure()
    pace = median(entry.probe_s for entry in timed)
    repeats = 1 if budget_s is None else _VALIDATION_REPEATS
    held_out = measure_held_out(config, lone, repeats, report, budget, reference)
    grids = measure_grids(config, report, budget, reference) if grid and budget.left() else {}
    probes = [*passes.probes, *_beside(held_out, reference)]
    stability = stability_of(probes, load)
    facts = {
        "what": "non-negative least squares on measured steps",
        "device": device_identity(config.engine.device),
        "clock": str(clock_of(config)),
        "cases": [f"{entry.case.name}: {entry.case.requests} requests" for entry in timed],
        **({"yardstick_s": list(reference)} if reference else {"probe_s": pace}),
        "started": begun.isoformat(timespec="seconds"),
        "seconds": budget.spent_s,
        "stability": stability.section(),
    }
    fitted = _fitted(config, timed, held_out, pace, facts)
    save_calibration(config, fitted, grids)
    measured = {entry.case.name for entry in timed}
    left_out = tuple(case.name for case in cases if case.name not in measured)
    table = measured_table(fitted, grids) if grids else None
    return Calibration(fitted, table, stability, grid, left_out)


class _CaseCounter:
    """Reports the next case and how many are done."""

    def __init__(self, progress: CaseProgress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, name: str) -> None:
        if self._progress:
            self._progress(name, self._done, max(self._total, self._done + 1))
        self._done += 1


def _beside(held_out: Sequence[Validated], reference: Reading | None) -> list[float]:
    """The probes beside the held-out workloads, or with a yardstick their paces."""
    if reference is None:
        return [entry.probe_s for entry in held_out]
    return [pace_of_runs([run]).ratio for entry in held_out for run in entry.runs]


def _lone_request_s(config: RunConfig) -> tuple[float, float, Reading | None]:
    """Seconds of a request that runs alone, by the engine's clock (the unit of loads) and by the wall clock.

    Also the reading of the yardstick, if there is one: the reference of all times from now on. The first run warms the
    engine up.
    """
    for _ in range(2):
        begun = time.perf_counter()
        run = measure(config, probe_workload(config, LONE_REQUEST), seed=SEED)
    wall = time.perf_counter() - begun
    reference = Reading(*run.yardstick_s) if run.yardstick_s else None
    return run.log.span_s / LONE_REQUEST.requests, wall / LONE_REQUEST.requests, reference


def _fitted(
    config: RunConfig,
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
    source = CostSource(
        "fitted",
        config.model.name,
        calibration_fingerprint(config),
        beam_churn=churn,
        beam_evenness=evenness,
        draft_acceptance=_acceptance(timed),
        hull=hull_of(_all_steps([run for run, _ in seen])),
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
    """Features, step seconds and attention seconds; times are scaled to the median pace of the calibration."""
    features = np.concatenate([run.recorder.features for run, _ in runs])
    seconds, attention = (
        np.concatenate([run.log.steps[name] * (pace / probe) for run, probe in runs])
        for name in ("seconds", "attention_s")
    )
    return features, seconds, attention


def _all_steps(runs: Sequence[MeasuredRun]) -> dict[str, Column]:
    return {name: np.concatenate([run.log.steps[name] for run in runs]) for name in COLUMNS}


def _beams(timed: Sequence[TimedCase]) -> tuple[dict[int, float], dict[int, float]]:
    """Churn and evenness by beam width, over all selections except the first of each request."""
    chosen: dict[int, list[Sequence[int]]] = {}
    for entry in timed:
        for choices in choices_of_run(entry.runs[0].recorder.parents):
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
            entry.runs[0].recorder.drafted, entry.runs[0].recorder.results, strict=True
        )
        for request_id, drafts in drafted.items()
    ]
    return DraftAcceptance.fitted(*zip(*pairs, strict=True)).share if pairs else None
