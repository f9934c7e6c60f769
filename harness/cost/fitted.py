"""A cost model fitted to measured steps: non-negative least squares on physical features, with relative residuals."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harness.metrics.log import FloatArray
from harness.replay.cost_model import Amount, CostSource, Price
from harness.replay.features import ATTENTION_FEATURES, FEATURES

ATTENTION = [FEATURES.index(name) for name in ATTENTION_FEATURES]
REST = [column for column in range(len(FEATURES)) if column not in ATTENTION]
_HUBER_ROUNDS = 8


@dataclass(frozen=True)
class FittedCost:
    """Coefficients in seconds per unit of a feature: `attention` over the ATTENTION columns, `rest` over the others."""

    attention: FloatArray
    rest: FloatArray
    source: CostSource

    def price(self, features: Sequence[Amount]) -> Price:
        """Linear in the features; terms are added in a fixed order."""
        attention: Amount = 0.0
        for column, seconds in self.attention_terms:
            attention = attention + features[column] * seconds
        return Price(self.with_rest(features, attention), attention)

    def with_rest(self, features: Sequence[Amount], attention_s: Amount) -> Amount:
        """Seconds of the whole step from those of its attention."""
        total = attention_s
        for column, seconds in self.rest_terms:
            total = total + features[column] * seconds
        return total

    @cached_property
    def attention_terms(self) -> list[tuple[int, float]]:
        """Attention columns with a cost, with seconds per unit, in the order in which they are added."""
        return [(name, float(value)) for name, value in zip(ATTENTION, self.attention, strict=True) if value]

    @cached_property
    def rest_terms(self) -> list[tuple[int, float]]:
        """The same for the rest of the step."""
        return [(column, float(value)) for column, value in zip(REST, self.rest, strict=True) if value]

    def coefficients(self) -> dict[str, float]:
        """Seconds per unit, by feature name."""
        pairs = [*zip(ATTENTION, self.attention, strict=True), *zip(REST, self.rest, strict=True)]
        return {FEATURES[column]: float(value) for column, value in sorted(pairs)}


def fit_cost(
    features: FloatArray, seconds: FloatArray, attention_s: FloatArray, source: CostSource
) -> FittedCost:
    """Fit on measured steps: `features` `[n, len(FEATURES)]`, `seconds` and `attention_s` `[n]`."""
    attention = _relative_nnls(features[:, ATTENTION], attention_s, seconds)
    rest = _relative_nnls(features[:, REST], seconds - attention_s, seconds)
    return FittedCost(attention, rest, source)


def _relative_nnls(columns: FloatArray, target: FloatArray, scale: FloatArray) -> FloatArray:
    """Non-negative least squares on residuals divided by `scale`, the steps' seconds; a few slow steps weigh little.

    Other work on the machine makes some steps slow. Huber's weights (1 within 1.345 standard deviations, falling as
    1/|residual| beyond; the deviation is estimated from the median) limit their influence on the fit, and keep normal
    scatter.
    """
    from scipy.optimize import nnls

    weighted, goal = columns / scale[:, None], target / scale
    unit = np.maximum(np.abs(weighted).max(axis=0), 1e-300)  # condition the columns, which differ by 10^6
    weights = np.ones(len(goal))
    solution = np.zeros(columns.shape[1])
    for _ in range(_HUBER_ROUNDS):
        root = np.sqrt(weights)
        solution, _ = nnls(weighted / unit * root[:, None], goal * root)
        residual = np.abs(goal - weighted / unit @ solution)
        deviation = max(1.4826 * float(np.median(residual)), 1e-9)
        weights = np.minimum(1.0, 1.345 * deviation / np.maximum(residual, 1e-12))
    solution *= _level(goal, weighted / unit @ solution)
    return np.asarray(solution / unit, dtype=np.float64)


def _level(measured: FloatArray, predicted: FloatArray) -> float:
    """The factor from a robust fit to the mean: times scatter upwards, and a run's duration depends on the mean.

    The ratio of a single step is limited to 2/3 … 3/2, and counts by its share: attention that hardly adds to a step
    says little about attention that is a third of one.
    """
    seen = predicted > 0
    if not seen.any():
        return 1.0
    ratios = np.clip(measured[seen] / predicted[seen], 2 / 3, 3 / 2)
    return float(np.average(ratios, weights=predicted[seen]))


def held_out_error(predicted: FloatArray, measured: FloatArray) -> dict[str, float]:
    """Relative errors of predictions: mean, signed bias, 95th percentile, worst, and the error of the sum."""
    error = (predicted - measured) / measured
    return {
        "n": float(len(measured)),
        "mape": float(np.abs(error).mean()),
        "bias": float(error.mean()),
        "p95": float(np.quantile(np.abs(error), 0.95)),
        "max": float(np.abs(error).max()),
        "total_error": float(predicted.sum() / measured.sum() - 1),
    }


def spread_of_repeats(values: Sequence[float]) -> float:
    """The standard deviation of the logarithm of one more run like these; 0 of a single run.

    Of few runs it is known badly. So it is multiplied by the ratio of Student's t (as many degrees of freedom as runs
    beside the first) to the normal at 95 %, and by the share of the mean's own error: 1.3 times of seven runs, 2.0 of
    three.
    """
    from scipy import stats  # as slow to import as all of this module

    count = len(values)
    if count < 2:
        return 0.0
    known = float(np.std(np.log(values), ddof=1)) * (1 + 1 / count) ** 0.5
    return float(known * stats.t.ppf(0.95, count - 1) / stats.norm.ppf(0.95))
