"""What the policy is timed on: small replays through the scheduler's public face, each stressing one part of it.

No clock and no cost model: a step is planned and committed at once. The same calls give the same plans every time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.core.identity import KeyIdentity
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Load:
    """Requests and the pool they compete for; `parents` re-parents the beams of a request in a step."""

    requests: tuple[Request, ...]
    blocks: int
    limits: SchedulerLimits
    parents: Callable[[int, int], list[int]] | None = None

    def run(self) -> int:
        """Serve every request to its end; returns the number of steps."""
        scheduler = Scheduler(PagedManager(self.blocks, BLOCK_SIZE), self.limits)
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
    """The loads by name. A changed load is a new case: give it a new name."""
    return {
        "scheduler: decode, 64 sequences": Load(_plain(64, 16, 96), 2000, SchedulerLimits(2048, 64)),
        "scheduler: chunked prefill, 200 prompts of 700": Load(
            _plain(200, 700, 4), 4000, SchedulerLimits(512, 64)
        ),
        "block manager: shared prefixes": Load(_sharing(120), 3000, SchedulerLimits(4096, 64)),
        "block manager: pool too small, preemption": Load(_plain(48, 64, 96), 200, SchedulerLimits(2048, 48)),
        "block manager: beams, copy on write": Load(_beams(6, 8), 3000, SchedulerLimits(2048, 64), _half),
    }


def _plain(count: int, prompt: int, output: int) -> tuple[Request, ...]:
    return tuple(Request(rid, prompt, output) for rid in range(count))


def _sharing(count: int) -> tuple[Request, ...]:
    """Three prompts of 1,024 tokens in turn, each followed by a question of its own."""
    return tuple(
        Request(rid, 1064, 8, identity=KeyIdentity(rid, [(rid % 3, 1024), (None, 40)]))
        for rid in range(count)
    )


def _beams(count: int, width: int) -> tuple[Request, ...]:
    return tuple(Request(rid, 40, 48, width, Decoding.BEAM) for rid in range(count))


def _half(width: int, step: int) -> list[int]:
    """Half of the beams continue, each in two hypotheses; which half alternates."""
    return [2 * (place // 2) + step % 2 for place in range(width)]
