"""The compiled replay from outside: lengths and rules in, the columns of a run log out.

`advance` is the loop that numba compiles. It runs step after step until the log is full or every request has ended.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from engine.core.options import SchedulerLimits
from harness.compiled.committing import commit, log_step
from harness.compiled.numba_edge import compiled, part
from harness.compiled.pricing import measure, price, took
from harness.compiled.scheduling import admit, continue_running, take_arrivals
from harness.compiled.state import (
    ARRIVED,
    COUNTS,
    ENDED,
    GAPS,
    HEAD,
    LAST_END,
    NEVER,
    NOW,
    PREEMPTED,
    RUNNING,
    STEPS,
    TAIL,
    Lengths,
    Prices,
    Rules,
    Run,
    new_run,
)
from harness.metrics.log import (
    GENERATED,
    REQUEST_COLUMNS,
    STEP_COLUMNS,
    Column,
    FloatArray,
    IntArray,
    Outcome,
    RunLog,
)
from harness.replay.features import FEATURES
from harness.replay.streaming import CHUNK, RunFold
from harness.replay.virtual_time import LATEST_NS, NS_PER_S, TimeSpanError, to_s

_TIME_COLUMNS = ("start_ns", "ns")
_UNKNOWN = ("policy_s", "build_s", "forward_s", "sample_s")
_STATES = ("token", "cached", "internal", "free")


def step_columns(run: Run, before: int, capacity_slots: int) -> dict[str, Column]:
    """The logged steps as in `RunLog.steps`; `before` steps were logged and taken out before."""
    count = run.at[STEPS]
    counts = run.log.counts[:count]
    found: dict[str, Column] = {
        name: counts[:, i].copy() for i, name in enumerate(COUNTS) if name not in _TIME_COLUMNS
    }
    found |= {name: np.full(count, np.nan) for name in _UNKNOWN}
    found["step"] = before + np.arange(count)
    found["start_s"], found["seconds"] = to_s(counts[:, 0]), to_s(counts[:, 1])
    found["attention_s"] = run.log.attention_s[:count].copy()
    found["logical_blocks"] = found["physical_blocks"]
    found["reserved"] = capacity_slots - np.sum([found[name] for name in _STATES], axis=0)
    nothing = np.zeros(count, dtype=np.int64)
    return {name: found.get(name, nothing) for name in STEP_COLUMNS}


def gaps(run: Run) -> tuple[FloatArray, FloatArray]:
    """The logged gaps between tokens in seconds, and how often each occurred."""
    count = run.at[GAPS]
    return to_s(run.log.gap_ns[:count]), run.log.gap_weight[:count].astype(np.float64)


def request_columns(run: Run, request_ids: IntArray, first: int, last: int) -> dict[str, Column]:
    """The requests that ended as number `first` … `last - 1`, in order of arrival, as in `RunLog.requests`."""
    lives, lengths = run.lives, run.lengths
    who = np.sort(lives.ended[first : min(last, run.at[ENDED])])
    nothing = np.zeros(len(who), dtype=np.int64)
    found: dict[str, Column] = {
        "request_id": request_ids[who],
        "arrival_s": to_s(lengths.arrival_ns[who]),
        "first_scheduled_s": _moment(lives.scheduled[who]),
        "first_token_s": _moment(lives.first_token[who]),
        "finish_s": _moment(lives.finish[who]),
        "prompt_tokens": lengths.prompt[who],
        "output_tokens": lengths.output[who],
        "width": nothing + 1,
        "resumed_hit_tokens": lives.resumed_hits[who],
        "recomputed_tokens": lives.recomputed[who],
        "preemptions": lives.preemptions[who],
        "outcome": np.where(lengths.fits[who] == 1, Outcome.FINISHED, Outcome.REJECTED),
    }
    table = {name: found.get(name, nothing) for name in REQUEST_COLUMNS}
    return {**table, GENERATED: lengths.output[who]}


def _moment(ns: IntArray) -> FloatArray:
    return np.where(ns == NEVER, np.nan, to_s(ns))


FULL, DONE, TOO_LONG = 0, 1, 2
_NS, _LATEST_NS = float(NS_PER_S), float(LATEST_NS)


def advance(run: Run, num_blocks: int) -> int:
    """Run steps; returns FULL, DONE, or TOO_LONG where the next one would end beyond what the clock counts."""
    at, log = run.at, run.log
    while at[STEPS] < len(log.counts) and at[GAPS] + run.rules.max_running < len(log.gap_ns):
        take_arrivals(run)
        if at[RUNNING] or at[HEAD] < at[TAIL]:
            if not step(run, num_blocks):
                return TOO_LONG
        elif at[ARRIVED] < len(run.lengths.prompt):
            at[NOW] = run.lengths.arrival_ns[at[ARRIVED]]
        else:
            return DONE
    return FULL


@part
def step(run: Run, num_blocks: int) -> bool:
    """One step; False, and nothing logged, where it would end too late."""
    budget = continue_running(run)
    if not run.at[PREEMPTED]:
        admit(run, budget)
    measure(run)
    seconds, attention_s = price(run)
    if not run.at[NOW] + seconds * _NS <= _LATEST_NS:
        return False
    took_ns = max(1, int(np.rint(seconds * _NS)))
    log_step(run, num_blocks, took_ns, attention_s)
    took(run)
    run.at[NOW] += took_ns
    commit(run, run.at[NOW])
    return True


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
