"""Small scenes on the policy core: a few requests, a few steps, and the counts that claims are about.

Nothing is timed here. Every scene runs the scheduler and the managers that the simulator and the engine run.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from engine.core.identity import TokenIdentity
from engine.core.memory.manager import KVCacheManager
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.plan import SlotUsage, StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from engine.core.sequence import Group, ScheduledRow

Prompts = Sequence[Sequence[int]]
"""Token ids of each prompt."""


class Step(NamedTuple):
    """What one step did: its usage of slots, query tokens of its rows, copies, new blocks and hit tokens."""

    usage: SlotUsage
    queries: tuple[int, ...]
    copies: int
    new_blocks: int
    hit_tokens: int
    preempted: int


def scheduler(manager: KVCacheManager, *, running: int = 4096, budget: int = 1 << 20) -> Scheduler:
    """A scheduler whose limits never bind, unless they are given."""
    return Scheduler(manager, SchedulerLimits(budget, running))


def requests_of(prompts: Prompts, output: int = 1, first: int = 0) -> list[Request]:
    """Requests with these prompts, so that equal beginnings can be shared."""
    return [
        Request(rid, len(tokens), output, identity=TokenIdentity(rid, np.asarray(tokens)))
        for rid, tokens in enumerate(prompts, first)
    ]


def first_step(manager: KVCacheManager, requests: Iterable[Request]) -> StepPlan:
    """Plan the step that admits all that fit, prompts whole."""
    found = scheduler(manager)
    for request in requests:
        found.submit(request)
    return found.schedule()


def lengths_of(*lengths: int) -> list[Request]:
    """Requests with these prompt lengths that share nothing and generate one token."""
    return [Request(rid, length, 1) for rid, length in enumerate(lengths)]


def blocks_at(size: int, lengths: Sequence[int]) -> SlotUsage:
    """Slots while paged sequences of these lengths, just prefilled, are running."""
    blocks = sum(-(-length // size) for length in lengths)
    return first_step(PagedManager(blocks, size, prefix_caching=False), lengths_of(*lengths)).usage


def run(found: Scheduler, requests: Iterable[Request]) -> list[Step]:
    """Submit the requests and serve them to their end; branches keep their parents."""
    widths = {}
    for request in requests:
        found.submit(request)
        widths[request.request_id] = request.width
    steps = []
    while found.has_work:
        plan = found.schedule()
        steps.append(
            Step(
                plan.usage,
                tuple(int(tokens) for tokens in plan.query_len),
                len(plan.copies),
                plan.new_blocks,
                plan.hit_tokens,
                len(plan.preempted),
            )
        )
        found.commit(plan, StepResult(parents=_parents(plan, widths)))
    return steps


def _parents(plan: StepPlan, widths: dict[int, int]) -> dict[int, Sequence[int]]:
    rows: defaultdict[int, int] = defaultdict(int)
    for row in plan.rows:
        rows[row.request_id] += row.samples
    return {
        rid: [0] * widths[rid] if count == 1 else range(count)
        for rid, count in rows.items()
        if count and widths[rid] > 1
    }


def branches(prompt: int, width: int, own: int, size: int = 16, *, copy_at_fork: bool = False) -> list[Step]:
    """A group that writes `own` tokens in each of `width` branches behind its prompt, run to its end."""
    request = Request(0, prompt, own + 1, width, Decoding.sample)
    blocks = width * -(-(prompt + own) // size)
    return run(scheduler(PagedManager(blocks, size, copy_at_fork=copy_at_fork)), [request])


def peak(steps: Sequence[Step]) -> SlotUsage:
    """The usage of the step with the most blocks."""
    return max((step.usage for step in steps), key=lambda usage: usage.physical_blocks)


def forked(prompt: int, width: int, own: int = 64, size: int = 16) -> tuple[PagedManager, Group]:
    """A group whose prompt is computed and which has just forked; nothing of its own is written."""
    manager = PagedManager(width * -(-(prompt + own) // size), size)
    group = Group(Request(0, prompt, own, width, Decoding.sample))
    admitted(manager, group, prompt)
    manager.fork(group.sequences[0], group.fork())
    return manager, group


def admitted(manager: PagedManager, group: Group, tokens: int) -> None:
    """Admit the group with its hits, and write its prompt's first `tokens` tokens."""
    manager.admit(group, manager.lookup(group))
    root = group.sequences[0]
    manager.extend(ScheduledRow(root, tokens - root.computed, True))
    root.computed = tokens
