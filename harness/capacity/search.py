"""Bisection for the edge between what meets an SLO and what does not, once for each seed, and how sure the edge is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Meets = Callable[[float], bool]


@dataclass(frozen=True, slots=True)
class Edge:
    """`good` meets the SLO and `bad` does not; None where everything tried was of the other kind."""

    good: float | None
    bad: float | None
    tried: int

    @property
    def found(self) -> bool:
        """Whether the edge lies between two values that were tried."""
        return self.good is not None and self.bad is not None


def highest(meets: Meets, start: float, *, precision: float, low: float, high: float) -> Edge:
    """The highest value that meets: doubled or halved from `start` until both kinds are seen, then bisected.

    Stops when good and bad differ by less than the share `precision`, or at `low` and `high`. If meeting is not
    monotone, the edge is one of several: that is why every seed searches on its own.
    """
    tried, value = 1, min(max(start, low), high)
    good, bad = (value, None) if meets(value) else (None, value)
    while bad is None or good is None:
        known = good if bad is None else bad
        assert known is not None
        if (known >= high and bad is None) or (known <= low and good is None):
            return Edge(good, bad, tried)
        value = min(known * 2, high) if bad is None else max(known / 2, low)
        tried += 1
        good, bad = (value, bad) if meets(value) else (good, value)
    while bad / good > 1 + precision:
        value = float(np.sqrt(good * bad))
        tried += 1
        good, bad = (value, bad) if meets(value) else (good, value)
    return Edge(good, bad, tried)


def smallest(meets: Callable[[int], bool], *, low: int, high: int) -> int | None:
    """The smallest whole number from `low` to `high` that meets, by bisection; None where `high` does not."""
    if not meets(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle + 1
    return high


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of the seeds' answers, with Student's interval of it; a single seed has none."""

    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]


def estimate(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """From one answer a seed; at least one."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, None, None, tuple(values))
    from scipy.stats import t

    spread = float(np.std(values, ddof=1)) / len(values) ** 0.5
    half = float(t.ppf((1 + confidence) / 2, len(values) - 1)) * spread
    return Estimate(mean, mean - half, mean + half, tuple(values))
