"""Generate a trace that shares prefixes like a given trace: its hit-ratio curve is the nearest one found.

For each of a few Zipf exponents and numbers of texts, a search finds the share of the prompt that gives the hit ratio
of the given trace. The combination whose whole curve is nearest is kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import numpy as np
import numpy.typing as npt

from traces.analysis.reuse import ReuseProfile, reuse_profile
from traces.arrivals import ArrivalProcess
from traces.errors import ParameterError
from traces.reshape import take
from traces.synth.generator import generate_trace
from traces.synth.sharing import Sharing
from traces.trace import Trace

_EXPONENTS = (0.0, 0.8, 1.4)
_COUNTS = (8, 64)
_STEPS = 7  # halvings of the interval of shares: the result is within 0.01
_BLOCK = 16
_POINTS = 12


def calibrated_trace(
    table: str,
    target: Trace,
    model: str,
    *,
    num_requests: int,
    seed: int,
    arrivals: ArrivalProcess | None = None,
) -> Trace:
    """A generated trace that shares like `target`. Its header says how close it is.

    For each combination the share is found by bisection, so that the ideal hit ratio equals that of the target's first
    `num_requests` requests. The combination whose whole curve is nearest is kept. Raises ParameterError if the target
    shares nothing.
    """
    target = take(target, num_requests)
    wanted = reuse_profile(target, _BLOCK)
    if not wanted.distance.size:
        raise ParameterError("like", f"{target.header.name} shares no prefix; nothing to calibrate to")
    capacities = _capacities(wanted)
    best: tuple[float, Sharing, Trace, ReuseProfile] | None = None
    for count in _COUNTS:
        for zipf in _EXPONENTS:
            sharing, trace, profile = _nearest(
                Sharing(model, 0.5, count, zipf), wanted, table, len(target.requests), seed, arrivals
            )
            error = _rms(profile.curve(capacities), wanted.curve(capacities))
            if best is None or error < best[0]:
                best = error, sharing, trace, profile
    assert best is not None  # both lists have entries
    return _with_quality(best[2], target, wanted, best[3], best[0])


def _nearest(
    sharing: Sharing, wanted: ReuseProfile, table: str, count: int, seed: int, arrivals: ArrivalProcess | None
) -> tuple[Sharing, Trace, ReuseProfile]:
    low, high = 0.0, 1.0
    goal = wanted.hit_ratio(float("inf"))
    for _ in range(_STEPS):
        sharing = replace(sharing, share=(low + high) / 2)
        trace = generate_trace(table, num_requests=count, seed=seed, arrivals=arrivals, sharing=sharing)
        profile = reuse_profile(trace, _BLOCK)
        if profile.hit_ratio(float("inf")) < goal:
            low = sharing.share
        else:
            high = sharing.share
    return sharing, trace, profile


def _capacities(profile: ReuseProfile) -> list[float]:
    """Sizes in tokens from a thousandth of all distinct blocks to all of them."""
    tokens = profile.distinct_blocks * profile.block_size
    return [float(size) for size in np.geomspace(max(tokens / 1000, profile.block_size), tokens, _POINTS)]


def _with_quality(
    trace: Trace, target: Trace, wanted: ReuseProfile, found: ReuseProfile, error: float
) -> Trace:
    sides = {
        f"{side}_ks_to_target": round(ks_distance(_column(trace, side), _column(target, side)), 4)
        for side in ("prompt_tokens", "output_tokens")
    }
    unlimited = float("inf")
    stated: dict[str, float | str] = {
        **trace.header.calibration,
        "sharing_calibrated_on": f"{target.header.name}, {len(target.requests):,} requests, blocks of {_BLOCK} tokens",
        "target_hit_ratio": round(wanted.hit_ratio(unlimited), 4),
        "hit_ratio_error": round(found.hit_ratio(unlimited) - wanted.hit_ratio(unlimited), 4),
        "hit_curve_rms_error": round(error, 4),
        **sides,
    }
    return replace(trace, header=replace(trace.header, calibration=stated))


def ks_distance(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> float:
    """The largest distance between two empirical distribution functions (Kolmogorov-Smirnov)."""
    points = np.union1d(first, second)
    shares = [np.searchsorted(np.sort(side), points, "right") / len(side) for side in (first, second)]
    return float(np.abs(shares[0] - shares[1]).max())


def _column(trace: Trace, name: str) -> npt.NDArray[np.int64]:
    return np.array([getattr(request, name) for request in trace.requests], dtype=np.int64)


def _rms(first: Sequence[float], second: Sequence[float]) -> float:
    return sqrt(sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) / len(first))
