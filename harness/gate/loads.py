"""The loads of the policy layer: small replays of block manager and scheduler through the scheduler's public interface.

This file is kept in the baseline beside the policy core, so the accepted core runs the loads that were written for it.
It imports nothing but the core.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.core.identity import KeyIdentity
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler

LOAD_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Load:
    """Requests and the size of their pool in blocks. `parents(width, step)` gives the parents of a request's beams."""

    requests: tuple[Request, ...]
    blocks: int
    limits: SchedulerLimits
    parents: Callable[[int, int], list[int]] | None = None

    def run(self) -> int:
        """Serve all requests; returns the number of steps."""
        scheduler = Scheduler(PagedManager(self.blocks, LOAD_BLOCK_SIZE), self.limits)
        for request in self.requests:
            scheduler.submit(request)
        steps = 0
        while scheduler.has_work:
            plan = scheduler.schedule()
            scheduler.commit(plan, StepResult(parents=dict(self._parents(plan, steps))))
            steps += 1
        return steps

    def _parents(self, plan: StepPlan, step: int) -> Iterator[tuple[int, list[int]]]:
        if self.parents is None:
            return
        for request in self.requests:
            yield request.request_id, self.parents(request.width, step)


def loads() -> dict[str, Load]:
    """The loads by name. A changed load is a new case and needs a new name."""
    prompts = _plain(200, 700, 4)
    beams = tuple(Request(rid, 40, 48, 8, Decoding.beam) for rid in range(6))
    return {
        "scheduler: decode, 64 sequences": Load(_plain(64, 16, 96), 2000, SchedulerLimits(2048, 64)),
        "scheduler: chunked prefill, 200 prompts of 700": Load(prompts, 4000, SchedulerLimits(512, 64)),
        "block manager: shared prefixes": Load(_sharing(120), 3000, SchedulerLimits(4096, 64)),
        "block manager: pool too small, preemption": Load(_plain(48, 64, 96), 200, SchedulerLimits(2048, 48)),
        "block manager: beams, copy on write": Load(beams, 3000, SchedulerLimits(2048, 64), _half),
    }


def _plain(count: int, prompt: int, output: int) -> tuple[Request, ...]:
    return tuple(Request(rid, prompt, output) for rid in range(count))


def _sharing(count: int) -> tuple[Request, ...]:
    """Requests with one of three shared prefixes of 1,024 tokens in turn, and 40 tokens of their own."""
    keys = ([(rid % 3, 1024), (None, 40)] for rid in range(count))
    return tuple(Request(rid, 1064, 8, identity=KeyIdentity(rid, key)) for rid, key in enumerate(keys))


def _half(width: int, step: int) -> list[int]:
    """Parents that continue every second beam, each twice. Even and odd steps continue the other half."""
    return [2 * (place // 2) + step % 2 for place in range(width)]
