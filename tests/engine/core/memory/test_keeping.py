"""Orders of eviction that know sessions: each rule, and random walks through the policy core with each of them."""

import random

import pytest

from engine.core import KeyIdentity, PagedManager, Request, Scheduler, SchedulerLimits, StepResult
from engine.core.errors import OutOfBlocksError
from engine.core.memory.eviction import KeepQueue, TurnOf
from engine.core.options import Keep

SIZE = 4


def request(rid: int, priority: int = 0, blocks: int = 1) -> Request:
    return Request(
        rid, blocks * SIZE, 1, identity=KeyIdentity(rid, [(rid + 1, blocks * SIZE)]), priority=priority
    )


def pushed(queue: KeepQueue, owner: Request | None, *blocks: int) -> None:
    queue.owner = owner
    queue.push(blocks)


def test_a_time_to_live_keeps_sessions_before_the_rest_until_it_is_over() -> None:
    queue, now = KeepQueue(Keep.ttl, {0: TurnOf("a", 1)}, seconds=10), [0]
    queue.clock = lambda: now[0]
    pushed(queue, request(0), 1, 2)
    pushed(queue, request(9), 3)  # of no session
    assert queue.blocks() == [3, 2, 1]
    now[0] = 10_000_000_000
    assert queue.pop(3) == [3, 2, 1]


def test_blocks_whose_time_is_over_are_evicted_before_those_of_live_sessions() -> None:
    queue, now = KeepQueue(Keep.ttl, {0: TurnOf("a", 1), 1: TurnOf("b", 1)}, seconds=10), [0]
    queue.clock = lambda: now[0]
    pushed(queue, request(0), 1)
    now[0] = 6_000_000_000
    pushed(queue, request(1), 2)
    pushed(queue, request(9), 3)
    now[0] = 11_000_000_000
    assert queue.pop(3) == [3, 1, 2]


def test_blocks_whose_time_is_over_are_evicted_before_what_is_released_later() -> None:
    queue, now = KeepQueue(Keep.ttl, {0: TurnOf("a", 1)}, seconds=10), [0]
    queue.clock = lambda: now[0]
    pushed(queue, request(0), 1)
    pushed(queue, request(9), 2)
    now[0] = 11_000_000_000
    assert queue.pop(1) == [2]
    pushed(queue, request(8), 3)
    assert queue.pop(2) == [1, 3]


def test_pinned_blocks_are_evicted_last() -> None:
    queue = KeepQueue(Keep.pin, {}, pinned=2)
    pushed(queue, request(0), 1, 2, 3, 4)
    pushed(queue, request(1), 5, 6, 7)
    assert queue.pop(7) == [4, 3, 7, 2, 1, 6, 5]


def test_blocks_of_requests_that_matter_less_are_evicted_first() -> None:
    queue = KeepQueue(Keep.priority, {})
    pushed(queue, request(0, priority=0), 1)
    pushed(queue, request(1, priority=2), 2)
    pushed(queue, request(2, priority=1), 3)
    assert queue.pop(3) == [2, 3, 1]


def test_what_the_next_turn_does_not_take_up_is_evicted_first() -> None:
    queue = KeepQueue(Keep.superseded, {0: TurnOf("a", 1), 1: TurnOf("a", 2), 2: TurnOf("b", 1)})
    pushed(queue, request(2), 9)
    pushed(queue, request(0), 1, 2, 3)
    queue.remove(1)  # the next turn hits the first block alone
    pushed(queue, request(1), 1, 4)
    assert queue.pop(5) == [3, 2, 9, 4, 1]


@pytest.mark.parametrize("rule", [rule for rule in Keep if rule is not Keep.recent])
def test_more_than_there_is_cannot_be_evicted(rule: Keep) -> None:
    queue = KeepQueue(rule, {})
    pushed(queue, request(0), 1)
    with pytest.raises(OutOfBlocksError, match="2 blocks to evict were asked for, 1 are in the queue"):
        queue.pop(2)
    assert queue.blocks() == [1]


@pytest.mark.parametrize("rule", list(Keep))
@pytest.mark.parametrize("seed", range(3))
def test_random_sessions_leave_every_counter_right(rule: Keep, seed: int) -> None:
    draw = random.Random(seed)
    turns = {rid: TurnOf(str(draw.randint(0, 4)), rid) for rid in range(60) if draw.random() < 0.8}
    queue = KeepQueue(rule, turns, seconds=5e-9, pinned=2)
    steps = [0]
    queue.clock = lambda: steps[0]
    manager = PagedManager(24, SIZE, eviction=None if rule is Keep.recent else queue)
    scheduler = Scheduler(manager, SchedulerLimits(32, 4))
    hits = 0
    for rid in range(60):
        key = 1 + (int(turns[rid].session) if rid in turns else 9)
        segments = [(key, draw.randint(1, 40)), (None, draw.randint(1, 9))]
        total = sum(tokens for _, tokens in segments)
        identity = KeyIdentity(rid, segments)
        scheduler.submit(
            Request(rid, total, draw.randint(1, 12), identity=identity, priority=draw.randint(0, 2))
        )
        for _ in range(draw.randint(0, 6)):
            if scheduler.has_work:
                plan = scheduler.schedule()
                hits += plan.hit_tokens
                scheduler.commit(plan, StepResult())
                manager.check()
                steps[0] += 1
    while scheduler.has_work:
        scheduler.commit(scheduler.schedule(), StepResult())
        manager.check()
    assert hits > 0
    assert manager.pool.live_blocks == 0
