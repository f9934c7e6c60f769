"""What a calibration runs on the engine: the cases in several passes, the held-out workloads, and a grid of shapes.

Each case is measured in several passes. Where a yardstick divides the pace out of all times, the runs of all passes but
the first are fitted; else the fastest run is. For the table model attention is measured on a grid, one shape at a time.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from engine.core.options import CachePolicy, SchedulerLimits
from harness.cost.grid import GRID_BLOCK_SIZE as BLOCK_SIZE
from harness.cost.grid import Grid, GridPoint, grid_of
from harness.measure.cases import (
    HELD_OUT_SEED,
    LONE_REQUEST,
    SEED,
    Budget,
    CalibrationCase,
    HeldOut,
    alone,
    case_point,
    held_out_of,
    held_out_point,
    planned_trace,
    probe_point,
)
from harness.measure.engine import measure
from harness.measure.executor import Reading
from harness.measure.pace import off_pace, pace_of_runs, probe_s
from harness.replay.features import AT
from harness.replay.recorder import MeasuredRun
from harness.workload.deployment import Deployment, PoolShape
from harness.workload.point import Point, Workload
from traces.trace import Segment, TraceRequest

# Passes over the cases without a budget: PASSES where the quietest counts, MOST_PASSES where a yardstick lets all but
# the first count, which is for the code that libraries compile for new shapes. With a budget there are as many as its
# share allows, up to MOST_PASSES.
PASSES, MOST_PASSES = 2, 4

# Share of the budget after which no further case is started.
FITTING = 0.5

_FEWEST_CASES = 3
_VALIDATING = 0.75  # share of the budget after which no further workload is started


def lone_request_s(deployment: Deployment) -> tuple[float, float, Reading | None]:
    """Seconds of a request that runs alone, by the engine's clock (the unit of loads) and by the wall clock.

    Also the reading of the yardstick, if there is one: the reference of all times from now on. The first run warms the
    engine up.
    """
    for _ in range(2):
        begun = time.perf_counter()
        run = measure(probe_point(deployment, LONE_REQUEST), seed=SEED)
    wall = time.perf_counter() - begun
    reference = Reading(*run.yardstick_s) if run.yardstick_s else None
    return run.log.span_s / LONE_REQUEST.requests, wall / LONE_REQUEST.requests, reference


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
        deployment: Deployment,
        cases: Sequence[CalibrationCase],
        lone_request_s: float,
        report: Callable[[str], None],
        budget: Budget,
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
        self._kept: dict[CalibrationCase, TimedCase] = {}
        self._levels: defaultdict[int, dict[CalibrationCase, float]] = defaultdict(dict)

    @property
    def levels(self) -> list[float]:
        """Seconds of each pass but the first over the mean of its cases: passes are spread over the calibration's time,
        so that they tell how well it would repeat itself. Cases with one such pass are left out."""
        passes = [found for number, found in sorted(self._levels.items()) if 0 < number < MOST_PASSES]
        each = {case: [found[case] for found in passes if case in found] for case in self._kept}
        means = {case: float(np.mean(seconds)) for case, seconds in each.items() if len(seconds) > 1}
        ratios = [[found[case] / means[case] for case in means if case in found] for found in passes]
        return [float(np.mean(one)) for one in ratios if one]

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
        point = case_point(self._deployment, case, self._lone)
        step_ns = known.runs[0].recording.step_ns if known else None
        run = measure(point, seed=SEED, step_ns=step_ns, reference=self._reference)
        self._probe = probe_s(self._deployment)
        self.probes.append(pace_of_runs([run]).ratio if self._reference else self._probe)
        found = TimedCase(case, (run,), (before + self._probe) / 2)
        self._levels[number][case] = found.seconds / found.probe_s
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
class Validated:
    """A held-out workload with its measured runs and the pace of the device beside them."""

    held_out: HeldOut
    point: Point
    runs: Sequence[MeasuredRun]
    probe_s: float


def measure_held_out(
    deployment: Deployment,
    lone_request_s: float,
    repeats: int,
    progress: Callable[[str], None],
    budget: Budget,
    reference: Reading | None,
) -> list[Validated]:
    """Run every held-out workload `repeats` times while the budget lasts, the first one always."""
    found: list[Validated] = []
    for held_out in held_out_of(deployment):
        if found and not budget.left(_VALIDATING):
            break
        progress(f"held out: {held_out.name}")
        point = held_out_point(deployment, held_out, lone_request_s)
        # libraries compile code for new shapes here
        measure(point, seed=HELD_OUT_SEED, reference=reference)
        probes, runs = [probe_s(deployment)], list[MeasuredRun]()
        for number in range(repeats):
            runs.append(measure(point, seed=HELD_OUT_SEED + number, reference=reference))
            probes.append(probe_s(deployment))
        found.append(Validated(held_out, point, runs, median(probes)))
    return found


ROWS = (1, 4, 16, 64)
LENGTHS = (16, 128, 512)
CHUNKS = (16, 128)
CONTEXTS = (0, 256, 512)
_GRID_STEPS = 6  # decode steps a shape
_MOST_TOKENS = 16_384  # of one shape's rows
_CORNERS = 2  # values of an axis that are measured even when the time is up


def measure_grids(
    deployment: Deployment, progress: Callable[[str], None], budget: Budget, reference: Reading | None
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
    point = Point(alone(deployment, pool, limits), Workload(planned_trace("grid", requests)))
    return measure(point, seed=SEED, reference=reference)
