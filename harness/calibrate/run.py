"""A calibration: run the designed workloads on the engine, fit the cost model, test it on held-out workloads.

Each case is measured in several passes. Where a yardstick divides the pace out of all times, the runs of all passes but
the first are fitted; else the fastest run is.

The pace of the device changes with its clocks and with other work on the machine. On a CPU a yardstick between the
steps follows it, and measured times are divided by it (`harness.measure.executor`). A GPU has no such yardstick: a
fixed probe that no prediction uses runs beside the measured runs, and predictions are scaled by it. `Stability`
describes whether the pace was constant during a calibration.

For the table model attention is also measured on a grid, one shape at a time.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import count
from statistics import median
from typing import Any

import numpy as np

from engine.core.options import CachePolicy, SchedulerLimits
from engine.runtime.options import Audit
from harness.calibrate import design
from harness.calibrate.store import GRID_BLOCK_SIZE as BLOCK_SIZE
from harness.calibrate.store import calibration_fingerprint, measured_table, save_calibration
from harness.cost.fitted import FittedCost, fit_cost, held_out_error
from harness.cost.grid import Grid, GridPoint, grid_of
from harness.cost.table import TableCost
from harness.measure.engine import measure
from harness.measure.executor import Reading
from harness.metrics import METRICS
from harness.metrics.compute import compute_metrics
from harness.metrics.log import FloatArray
from harness.metrics.record import comparison_error
from harness.replay.beams import choices_of_run, churn_of_run, evenness_of_run
from harness.replay.branches import DraftAcceptance
from harness.replay.cost_model import CostModel, CostSource, PacedCost, price_table
from harness.replay.features import AT
from harness.replay.folds import COLUMNS, hull_of
from harness.replay.recorder import MeasuredRun
from harness.workload.deployment import Deployment, PoolShape
from harness.workload.point import Point, Workload
from harness.workload.simulate import simulate
from traces.trace import Segment, TraceRequest

# Prompts and steps of one to three rows, as under light load. Other work on the machine slows larger batches down more
# than most workloads, and single rows less.
PROBE = design.CalibrationCase("probe", 6, (20, 140), (16, 32), 1.5)

# Probes within this share of their median have the same pace; measurements beside other probes are repeated.
STEADY = 0.10

# Beyond this share the pace has changed, and the calibration warns.
MOVED = 0.15

_STEP_NS = (3_000_000,) * 10_000
_LONE_S = 0.08  # seconds of a lone request of the probe, by the durations above


class PaceSource(StrEnum):
    """What told the pace."""

    probe = "probe"
    yardstick = "yardstick"


@dataclass(frozen=True)
class Pace:
    """The device's pace during a point's runs over that at calibration; above 1 it is slower now.

    By probes: their median, lowest and highest ratio. By the yardstick: the ratio of clock time to the times of the
    record, and the 5th and 95th percentile of the steps' paces. `since` says what the pace is relative to; without a
    calibration that is the first warm-up of the process.
    """

    by: PaceSource
    ratio: float
    low: float
    high: float
    probes: int
    since: str = "calibration"

    def section(self) -> dict[str, float | str]:
        """The section of the record."""
        return asdict(self)


def probe_s(deployment: Deployment) -> float:
    """Seconds of the probe's steps, by the clock of the measured runs. Its step plans are the same on every device.

    1 where the yardstick has divided the pace out of every time already.
    """
    if deployment.has_yardstick:
        return 1.0
    run = measure(design.case_point(deployment, PROBE, _LONE_S), seed=0, step_ns=_STEP_NS)
    return float(run.log.steps["seconds"].sum())


def pace_of(probes: Sequence[float], calibrated_s: float) -> Pace:
    """The median pace of several probes."""
    ratios = [seconds / calibrated_s for seconds in probes]
    return Pace(PaceSource.probe, median(ratios), min(ratios), max(ratios), len(ratios))


def pace_of_runs(runs: Sequence[MeasuredRun]) -> Pace:
    """The pace that the yardstick told during measured runs."""
    paces = np.concatenate([run.log.steps["pace"] for run in runs])
    clocked = sum(float(run.clocked_s.sum()) for run in runs)
    seconds = sum(float(run.log.steps["seconds"].sum()) for run in runs)
    low, high = np.quantile(paces, (0.05, 0.95))
    return Pace(PaceSource.yardstick, clocked / seconds, float(low), float(high), len(np.unique(paces)))


def reference_of(provenance: Mapping[str, Any]) -> Reading | None:
    """The yardstick at the calibration that `provenance` describes; None where it had none."""
    seconds = provenance.get("yardstick_s")
    return Reading(*seconds) if seconds else None


@dataclass(frozen=True)
class Stability:
    """Probe times (on a CPU: paces of the runs) over their median, and the machine's load before and after."""

    low: float
    high: float
    probes: int
    load_before: float
    load_after: float
    cores: int

    @property
    def moved(self) -> bool:
        """Whether the pace changed by more than MOVED."""
        return self.low < 1 - MOVED or self.high > 1 + MOVED

    @property
    def crowded(self) -> bool:
        """Whether the load was higher than the number of cores."""
        return max(self.load_before, self.load_after) > self.cores

    def section(self) -> dict[str, float | bool]:
        """The section of the calibration file."""
        return {**asdict(self), "moved": self.moved, "crowded": self.crowded}

    def warnings(self) -> list[str]:
        """Warnings to print before a user trusts the calibration."""
        found = []
        if self.moved:
            found.append(
                f"the device changed its pace while it was measured (probes from {self.low:.2f} to {self.high:.2f} of "
                "their median): clocks moved, or something else ran. Calibrate again when it is quiet"
            )
        if self.crowded:
            found.append(
                f"the machine was crowded (load average {self.load_before:.1f} before, {self.load_after:.1f} after, "
                f"{self.cores} cores)"
            )
        return found


