"""Means and quantiles of weighted samples, so that a million equal inter-token gaps cost one sample."""

import numpy as np

from harness.metrics.log import FloatArray


def weighted_mean(values: FloatArray, weights: FloatArray) -> float | None:
    """Mean of `values`; None where no sample has weight."""
    total = float(weights.sum())
    return float(values @ weights) / total if total > 0 else None


def weighted_quantiles(values: FloatArray, weights: FloatArray, levels: FloatArray) -> FloatArray:
    """Quantiles at `levels` (0 to 1) of samples that each stand for an integral `weight` of equal samples.

    Equal to `numpy.quantile(numpy.repeat(values, weights), levels)`: linear between order statistics. At
    least one sample must have weight.
    """
    order = np.argsort(values, kind="stable")
    order = order[weights[order] > 0]
    ranked, ends = values[order], np.cumsum(weights[order])
    position = levels * (ends[-1] - 1)
    low = ranked[np.searchsorted(ends, np.floor(position), side="right")]
    high = ranked[np.searchsorted(ends, np.ceil(position), side="right")]
    fraction = position - np.floor(position)
    return np.asarray(low + (high - low) * fraction, dtype=np.float64)
