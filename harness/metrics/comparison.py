"""One point's comparison: analytic, simulated and measured values side by side, with the spread of repeated runs."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TypedDict

from harness.metrics.definitions import METRICS, Metric


class Row(TypedDict):
    """One metric at one point, in the metric's unit; None where a side has no value.

    `measured` is the median of the runs, `low` and `high` their range. `error` and `spread` are on one scale:
    `error` is simulated / measured − 1, for shares simulated − measured; `spread` is the largest such error
    of a single run against the median of the runs, None for one run.
    """

    metric: str
    unit: str
    analytic: float | None
    simulated: float | None
    measured: float | None
    low: float | None
    high: float | None
    spread: float | None
    error: float | None


def compare(
    analytic: Mapping[str, float],
    simulated: Mapping[str, float],
    measured_runs: Sequence[Mapping[str, float]],
) -> list[Row]:
    """A row for every metric that some side has, in the order of `METRICS`; unknown names are ignored."""
    sides = (analytic, simulated, *measured_runs)
    present = [metric for metric in METRICS.values() if any(metric.name in side for side in sides)]
    return [_row(metric, analytic, simulated, measured_runs) for metric in present]


def _row(
    metric: Metric,
    analytic: Mapping[str, float],
    simulated: Mapping[str, float],
    measured_runs: Sequence[Mapping[str, float]],
) -> Row:
    runs = [run[metric.name] for run in measured_runs if metric.name in run]
    middle = median(runs) if runs else None
    predicted = simulated.get(metric.name)
    return Row(
        metric=metric.name,
        unit=metric.unit,
        analytic=analytic.get(metric.name),
        simulated=predicted,
        measured=middle,
        low=min(runs, default=None),
        high=max(runs, default=None),
        spread=_spread(metric, runs, middle),
        error=comparison_error(metric, predicted, middle),
    )


def comparison_error(metric: Metric, predicted: float | None, measured: float | None) -> float | None:
    """The error of `predicted`: its ratio to `measured` minus 1, for shares the difference.

    None where a side is missing, or where something is predicted and nothing was measured (no finite ratio).
    """
    if predicted is None or measured is None:
        return None
    if metric.is_share:
        return predicted - measured
    if measured == 0:
        return 0.0 if predicted == 0 else None
    return predicted / measured - 1


def _spread(metric: Metric, runs: Sequence[float], middle: float | None) -> float | None:
    if len(runs) < 2:
        return None
    errors = (comparison_error(metric, run, middle) for run in runs)
    return max((abs(error) for error in errors if error is not None), default=None)
