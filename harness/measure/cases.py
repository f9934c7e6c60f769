"""The workloads of a calibration: small ones that are fitted, with uniform lengths, and others that are held out.

Those held out have published lengths and arrivals. Both are different from those of sweeps.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from engine.core.options import CachePolicy, Decoding, Preemption, SchedulerLimits, Sharing
from engine.core.request import Speculation
from harness.config.schema import CacheConfig, ReplayMode, SchedulerConfig
from harness.workload.decoding import RequestDecoding, TraceDecoding
from harness.workload.deployment import Deployment, PoolShape
from harness.workload.point import Point, Workload
from harness.workload.trace import Traffic
from traces.reshape import scale_lengths, set_rate
from traces.synth.generator import generate_trace
from traces.trace import CONTENT, Segment, Trace, TraceHeader, TraceRequest

SEED = 7_919
_POOL_TOKENS = 16_384
_LONGEST = 1024
SHARED_KEY = 2**62  # of calibration prefixes; no trace uses keys as large
_LARGEST_BATCH = 256
_FEWEST = 6  # requests of a case, however small the budget


class Budget:
    """A budget of wall time that starts now; `seconds` None is unlimited."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._begun = time.perf_counter()

    @property
    def limited(self) -> bool:
        """Whether it is limited."""
        return self._seconds is not None

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begun

    def left(self, share: float = 1.0) -> bool:
        """Whether less than `share` of the budget is spent."""
        return self._seconds is None or self.spent_s < share * self._seconds


@dataclass(frozen=True)
class CalibrationCase:
    """One calibration workload. `load` is the requests that arrive in the time of a lone request; 0: all at once."""

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
    chunk: int | None = None  # token budget of a step; None: the scheduler's
    swaps: bool = False  # the pool holds a quarter of the requests; the others are swapped out
    drafts: int = 0  # tokens that the draft model proposes a step


# A request that runs alone; its time is the unit of loads.
LONE_REQUEST = CalibrationCase("alone", 2, (64, 64), (16, 16), 0)

CASES = (
    CalibrationCase("burst", 64, (16, 256), (24, 48), 0),
    CalibrationCase("lone requests", 16, (8, 200), (10, 40), 0.5),
    CalibrationCase("prompts alone", 48, (1, 500), (1, 2), 0.3),
    CalibrationCase("short prompts", 32, (1, 40), (2, 6), 0.5, block_size=32),
    CalibrationCase("few at a time", 24, (8, 250), (10, 40), 1.5, block_size=32),
    CalibrationCase("steady", 40, (32, 200), (10, 30), 4, block_size=8),
    CalibrationCase("long prompts", 12, (300, 900), (4, 16), 1.5, block_size=32),
    CalibrationCase("two beams", 28, (16, 160), (10, 24), 3, block_size=32, beam_width=2),
    CalibrationCase("four beams", 24, (16, 160), (10, 24), 2, block_size=8, beam_width=4),
    CalibrationCase("many beams", 16, (16, 160), (10, 24), 0, beam_width=4),
    CalibrationCase("contiguous", 32, (16, 160), (8, 30), 3, contiguous=True),
    CalibrationCase("contiguous beams", 16, (16, 120), (8, 24), 2, contiguous=True, beam_width=4),
    CalibrationCase("shared prefix", 40, (64, 300), (8, 24), 4, block_size=4, shared=0.8),
    CalibrationCase("samples", 16, (16, 160), (8, 24), 2, samples=4),
    CalibrationCase("swaps", 16, (32, 160), (16, 40), 0, block_size=8, swaps=True),
    CalibrationCase("swaps of large blocks", 16, (32, 160), (16, 40), 0, block_size=32, swaps=True),
)
# Measured where a draft model is configured.
DRAFTING = (
    CalibrationCase("drafts", 12, (16, 160), (16, 40), 0.8, drafts=2),
    CalibrationCase("many drafts", 16, (16, 160), (16, 40), 2, drafts=5),
)


