"""The statistics and the distributions of a trace as plain data, ready for JSON, for `trace inspect`.

The definitions of the statistics are those of the published tables: sample standard deviations, and gaps between
arrivals over the whole trace. The distributions are for pictures: lengths, arrivals, burstiness, reuse.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.analysis.reuse import PrefixPaths, reuse_profile, shared_prefix_tokens
from traces.trace import Trace

Statistics = dict[str, Any]
_PERCENTILES = (50, 90, 99)
_WINDOW_US = 60_000_000


def trace_statistics(trace: Trace) -> Statistics:
    """Rows, lengths (tokens), arrivals (seconds), ideal sharing (0 to 1), and remarks on what the trace cannot show."""
    prompts = np.array([request.prompt_tokens for request in trace.requests], dtype=np.int64)
    outputs = np.array([request.output_tokens for request in trace.requests], dtype=np.int64)
    header = trace.header
    return {
        **{name: getattr(header, name) for name in ("name", "format", "source", "sha256")},
        "digest": trace.digest,
        **{name: getattr(header, name) for name in ("licence", "clock_quantum_us", "rows_read", "rows_kept")},
        "dropped": dict(header.dropped),
        "noted": dict(header.noted),
        "changes": list(header.changes),
        "calibration": dict(header.calibration),
        "requests": len(trace.requests),
        "prompt_tokens": _lengths(prompts),
        "output_tokens": _lengths(outputs),
        "prompt_output_spearman": _spearman(prompts, outputs),
        "arrivals": _arrivals(np.array([request.arrival_us for request in trace.requests], dtype=np.int64)),
        "sharing": _sharing(trace, prompts),
        "remarks": _remarks(trace),
    }


def _lengths(tokens: npt.NDArray[np.int64]) -> Statistics:
    if not tokens.size:
        return {"total": 0}
    percentiles = {f"p{p}": float(np.percentile(tokens, p)) for p in _PERCENTILES}
    return {
        "total": int(tokens.sum()),
        "mean": float(tokens.mean()),
        "std": float(tokens.std(ddof=1)) if tokens.size > 1 else 0.0,
        "min": int(tokens.min()),
        **percentiles,
        "max": int(tokens.max()),
    }


def _arrivals(times_us: npt.NDArray[np.int64]) -> Statistics:
    gaps_s = np.diff(times_us) / 1e6
    span_s = float(gaps_s.sum())
    if span_s == 0:
        return {"span_s": 0.0}
    counts = np.bincount((times_us - times_us[0]) // _WINDOW_US)
    return {
        "span_s": span_s,
        "rate_rps": gaps_s.size / span_s,
        "gap_cv": float(gaps_s.std(ddof=1) / gaps_s.mean()) if gaps_s.size > 1 else 0.0,
        "zero_gap_share": float((gaps_s == 0).mean()),
        "peak_60s_rps": int(counts.max()) / min(60.0, span_s),
    }


def _sharing(trace: Trace, prompts: npt.NDArray[np.int64]) -> Statistics:
    seen = np.array(shared_prefix_tokens(trace), dtype=np.int64)
    keyed = [each for request in trace.requests for each in request.segments if each.key is not None]
    total = max(int(prompts.sum()), 1)
    return {
        "key_kind": trace.header.key_kind,
        "source_block_tokens": trace.header.source_block_tokens,
        "keyed_token_share": sum(each.tokens for each in keyed) / total,
        "key_accesses": len(keyed),
        "distinct_keys": len({each.key for each in keyed}),
        "ideal_prefix_share": int(seen.sum()) / total,
        "ideal_hit_tokens": int(seen.sum()),
        "requests_with_hit_share": float((seen > 0).mean()) if seen.size else 0.0,
        "mean_shared_prefix_tokens": float(seen.mean()) if seen.size else 0.0,
    }


def _spearman(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> float | None:
    """Rank correlation with mean ranks for ties. None if one side does not vary."""
    ranks = _ranks(first), _ranks(second)
    if first.size < 2 or any(rank.std() == 0 for rank in ranks):
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: npt.NDArray[np.float64] = (last - (counts - 1) / 2)[inverse]
    return ranks


def _remarks(trace: Trace) -> list[str]:
    header = trace.header
    remarks = []
    if header.source_block_tokens is not None:
        remarks.append(
            f"sharing is recorded in blocks of {header.source_block_tokens} tokens: the effect of smaller "
            "cache blocks on hits is not in this trace, and a flat curve below that size means nothing"
        )
    if all(segment.key is None for request in trace.requests for segment in request.segments):
        remarks.append("no sharing is recorded: add it with workload.prefix_share")
    if header.clock_quantum_us >= 1_000_000:
        remarks.append(
            f"arrivals stand on ticks of {header.clock_quantum_us / 1e6:g} s: bursts are made by the recording clock; "
            "trace.ticks=even or random spreads them"
        )
    return remarks


Profile = dict[str, Any]
_TOKEN_EXACT = (16, 64, 256, 1024)  # block sizes if the source knows sharing to the token
_COARSE = (1, 2, 4, 8)  # else multiples of the source's block: it records nothing below that size
_WINDOWS_S = (1, 10, 60)
_FIVE_MINUTES_S, _ENOUGH = 300, 30
_CURVE_POINTS, _CDF_POINTS = 24, 200
_SHARES = (0.5, 0.9, 0.99)


def trace_distributions(trace: Trace, block_sizes: Sequence[int] | None = None) -> Profile:
    """Distributions of lengths, arrivals and reuse, ready for JSON. Block sizes default to what the trace can show."""
    source = trace.header.source_block_tokens
    known = _TOKEN_EXACT if source is None else tuple(source * factor for factor in _COARSE)
    sizes = tuple(block_sizes or known)
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
        "arrivals": _arrival_rates(times_s),
        "burstiness": _burstiness(times_s),
        "sessions": _session_turns(trace),
        "reuse": _reuse(trace, sizes),
    }


def _cdf(values: Sequence[float]) -> Profile:
    """Quantiles at evenly spaced shares: points of the distribution function."""
    shares = np.linspace(0, 1, _CDF_POINTS + 1)
    return {"values": np.quantile(values, shares).tolist() if len(values) else [], "shares": shares.tolist()}


def _arrival_rates(times_s: npt.NDArray[np.float64]) -> Profile:
    """Requests per second over time, in at most 200 windows of a round number of seconds.

    The last window is left out where the trace ends inside of it: its rate would be too low.
    """
    span = float(times_s[-1] - times_s[0]) if times_s.size else 0.0
    window = next((s for s in (1, 2, 5, 10, 30, 60, 300, 900, 3600, 21_600) if span / s <= 200), 86_400)
    counts = np.bincount(((times_s - times_s[0]) // window).astype(np.int64)) if times_s.size else np.zeros(0)
    counts = counts[: max(1, int(span // window))]
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
    busy = np.flatnonzero(np.bincount(windows) >= _ENOUGH)
    local = (_cv(np.diff(times_s[windows == window])) for window in busy)
    known = [value for value in local if value is not None]
    return float(np.median(known)) if known else None


def _dispersion(times_s: npt.NDArray[np.float64], window_s: int) -> float | None:
    """Variance / mean of the counts in full windows; 1 for Poisson."""
    if not times_s.size:
        return None
    counts = np.bincount(((times_s - times_s[0]) // window_s).astype(np.int64))
    whole = counts[: int((times_s[-1] - times_s[0]) // window_s)]
    return float(whole.var(ddof=1) / whole.mean()) if whole.size > 1 and whole.mean() > 0 else None


def _session_turns(trace: Trace) -> Profile | None:
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
    profiles = {size: reuse_profile(paths, size, spare_last_token=True) for size in sizes}
    footprint = max(profile.distinct_blocks * size for size, profile in profiles.items())
    steps = np.geomspace(min(sizes) * 16, max(footprint, min(sizes) * 32), _CURVE_POINTS)
    capacities = np.unique(steps.astype(np.int64)).tolist()
    finest = profiles[min(sizes)]
    shares = np.linspace(0.005, 0.995, _CDF_POINTS).tolist()
    return {
        "block_sizes": list(sizes),
        "ideal_hit_ratio": {str(size): profile.hit_ratio(float("inf")) for size, profile in profiles.items()},
        "distinct_tokens": {str(size): profile.distinct_blocks * size for size, profile in profiles.items()},
        "capacity_tokens": capacities,
        "lru_hit_ratio": {str(size): profile.curve(capacities) for size, profile in profiles.items()},
        "stack_distance_tokens": _percentiles([d * min(sizes) for d in finest.distances(_SHARES)]),
        "reuse_gap_s": _percentiles(finest.gaps_s(_SHARES)),
        "distance_cdf": {
            "shares": shares,
            "distance_tokens": [blocks * finest.block_size for blocks in finest.distances(shares)],
            "gap_s": finest.gaps_s(shares),
        },
    }


def _percentiles(values: list[float]) -> Profile | None:
    if not values:
        return None
    return {f"p{share * 100:g}": value for share, value in zip(_SHARES, values, strict=True)}
