"""The compiled replay says of tiers below the pool what the policy core says."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from compiled_cases import (
    COSTS,
    LIMITS,
    POOLS,
    Sharing,
    assert_same,
    compiled_replay,
    core_log,
    crowded,
    log_of,
    sharing,
    waiting,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import tier

from engine.core.memory.eviction import LruQueue, PoolFacts
from engine.core.memory.tiers import Tier, Tiers, TierSpec
from engine.core.options import SchedulerLimits, Scheduling, TierLoad, TierStore
from harness.compiled.replay import PlainPool
from harness.replay.memory import TierUse


@st.composite
def below(draw: st.DrawFn) -> Callable[[int], Tiers]:
    """Makes tiers below a pool of blocks of so many tokens, the same ones each time."""
    chunk, store = draw(
        st.sampled_from([(1, TierStore.written), (1, TierStore.evicted), (3, TierStore.written)])
    )
    seconds = st.sampled_from([0.0, 1e-6, 3e-5, 1e-3])
    specs = [TierSpec("host", draw(st.integers(1, 60)), draw(seconds), draw(seconds), draw(seconds))]
    if draw(st.booleans()):
        specs.append(TierSpec("disk", draw(st.integers(1, 90)), draw(seconds), draw(seconds), draw(seconds)))
    load, overlaps = draw(st.sampled_from(TierLoad)), draw(st.booleans())

    def made(block_size: int) -> Tiers:
        facts = PoolFacts(block_size=block_size, token_s=2e-6, pair_s=1e-8)
        tiers = [Tier(spec, LruQueue()) for spec in specs]
        return Tiers(tiers, facts, chunk=chunk, store=store, load=load, overlaps=overlaps)

    return made


@settings(max_examples=tier(25, 600))
@given(st.data(), sharing() | st.integers(0, 10**6).map(crowded), LIMITS, POOLS, below(), st.booleans())
def test_hits_loads_and_writes_of_tiers_are_those_of_the_core(
    data: st.DataObject,
    shared: Sharing,
    limits: SchedulerLimits,
    pool: PlainPool,
    made: Callable[[int], Tiers],
    asynchronous: bool,
) -> None:
    count = len(shared.salts)
    priority = np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    limits = replace(limits, policy=data.draw(st.sampled_from(Scheduling)))
    requests = replace(shared.named(pool.block_size), waiting=data.draw(waiting(count)), priority=priority)
    cost = COSTS[data.draw(st.sampled_from(["expected", "paced"]))]
    ours, theirs = (TierUse(made(pool.block_size), pool.block_size, 2) for _ in range(2))
    found = compiled_replay(requests, limits, replace(pool, tiers=ours), cost, asynchronous=asynchronous)
    expected = core_log(requests, limits, pool, cost, shared, asynchronous=asynchronous, tiers=theirs.tiers)
    assert_same(log_of(found, pool), expected)
    assert ours.value() == theirs.value()
