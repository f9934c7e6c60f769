"""The cost model of planning: how long the points of a sweep take, learned from the points that a store holds.

The seconds of a point are a fixed part and a part for each request and run: one simulated and, of a measured point,
`replay.repeats` measured. Both are fitted by least squares of relative errors to earlier points of the same kind
(measured or not, cache policy, model, device, cost model, beams or not), or, where there are none, to all points that
were measured or not alike. The interval holds the scatter of the points about the fit and the few points that it was
fitted to (Student's t, 95 %). Where nothing was learned nothing is said: a guess would be taken for a measurement.

The same fit groups points into jobs of Slurm, and says during a sweep what is left.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from harness.config.schema import Place, RunConfig
from harness.store.reading import Record
from harness.sweep.plan import PlannedPoint, SweepPlan

_CONFIDENCE = 0.975  # of one side
_UNKNOWN = 1000  # requests of a trace in a file without a limit
_TRUSTED = (
    2  # points at a time: after so many this sweep's own speed counts as much as that of earlier points
)

Kind = tuple[Any, ...]
Sample = tuple[float, float]  # requests times runs, seconds


@dataclass(frozen=True)
class Span:
    """Seconds with their 95 % interval; None where one earlier point says nothing of the scatter."""

    seconds: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Fit:
    """Seconds of a kind of point, and how far they scatter about the fit."""

    fixed: float
    each: float  # seconds a request and run
    scatter: float | None  # relative standard deviation of a point
    points: int
    known: int  # parameters that were fitted

    def seconds(self, work: float) -> float:
        """Seconds of a point with `work` requests times runs."""
        return self.fixed + self.each * work

    def variance(self, took: float, alone: float) -> float | None:
        """Of `took` seconds in all: of the fit itself, and of points whose squared seconds sum up to `alone`."""
        if self.scatter is None:
            return None
        return self.scatter**2 * (took**2 * self.known / self.points + alone)


@dataclass(frozen=True)
class Pace:
    """What was learned from earlier points: a fit for each kind of point, and for measured points or not."""

    fits: Mapping[Kind, Fit]
    points: int

    def seconds(self, config: RunConfig) -> float | None:
        """Seconds of one point; None: not known."""
        fit = self._fit(config)
        return None if fit is None else fit.seconds(work_of(config))

    def duration(self, todo: Iterable[PlannedPoint], workers: int) -> Span | None:
        """Seconds that `todo` takes: measured points one after the other, the others on `workers`. None: not known."""
        took: dict[tuple[bool, Fit], list[float]] = {}
        for point in todo:
            fit = self._fit(point.config)
            if fit is None:
                return None
            took.setdefault((point.config.measure, fit), []).append(fit.seconds(work_of(point.config)))
        total, variance = 0.0, 0.0
        for (measured, fit), seconds in took.items():
            share = 1 if measured else 1 / workers
            total += share * sum(seconds)
            part = fit.variance(sum(seconds), sum(each**2 for each in seconds))
            variance = float("nan") if part is None else variance + share**2 * part
        if variance != variance:
            return Span(total, None, None)
        half = _student(min(fit.points - fit.known for _, fit in took)) * sqrt(variance) if took else 0.0
        return Span(total, max(0.0, total - half), total + half)

    def _fit(self, config: RunConfig) -> Fit | None:
        kind = _kind_of(config)
        return self.fits.get(kind) or self.fits.get(kind[:1])


class TimeLeft:
    """How long the rest of a sweep takes: the cost model, corrected by how fast this sweep goes.

    Args:
        pace: what was learned from earlier points; where it does not know a point, work stands for seconds.
        todo: the points that run.
        workers: that run simulation-only points at the same time.
        clock: seconds; a test passes its own.
    """

    def __init__(
        self,
        pace: Pace,
        todo: Sequence[PlannedPoint],
        workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        costs = [pace.seconds(point.config) for point in todo]
        self._known = None not in costs
        self._cost = pace.seconds if self._known else work_of
        self._workers, self._clock = max(1, min(workers, len(todo))), clock
        self._left = sum(map(self._share, todo))
        self._prior = _TRUSTED * self._left / len(todo) if todo and self._known else 0.0
        self._begun = self._last = clock()
        self._done = 0.0
        self._runs: dict[str, int] = {}  # that are done, of points that run in stages

    def ran(self, point: PlannedPoint) -> None:
        """A point is ready for its first measured run, or one of its runs is done."""
        runs = self._runs.get(point.fingerprint)
        self._runs[point.fingerprint] = 0 if runs is None else runs + 1
        if runs is not None:
            self._less(self._share(point) / point.config.replay.repeats)

    def ended(self, point: PlannedPoint) -> None:
        """A point is committed or has failed."""
        runs, repeats = self._runs.pop(point.fingerprint, 0), point.config.replay.repeats
        self._less(self._share(point) * (1 - runs / repeats if repeats else 1.0))

    def _less(self, work: float) -> None:
        self._done, self._left, self._last = self._done + work, max(0.0, self._left - work), self._clock()

    def seconds(self) -> float | None:
        """Seconds from now to the end; None while nothing is known."""
        weight = self._done + self._prior
        if not weight:
            return None
        left = self._left * (self._last - self._begun + self._prior) / weight
        return max(0.0, left - (self._clock() - self._last))

    def _share(self, point: PlannedPoint) -> float:
        return float(self._cost(point.config) or 0.0) / (1 if point.config.measure else self._workers)


def pace_of(records: Iterable[Record]) -> Pace:
    """The pace of earlier points. Records of older versions, which hold no seconds, do not count."""
    seen: dict[Kind, list[Sample]] = {}
    count = 0
    for record in records:
        sample = _sample(record)
        if sample is not None:
            kind, count = _kind(record["config"]), count + 1
            seen.setdefault(kind, []).append(sample)
            seen.setdefault(kind[:1], []).append(sample)
    return Pace({kind: fitted(samples) for kind, samples in seen.items()}, count)


def fitted(samples: Sequence[Sample]) -> Fit:
    """The fit of relative errors to (requests times runs, seconds); one part alone where both cannot be told apart."""
    work, seconds = np.array(samples, dtype=float).T
    parts = np.stack([1 / seconds, work / seconds], axis=1)
    fixed, each, known = 0.0, float(np.mean(seconds / work)), 1
    if len(set(work)) > 1 and len(work) > 2:
        found = np.linalg.lstsq(parts, np.ones(len(work)), rcond=None)[0]
        if found.min() >= 0:
            fixed, each, known = float(found[0]), float(found[1]), 2
        elif np.ptp(seconds / seconds.mean()) < np.ptp(work * each / seconds):
            fixed, each = float(np.mean(seconds)), 0.0  # larger points are not slower
    left = len(work) - known
    errors = seconds / (fixed + each * work) - 1
    scatter = sqrt(float(errors @ errors) / left) if left > 0 else None
    return Fit(fixed, each, scatter, len(work), known)


def at_once(sweep: SweepPlan) -> int:
    """Simulation-only points that run at the same time. A Ray cluster elsewhere counts as one core."""
    execute = sweep.points[0].config.execute
    if execute.place is Place.slurm:
        return execute.jobs * execute.cpus
    if (
        execute.place is Place.ray
        and (execute.address or os.environ.get("RAY_ADDRESS") or "local") != "local"
    ):
        return 1
    return sweep.workers or os.cpu_count() or 1


def work_of(config: RunConfig) -> int:
    """The size of a point: requests times runs; a trace in a file without a limit counts as 1,000 requests."""
    return (config.workload.num_requests or _UNKNOWN) * (1 + config.replay.repeats if config.measure else 1)


def _student(freedom: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, _CONFIDENCE))


def _kind_of(config: RunConfig) -> Kind:
    """What kind of point it is, whether it is measured first."""
    model, beams = config.model, config.decoding.beam_width > 1
    words = (config.cache.policy, model.name, model.path, config.device.name, config.cost.kind)
    return (config.measure, *map(str, words), beams)


def _kind(config: Mapping[str, Any]) -> Kind:
    """The same of the settings in a record."""

    def word(section: str, key: str) -> str:
        return str((config.get(section) or {}).get(key))

    beams = (config.get("decoding") or {}).get("beam_width") or 1
    return (
        bool(config.get("measure")),
        *(word("cache", "policy"), word("model", "name"), word("model", "path"), word("device", "name")),
        *(word("cost", "kind"), beams > 1),
    )


def _sample(record: Record) -> Sample | None:
    seconds = (record.get("seconds") or {}).get("point")
    requests = (record.get("trace") or {}).get("requests")
    if not isinstance(seconds, float) or not isinstance(requests, int) or requests < 1 or seconds <= 0:
        return None
    return float(requests * _runs(record["config"])), seconds


def _runs(config: Mapping[str, Any]) -> int:
    repeats = (config.get("replay") or {}).get("repeats")
    return 1 + repeats if config.get("measure") and isinstance(repeats, int) else 1
