"""The best cell of a grid of settings, of which a few are measured, and how much worse than the best it may be.

All cells are predicted. A measurement tells how far the prediction of its cell is off, and what that says of the
others: the logarithm of measured over predicted is taken as the sum of a level, a part of each value of each axis, and
a part of the cell alone, all normal. Their spreads are not known beforehand: many are drawn, each as likely as it
explains what was measured (a Gaussian process whose covariance sums over the values that two cells share, integrated
over its spreads). What the cells may be is drawn from that. The cell that is measured next is the one that is most
often the best of them, and the *regret* of a choice is how much worse it is than the best, in 19 of 20 draws at most.

The predictions do not follow the pace of a GPU, as those of a sweep do: a slower day is a part of the level.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from scipy import stats

from harness.capacity.case import LOST, LoadCase
from harness.capacity.slo import Goal, Slo, broken_goals
from harness.config.errors import UserError
from harness.metrics import METRICS
from harness.metrics.log import FloatArray, IntArray
from harness.point import PointSession
from harness.point.run import calibrated_cost
from harness.report.numbers import digits
from harness.sweep.plan import PlannedPoint, plan_sweep, run_request
from harness.workload.point import resolve
from harness.workload.simulate import predict

SURE = 0.95  # of the draws hold a regret that is stated
_DRAWS = 4000
_PRECISE = 0.01  # a difference that is not worth a measurement, whatever the noise
_LEVEL = 0.3  # standard deviations of logarithms: of the level; those of the others are learned between these
_SPREADS = (0.001, 0.2)
_SAMPLES = 300  # of the spreads
_TINY = 1e-8  # a variance that keeps covariances positive
_LEAST = 3  # cells, without which nothing is known of the spreads
_MEDIAN = 1.2533  # the standard error of a median over that of a mean


@dataclass(frozen=True)
class Cell:
    """A cell that was measured: its place in the grid, and the scores of its runs."""

    place: int
    runs: tuple[float, ...]


@dataclass(frozen=True)
class Tuned:
    """The chosen cell, those that were measured in their order, and the shares by which it may be worse.

    `regret` is that against the best cell of the whole grid; `noise` the share by which two equal cells differ in one
    of twenty comparisons.
    """

    place: int
    cells: tuple[Cell, ...]
    regret: float
    noise: float

    @property
    def known(self) -> bool:
        """Whether no other cell is better by more than measuring can tell."""
        return self.regret <= max(self.noise, _PRECISE)


def score(slo: Slo, metrics: Mapping[str, float]) -> float:
    """The figure of an SLO that is farthest from its bound, as a multiple of it: the less, the better."""
    return max(goal.share(metrics) for goal in slo)


Figures = Mapping[str, float]


@dataclass
class _Grid:
    """The cells of a request for a sweep, the predicted figures of each, and those of each run of what was measured."""

    points: tuple[PlannedPoint, ...]
    values: list[list[str]]
    predicted: list[Figures]
    served: int  # requests at each of them
    refused: int  # cells at which fewer are served
    session: PointSession
    runs: dict[int, list[Figures]]

    @classmethod
    def of(cls, words: Sequence[str]) -> "_Grid":
        request, session = run_request(words), PointSession()
        if not request.varying:
            reason = "--measure N needs a grid: several values of some settings, as scheduler.max_running=32,64,128"
            raise UserError(reason)
        points = plan_sweep(request, session).points
        if not points[0].config.measure:
            raise UserError("--measure N measures: leave out measure=false")
        if any(planned.config.replay.repeats < 2 for planned in points):
            reason = "--measure N tells noise from runs: replay.repeats must be at least 2 (default: 3)"
            raise UserError(reason)
        found, counts = [], []
        for planned in points:
            point = resolve(planned.config)
            cost = calibrated_cost(point.deployment, None, session.repeated)
            found.append(predict(point, cost, rows=False))
            lost = any(found[-1].outcome.get(name) for name in LOST)
            counts.append(0 if lost else len(point.trace.requests))
        served = max(counts)
        kept = [at for at, count in enumerate(counts) if count == served]
        if not served:
            raise UserError("--measure N: at every cell of the grid there are requests that are not served")
        given = [dict(text.split("=", 1) for text in points[at].overrides) for at in kept]
        values = [[each[key] for key in request.varying] for each in given]
        chosen = tuple(points[at] for at in kept)
        predicted: list[Figures] = [found[at].metrics for at in kept]
        return cls(chosen, values, predicted, served, len(points) - len(kept), session, {})

    def measure(self, place: int) -> list[Figures]:
        """Measure a cell; the figures of its runs."""
        record = self.session.run_point(self.points[place].config).record
        self.runs[place] = list(record.measured["runs"])
        return self.runs[place]


def tune_grid(words: Sequence[str], slo: Slo, most: int, tell: Callable[[str], None]) -> Iterator[str]:
    """The best cell of the grid that `words` span, as overrides of a sweep, in sentences: first what is measured.

    Raises:
        UserError: there is no grid, a cell is not allowed, or no run has a figure of the SLO.
    """
    tell("all cells are predicted; a device that is not calibrated is so first, which takes a minute or more")
    grid = _Grid.of(words)
    yield str(LoadCase(grid.points[0].config, slo, requests=grid.served).scope)

    def measure(place: int) -> list[float]:
        tell(f"measuring {grid.points[place].label}")
        return scores_of(slo, grid.measure(place))

    yield from _said(grid, slo, tune(grid.values, scores_of(slo, grid.predicted), measure, most))


def scores_of(slo: Slo, figures: Sequence[Figures]) -> list[float]:
    """The scores of cells or runs. Raises UserError where a figure of the SLO is missing or 0."""
    scores = [score(slo, one) for one in figures]
    if not min(scores) > 0 or any(goal.metric not in one for goal in slo for one in figures):
        names = " or ".join(goal.metric for goal in slo)
        raise UserError(
            f"--slo: somewhere there is no {names}, or it is 0, so cells cannot be compared by it"
        )
    return scores


def _said(grid: _Grid, slo: Slo, found: Tuned) -> list[str]:
    best, figures = grid.points[found.place], _medians(grid, slo, found.place)
    shown = ", ".join(f"{name} {_figure(name, value)}" for name, value in figures.items())
    broken = ", ".join(map(str, broken_goals(slo, figures)))
    total = len(grid.points)
    engine = "vLLM" if grid.points[0].config.engine.on_vllm else "PageTwin's engine"
    worst = max(slo, key=lambda goal: goal.share(figures))
    lines = [
        f"Best of {total} cells, {len(found.cells)} of them measured on {engine}: {best.label}: {shown}"
        + (f". It does not hold {broken}." if broken else "."),
        f"Regret: {regret_words(found, worst)} that of the best of all {total} cells. Two cells that are equal differ "
        f"by up to {100 * found.noise:.1f} % when they are measured.",
    ]
    if not found.known:
        lines.append("That is more than the noise: measure more cells, or write fewer.")
    if grid.refused:
        lines.append(f"Left out: {grid.refused} cells at which fewer requests are served.")
    lines += [
        f"  {grid.points[at].label}: {_beside(grid, slo, at)}" for at in (one.place for one in found.cells)
    ]
    return lines


def regret_words(found: Tuned, goal: Goal) -> str:
    """How much worse than the best cell the chosen one may be, in its figure of a goal, without the last words."""
    worse = found.regret if goal.upper else found.regret / (1 + found.regret)
    side = "above" if goal.upper else "below"
    return f"in {100 * SURE:.0f} of 100 cases its {goal.metric} is at most {100 * worse:.1f} % {side}"


def _medians(grid: _Grid, slo: Slo, place: int) -> dict[str, float]:
    """The median of each figure of the SLO over the runs of a cell."""
    names = dict.fromkeys(goal.metric for goal in slo)
    found = {name: [run[name] for run in grid.runs[place] if name in run] for name in names}
    return {name: median(values) for name, values in found.items() if values}


def _beside(grid: _Grid, slo: Slo, place: int) -> str:
    """Each figure of the SLO at a cell, measured and predicted."""
    predicted = grid.predicted[place]
    return "; ".join(
        f"{name} {_figure(name, value)}, predicted {_figure(name, predicted[name])} "
        f"({100 * (predicted[name] / value - 1):+.1f} %)"
        for name, value in _medians(grid, slo, place).items()
        if name in predicted and value
    )


def _figure(name: str, value: float) -> str:
    return f"{digits(value)} {METRICS[name].unit}"


def tune(
    values: Sequence[Sequence[Any]],
    predicted: Sequence[float],
    measure: Callable[[int], Sequence[float]],
    most: int,
) -> Tuned:
    """Measure at most `most` cells of a grid, until the best is known.

    Args:
        values: of each cell the value of each axis.
        predicted: of each cell its score, above 0; the least is the best.
        measure: measures a cell: the score of each run.
        most: cells that may be measured, at least 1.
    """
    logs, shared = np.log(np.asarray(predicted, np.float64)), _shared(values)
    cells, place = list[Cell](), int(np.argmin(logs))
    while True:
        cells.append(Cell(place, tuple(measure(place))))
        found, chances = _judged(logs, shared, cells)
        if len(cells) == min(most, len(logs)) or (found.known and len(cells) >= _LEAST):
            return found
        place = int(np.argmax(chances))


def _shared(values: Sequence[Sequence[Any]]) -> FloatArray:
    """`[axes, cells, cells]`: 1 where two cells have the same value of an axis that varies."""
    columns = [np.array([str(value) for value in column]) for column in zip(*values, strict=True)]
    varying = [column for column in columns if len(set(column)) > 1]
    found = np.array([column[:, None] == column[None, :] for column in varying], dtype=np.float64)
    return found.reshape(len(varying), len(values), len(values))


def _judged(logs: FloatArray, shared: FloatArray, cells: Sequence[Cell]) -> tuple[Tuned, FloatArray]:
    """What is known after these cells, and of each other cell how often it is the best (-1: measured)."""
    at = np.array([cell.place for cell in cells])
    seen = np.array([float(np.median(np.log(cell.runs))) for cell in cells])
    noise = _noise(cells)
    error = noise * np.array([_MEDIAN / np.sqrt(len(cell.runs)) for cell in cells])
    draws = logs + _draws(shared, at, seen - logs[at], error)
    place = int(at[np.argmin(draws[:, at].mean(axis=0))])
    regret = float(np.quantile(np.expm1(draws[:, place] - draws.min(axis=1)), SURE))
    chances = np.bincount(np.argmin(draws, axis=1), minlength=len(logs)).astype(np.float64)
    chances[at] = -1
    told = float(stats.norm.ppf(0.5 + SURE / 2) * np.sqrt(2) * error.mean())
    return Tuned(place, tuple(cells), regret, told), chances


def _noise(cells: Sequence[Cell]) -> float:
    """The standard deviation of a run's logarithm, over all cells with several runs; 0 where there is none."""
    off = [np.log(cell.runs) - np.mean(np.log(cell.runs)) for cell in cells if len(cell.runs) > 1]
    if not off:
        return 0.0
    return float(np.sqrt(sum(float(one @ one) for one in off) / sum(len(one) - 1 for one in off)))


