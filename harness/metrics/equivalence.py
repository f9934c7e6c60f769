"""Equivalence tests: is the error of a prediction smaller than a margin, as far as points and repeated runs can tell?

A test of difference cannot show that two things agree: with few data it never finds a difference. An equivalence test
(Schuirmann 1987) asks the other way round: the upper confidence bound of the error must lie below the margin. The bound
is a one-sided percentile bootstrap (Efron 1979), which draws points, and within each point its repeated runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

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
