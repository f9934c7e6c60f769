"""The distribution of a latency: all its samples, or, in constant memory, counts in narrow bins."""

from typing import Protocol

import numpy as np

from harness.metrics.log import FloatArray
from harness.metrics.weighted import weighted_mean, weighted_quantiles


class Samples(Protocol):
    """Weighted samples of one quantity."""

    def mean(self) -> float | None:
        """Their mean; None where there is none."""
        ...

    def quantiles(self, levels: FloatArray) -> FloatArray:
        """Their quantiles at `levels` (0 to 1); at least one sample must have weight."""
        ...


class ExactSamples:
    """Every sample, as an array; those that are not numbers (it did not happen) are left out."""

    def __init__(self, values: FloatArray, weights: FloatArray | None = None) -> None:
        weights = np.ones_like(values) if weights is None else weights
        known = np.isfinite(values) & (weights > 0)
        self._values, self._weights = values[known], weights[known]

    def mean(self) -> float | None:
        """Their mean; None where there is none."""
        return weighted_mean(self._values, self._weights)

    def quantiles(self, levels: FloatArray) -> FloatArray:
        """Linear between order statistics."""
        return weighted_quantiles(self._values, self._weights, levels)


class BinnedSamples:
    """Counts in bins whose ends differ by 0.2 %: quantiles are right within 0.1 %, means are exact.

    18,000 bins reach from a nanosecond to half a year; what is smaller or larger counts in the outermost. Counts are
    whole numbers, so that the order in which samples come changes no quantile; with `whole_ns` samples are whole
    nanoseconds, and no mean either.
    """

    GROWTH, LOWEST, BINS = 1.002, 1e-9, 18_000

    def __init__(self, *, whole_ns: bool = False) -> None:
        self._counts = np.zeros(self.BINS + 1, dtype=np.int64)
        self._whole_ns = whole_ns
        self._sum: float = 0
        self._least, self._most = np.inf, -np.inf

    def add(self, values: FloatArray, weights: FloatArray | None = None) -> None:
        """Count samples; those that are not numbers are left out."""
        weights = np.ones_like(values) if weights is None else weights
        known = np.isfinite(values) & (weights > 0)
        values, weights = values[known], weights[known]
        if not len(values):
            return
        place = np.log(np.maximum(values, self.LOWEST) / self.LOWEST) / np.log(self.GROWTH)
        index = np.minimum(place.astype(np.int64) + 1, self.BINS)
        index[values < self.LOWEST] = 0
        self._counts += np.bincount(index, weights=weights, minlength=self.BINS + 1).astype(np.int64)
        self._sum += self._total(values, weights)
        self._least, self._most = min(self._least, values.min()), max(self._most, values.max())

    def _total(self, values: FloatArray, weights: FloatArray) -> float:
        if not self._whole_ns:
            return float(values @ weights)
        return int(np.rint(values * 1e9).astype(np.int64) @ weights.astype(np.int64))

    def mean(self) -> float | None:
        """Their mean; None where there is none."""
        total = int(self._counts.sum())
        if not total:
            return None
        return self._sum / total / (1e9 if self._whole_ns else 1)

    def quantiles(self, levels: FloatArray) -> FloatArray:
        """The middle of the bin in which each quantile lies, within the smallest and the largest sample."""
        ends = np.cumsum(self._counts)
        index = np.searchsorted(ends, np.floor(levels * (ends[-1] - 1)), side="right")
        middle = self.LOWEST * self.GROWTH ** (index - 0.5)
        return np.clip(np.where(index == 0, 0.0, middle), self._least, self._most)