def design(
    deployment: Deployment, lone_request_s: float, budget_s: float | None
) -> tuple[CalibrationCase, ...]:
    """The cases for this device and model: as large as the scheduler's batches, as many requests as time allows.

    `lone_request_s` is the wall time of a request of LONE_REQUEST. The cases are scaled so that one pass is expected to
    take a sixth of `budget_s` (None: not scaled). The rest is for further passes and for validation.
    """
    widest = max(CASES[0].requests, min(deployment.scheduler.max_running, _LARGEST_BATCH))
    drafting = DRAFTING if deployment.decoding.draft_tokens else ()
    cases = (replace(CASES[0], requests=widest), *CASES[1:], *drafting)
    cases = tuple(case for case in cases if not deployment.engine.on_vllm or _on_vllm(case))
    if budget_s is None:
        return cases
    expected = lone_request_s * sum(case.requests * _weight(case) for case in cases)
    factor = min(2.0, budget_s / 6 / expected)
    return tuple(replace(case, requests=max(_FEWEST, round(case.requests * factor))) for case in cases)


def _on_vllm(case: "CalibrationCase | HeldOut") -> bool:
    """Whether vLLM serves such requests as we do: no copies of beams, no swapped requests, paged."""
    several = max(case.beam_width, getattr(case, "samples", 1)) > 1
    return not (several or case.contiguous or getattr(case, "swaps", False))


def _weight(case: CalibrationCase) -> float:
    """Engine time of a request of this case over that of LONE_REQUEST, from its share of steps and its prompt."""
    width = max(case.beam_width, case.samples)
    batch = 4.0 if case.load == 0 or case.load > 2 else max(1.0, case.load)
    steps = sum(case.output) / 2 / LONE_REQUEST.output[0] * float(width**0.5) / batch
    return steps + sum(case.prompt) / 2 / LONE_REQUEST.prompt[0] / 8


def case_trace(case: CalibrationCase, *, seed: int, lone_request_s: float, longest: int) -> Trace:
    """The case's requests: Poisson arrivals at `load / lone_request_s`, lengths within `longest` tokens in all."""
    draw = np.random.default_rng((seed, len(case.name), case.requests))
    rate = case.load / lone_request_s if case.load else 0.0
    gaps = draw.exponential(1 / rate, case.requests) if rate else np.zeros(case.requests)
    arrivals = np.rint(np.cumsum(gaps) * 1e6).astype(np.int64)
    rows = tuple(_rows(case, draw, arrivals.tolist(), longest))
    return planned_trace(f"calibration: {case.name}", rows)


def planned_trace(name: str, rows: tuple[TraceRequest, ...]) -> Trace:
    """The trace of requests that no file has."""
    count = len(rows)
    return Trace(TraceHeader(name, "generated", "calibration plan", CONTENT, None, 1, "", count, count), rows)


def _rows(
    case: CalibrationCase, draw: np.random.Generator, arrivals: list[int], longest: int
) -> Iterator[TraceRequest]:
    scale = min(1.0, longest / (case.prompt[1] + case.output[1]))
    for number, arrival in enumerate(arrivals):
        prompt = max(1, int(scale * draw.integers(*case.prompt, endpoint=True)))
        output = max(1, int(scale * draw.integers(*case.output, endpoint=True)))
        common = round(prompt * case.shared)
        pieces = (Segment(SHARED_KEY, common), Segment(None, prompt - common))
        yield TraceRequest(number, arrival, prompt, output, tuple(piece for piece in pieces if piece.tokens))


def case_point(deployment: Deployment, case: CalibrationCase, lone_request_s: float) -> Point:
    """The case's requests on a pool of its own, large enough that nothing is preempted unless the case swaps."""
    longest = min(deployment.pool.max_model_len, _LONGEST)
    pool = _pool(deployment, case, _pool_tokens(case, deployment.pool.tokens, longest))
    width = max(case.beam_width, case.samples)
    decoding = Decoding.beam if case.beam_width > 1 else Decoding.sample if width > 1 else Decoding.greedy
    budget = max(case.chunk or deployment.scheduler.max_batched_tokens, width)
    limits = SchedulerLimits(
        budget,
        max_running=max(64, case.requests),
        max_model_len=longest,
        preemption=Preemption.swap if case.swaps else Preemption.recompute,
    )
    trace = case_trace(case, seed=SEED, lone_request_s=lone_request_s, longest=longest)
    served = alone(deployment, pool, limits, host_tokens=_tokens(case) if case.swaps else 0)
    speculation = Speculation(case.drafts) if case.drafts else None
    return Point(served, Workload(trace, TraceDecoding(RequestDecoding(width, decoding, speculation))))


