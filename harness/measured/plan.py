"""Which workloads calibrate the cost model: small, and other than any that is predicted.

Lengths are uniform or from another table than the default trace's, seeds are their own, and the batch sizes, block
sizes, beams and loads span what a sweep visits. Some are held out: the error on those is what the report shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from engine.core.limits import SchedulerLimits
from engine.core.request import Decoding
from harness.config.schema import CachePolicy, RunConfig
from harness.point.shapes import pool_shape
from harness.point.workload import Workload
from traces.trace import CONTENT, Segment, Trace, TraceHeader, TraceRequest

SEED = 7_919
_POOL_TOKENS = 16_384
_LONGEST = 1024
SHARED = 2**62  # keys of calibration prefixes lie apart from everyone's


@dataclass(frozen=True)
class CalibrationCase:
    """One calibration workload: `load` requests per request-time of a lone request; 0 means all at once."""

    name: str
    requests: int
    prompt: tuple[int, int]  # uniform, tokens
    output: tuple[int, int]
    load: float
    block_size: int = 16
    contiguous: bool = False
    beam_width: int = 1
    samples: int = 1
    shared: float = 0.0  # share of the prompt that all requests have in common
    held_out: bool = False


CASES = (
    CalibrationCase("burst", 64, (16, 256), (8, 40), 0),
    CalibrationCase("lone requests", 16, (8, 200), (10, 40), 0.5),
    CalibrationCase("prompts alone", 48, (1, 500), (1, 2), 0.3),
    CalibrationCase("short prompts", 32, (1, 40), (2, 6), 0.5, block_size=32),
    CalibrationCase("few at a time", 24, (8, 250), (10, 40), 1.5, block_size=32),
    CalibrationCase("steady", 40, (32, 200), (10, 30), 4, block_size=8),
    CalibrationCase("long prompts", 12, (300, 900), (4, 16), 1.5, block_size=32),
    CalibrationCase("two beams", 28, (16, 160), (10, 24), 3, block_size=32, beam_width=2),
    CalibrationCase("four beams", 24, (16, 160), (10, 24), 2, block_size=8, beam_width=4),
    CalibrationCase("contiguous", 32, (16, 160), (8, 30), 3, contiguous=True),
    CalibrationCase("contiguous beams", 16, (16, 120), (8, 24), 2, contiguous=True, beam_width=4),
    CalibrationCase("shared prefix", 40, (64, 300), (8, 24), 4, block_size=4, shared=0.8),
    CalibrationCase("samples", 16, (16, 160), (8, 24), 2, samples=4),
    CalibrationCase("held-out prompts", 24, (4, 400), (1, 3), 0.4, block_size=8, held_out=True),
    CalibrationCase("held-out mix", 32, (20, 300), (6, 30), 2, block_size=16, shared=0.4, held_out=True),
    CalibrationCase("held-out beams", 18, (30, 200), (8, 20), 2, block_size=16, beam_width=3, held_out=True),
    CalibrationCase("held-out contiguous", 24, (20, 250), (6, 26), 2, contiguous=True, held_out=True),
    CalibrationCase("held-out small blocks", 32, (10, 180), (8, 28), 4, block_size=6, held_out=True),
)


def case_trace(case: CalibrationCase, *, seed: int, lone_request_s: float, longest: int) -> Trace:
    """The case's requests: Poisson arrivals at `load / lone_request_s`, lengths within `longest` tokens in all."""
    draw = np.random.default_rng((seed, len(case.name), case.requests))
    rate = case.load / lone_request_s if case.load else 0.0
    gaps = draw.exponential(1 / rate, case.requests) if rate else np.zeros(case.requests)
    arrivals = np.rint(np.cumsum(gaps) * 1e6).astype(np.int64)
    rows = tuple(_rows(case, draw, arrivals.tolist(), longest))
    header = TraceHeader(
        name=f"calibration: {case.name}",
        format="generated",
        source="calibration plan",
        key_kind=CONTENT,
        source_block_tokens=None,
        clock_quantum_us=1,
        sha256="",
        rows_read=len(rows),
        rows_kept=len(rows),
    )
    return Trace(header, rows)


def _rows(
    case: CalibrationCase, draw: np.random.Generator, arrivals: list[int], longest: int
) -> Iterator[TraceRequest]:
    scale = min(1.0, longest / (case.prompt[1] + case.output[1]))
    for number, arrival in enumerate(arrivals):
        prompt = max(1, int(scale * draw.integers(*case.prompt, endpoint=True)))
        output = max(1, int(scale * draw.integers(*case.output, endpoint=True)))
        common = round(prompt * case.shared)
        pieces = (Segment(SHARED, common), Segment(None, prompt - common))
        yield TraceRequest(number, arrival, prompt, output, tuple(piece for piece in pieces if piece.tokens))


def case_workload(config: RunConfig, case: CalibrationCase, lone_request_s: float) -> Workload:
    """The case's requests on a pool of its own, large enough that nothing is preempted."""
    base = pool_shape(config)
    longest = min(base.max_model_len, _LONGEST)
    size = 1 if case.contiguous else case.block_size
    pool = replace(
        base,
        policy=CachePolicy.contiguous_max if case.contiguous else CachePolicy.paged,
        num_blocks=_POOL_TOKENS // size,
        block_size=size,
        max_model_len=longest,
        prefix_caching=not case.contiguous,
    )
    width = max(case.beam_width, case.samples)
    decoding = Decoding.BEAM if case.beam_width > 1 else Decoding.SAMPLE if width > 1 else Decoding.GREEDY
    budget = max(config.scheduler.max_batched_tokens, width)
    limits = SchedulerLimits(budget, max_running=64, max_model_len=longest)
    trace = case_trace(case, seed=SEED, lone_request_s=lone_request_s, longest=longest)
    return Workload(trace, pool, limits, decoding, width)


def probe_workload(config: RunConfig, case: CalibrationCase) -> Workload:
    """A case that arrives all at once."""
    return case_workload(config, case, 1.0)
