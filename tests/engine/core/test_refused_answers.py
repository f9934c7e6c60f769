"""What cannot be an answer, a plan or a parent is refused by name, before anything has changed."""

import numpy as np
import pytest

from engine.core.errors import CoreError, OutOfBlocksError, UnknownSequenceError
from engine.core.identity import TokenIdentity
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.contiguous import ContiguousManager
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from engine.core.sequence import Group, ScheduledRow


def scheduler_with(request: Request) -> Scheduler:
    scheduler = Scheduler(PagedManager(20, 4), SchedulerLimits(64, 8))
    scheduler.submit(request)
    return scheduler


def sampled(rid: int = 3) -> Request:
    return Request(rid, 6, 4, 3, Decoding.sample, TokenIdentity(rid, np.arange(6)))


def test_a_plan_is_answered_once() -> None:
    scheduler = scheduler_with(Request(0, 6, 4))
    plan = scheduler.schedule()
    scheduler.commit(plan, StepResult())
    with pytest.raises(CoreError, match="step 0 does not wait for a result"):
        scheduler.commit(plan, StepResult())
    assert scheduler.running[0].generated == 1


def test_a_plan_is_answered_before_the_next_is_made() -> None:
    scheduler = scheduler_with(Request(0, 6, 4))
    scheduler.schedule()
    with pytest.raises(CoreError, match="step 0 waits for its result"):
        scheduler.schedule()


def test_a_fast_forward_of_no_step_is_refused() -> None:
    with pytest.raises(CoreError, match="max_steps is 0"):
        scheduler_with(Request(0, 6, 4)).schedule(0)


def test_a_branch_that_is_not_there_cannot_end() -> None:
    scheduler = scheduler_with(sampled())
    plan: StepPlan = scheduler.schedule()
    with pytest.raises(CoreError, match=r"request 3 ends branches \[7\], it has \[0, 1, 2\]"):
        scheduler.commit(plan, StepResult(ended={3: [7]}))
    scheduler.commit(plan, StepResult())
    assert scheduler.running[0].width == 3


@pytest.mark.parametrize("parents", [[0, 1], [0, 1, 3], [-1, 0, 1]])
def test_every_branch_needs_a_parent_among_the_branches(parents: list[int]) -> None:
    manager, group = PagedManager(20, 4), Group(Request(5, 6, 4, 3, Decoding.beam))
    manager.admit(group, [])
    manager.extend(ScheduledRow(group.sequences[0], 6, True))
    group.sequences[0].computed = 6
    manager.fork(group.sequences[0], group.fork())
    with pytest.raises(CoreError, match="request 5 needs 3 parents, each below 3"):
        manager.reparent(group.sequences, parents)
    manager.check()


def test_a_negative_number_of_blocks_is_refused() -> None:
    pool = BlockPool(4)
    with pytest.raises(CoreError, match="-1 blocks asked for"):
        pool.take(-1)
    assert pool.free_blocks == 4


def test_each_block_has_one_hash() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    with pytest.raises(CoreError, match="2 blocks were given with 1 hashes"):
        pool.cache_full_blocks(blocks, ["a"])
    assert pool.find(["a"]) == []


def test_a_group_that_finds_no_room_reserves_nothing() -> None:
    manager, group = ContiguousManager(100, 40), Group(Request(2, 6, 4, 3, Decoding.sample))
    with pytest.raises(OutOfBlocksError, match="request 2 reserves 3 x 40 slots; 100 are free"):
        manager.admit(group, [])
    assert manager.usage(None).free == 100


def test_a_group_that_was_not_saved_cannot_come_back() -> None:
    manager = PagedManager(8, 4, host_blocks=4)
    with pytest.raises(UnknownSequenceError, match="request 1 has nothing in host memory"):
        manager.swap_in(Group(Request(1, 6, 4)))


def test_a_model_of_no_length_is_refused() -> None:
    with pytest.raises(CoreError, match="max_model_len is 0"):
        SchedulerLimits(max_model_len=0)
