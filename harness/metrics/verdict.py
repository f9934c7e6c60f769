"""Can the prediction be trusted? A verdict on each class of figures, from an equivalence test against repeated runs.

A test of difference cannot show that two things agree: with few data it never finds a difference. An equivalence test
(Schuirmann 1987) asks the other way round: the upper confidence bound of the error must lie below the margin. The bound
is a one-sided percentile bootstrap (Efron 1979), which draws points, and within each point its repeated runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from statistics import median

import numpy as np

from harness.metrics import METRICS, Metric
from harness.metrics.record import PointRecord, comparison_error

CONFIDENCE = 0.95
"""Confidence of the one-sided bounds."""

MOST_POINTS = 0.9
"""The share of the points whose errors the reach covers."""

_DRAWS = 2000
_CELLS = 4_000_000  # drawn runs in memory at once
_SEED = 0  # the same records give the same report


@dataclass(frozen=True, slots=True)
class PointError:
    """The error of one point against the median of its runs, and against each of its runs."""

    label: str
    error: float
    runs: tuple[float, ...]
    spread: float | None = None


@dataclass(frozen=True, slots=True)
class ErrorBounds:
    """Upper confidence bounds of the sizes of errors over points: of the median, and of `MOST_POINTS` of them."""

    typical: float
    reach: float


def error_bounds(points: Sequence[PointError]) -> ErrorBounds | None:
    """The bounds; None for a single point with a single run, which says nothing about chance.

    With fewer than three points a bootstrap of points is too narrow: then the largest error against any run bounds
    both.
    """
    runs = min((len(point.runs) for point in points), default=0)
    if len(points) * runs < 2:
        return None
    if len(points) < 3:
        worst = max(abs(error) for point in points for error in (*point.runs, point.error))
        return ErrorBounds(worst, worst)
    errors = np.array([point.runs[:runs] for point in points])
    draws = int(min(_DRAWS, max(200, _CELLS // errors.size)))
    random = np.random.default_rng(_SEED)
    chosen = random.integers(len(points), size=(draws, len(points)))
    again = random.integers(runs, size=(*chosen.shape, runs))
    sizes = np.abs(np.median(errors[chosen[:, :, None], again], axis=2))
    typical, most = np.median(sizes, axis=1), np.quantile(sizes, MOST_POINTS, axis=1)
    return ErrorBounds(float(np.quantile(typical, CONFIDENCE)), float(np.quantile(most, CONFIDENCE)))


def noise_floor(points: Sequence[Sequence[float]], *, share: bool) -> float | None:
    """The typical error with which one half of the repeated runs predicts the other; None without repeats.

    `points` are the measured values of each point's runs; with `share` an error is a difference, else a ratio minus 1.
    Each point gives the median over all ways to halve its runs (the first half is the smaller one), all points their
    median. No model can be shown to be better than this.
    """
    found = [median(_halves(runs, share=share)) for runs in points if len(runs) > 1]
    return median(found) if found else None


def _halves(runs: Sequence[float], *, share: bool) -> list[float]:
    places = range(len(runs))
    errors = []
    for chosen in combinations(places, len(runs) // 2):
        one = median(runs[place] for place in chosen)
        other = median(runs[place] for place in places if place not in chosen)
        errors.append(abs(one - other) if share else abs(one / other - 1) if other else 0.0)
    return errors


RELATIVE_BAND = 0.10
"""The band that figures of errors draw for the eye; no verdict depends on it."""

FLOOR_FACTOR = 1.2
"""A typical error up to so many times the noise floor is trusted: no better model could be told from it."""

WORST_FACTOR, WORST_SPREADS = 2.5, 2.0
"""In a trusted class no point is off by more than so many margins, or so many times its own spread of repeats."""

CEILING, SHARE_CEILING = 0.25, 0.10
"""Errors beyond this (for shares: this difference) at nine of ten points are not trusted at all."""

_RESAMPLES = 2000


class Trust(StrEnum):
    """The verdict on a metric or a class."""

    trusted = "trusted"
    within = "trusted within"
    not_trusted = "not trusted"
    untested = "not tested"


_GRAVITY = (Trust.trusted, Trust.untested, Trust.within, Trust.not_trusted)


@dataclass(frozen=True, slots=True)
class MetricClass:
    """Metrics that one verdict covers; `margin` is the typical error up to which they are trusted."""

    name: str
    metrics: tuple[str, ...]
    margin: float


CLASSES = (
    MetricClass("memory", ("utilisation", "internal_share", "sharing_saving", "hit_ratio"), 0.02),
    MetricClass("throughput", ("request_throughput", "output_throughput"), 0.02),
    MetricClass("time per output token", ("tpot_p50", "norm_latency_mean"), 0.05),
    MetricClass("time to first token", ("ttft_p50",), 0.08),
    MetricClass("tails of latency", ("ttft_p99", "itl_p99"), 0.15),
    MetricClass("attention time", ("attention_per_decode_step",), 0.10),
)
"""The classes beside `counts`, which must be identical."""

COUNTS = "counts"
TIMES = frozenset({"throughput", "time per output token", "time to first token"})
"""The classes whose predictions rest on the cost model and that a user asks for first."""

JUDGED = tuple(name for group in CLASSES for name in group.metrics)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the median of `values`; None for fewer than three values.

    It says how much the median depends on the points of this sweep. It does not describe other sweeps.
    """
    if len(values) < 3:
        return None
    found = np.asarray(values, dtype=np.float64)
    draws = min(_RESAMPLES, max(200, 4_000_000 // len(found)))
    chosen = np.random.default_rng(_SEED).integers(len(found), size=(draws, len(found)))
    medians = np.median(found[chosen], axis=1)
    low, high = np.quantile(medians, ((1 - confidence) / 2, (1 + confidence) / 2))
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class MetricVerdict:
    """One metric over all measured points; errors and spreads on the scale of `harness.metrics.record.MetricRow`.

    `bound` is the upper confidence bound of the typical error and `reach` of the errors of nine in ten points, None
    where chance cannot be judged. `floor` is the noise floor: half of the repeats predict the other half.
    """

    metric: Metric
    points: int
    median_error: float
    worst_error: float
    worst_point: str
    worst_spread: float | None
    bound: float | None
    reach: float | None
    floor: float | None
    trust: Trust


@dataclass(frozen=True, slots=True)
class ClassVerdict:
    """A class of metrics with the gravest verdict of them. `within` is the error that holds at nine of ten points."""

    name: str
    trust: Trust
    metrics: tuple[MetricVerdict, ...] = ()
    within: float | None = None

    @property
    def worst(self) -> MetricVerdict | None:
        """The metric that decided the verdict."""
        graded = sorted(self.metrics, key=lambda one: (_GRAVITY.index(one.trust), one.reach or 0.0))
        return graded[-1] if graded else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a sweep shows about the quality of the prediction.

    `unfinished` names the points at which a request was rejected, dropped or left unfinished, with the
    numbers. `different` names the points whose counts differ between the sides although both had the same step
    durations; each of them is a bug.
    """

    points: int
    measured: int
    unfinished: Mapping[str, str]
    counted: int
    different: Mapping[str, str]
    audit_checks: int
    audit_mismatches: int
    metrics: tuple[MetricVerdict, ...]

    @property
    def sound(self) -> bool:
        """Whether counts agree wherever they were compared, and the counters agree with the tensors."""
        return not self.different and self.audit_mismatches == 0

    @property
    def classes(self) -> tuple[ClassVerdict, ...]:
        """The verdict on each class that was measured, counts first."""
        exact = Trust.trusted if self.sound else Trust.not_trusted
        counts = ClassVerdict(COUNTS, exact if self.counted or self.audit_checks else Trust.untested)
        found = (_judge_class(group, self.metrics) for group in CLASSES)
        return (counts, *(one for one in found if one is not None)) if self.measured else ()


def judge(records: Sequence[PointRecord], names: Sequence[str] = JUDGED) -> Verdict:
    """The verdict over the records of a sweep, for the metrics `names` that were measured at some point."""
    measured = [record for record in records if record.measured]
    levels = {r.point_label: r.levels.get("counts") for r in measured}
    counts = {label: level for label, level in levels.items() if level}
    audits = [record.audit for record in measured]
    found = _point_errors(measured, frozenset(names))
    verdicts = (_judge_metric(METRICS[name], *found[name]) for name in names if name in found)
    return Verdict(
        points=len(records),
        measured=len(measured),
        unfinished={r.point_label: text for r in records if (text := r.unfinished)},
        counted=len(counts),
        different={k: v.get("first_difference") or "" for k, v in counts.items() if not v["identical"]},
        audit_checks=sum(audit.get("checks") or 0 for audit in audits),
        audit_mismatches=sum(audit.get("mismatches") or 0 for audit in audits),
        metrics=tuple(verdicts),
    )


_Found = tuple[list[PointError], list[list[float]]]


def _point_errors(records: Sequence[PointRecord], names: frozenset[str]) -> dict[str, _Found]:
    """For each metric the errors of its points, and the measured values of their runs."""
    found: dict[str, _Found] = {}
    for record in records:
        runs = record.measured.get("runs") or ()
        for row in record.comparison:
            name = row["metric"]
            if name not in names or row["error"] is None:
                continue
            values = [float(run[name]) for run in runs if name in run]
            values = values or [row["measured"] or 0.0]  # an error was measured, so this is no None
            errors = [comparison_error(METRICS[name], row["simulated"], value) for value in values]
            known = tuple(row["error"] if error is None else error for error in errors)
            points, measured = found.setdefault(name, ([], []))
            points.append(PointError(record.point_label, row["error"], known, row["spread"]))
            measured.append(values)
    return found


def _judge_metric(
    metric: Metric, found: Sequence[PointError], runs: Sequence[Sequence[float]]
) -> MetricVerdict:
    spreads = [point.spread for point in found if point.spread is not None]
    worst = max(found, key=lambda point: abs(point.error))
    bounds, floor = error_bounds(found), noise_floor(runs, share=metric.is_share)
    bound, reach = (bounds.typical, bounds.reach) if bounds else (None, None)
    return MetricVerdict(
        metric=metric,
        points=len(found),
        median_error=median(abs(point.error) for point in found),
        worst_error=worst.error,
        worst_point=worst.label,
        worst_spread=max(spreads, default=None),
        bound=bound,
        reach=reach,
        floor=floor,
        trust=_trust(metric, found, bound, reach, floor),
    )


def margin(name: str) -> float:
    """The typical error up to which a metric is trusted."""
    return next((group.margin for group in CLASSES if name in group.metrics), RELATIVE_BAND)


def _trust(
    metric: Metric, found: Sequence[PointError], bound: float | None, reach: float | None, floor: float | None
) -> Trust:
    if bound is None or reach is None:
        return Trust.untested
    ceiling, allowed = SHARE_CEILING if metric.is_share else CEILING, margin(metric.name)
    typical = max(allowed, FLOOR_FACTOR * min(floor or 0.0, ceiling / 2))  # noise is no excuse without end
    close = all(
        abs(point.error) <= max(WORST_FACTOR * allowed, WORST_SPREADS * (point.spread or 0.0))
        for point in found
    )
    if bound <= typical and close:
        return Trust.trusted
    return Trust.within if reach <= ceiling else Trust.not_trusted


def _judge_class(group: MetricClass, metrics: Sequence[MetricVerdict]) -> ClassVerdict | None:
    mine = tuple(one for one in metrics if one.metric.name in group.metrics)
    if not mine:
        return None
    trust = max((one.trust for one in mine), key=_GRAVITY.index)
    reaches = [one.reach for one in mine if one.reach is not None]
    return ClassVerdict(group.name, trust, mine, max(reaches, default=None))