def alone(
    deployment: Deployment, pool: PoolShape, limits: SchedulerLimits, host_tokens: int = 0
) -> Deployment:
    """The same model and engine with the default policies on another pool: for runs that time the engine."""
    return replace(
        deployment,
        cache=CacheConfig(host_tokens=host_tokens),
        scheduler=SchedulerConfig(),
        decoding=replace(deployment.decoding, sharing=Sharing.copy_on_write, beam_churn=None),
        device=replace(deployment.device, data_parallel=1),
        pool=pool,
        limits=limits,
    )


def _pool(deployment: Deployment, case: "CalibrationCase | HeldOut", tokens: int) -> PoolShape:
    """A pool of so many KV slots, for sequences as long as those of a calibration."""
    size = 1 if case.contiguous else case.block_size
    if deployment.engine.on_vllm:
        size = 32 if size < 32 else 64  # vLLM has multiples of 32 on a CPU
    return replace(
        deployment.pool,
        policy=CachePolicy.contiguous_max if case.contiguous else CachePolicy.paged,
        num_blocks=tokens // size,
        block_size=size,
        max_model_len=min(deployment.pool.max_model_len, _LONGEST),
        prefix_caching=not case.contiguous,
    )


def _pool_tokens(case: CalibrationCase, most: int, longest: int) -> int:
    """KV slots of the case's pool; where the default is not enough, at most `most`."""
    if case.swaps:
        return max(2 * min(longest, case.prompt[1] + case.output[1]), _tokens(case) // 4)
    return max(_POOL_TOKENS, min(most, _tokens(case)))


def _tokens(case: CalibrationCase) -> int:
    """The most slots that all requests of the case take at once."""
    return case.requests * (case.prompt[1] + case.output[1] * max(case.beam_width, case.samples))


def probe_point(deployment: Deployment, case: CalibrationCase) -> Point:
    """A case that arrives all at once."""
    return case_point(deployment, case, 1.0)


HELD_OUT_SEED = 104_729
_MEAN_TOKENS = 160  # mean of a held-out request after scaling, unless the model takes fewer


@dataclass(frozen=True)
class HeldOut:
    """A workload for validation. `load` is the requests that arrive in the time of a lone request."""

    name: str
    table: str
    requests: int
    load: float
    block_size: int = 16
    contiguous: bool = False
    beam_width: int = 1
    users: int = 0  # above 0: a closed loop


HELD_OUT = (
    HeldOut("Azure code, open loop", "azure_code", 20, 2.5),
    HeldOut("Azure conversation, 6 users", "azure_conv", 20, 1.0, block_size=8, users=6),
    HeldOut("Mooncake conversation, 3 beams", "mooncake_conversation", 12, 1.0, block_size=32, beam_width=3),
    HeldOut("arXiv summaries, contiguous", "arxiv", 12, 1.5, contiguous=True),
)


def held_out_of(deployment: Deployment) -> tuple[HeldOut, ...]:
    """The workloads for validation that the engine serves."""
    return tuple(each for each in HELD_OUT if not deployment.engine.on_vllm or _on_vllm(each))


def held_out_point(deployment: Deployment, held_out: HeldOut, lone_request_s: float) -> Point:
    """The workload on a pool of its own, its lengths cut to what the model takes."""
    pool = _pool(deployment, held_out, _POOL_TOKENS)
    longest = pool.max_model_len
    budget = max(deployment.scheduler.max_batched_tokens, held_out.beam_width)
    served = alone(deployment, pool, SchedulerLimits(budget, max_running=64, max_model_len=longest))
    trace = generate_trace(held_out.table, num_requests=held_out.requests, seed=HELD_OUT_SEED)
    totals = [row.prompt_tokens + row.output_tokens for row in trace.requests]
    factor = min(_MEAN_TOKENS / (sum(totals) / len(totals)), (longest - 4) / max(totals), 1.0)
    trace = set_rate(scale_lengths(trace, factor), held_out.load / lone_request_s)
    decoding = Decoding.beam if held_out.beam_width > 1 else Decoding.greedy
    traffic = Traffic(ReplayMode.closed, users=held_out.users) if held_out.users else Traffic()
    requests = TraceDecoding(RequestDecoding(held_out.beam_width, decoding))
    return Point(served, Workload(trace, requests, traffic))
