"""Sampled residency of blocks: lifetimes, idle times and gaps between uses."""

import random

import pytest

from engine.core import (
    PagedManager,
    Request,
    ResidencySampler,
    Scheduler,
    SchedulerLimits,
    StepResult,
    TokenIdentity,
)
from engine.core.errors import CoreError
from engine.core.memory.block_pool import Residency, SampledPool

SECOND = 1_000_000_000


class Clock:
    """Virtual time in ns."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def sampled(blocks: int, sampler: ResidencySampler) -> SampledPool:
    pool = SampledPool(blocks)
    pool.sampler = sampler
    return pool


@pytest.fixture
def pool(clock: Clock) -> SampledPool:
    return sampled(1, ResidencySampler(1.0, clock=clock))


def cached(pool: SampledPool) -> list[int]:
    """A block in the prefix cache that no table refers to."""
    blocks = pool.take(1)
    pool.cache_full_blocks(blocks, [b"one"])
    pool.release(blocks)
    return blocks


def used(pool: SampledPool, clock: Clock, *seconds: int) -> None:
    """A request hits the only block at each of these times, and releases it at once."""
    for second in seconds:
        clock.now = second * SECOND
        blocks = pool.find([b"one"])
        pool.share(blocks)
        pool.release(blocks)


def evicted_at(pool: SampledPool, clock: Clock, second: int) -> Residency:
    clock.now = second * SECOND
    pool.take(1)
    (found,) = pool.sampler.drain()
    return found


def test_a_block_that_nobody_used_again_was_idle_all_its_life(pool: SampledPool, clock: Clock) -> None:
    cached(pool)
    assert evicted_at(pool, clock, 5) == Residency(5.0, 5.0, ())


def test_a_use_ends_the_idle_time(pool: SampledPool, clock: Clock) -> None:
    cached(pool)
    used(pool, clock, 2, 3)
    assert evicted_at(pool, clock, 7) == Residency(7.0, 4.0, (1.0,))


def test_the_last_four_uses_give_three_gaps(pool: SampledPool, clock: Clock) -> None:
    cached(pool)
    used(pool, clock, 1, 2, 4, 7, 11, 16)
    assert evicted_at(pool, clock, 17).reuse_gaps_s == (3.0, 4.0, 5.0)


def test_a_block_that_is_given_out_again_begins_a_new_residency(pool: SampledPool, clock: Clock) -> None:
    cached(pool)
    evicted_at(pool, clock, 4)
    pool.release([1])
    assert evicted_at(pool, clock, 9) == Residency(5.0, 5.0, ())


def test_an_emptied_cache_forgets_its_samples(pool: SampledPool, clock: Clock) -> None:
    cached(pool)
    pool.reset()
    pool.take(1)
    assert pool.sampler.drain() == []


def test_about_the_asked_share_of_the_blocks_is_sampled(clock: Clock) -> None:
    pool = sampled(4_000, ResidencySampler(0.25, clock=clock))
    for _ in range(2):
        pool.release(pool.take(4_000))
    assert 900 < len(pool.sampler.drain()) < 1_100


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5])
def test_a_share_outside_of_0_to_1_is_refused(rate: float) -> None:
    with pytest.raises(CoreError, match="must be above 0 and at most 1"):
        ResidencySampler(rate)


def test_sampling_without_a_clock_is_refused() -> None:
    with pytest.raises(CoreError, match="without a clock"):
        sampled(1, ResidencySampler(1.0)).take(1)


def test_sampling_changes_no_decision(clock: Clock) -> None:
    plans = []
    for sampler in (None, ResidencySampler(0.5, clock=clock)):
        draw = random.Random(3)
        manager = PagedManager(24, 4, residency=sampler)
        scheduler = Scheduler(manager, SchedulerLimits(32, 6))
        for number in range(30):
            prompt = [draw.randrange(2) for _ in range(draw.randrange(1, 24))]
            scheduler.submit(Request(number, len(prompt), 9, identity=TokenIdentity(number, prompt)))
        steps = []
        while scheduler.has_work:
            plan = scheduler.schedule()
            clock.now += SECOND
            steps.append([(row.request_id, row.context_len, list(row.table)) for row in plan.rows])
            scheduler.commit(plan, StepResult())
        plans.append(steps)
        manager.pool.check({})
    assert plans[0] == plans[1]
    assert sampler is not None
    assert sampler.drain()
