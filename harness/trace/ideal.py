"""The ideal hit ratio from the real prefix cache: the prompts of a trace, one after another, in an unlimited pool.

`traces.analysis.reuse` computes the same number from the keys of the trace. If the two differ, one of them is wrong.
"""

from collections.abc import Callable

from engine.core.identity import BlockIdentity, KeyIdentity
from engine.core.memory.paged import PagedManager
from engine.core.options import SchedulerLimits
from engine.core.plan import StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from traces.trace import Trace, TraceRequest

Identify = Callable[[TraceRequest], BlockIdentity]


def by_keys(request: TraceRequest) -> BlockIdentity:
    """A block identity that hashes the trace's keys; it needs no tokens."""
    return KeyIdentity(request.request_id, request.segments, request.salt)


def ideal_hit_tokens(trace: Trace, block_size: int, identify: Identify = by_keys) -> int:
    """Prompt tokens that the scheduler found in its cache: full blocks, and never a prompt's last token.

    Each request generates one token and ends before the next begins, so nothing but prompts is cached.
    """
    blocks = sum(-(-request.prompt_tokens // block_size) for request in trace.requests) + 1
    longest = max(request.prompt_tokens for request in trace.requests) + 1
    limits = SchedulerLimits(
        max_batched_tokens=longest, max_running=1, max_model_len=longest, chunked_prefill=False, watermark=0.0
    )
    scheduler = Scheduler(PagedManager(blocks, block_size), limits)
    return sum(_hit_tokens(scheduler, request, identify(request)) for request in trace.requests)


def _hit_tokens(scheduler: Scheduler, request: TraceRequest, identity: BlockIdentity) -> int:
    scheduler.submit(Request(request.request_id, request.prompt_tokens, 1, identity=identity))
    hits = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        hits += plan.hit_tokens
        scheduler.commit(plan, StepResult())
    return hits
