"""How much slower than its baseline a case is, with bounds, and the verdict that follows from the bounds.

The statistic is the ratio of two medians: of the rounds measured now, and of the rounds of the baseline. Each round is
itself a ratio of kernel to yardstick, so the influence of clocks and of a busy machine cancels. The bounds are a
bootstrap percentile interval (Efron 1979; `scipy.stats.bootstrap`). It assumes that rounds are independent, and nothing
about their distribution.

The verdict answers two questions, so that noise can neither raise an alarm nor hide a regression:

* regressed: even the lower bound is above the baseline by more than the negligible margin;
* pass: even the upper bound is above the baseline by less than the material margin, and the bounds are close together;
* inconclusive: neither of the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.gate.findings import Verdict

CONFIDENCE = 0.99
RESAMPLES = 2000
FEWEST_ROUNDS = 10  # a bootstrap of fewer rounds has bounds that are too narrow


@dataclass(frozen=True)
class Margins:
    """A case slower by less than `negligible` raises no alarm; a case slower by `material` must not pass.

    With bounds further apart than `widest` no case passes, because a single lucky run could produce them.
    """

    negligible: float
    material: float
    widest: float


@dataclass(frozen=True)
class Effect:
    """Time now divided by time of the baseline, with bounds at `CONFIDENCE`. 1.0 is no change, 1.05 is 5 % slower."""

    ratio: float
    lower: float
    upper: float

    def verdict(self, margins: Margins) -> Verdict:
        """The verdict that the bounds allow."""
        if self.lower > 1 + margins.negligible:
            return Verdict.regressed
        close = self.upper - self.lower < margins.widest
        return Verdict.passed if close and self.upper < 1 + margins.material else Verdict.inconclusive

    def __str__(self) -> str:
        return (
            f"{self.ratio:.3f} of the baseline ({CONFIDENCE:.0%} bounds {self.lower:.3f} to {self.upper:.3f})"
        )


def effect(now: Sequence[float], baseline: Sequence[float]) -> Effect:
    """Compare two sets of rounds, each round a ratio of kernel to yardstick.

    Raises:
        ValueError: fewer than `FEWEST_ROUNDS` rounds, or a round that is not a positive number.
    """
    mine, theirs = _rounds(now, "now"), _rounds(baseline, "in the baseline")
    ratio = float(np.median(mine) / np.median(theirs))
    lower, upper = _bounds(mine, theirs)
    return Effect(ratio, lower, upper)


def _bounds(mine: "np.ndarray[Any, Any]", theirs: "np.ndarray[Any, Any]") -> tuple[float, float]:
    from scipy.stats import bootstrap

    if np.ptp(mine) == 0 and np.ptp(theirs) == 0:  # nothing to resample; scipy would warn about it
        same = float(mine[0] / theirs[0])
        return same, same
    interval = bootstrap(
        (mine, theirs),
        lambda a, b, axis: np.median(a, axis=axis) / np.median(b, axis=axis),
        vectorized=True,
        paired=False,
        method="percentile",
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _rounds(values: Sequence[float], where: str) -> "np.ndarray[Any, Any]":
    rounds = np.asarray(values, dtype=np.float64)
    if len(rounds) < FEWEST_ROUNDS:
        raise ValueError(
            f"{len(rounds)} rounds {where}; {FEWEST_ROUNDS} are the fewest that bounds can rest on"
        )
    if not (np.isfinite(rounds) & (rounds > 0)).all():
        raise ValueError(f"a round {where} is not a positive number")
    return rounds
