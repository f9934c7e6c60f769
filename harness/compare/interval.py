"""How sure a median over the points of a sweep is."""

from collections.abc import Sequence

import numpy as np

_RESAMPLES = 2000
_SEED = 0  # the same records give the same report


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the median of `values`; None for fewer than three values.

    It says how much the median depends on which points the sweep happened to hold, and nothing about other
    sweeps.
    """
    if len(values) < 3:
        return None
    if len(set(values)) == 1:
        return values[0], values[0]
    from scipy import stats  # lazily: two seconds that a console command need not pay

    result = stats.bootstrap(
        (np.asarray(values),),
        np.median,
        n_resamples=_RESAMPLES,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
