"""The statistics of a trace as plain data (ready for JSON), for `python -m harness trace inspect`.

The definitions are those of the published tables: sample standard deviations, and gaps between arrivals over the whole
trace.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from traces.analysis.reuse import shared_prefix_tokens
from traces.trace import Trace

Statistics = dict[str, Any]
_PERCENTILES = (50, 90, 99)
_WINDOW_US = 60_000_000


def trace_statistics(trace: Trace) -> Statistics:
    """Rows, lengths (tokens), arrivals (seconds), ideal sharing (0 to 1), and remarks on what the trace cannot show."""
    prompts = np.array([request.prompt_tokens for request in trace.requests], dtype=np.int64)
    outputs = np.array([request.output_tokens for request in trace.requests], dtype=np.int64)
    return {
        **_origin(trace),
        "requests": len(trace.requests),
        "prompt_tokens": _lengths(prompts),
        "output_tokens": _lengths(outputs),
        "prompt_output_spearman": _spearman(prompts, outputs),
        "arrivals": _arrivals(np.array([request.arrival_us for request in trace.requests], dtype=np.int64)),
        "sharing": _sharing(trace, prompts),
        "remarks": _remarks(trace),
    }


def _origin(trace: Trace) -> Statistics:
    header = trace.header
    return {
        "name": header.name,
        "format": header.format,
        "source": header.source,
        "sha256": header.sha256,
        "digest": trace.digest,
        "licence": header.licence,
        "clock_quantum_us": header.clock_quantum_us,
        "rows_read": header.rows_read,
        "rows_kept": header.rows_kept,
        "dropped": dict(header.dropped),
        "noted": dict(header.noted),
        "changes": list(header.changes),
        "calibration": dict(header.calibration),
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
    keys, keyed_tokens, accesses = set(), 0, 0
    for request in trace.requests:
        for key, tokens in request.segments:
            if key is not None:
                keys.add(key)
                keyed_tokens += tokens
                accesses += 1
    total = max(int(prompts.sum()), 1)
    return {
        "key_kind": trace.header.key_kind,
        "source_block_tokens": trace.header.source_block_tokens,
        "keyed_token_share": keyed_tokens / total,
        "key_accesses": accesses,
        "distinct_keys": len(keys),
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
