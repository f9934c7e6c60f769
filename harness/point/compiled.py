"""Whether a point's prediction can be replayed compiled, and the replay; `harness.sim.compiled` says what that is."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from engine.core.options import Decoding, Preemption, Scheduling
from harness.config.errors import ConfigError
from harness.config.schema import CachePolicy, Compiled, ReplayMode, RetentionRule
from harness.point.workload import Workload
from harness.sim.compiled.compiling import is_available
from harness.sim.compiled.replay import CompiledReplay, PlainPool, PlainRequests
from harness.sim.compiled.state import IntArray
from harness.sim.cost import CostModel
from traces.trace import TraceRequest

ENOUGH = 5_000  # requests from which the compiled code is worth loading (a second, and some more to compile it once)
_OPEN_LOOP = (ReplayMode.trace, ReplayMode.poisson, ReplayMode.gamma, ReplayMode.offline)


def compiled_replay(workload: Workload, cost: CostModel) -> CompiledReplay | None:
    """The point's compiled replay, or None where it must go, or had better go, through the policy core.

    Raises ConfigError where `replay.compiled=always` and it cannot be had.
    """
    mode, rows = workload.compiled, workload.trace.requests
    if mode is Compiled.never or (mode is Compiled.auto and len(rows) < ENOUGH):
        return None
    reason = obstacle(workload, cost)
    if reason is None:
        return replay_of(workload, plain_requests(rows), cost)
    if mode is Compiled.always:
        raise _refusal(reason)
    return None


def check_compiled(workload: Workload) -> None:
    """Raises ConfigError where `replay.compiled=always` and no cost model could make it so; cheap otherwise."""
    reason = _obstacle(workload) if workload.compiled is Compiled.always else None
    if reason is not None:
        raise _refusal(reason)


def _refusal(reason: str) -> ConfigError:
    return ConfigError("replay.compiled", f"always, but {reason}; use auto")


def obstacle(workload: Workload, cost: CostModel) -> str | None:
    """Why the point cannot be replayed compiled; None where it can."""
    from harness.sim.compiled.prices import prices_of

    if prices_of(cost) is None:
        return f"cost={cost.source.kind} is neither a roofline nor linear"
    return _obstacle(workload)


def _obstacle(workload: Workload) -> str | None:
    if not is_available():
        return "numba is not installed, or cannot be imported (pip install numba)"
    return _policy_obstacle(workload) or _request_obstacle(workload)


def _policy_obstacle(workload: Workload) -> str | None:
    limits, batching, chance = workload.limits, workload.batching, workload.chance
    if workload.pool.policy is not CachePolicy.paged:
        return f"cache.policy={workload.pool.policy} is not paged"
    if limits.scheduling is not Scheduling.FCFS or limits.static_batch:
        return "the scheduler is not first come, first served with continuous batching"
    if limits.preemption is Preemption.SWAP:
        return "preempted requests are swapped out (scheduler.preemption)"
    if workload.cache.eviction or batching.order or batching.victim or batching.admission:
        return "there is a policy of your own, which decides in Python"
    if workload.release.mode not in _OPEN_LOOP or workload.release.until_ns is not None:
        return "requests wait for others (replay.mode), or the replay stops early (replay.duration_s)"
    return "branches end by chance" if chance.survival else None


def _request_obstacle(workload: Workload) -> str | None:
    rows = workload.trace.requests
    forms = {workload.forms.of(row) for row in rows}
    if any(form.width > 1 or form.decoding is Decoding.BEAM or form.speculation for form in forms):
        return "requests have beams, several samples or drafts"
    if workload.pool.prefix_caching and any(map(partial(_shares, workload.pool.block_size), rows)):
        return "prompts may share prefixes"
    return None


def _shares(block_size: int, row: TraceRequest) -> bool:
    """Whether another request may have the first block of `row`."""
    keyed = 0
    for segment in row.segments:
        if segment.key is None or keyed >= block_size:
            break
        keyed += segment.tokens
    return keyed >= block_size


def plain_requests(rows: Sequence[TraceRequest]) -> PlainRequests:
    """The lengths of `rows`."""
    return PlainRequests(
        _column([row.request_id for row in rows]),
        _column([row.arrival_us for row in rows]) * 1000,
        _column([row.prompt_tokens for row in rows]),
        _column([row.output_tokens for row in rows]),
    )


def _column(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def replay_of(workload: Workload, requests: PlainRequests, cost: CostModel) -> CompiledReplay:
    """`requests` on the workload's pool; there must be no `obstacle`."""
    from harness.sim.compiled.prices import prices_of

    pool, prices = workload.pool, prices_of(cost)
    assert prices is not None
    keeps = pool.prefix_caching and workload.cache.retention is RetentionRule.lru
    plain = PlainPool(pool.num_blocks, pool.block_size, pool.kv_bytes_per_token, keeps)
    return CompiledReplay(requests, workload.limits, plain, prices)
