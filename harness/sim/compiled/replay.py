"""The compiled replay from outside: lengths and rules in, the columns of a run out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from engine.core.options import SchedulerLimits
from harness.metrics.log import Column, RunLog
from harness.sim.clock import TimeSpanError, to_s
from harness.sim.compiled.columns import gaps, request_columns, step_columns
from harness.sim.compiled.compiling import compiled
from harness.sim.compiled.loop import FULL, TOO_LONG, advance
from harness.sim.compiled.state import (
    ENDED,
    GAPS,
    LAST_END,
    STEPS,
    FloatArray,
    IntArray,
    Lengths,
    Prices,
    Rules,
    Run,
    new_run,
)
from harness.sim.features import FEATURES
from harness.sim.folding import CHUNK, RunFold

LOG_STEPS = 2 * CHUNK  # steps in memory before they are handed on: few enough for the processor's caches


@dataclass(frozen=True)
class PlainRequests:
    """Requests without content, int64 `[requests]` each, in order of arrival; lengths in tokens."""

    request_id: IntArray
    arrival_ns: IntArray
    prompt_tokens: IntArray
    output_tokens: IntArray


@dataclass(frozen=True)
class PlainPool:
    """A paged pool; `keeps` says whether released blocks stay findable until they are taken again."""

    num_blocks: int
    block_size: int
    kv_bytes_per_token: int
    keeps: bool

    @property
    def slots(self) -> int:
        """KV slots."""
        return self.num_blocks * self.block_size


class CompiledReplay:
    """One run of plain requests, from an empty pool to the end of the last request."""

    def __init__(
        self,
        requests: PlainRequests,
        limits: SchedulerLimits,
        pool: PlainPool,
        prices: Prices,
        *,
        log_steps: int = LOG_STEPS,
        play: Callable[[Run, int], int] | None = None,
    ) -> None:
        self._requests = requests
        self._pool = pool
        rules = _rules(limits, pool, len(requests.request_id))
        fits = _fits(requests, limits, pool)
        lengths = Lengths(requests.arrival_ns, requests.prompt_tokens, requests.output_tokens, fits)
        self._run = new_run(lengths, rules, prices, pool.num_blocks, len(FEATURES), log_steps)
        self._advance = play or compiled(advance)

    def fold(self, fold: RunFold) -> float:
        """Play into `fold`; returns when the last step ended, in s."""
        handed = 0
        for steps, between in self._chunks():
            fold.add_steps(steps)
            fold.add_gaps(*between)
            while self._run.at[ENDED] - handed >= CHUNK:
                fold.add_requests(self._ended(handed, handed + CHUNK))
                handed += CHUNK
        fold.close()
        if handed < self._run.at[ENDED]:
            fold.add_requests(self._ended(handed, handed + CHUNK))
        return self._span_s()

    def log(self) -> RunLog:
        """Play, and keep every row."""
        chunks = list(self._chunks())
        names = list(chunks[0][0])
        itl_s, weight = (np.concatenate([between[i] for _, between in chunks]) for i in (0, 1))
        values, inverse = np.unique(itl_s, return_inverse=True)
        return RunLog(
            steps={name: np.concatenate([steps[name] for steps, _ in chunks]) for name in names},
            requests=self._ended(0, len(self._requests.request_id)),
            itl_s=values,
            itl_weight=np.bincount(inverse, weights=weight, minlength=len(values)).astype(np.float64),
            block_size=self._pool.block_size,
            capacity_slots=self._pool.slots,
            kv_bytes_per_token=self._pool.kv_bytes_per_token,
            span_s=self._span_s(),
        )

    def _chunks(self) -> Iterator[tuple[dict[str, Column], tuple[FloatArray, FloatArray]]]:
        """Steps and gaps as the log fills."""
        at, played, code = self._run.at, 0, FULL
        while code == FULL:
            code = self._advance(self._run, self._pool.num_blocks)
            if code == TOO_LONG:
                raise TimeSpanError
            yield step_columns(self._run, played, self._pool.slots), gaps(self._run)
            played += int(at[STEPS])
            at[STEPS] = at[GAPS] = 0

    def _ended(self, first: int, last: int) -> dict[str, Column]:
        return request_columns(self._run, self._requests.request_id, first, last)

    def _span_s(self) -> float:
        """When the last step ended."""
        return float(to_s(int(self._run.at[LAST_END])))


def _rules(limits: SchedulerLimits, pool: PlainPool, requests: int) -> Rules:
    """More rows than requests are never needed: limits that nothing reaches cost no memory."""
    return Rules(
        budget=limits.max_batched_tokens,
        max_running=min(limits.max_running, requests),
        chunked=int(limits.chunked_prefill),
        whole_prompt=int(limits.admit_whole_prompt),
        prefill_cap=limits.long_prefill_tokens or 0,
        watermark_blocks=int(limits.watermark * pool.num_blocks),
        block_size=pool.block_size,
        keeps=int(pool.keeps),
    )


def _fits(requests: PlainRequests, limits: SchedulerLimits, pool: PlainPool) -> IntArray:
    """1 for requests that some schedule can serve (`Scheduler.never_fits`), else 0."""
    final = requests.prompt_tokens + requests.output_tokens - 1
    fits = -(-final // pool.block_size) <= pool.num_blocks
    if limits.max_model_len is not None:
        fits &= final < limits.max_model_len
    if not limits.chunked_prefill:
        fits &= final <= limits.max_batched_tokens
    return fits.astype(np.int64)
