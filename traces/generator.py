"""Generated traces: lengths and arrivals drawn from an embedded table, so that a fresh machine needs no download.

Lengths are independent draws by inverse CDF, gaps are gamma. Each stream is counter-based and of its own, so a
shorter trace is the beginning of a longer one.
"""

import hashlib
import json
from dataclasses import asdict

import numpy as np
import numpy.typing as npt

from traces.errors import ParameterError
from traces.streams import uniform
from traces.tables import CalibrationTable, LengthTable, load_table
from traces.trace import CONTENT, Segment, Trace, TraceHeader, TraceRequest

_PROMPTS, _OUTPUTS, _GAPS = 1, 2, 3  # stream numbers; changing one changes every generated trace


def generate_trace(table: str, *, num_requests: int, seed: int) -> Trace:
    """`num_requests` requests calibrated on an embedded table (`traces.tables.TABLES`), at its recorded rate.

    Every prompt is unique: sharing is added by `reshape.share_prefixes`. Raises ParameterError.
    """
    if num_requests < 1:
        raise ParameterError("num_requests", f"at least 1 expected, found {num_requests}")
    chosen = load_table(table)
    prompts = _lengths(chosen.prompt_tokens, num_requests, seed, _PROMPTS)
    outputs = _lengths(chosen.output_tokens, num_requests, seed, _OUTPUTS)
    arrivals = _arrivals_us(chosen, num_requests, seed)
    columns = zip(arrivals, prompts, outputs, strict=True)
    requests = tuple(
        TraceRequest(number, arrival_us, prompt, output, (Segment(None, prompt),))
        for number, (arrival_us, prompt, output) in enumerate(columns)
    )
    return Trace(_header(chosen, num_requests, seed), requests)


def _lengths(table: LengthTable, count: int, seed: int, stream: int) -> list[int]:
    drawn = np.rint(table.quantile(uniform(seed, stream, count)))
    lengths: list[int] = np.maximum(drawn, 1).astype(np.int64).tolist()
    return lengths


def _arrivals_us(table: CalibrationTable, count: int, seed: int) -> list[int]:
    """Arrival times from 0. Gaps are gamma with mean 1 / rate, whatever the shape."""
    shape, rate_rps = table.arrivals.gamma_shape, table.arrivals.rate_rps
    source = np.random.Generator(np.random.Philox(key=np.array([seed, _GAPS], dtype=np.uint64)))
    gaps_s: npt.NDArray[np.float64] = source.standard_gamma(shape, count - 1) / (shape * rate_rps)
    times_us: list[int] = np.rint(np.cumsum(gaps_s) * 1e6).astype(np.int64).tolist()
    return [0, *times_us]


def _header(table: CalibrationTable, num_requests: int, seed: int) -> TraceHeader:
    specification = json.dumps({"table": asdict(table), "seed": seed}, sort_keys=True)
    return TraceHeader(
        name=table.name,
        format="generated",
        source=f"generator {table.name}, seed {seed}",
        key_kind=CONTENT,
        source_block_tokens=None,
        clock_quantum_us=1,
        sha256=hashlib.sha256(specification.encode()).hexdigest(),
        rows_read=num_requests,
        rows_kept=num_requests,
        licence=table.licence,
        calibration=table.quality(),
    )