def stability_of(probes_s: Sequence[float], load_before: float) -> Stability:
    """From the probe times of a calibration, in seconds, or from the paces of its runs."""
    middle = median(probes_s)
    return Stability(
        min(probes_s) / middle,
        max(probes_s) / middle,
        len(probes_s),
        load_before,
        os.getloadavg()[0],
        os.cpu_count() or 1,
    )


def is_steady(ratio: float) -> bool:
    """Whether a probe that took `ratio` times the usual time still has the usual pace; probes scatter."""
    return abs(ratio - 1) <= STEADY


def off_pace(probes_s: Sequence[float]) -> list[int]:
    """Numbers of the probes that are further from the median than STEADY."""
    middle = median(probes_s)
    return [place for place, probe in enumerate(probes_s) if not is_steady(probe / middle)]


METRICS_VALIDATED = ("output_throughput", "tpot_mean", "ttft_p50")
_VALIDATING = 0.75  # share of the budget after which no further workload is started


@dataclass(frozen=True)
class Validated:
    """A held-out workload with its measured runs and the pace of the device beside them."""

    held_out: design.HeldOut
    point: Point
    runs: Sequence[MeasuredRun]
    probe_s: float


def measure_held_out(
    deployment: Deployment,
    lone_request_s: float,
    repeats: int,
    progress: Callable[[str], None],
    budget: design.Budget,
    reference: Reading | None,
) -> list[Validated]:
    """Run every held-out workload `repeats` times while the budget lasts, the first one always."""
    found: list[Validated] = []
    for held_out in design.HELD_OUT:
        if found and not budget.left(_VALIDATING):
            break
        progress(f"held out: {held_out.name}")
        point = design.held_out_point(deployment, held_out, lone_request_s)
        # libraries compile code for new shapes here
        measure(point, seed=design.HELD_OUT_SEED, reference=reference)
        probes, runs = [probe_s(deployment)], list[MeasuredRun]()
        for number in range(repeats):
            runs.append(measure(point, seed=design.HELD_OUT_SEED + number, reference=reference))
            probes.append(probe_s(deployment))
        found.append(Validated(held_out, point, runs, median(probes)))
    return found


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