def _draws(shared: FloatArray, at: IntArray, errors: FloatArray, noise: FloatArray) -> FloatArray:
    """`[draws, cells]`: what the errors of all cells may be, given those of the cells `at`."""
    rng, count = np.random.default_rng(5), shared.shape[1]
    low, high = map(float, np.log(_SPREADS))
    spreads = np.exp(rng.uniform(low, high, (_SAMPLES, len(shared) + 1)))
    covariances = (
        _LEVEL**2 + np.tensordot(one[1:] ** 2, shared, 1) + one[0] ** 2 * np.eye(count) for one in spreads
    )
    fits = [_conditioned(one, at, errors, noise) for one in covariances]
    likely = np.exp(np.array([one[0] for one in fits]) - max(one[0] for one in fits))
    often = rng.multinomial(_DRAWS, likely / likely.sum())
    # by Cholesky: eigenvectors of equal eigenvalues, which grids have, are others on another kind of CPU
    parts = [
        rng.multivariate_normal(mean, spread, size=times, method="cholesky")
        for (_, mean, spread), times in zip(fits, often, strict=True)
        if times
    ]
    return np.concatenate(parts)


def _conditioned(
    covariance: FloatArray, at: IntArray, errors: FloatArray, noise: FloatArray
) -> tuple[float, FloatArray, FloatArray]:
    """The logarithm of the likelihood of the errors, and mean and covariance of those of all cells given them."""
    inner = covariance[np.ix_(at, at)] + np.diag(noise**2 + _TINY)
    gain = np.linalg.solve(inner, covariance[at]).T
    likelihood = float(stats.multivariate_normal.logpdf(errors, np.zeros(len(at)), inner))
    return likelihood, gain @ errors, covariance - gain @ covariance[at] + _TINY * np.eye(len(covariance))
