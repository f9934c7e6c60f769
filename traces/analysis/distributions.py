"""The distributions of a trace as plain data, for pictures and `trace inspect`: lengths, arrivals, burstiness, reuse.

Counts and means are in `traces.analysis.statistics`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.analysis.reuse import PrefixPaths, ReuseProfile, reuse_profile
from traces.trace import Trace

Profile = dict[str, Any]
_TOKEN_EXACT = (16, 64, 256, 1024)  # block sizes if the source knows sharing to the token
_COARSE = (1, 2, 4, 8)  # else multiples of the source's block: it records nothing below that size
_WINDOWS_S = (1, 10, 60)
_FIVE_MINUTES_S, _ENOUGH = 300, 30
_CURVE_POINTS, _CDF_POINTS = 24, 200
_SHARES = (0.5, 0.9, 0.99)


def trace_distributions(trace: Trace, block_sizes: Sequence[int] | None = None) -> Profile:
    """Distributions of lengths, arrivals and reuse, ready for JSON. Block sizes default to what the trace can show."""
    sizes = tuple(block_sizes or _block_sizes(trace))
    times_s = np.array([request.arrival_us for request in trace.requests], dtype=np.float64) / 1e6
    return {
        "name": trace.header.name,
        "requests": len(trace.requests),
        "source_block_tokens": trace.header.source_block_tokens,
        "changes": list(trace.header.changes),
        "lengths": {
            "prompt_tokens": _cdf([request.prompt_tokens for request in trace.requests]),
            "output_tokens": _cdf([request.output_tokens for request in trace.requests]),
        },
        "arrivals": _arrivals(times_s),
        "burstiness": _burstiness(times_s),
        "sessions": _sessions(trace),
        "reuse": _reuse(trace, sizes),
    }


def _block_sizes(trace: Trace) -> tuple[int, ...]:
    source = trace.header.source_block_tokens
    return _TOKEN_EXACT if source is None else tuple(source * factor for factor in _COARSE)


def _cdf(values: Sequence[float]) -> Profile:
    """Quantiles at evenly spaced shares: points of the distribution function."""
    shares = np.linspace(0, 1, _CDF_POINTS + 1)
    return {"values": np.quantile(values, shares).tolist() if len(values) else [], "shares": shares.tolist()}


def _arrivals(times_s: npt.NDArray[np.float64]) -> Profile:
    """Requests per second over time, in at most 200 windows of a round number of seconds."""
    span = float(times_s[-1] - times_s[0]) if times_s.size else 0.0
    window = next((s for s in (1, 2, 5, 10, 30, 60, 300, 900, 3600, 21_600) if span / s <= 200), 86_400)
    counts = np.bincount(((times_s - times_s[0]) // window).astype(np.int64)) if times_s.size else np.zeros(0)
    return {
        "window_s": window,
        "start_s": (np.arange(len(counts)) * window).tolist(),
        "rps": (counts / window).tolist(),
    }


def _burstiness(times_s: npt.NDArray[np.float64]) -> Profile:
    gaps = np.diff(times_s)
    mean = float(gaps.mean()) if gaps.size else 0.0
    return {
        "gap_cv": _cv(gaps),
        "gap_cv_median_5min": _local_cv(times_s),
        "dispersion": {f"{window}s": _dispersion(times_s, window) for window in _WINDOWS_S},
        "gaps_s": _cdf(gaps.tolist()),
        "mean_gap_s": mean,
    }


def _cv(gaps: npt.NDArray[np.float64]) -> float | None:
    return float(gaps.std(ddof=1) / gaps.mean()) if gaps.size > 1 and gaps.mean() > 0 else None


def _local_cv(times_s: npt.NDArray[np.float64]) -> float | None:
    """Median CV of gaps over windows of 300 s with at least 30 arrivals: burstiness without slow drift."""
    if not times_s.size:
        return None
    windows = ((times_s - times_s[0]) // _FIVE_MINUTES_S).astype(np.int64)
    found = [
        _cv(np.diff(times_s[windows == window])) for window in np.flatnonzero(np.bincount(windows) >= _ENOUGH)
    ]
    known = [value for value in found if value is not None]
    return float(np.median(known)) if known else None


def _dispersion(times_s: npt.NDArray[np.float64], window_s: int) -> float | None:
    """Variance / mean of the counts in full windows; 1 for Poisson."""
    if not times_s.size:
        return None
    counts = np.bincount(((times_s - times_s[0]) // window_s).astype(np.int64))
    whole = counts[: int((times_s[-1] - times_s[0]) // window_s)]
    return float(whole.var(ddof=1) / whole.mean()) if whole.size > 1 and whole.mean() > 0 else None


def _sessions(trace: Trace) -> Profile | None:
    turns: dict[str, int] = {}
    for request in trace.requests:
        if request.session is not None:
            turns[request.session] = turns.get(request.session, 0) + 1
    if not turns:
        return None
    counts = np.array(list(turns.values()))
    thinking = [request.think_us / 1e6 for request in trace.requests if request.think_us is not None]
    return {
        "sessions": len(turns),
        "turns_mean": float(counts.mean()),
        "turns_p90": float(np.percentile(counts, 90)),
        "turns_max": int(counts.max()),
        "released_after_others": sum(request.release == "after" for request in trace.requests),
        "think_s_p50": float(np.percentile(thinking, 50)) if thinking else None,
        "think_s_p90": float(np.percentile(thinking, 90)) if thinking else None,
    }


def _reuse(trace: Trace, sizes: Sequence[int]) -> Profile:
    paths = PrefixPaths(trace)
    profiles = {size: reuse_profile(paths, size) for size in sizes}
    footprint = max(profile.distinct_blocks * size for size, profile in profiles.items())
    capacities = np.unique(
        np.geomspace(min(sizes) * 16, max(footprint, min(sizes) * 32), _CURVE_POINTS).astype(np.int64)
    )
    finest = profiles[min(sizes)]
    return {
        "block_sizes": list(sizes),
        "ideal_hit_ratio": {str(size): profile.hit_ratio(float("inf")) for size, profile in profiles.items()},
        "distinct_tokens": {str(size): profile.distinct_blocks * size for size, profile in profiles.items()},
        "capacity_tokens": capacities.tolist(),
        "lru_hit_ratio": {
            str(size): profile.curve(capacities.tolist()) for size, profile in profiles.items()
        },
        "stack_distance_tokens": _percentiles([d * min(sizes) for d in finest.distances(_SHARES)]),
        "reuse_gap_s": _percentiles(finest.gaps_s(_SHARES)),
        "distance_cdf": _reuse_cdf(finest),
    }


def _reuse_cdf(profile: ReuseProfile) -> Profile:
    shares = np.linspace(0.005, 0.995, _CDF_POINTS).tolist()
    distances = [blocks * profile.block_size for blocks in profile.distances(shares)]
    return {"shares": shares, "distance_tokens": distances, "gap_s": profile.gaps_s(shares)}


def _percentiles(values: list[float]) -> Profile | None:
    return (
        {f"p{share * 100:g}": value for share, value in zip(_SHARES, values, strict=True)} if values else None
    )
