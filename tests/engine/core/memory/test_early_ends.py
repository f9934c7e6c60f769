"""Branches that end at the very token of their fork: copies that nobody needs any more are not made."""

import numpy as np
import pytest

from engine.core.identity import TokenIdentity
from engine.core.memory.contiguous import ContiguousManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.plan import StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler


def forked(width: int = 3) -> Scheduler:
    """Branches of a prompt of 10 tokens, the step of the fork planned and not yet answered."""
    scheduler = Scheduler(ContiguousManager(200, 30), SchedulerLimits(64, 16, max_model_len=30))
    scheduler.submit(Request(0, 10, 8, width, Decoding.sample, TokenIdentity(0, np.arange(10))))
    return scheduler


@pytest.mark.parametrize("ended", [[0], [1], [2], [0, 1], [0, 2], [1, 2]])
def test_no_copy_reads_or_writes_what_was_given_back(ended: list[int]) -> None:
    scheduler = forked()
    first = scheduler.schedule()
    prompt = list(first.rows[0].table[:10])
    scheduler.commit(first, StepResult(ended={0: ended}))
    scheduler.manager.check()
    plan = scheduler.schedule()
    tables = [list(row.table[:10]) for row in plan.rows]
    assert len(tables) == 3 - len(ended)
    held = {slot for table in tables for slot in table}
    filled = set(prompt) | {target for _, target in plan.copies}
    assert held <= filled  # whoever goes on has a whole prompt
    assert {target for _, target in plan.copies} <= held
    assert {source for source, _ in plan.copies} <= held
    assert held.isdisjoint(plan.frees)


def test_all_branches_that_end_at_once_leave_nothing_behind() -> None:
    scheduler = forked()
    plan = scheduler.schedule()
    scheduler.commit(plan, StepResult(ended={0: [0, 1, 2]}))
    scheduler.manager.check()
    assert not scheduler.has_work
    assert not scheduler.manager.drain_copies()


def test_a_request_dropped_between_its_fork_and_its_copies_leaves_none() -> None:
    scheduler = forked()
    plan = scheduler.schedule()
    scheduler.commit(plan, StepResult())
    scheduler.abort(0)
    scheduler.manager.check()
    assert not scheduler.manager.drain_copies()
