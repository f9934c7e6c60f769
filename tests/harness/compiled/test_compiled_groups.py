"""Layers in groups: the compiled replay says to the bit what the policy core says, of their bytes too."""

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
    new_fold,
    sharing,
    waiting,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import cases, tier

from engine.core.memory.group_layout import LayerSet, uniform_layout
from engine.core.options import GroupKind, SchedulerLimits, Scheduling, WindowHits
from harness.compiled.grouping import Grouping
from harness.compiled.lists import take_run
from harness.compiled.pool import add_run, evict, own_run
from harness.compiled.replay import PlainPool, PlainRequests
from harness.compiled.state import ENTRY
from harness.metrics.log import RunLog
from harness.replay.features import Sight

WINDOWS = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([None, 2, 5, 16, 40])), min_size=1, max_size=3
)
HITS, EVERY = st.sampled_from(WindowHits), st.sampled_from([None, 0, 1, 3])


def grouped(
    pool: PlainPool,
    windows: list[tuple[int, int | None]],
    rule: WindowHits,
    every: int | None,
    *,
    chunked: bool = False,
) -> PlainPool:
    """The pool for groups of so many layers with such windows; `every`: blocks between checkpoints.

    With `chunked` they are chunks of attention, of whole blocks.
    """
    sets, block = list[LayerSet](), pool.block_size
    for layers, size in windows:
        kind = GroupKind.full if size is None else GroupKind.chunk if chunked else GroupKind.window
        sets.append(LayerSet(kind, layers, 6, size and (-(-size // block) * block if chunked else size)))
    interval = None if every is None else every * pool.block_size
    grouping = Grouping(uniform_layout(sets, pool.block_size), rule, interval)
    pages = pool.num_blocks * len(grouping.layout.groups)
    span = sets[-1].window
    return replace(pool, num_blocks=pages, grouping=grouping, window=span and Sight(span, chunked))


def assert_same_groups(
    requests: PlainRequests, limits: SchedulerLimits, pool: PlainPool, shared: Sharing
) -> RunLog:
    expected, fold = core_log(requests, limits, pool, COSTS["windows"], shared), new_fold(pool)
    found = fold.log(**compiled_replay(requests, limits, pool, COSTS["windows"]).run(fold))
    assert_same(found, expected)
    assert found.waste is not None
    assert expected.waste is not None
    for name, column in expected.waste.items():
        np.testing.assert_array_equal(found.waste[name], column, err_msg=name)
    return found


@settings(max_examples=tier(20, 400))
@given(st.data(), sharing(), LIMITS, POOLS, WINDOWS, HITS, EVERY)
def test_layers_in_groups_are_replayed_and_accounted_for_as_the_core_does(
    data: st.DataObject,
    shared: Sharing,
    limits: SchedulerLimits,
    pool: PlainPool,
    windows: list[tuple[int, int | None]],
    rule: WindowHits,
    every: int | None,
) -> None:
    count = len(shared.salts)
    priority = np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    limits = replace(limits, policy=data.draw(st.sampled_from(Scheduling)), ahead=False, mixed_steps=True)
    pool = grouped(pool, windows, rule, every, chunked=data.draw(st.booleans()))
    requests = replace(shared.named(pool.block_size), waiting=data.draw(waiting(count)), priority=priority)
    assert_same_groups(requests, limits, pool, shared)


@settings(max_examples=tier(4, 200))
@given(st.data(), st.integers(0, 10**6), WINDOWS, HITS, EVERY)
def test_crowded_groups_evict_and_come_back_as_in_the_core(
    data: st.DataObject, seed: int, windows: list[tuple[int, int | None]], rule: WindowHits, every: int | None
) -> None:
    size, tokens = data.draw(st.sampled_from([2, 4, 8])), data.draw(st.integers(140, 400))
    pool = grouped(
        PlainPool(tokens // size, size, keeps=True), windows, rule, every, chunked=data.draw(st.booleans())
    )
    budget, policy = data.draw(st.sampled_from([16, 48])), data.draw(st.sampled_from(Scheduling))
    limits = SchedulerLimits(budget, 12, policy=policy, admit_whole_prompt=data.draw(st.booleans()))
    shared = crowded(seed)
    assert_same_groups(shared.named(size), limits, pool, shared)


CROWDS = [
    (3, [(1, None), (2, 16)], 0, SchedulerLimits(48, 12, admit_whole_prompt=False)),
    (5, [(1, None), (2, 5)], None, SchedulerLimits(48, 12, admit_whole_prompt=False)),
    (7, [(1, None), (3, 5)], None, SchedulerLimits(16, 12)),
    (0, [(1, 16), (1, 5)], 0, SchedulerLimits(48, 12, admit_whole_prompt=False)),
]
CHUNKS = (3, [(3, 16), (1, None)], 0, SchedulerLimits(48, 12, admit_whole_prompt=False))


@cases(
    ("seed", "windows", "every", "limits", "chunked"),
    [*((*each, False) for each in CROWDS), (*CHUNKS, True)],
    day=1,
)
def test_groups_are_compared_where_requests_come_back_and_hold_duplicates(
    seed: int,
    windows: list[tuple[int, int | None]],
    every: int | None,
    limits: SchedulerLimits,
    chunked: bool,
) -> None:
    pool = grouped(PlainPool(40, 4, keeps=True), windows, WindowHits.window, every, chunked=chunked)
    shared = crowded(seed)
    found = assert_same_groups(shared.named(4), limits, pool, shared)
    assert found.waste is not None
    assert found.requests["preemptions"].sum() > 10
    assert found.requests["resumed_hit_tokens"].sum() > 50
    assert found.waste["duplicate"].max() > 0


def test_of_blocks_whose_middle_is_in_use_again_the_last_are_evicted_first() -> None:
    requests, pool = (
        PlainRequests(*(np.array([value]) for value in (7, 0, 40, 2))),
        PlainPool(9, 4, keeps=True),
    )
    state = compiled_replay(requests, SchedulerLimits(), pool, COSTS["fitted"]).state
    add_run(state, 0, 2, 6, True, 0)
    take_run(state.runs, state.evictable, 0, 4, 6)
    state.at[ENTRY.cached] -= 2
    evict(state, 2)
    assert own_run(state, 0, 2, 8) == 2
    assert own_run(state, 0, 6, 8) == 0
