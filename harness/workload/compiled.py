"""Which points compiled code replays (`harness.compiled`), and what it is given; others go through `engine.core`."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from engine.core.options import CachePolicy, Decoding, Keep, Preemption, Retention, Scheduling, Sharing
from harness.compiled.names import BlockNames
from harness.compiled.numba_edge import is_available
from harness.compiled.replay import Branches, CompiledReplay, PlainPool, PlainRequests
from harness.config.errors import ConfigError
from harness.config.schema import Compiled, ReplayMode
from harness.metrics.log import IntArray
from harness.replay.beams import BeamGenealogy
from harness.replay.cost_model import CostModel
from harness.workload.decoding import RequestDecoding
from harness.workload.workload import Workload
from traces.trace import TraceRequest

COMPILED_FROM = (
    5_000  # requests; loading the compiled code takes a second, and compiling it once takes some more
)
SHARING_FROM = 1_000  # the same where prompts may share blocks, which take the policy core longer
_OPEN_LOOP = (ReplayMode.trace, ReplayMode.poisson, ReplayMode.gamma, ReplayMode.offline)


def compiled_replay(
    workload: Workload, cost: CostModel, beam_churn: float | None = None
) -> CompiledReplay | None:
    """The point's compiled replay, or None where `engine.core` must replay it, or is quicker because requests are few.

    `beam_churn` None takes the calibrated one.

    Raises:
        ConfigError: `replay.compiled=always`, but the point cannot be replayed by compiled code.
    """
    mode, rows = workload.compiled, workload.trace.requests
    if mode is Compiled.never or (mode is Compiled.auto and _is_small(workload)):
        return None
    reason = obstacle(workload, cost)
    if reason is None:
        requests = plain_requests(rows, _named_blocks(workload), _branches(workload, cost, beam_churn))
        return replay_of(workload, requests, cost)
    if mode is Compiled.always:
        raise _refusal(reason)
    return None


def _is_small(workload: Workload) -> bool:
    """Whether `engine.core` replays the workload before the compiled code is loaded."""
    count = len(workload.trace.requests)
    return count < SHARING_FROM or (count < COMPILED_FROM and not _is_slow_in_the_core(workload))


def _is_slow_in_the_core(workload: Workload) -> bool:
    return _may_share(workload) or any(decoding.width > 1 for decoding in _decodings(workload))


def _decodings(workload: Workload) -> set[RequestDecoding]:
    return {workload.trace_decoding.of(row) for row in workload.trace.requests}


def check_compiled(workload: Workload) -> None:
    """Check `replay.compiled=always` without a cost model.

    Raises:
        ConfigError: the workload cannot be replayed by compiled code, whatever the cost model.
    """
    reason = _obstacle(workload) if workload.compiled is Compiled.always else None
    if reason is not None:
        raise _refusal(reason)


def refuse_preempted_branches(workload: Workload) -> None:
    """A compiled replay met a preemption of several branches: only the policy core replays that.

    Raises:
        ConfigError: `replay.compiled=always`.
    """
    if workload.compiled is Compiled.always:
        raise _refusal("a request with several samples or beams is preempted")


def _refusal(reason: str) -> ConfigError:
    return ConfigError("replay.compiled", f"always, but {reason}; use auto")


def obstacle(workload: Workload, cost: CostModel) -> str | None:
    """Why the point cannot be replayed by compiled code; None where it can."""
    from harness.compiled.pricing import prices_of

    if prices_of(cost) is None:
        return f"cost={cost.source.kind} has prices that the compiled code does not know (experts, windows, tables)"
    return _obstacle(workload)


def _obstacle(workload: Workload) -> str | None:
    if not is_available():
        return "numba is not installed, or cannot be imported (pip install numba)"
    if workload.replicas > 1:
        return "there are several replicas (device.data_parallel)"
    return _policy_obstacle(workload) or _request_obstacle(workload)


def _policy_obstacle(workload: Workload) -> str | None:
    limits, batching, drawn = workload.limits, workload.batching, workload.drawn
    if workload.pool.policy is not CachePolicy.paged:
        return f"cache.policy={workload.pool.policy} is not paged"
    if workload.pool.groups is not None:
        return f"layers are in groups (cache.groups={workload.cache.groups})"
    if limits.policy is not Scheduling.fcfs or limits.static_batch:
        return "the scheduler is not first come, first served with continuous batching"
    if limits.adaptive_watermark:
        return "the watermark is adaptive (scheduler.adaptive_watermark)"
    if limits.preemption is Preemption.swap:
        return "preempted requests are swapped out (scheduler.preemption)"
    if workload.kv_events or workload.lookups:
        return "events or lookups of the prefix cache are kept (replay.kv_events, replay.lookups)"
    if workload.residency is not None:
        return "the residency of blocks is sampled (replay.residency)"
    if workload.cache.keep is not Keep.recent:
        return f"cached blocks are kept by a rule (cache.keep={workload.cache.keep})"
    if workload.cache.eviction or batching.order or batching.victim or batching.admission:
        return "a policy of your own is configured, which runs in Python"
    if batching.async_scheduling:
        return "steps are scheduled ahead (scheduler.async_scheduling)"
    if workload.traffic.mode not in _OPEN_LOOP or workload.traffic.until_ns is not None:
        return "requests wait for others (replay.mode), or the replay stops early (replay.duration_s)"
    return "ends of sampled branches are drawn (decoding.branch_hazard)" if drawn.survival else None


def _request_obstacle(workload: Workload) -> str | None:
    if workload.shared_outputs:
        return "later prompts find the blocks of answers"
    if workload.resubmits:
        return "a client sends the beams as requests (decoding.sharing=prefix_cache)"
    decodings = _decodings(workload)
    if any(each.speculation for each in decodings):
        return "requests have drafts (decoding.spec_tokens)"
    if workload.drawn.parents is not None:
        return "beams follow a recording (decoding.beam_parents)"
    if workload.sharing is Sharing.tail_at_fork and any(each.width > 1 for each in decodings):
        return "beams keep their blocks (decoding.sharing=tail_at_fork)"
    if workload.cache.copy_at_fork and any(each.width > 1 for each in decodings):
        return "branches copy their blocks (cache.copy_at_fork)"
    if workload.cache.deduplicate and _may_share(workload):
        return "prompts may share prefixes, and equal blocks are merged (cache.deduplicate)"
    return None


def _may_share(workload: Workload) -> bool:
    """Whether two prompts may share a block."""
    rows = workload.trace.requests
    return workload.pool.prefix_caching and any(map(partial(_shares, workload.pool.block_size), rows))


def _named_blocks(workload: Workload) -> BlockNames | None:
    """Names for the blocks that several requests may share; None where none may."""
    if not _may_share(workload):
        return None
    return BlockNames.of(
        ((row.segments, row.salt) for row in workload.trace.requests), workload.pool.block_size
    )


def _shares(block_size: int, row: TraceRequest) -> bool:
    """Whether another request may share the first block of `row`."""
    keyed = 0
    for segment in row.segments:
        if segment.key is None or keyed >= block_size:
            break
        keyed += segment.tokens
    return keyed >= block_size


def _branches(workload: Workload, cost: CostModel, beam_churn: float | None) -> Branches | None:
    """Widths of the requests, and the model of their beams; None where each is a greedy request of one branch."""
    decodings = [workload.trace_decoding.of(row) for row in workload.trace.requests]
    if all(each.width == 1 and each.mode is Decoding.greedy for each in decodings):
        return None
    genealogy = workload.drawn.genealogy(cost.source, workload.width, beam_churn)
    assert isinstance(genealogy, BeamGenealogy)
    beam, drawn = (
        _column([int(each.mode is mode) for each in decodings]) for mode in (Decoding.beam, Decoding.sample)
    )
    return Branches(_column([each.width for each in decodings]), beam, drawn, genealogy)


def plain_requests(
    rows: Sequence[TraceRequest], names: BlockNames | None = None, branches: Branches | None = None
) -> PlainRequests:
    """Ids, arrivals and lengths of `rows` as arrays, with the names of their shared blocks and their branches."""
    return PlainRequests(
        _column([row.request_id for row in rows]),
        _column([row.arrival_us for row in rows]) * 1000,
        _column([row.prompt_tokens for row in rows]),
        _column([row.output_tokens for row in rows]),
        names,
        branches,
    )


def _column(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def replay_of(workload: Workload, requests: PlainRequests, cost: CostModel) -> CompiledReplay:
    """The compiled replay of `requests` on the workload's pool; `obstacle()` must be None."""
    from harness.compiled.pricing import prices_of

    pool, prices = workload.pool, prices_of(cost)
    assert prices is not None
    keeps = pool.prefix_caching and workload.cache.retention is Retention.lru
    plain = PlainPool(pool.num_blocks, pool.block_size, pool.kv_bytes_per_token, keeps)
    return CompiledReplay(requests, workload.limits, plain, prices)
