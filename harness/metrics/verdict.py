"""Can the prediction be trusted? The errors of every point of a sweep against the spread of repeated measured runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from harness.metrics.definitions import HEADLINE, METRICS, Metric

Record = Mapping[str, Any]

RELATIVE_BAND = 0.10
"""An error up to this ratio counts as close; it is printed wherever it is used."""

SHARE_BAND = 0.02
"""An error up to this difference counts as close, for metrics that are shares."""

_RESAMPLES = 2000
_SEED = 0  # the same records give the same report


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the median of `values`; None for fewer than three values.

    It says how much the median depends on the points of this sweep. It does not describe other sweeps.
    """
    if len(values) < 3:
        return None
    if len(set(values)) == 1:
        return values[0], values[0]
    from scipy import stats  # imported here, since it takes two seconds

    result = stats.bootstrap(
        (np.asarray(values),),
        np.median,
        n_resamples=_RESAMPLES,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


@dataclass(frozen=True, slots=True)
class MetricVerdict:
    """One metric over all measured points; errors and spreads on the scale of `harness.metrics.comparison.Row`.

    `close` counts the points whose |error| is within the band or within the point's own spread of repeats.
    """

    metric: Metric
    points: int
    close: int
    median_error: float
    interval: tuple[float, float] | None
    worst_error: float
    worst_point: str
    median_spread: float | None
    worst_spread: float | None

    @property
    def holds(self) -> bool:
        """Whether every point is close."""
        return self.close == self.points


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


def judge(records: Sequence[Record], names: Sequence[str] = HEADLINE) -> Verdict:
    """The verdict over the records of a sweep, for the metrics `names` that were measured at some point."""
    measured = [record for record in records if record.get("measured")]
    levels = {point_label(r): (r.get("levels") or {}).get("counts") for r in measured}
    counts = {label: level for label, level in levels.items() if level}
    audits = [record.get("audit") or {} for record in measured]
    verdicts = (_judge_metric(METRICS[name], measured) for name in names)
    return Verdict(
        points=len(records),
        measured=len(measured),
        unfinished={point_label(r): text for r in records if (text := unfinished_text(r))},
        counted=len(counts),
        different={k: v.get("first_difference") or "" for k, v in counts.items() if not v["identical"]},
        audit_checks=sum(audit.get("checks") or 0 for audit in audits),
        audit_mismatches=sum(audit.get("mismatches") or 0 for audit in audits),
        metrics=tuple(verdict for verdict in verdicts if verdict),
    )


def point_label(record: Record) -> str:
    """The overrides that make a point, or the start of its fingerprint where there are none."""
    return " ".join(record.get("overrides") or ()) or str(record.get("fingerprint", "?"))[:10]


def unfinished_text(record: Record) -> str:
    """The requests that did not finish at a point, in words; empty where all finished."""
    outcome = record.get("outcome") or {}
    parts = []
    for side in ("simulated", "measured"):
        counts = outcome.get(side) or {}
        parts += [f"{side}: {counts[k]} {k}" for k in ("rejected", "unfinished") if counts.get(k)]
    dropped = outcome.get("dropped") or 0
    dropped = sum(dropped.values()) if isinstance(dropped, Mapping) else dropped
    return ", ".join([*parts, f"{dropped} dropped before the replay"] if dropped else parts)


def _judge_metric(metric: Metric, records: Sequence[Record]) -> MetricVerdict | None:
    found = [
        (point_label(record), row["error"], row["spread"])
        for record in records
        for row in record.get("comparison") or ()
        if row["metric"] == metric.name and row["error"] is not None
    ]
    if not found:
        return None
    sizes = [abs(error) for _, error, _ in found]
    spreads = [spread for _, _, spread in found if spread is not None]
    worst_point, worst_error, _ = max(found, key=lambda point: abs(point[1]))
    return MetricVerdict(
        metric=metric,
        points=len(found),
        close=sum(abs(error) <= max(band(metric), spread or 0.0) for _, error, spread in found),
        median_error=median(sizes),
        interval=median_interval(sizes),
        worst_error=worst_error,
        worst_point=worst_point,
        median_spread=median(spreads) if spreads else None,
        worst_spread=max(spreads, default=None),
    )


def band(metric: Metric) -> float:
    """The |error| that counts as close for this metric."""
    return SHARE_BAND if metric.is_share else RELATIVE_BAND