ROWS = (1, 4, 16, 64)
LENGTHS = (16, 128, 512)
CHUNKS = (16, 128)
CONTEXTS = (0, 256, 512)
_GRID_STEPS = 6  # decode steps a shape
_MOST_TOKENS = 16_384  # of one shape's rows
_CORNERS = 2  # values of an axis that are measured even when the time is up


def measure_grids(
    deployment: Deployment, progress: Callable[[str], None], budget: design.Budget, reference: Reading | None
) -> dict[str, Grid]:
    """`decode` over (rows, KV slots a row) and `prefill` over (chunk, context), in seconds over all layers.

    When the time is up, larger shapes are left out; the fitted model prices them.
    """
    longest = min(deployment.pool.max_model_len, max(LENGTHS) + _GRID_STEPS)
    decode: list[GridPoint] = []
    for length in (length for length in LENGTHS if length + _GRID_STEPS <= longest):
        progress(f"grid: {length} KV slots a row")
        for place, rows in enumerate(rows for rows in ROWS if rows * length <= _MOST_TOKENS):
            if place < _CORNERS or budget.left():
                decode.append(_decode_point(deployment, rows, length, reference))
    prefill: list[GridPoint] = []
    for chunk in CHUNKS:
        progress(f"grid: chunks of {chunk} tokens")
        prefill += _prefill_points(deployment, chunk, longest, reference)
    return {"decode": grid_of(decode), "prefill": grid_of(prefill)}


def _decode_point(deployment: Deployment, rows: int, length: int, reference: Reading | None) -> GridPoint:
    """Median attention of steps in which `rows` sequences decode, scaled to `length` slots each."""
    half = _GRID_STEPS // 2
    run = _run_rows(deployment, rows, max(1, length - half), _GRID_STEPS, rows * length, reference)
    steps = run.recording.features
    chosen = (steps[:, AT.decode_rows] == rows) & (steps[:, AT.prefill_rows] == 0)
    middle = np.argmin(np.abs(steps[chosen, AT.decode_kv] / rows - length))
    nearest = run.log.steps["attention_s"][chosen][max(0, middle - 1) : middle + 2]
    return rows, length, float(np.median(nearest))


def _prefill_points(
    deployment: Deployment, chunk: int, longest: int, reference: Reading | None
) -> list[GridPoint]:
    """Attention of one request's chunks of `chunk` tokens, at each of CONTEXTS that its prompt reaches."""
    prompt = min(longest - 1, max(CONTEXTS) + chunk)
    run = _run_rows(deployment, 1, prompt, 1, chunk, reference)
    features, seconds = run.recording.features, run.log.steps["attention_s"]
    context = features[:, AT.prefill_kv] - features[:, AT.prefill_tokens]
    found: list[GridPoint] = []
    for wanted in CONTEXTS:
        at = (
            (features[:, AT.prefill_rows] == 1)
            & (features[:, AT.prefill_tokens] == chunk)
            & (context == wanted)
        )
        if at.any():
            found.append((chunk, wanted, float(np.median(seconds[at]))))
    return found


