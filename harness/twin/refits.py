"""Other fits that a log allows: how far its constants, and what they cannot explain, may be from those of the fit.

A fit is repeated on other draws of the requests (a bootstrap by neighbours in time, which have the same load), on the
first and on the later half of the time, each with other priors by chance. Each is one step of Gauss and Newton from the
fit, with the derivatives that it has, and is shortened until the log allows it. What is not explained is the error of
each quarter of the time, fitted without it.
"""

from dataclasses import replace

import numpy as np
from scipy.optimize import lsq_linear

from harness.config.schema import DeviceConfig
from harness.point.bands import DRAWS, fits_text
from harness.twin.log import FloatArray, IntArray
from harness.twin.residuals import PRIOR_WEIGHT, FitProblem

_NEIGHBOURS = 8  # requests that are drawn together
_PARTS = 4
# Of half the sum of squares, in units in which a prior weighs 9: what 19 of 20 draws stay below.
_ALLOWED = 12.0
_SHORTER = 4  # times


def with_refits(problem: FitProblem, place: FloatArray) -> DeviceConfig:
    """The device at the place of a fit, with other fits of the same log around it and what none of them explains."""
    draw = np.random.default_rng(11)
    count = len(problem.errors(place)[1])
    part = np.arange(count) * _PARTS // count
    found = []
    for number in range(DRAWS):
        if number < 2:
            weights = 2.0 * ((part >= _PARTS // 2) == bool(number))
        else:
            blocks = np.arange(count) // _NEIGHBOURS
            weights = draw.standard_gamma(1.0, blocks[-1] + 1)[blocks]
            weights *= count / weights.sum()
        prior = np.clip(draw.standard_normal(len(place)), -1.6, 1.6)
        found.append(_allowed(problem, place, _moved(problem, place, weights, prior)))
    devices = [problem.device(each) for each in found]
    fits = [{one.key: float(getattr(device, one.key)) for one in problem.constants} for device in devices]
    steps, first = _unexplained(problem, place, part)
    return replace(problem.device(place), fits=fits_text(fits), step_spread=steps, ttft_spread=first)


def _moved(problem: FitProblem, place: FloatArray, weights: FloatArray, prior: FloatArray) -> FloatArray:
    """Where the fit lies for requests of other weights, and priors moved by so many of their spreads."""
    slopes = np.vstack([problem.slopes(place, weights), PRIOR_WEIGHT * np.eye(len(place))])
    aim = np.concatenate([problem.misfits(place, weights), PRIOR_WEIGHT * (place - prior)])
    low, high = problem.scaled_low - place, problem.scaled_high - place
    return np.asarray(lsq_linear(slopes, -aim, bounds=(np.minimum(low, -1e-9), np.maximum(high, 1e-9))).x)


def _allowed(problem: FitProblem, place: FloatArray, move: FloatArray) -> FloatArray:
    """The place moved, by less where the log does not allow it: derivatives of a simulation hold nearby only."""

    def misfit(at: FloatArray) -> float:
        found = problem.misfits(at)
        return 0.5 * float(found @ found)

    limit = misfit(place) + _ALLOWED
    for _ in range(_SHORTER):
        if misfit(place + move) <= limit:
            return place + move
        move = 0.5 * move
    return place + move


def _unexplained(problem: FitProblem, place: FloatArray, part: IntArray) -> tuple[float, float]:
    """Root mean squares of the errors of mean TPOT and TTFT of each part of the time, which the fit has not seen."""
    errors = []
    for number in range(_PARTS):
        chosen = part == number
        without = _moved(problem, place, (~chosen).astype(np.float64), np.zeros(len(place)))
        tpot, ttft = problem.errors(_allowed(problem, place, without))
        errors.append((_mean(tpot[chosen]), _mean(ttft[chosen])))
    steps, first = (np.sqrt(_mean(column)) for column in np.square(errors).T)
    return float(np.nan_to_num(steps)), float(np.nan_to_num(first))


def _mean(errors: FloatArray) -> float:
    known = errors[~np.isnan(errors)]
    return float(known.mean()) if len(known) else float("nan")