def _run_rows(
    deployment: Deployment, rows: int, prompt: int, output: int, budget: int, reference: Reading | None
) -> MeasuredRun:
    """Run `rows` equal requests at once."""
    blocks = rows * -(-(prompt + output) // BLOCK_SIZE)
    shape = blocks, BLOCK_SIZE, deployment.pool.kv_bytes_per_token, prompt + output
    pool = PoolShape(CachePolicy.paged, *shape, prefix_caching=False)
    text = (Segment(None, prompt),)
    requests = tuple(TraceRequest(number, 0, prompt, output, text) for number in range(rows))
    limits = SchedulerLimits(max(budget, rows), max_running=rows, max_model_len=prompt + output)
    point = Point(deployment.alone(pool, limits), Workload(design.planned_trace("grid", requests)))
    return measure(point, seed=design.SEED, reference=reference)


# Passes over the cases without a budget: PASSES where the quietest counts, MOST_PASSES where a yardstick lets all but
# the first count, which is for the code that libraries compile for new shapes. With a budget there are as many as its
# share allows, up to MOST_PASSES.
PASSES, MOST_PASSES = 2, 4

# Share of the budget after which no further case is started.
FITTING = 0.5

_FEWEST_CASES = 3
_VALIDATION_REPEATS = 3
CaseProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TimedCase:
    """The runs of a case that are fitted, which have equal step plans, and the fastest probe of the device beside any
    run of it (1 with a yardstick).
    """

    case: design.CalibrationCase
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
        deployment: Deployment,
        cases: Sequence[design.CalibrationCase],
        lone_request_s: float,
        report: Callable[[str], None],
        budget: design.Budget,
        reference: Reading | None,
    ) -> None:
        self._deployment = deployment
        self._cases = cases
        self._lone = lone_request_s
        self._report = report
        self._budget = budget
        self._reference = reference
        self._probe = probe_s(deployment)
        self.probes = [] if reference else [self._probe]
        self._kept: dict[design.CalibrationCase, TimedCase] = {}

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

    def _run(self, case: design.CalibrationCase, number: int) -> None:
        self._report(case.name if number == 0 else f"{case.name}, pass {number + 1}")
        before, known = self._probe, self._kept.get(case)
        point = design.case_point(self._deployment, case, self._lone)
        run = measure(
            point,
            seed=design.SEED,
            step_ns=known.runs[0].recording.step_ns if known else None,
            reference=self._reference,
        )
        self._probe = probe_s(self._deployment)
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
    deployment: Deployment,
    progress: CaseProgress | None = None,
    *,
    budget_s: float | None = None,
    grid: bool = False,
) -> FittedCost:
    """Measure, fit, validate and store; at most a minute without a budget. `progress` gets (case, done, all).

    Without a budget held-out workloads are measured once, so that there is no spread of repeats.
    """
    return full_calibration(deployment, progress, budget_s=budget_s, grid=grid).fitted


def full_calibration(
    deployment: Deployment, progress: CaseProgress | None = None, *, budget_s: float | None, grid: bool
) -> Calibration:
    """The same, with all results; `grid` also measures attention shape by shape for the `table` model."""
    deployment = replace(deployment, engine=replace(deployment.engine, audit=Audit.off))
    begun, load, budget = datetime.now(UTC), os.getloadavg()[0], design.Budget(budget_s)
    lone, lone_wall, reference = _lone_request_s(deployment)
    cases = design.design(deployment, lone_wall, budget_s)
    ahead, done = len(cases) * (MOST_PASSES if reference else PASSES) + len(design.HELD_OUT), count()

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
    }
    fitted = _fitted(deployment, timed, held_out, pace, facts)
    save_calibration(deployment, fitted, grids)
    measured = {entry.case.name for entry in timed}
    left_out = tuple(case.name for case in cases if case.name not in measured)
    table = measured_table(fitted, grids) if grids else None
    return Calibration(fitted, table, stability, grid, left_out)


def _lone_request_s(deployment: Deployment) -> tuple[float, float, Reading | None]:
    """Seconds of a request that runs alone, by the engine's clock (the unit of loads) and by the wall clock.

    Also the reading of the yardstick, if there is one: the reference of all times from now on. The first run warms the
    engine up.
    """
    for _ in range(2):
        begun = time.perf_counter()
        run = measure(design.probe_point(deployment, design.LONE_REQUEST), seed=design.SEED)
    wall = time.perf_counter() - begun
    reference = Reading(*run.yardstick_s) if run.yardstick_s else None
    return run.log.span_s / design.LONE_REQUEST.requests, wall / design.LONE_REQUEST.requests, reference


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
