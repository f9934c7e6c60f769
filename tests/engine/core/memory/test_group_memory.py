"""Pages of several sizes in one memory: random walks, planted bugs that they notice, and the rules one by one."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from core_driver import random_walk
from group_driver import CHUNK, FULL, LATENT, SHORT, STATE, WINDOW, GroupSetup
from tiers import cases, tier

from engine.core.errors import CoreError, OutOfBlocksError
from engine.core.identity import KeyIdentity
from engine.core.memory.block_pool import HashIndex
from engine.core.memory.group_chunks import ChunkPages, _ChunkPool, pages_of
from engine.core.memory.group_layout import GroupLayout, LayerSet, separate_layout, uniform_layout
from engine.core.memory.paged import PagedManager
from engine.core.options import GroupKind, GroupPages, Preemption, SchedulerLimits, Scheduling
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler

SEEDS = tier(3, 60)
LCM = GroupPages.lcm
SETUPS = [
    GroupSetup(pages=LCM),
    GroupSetup(sets=(FULL, WINDOW, SHORT), pages=LCM, memory=7200, behind_first=True),
    GroupSetup(sets=(LATENT, STATE), pages=LCM, state_every=8, memory=4800),
    GroupSetup(pages=LCM, memory=3600),
    GroupSetup(sets=(FULL, SHORT), pages=LCM, scheduling=Scheduling.priority),
    GroupSetup(pages=LCM, caching=False, memory=2400),
    GroupSetup(sets=(FULL, CHUNK), pages=LCM, memory=4800, interval=None),
    GroupSetup(sets=(FULL, WINDOW, SHORT), pages=LCM, memory=6000, preemption=Preemption.swap, host=8000),
]
PAGES = separate_layout([FULL, WINDOW], 4, pages=LCM)  # pages of 64 and of 128 bytes: chunks of 128


@cases(
    "setup",
    SETUPS,
    day=1,
    ids=range(len(SETUPS)),
)
def test_random_walks_find_every_slot_as_it_was_written(setup: GroupSetup) -> None:
    for seed in range(SEEDS):
        random_walk(setup, seed, 120, 0.4)


@pytest.mark.nightly
def test_the_walks_hit_preempt_and_take_memory_from_the_other_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would notice nothing."""
    moved = []
    reopen = ChunkPages._reopen

    def noted(pages: ChunkPages, group: int, owner: int) -> int:
        moved.append(pages._group_of[next(iter(pages._idle))] != group)
        return reopen(pages, group, owner)

    monkeypatch.setattr(ChunkPages, "_reopen", noted)
    drivers = [random_walk(setup, 1, 250, 0.4) for setup in SETUPS]
    plans = [plan for driver in drivers for plan in driver.model.plans]
    assert sum(plan.hit_tokens for plan in plans) > 300
    assert sum(len(plan.preempted) for plan in plans) > 10
    assert sum(moved) > 50


# -- planted bugs ------------------------------------------------------------------------------------------


def evict_nothing(real: Callable[..., None]) -> Callable[..., None]:
    return lambda pool, victims: None


def nobody_leaves(real: Callable[..., None]) -> Callable[..., None]:
    return lambda pages, group, gone: real(pages, group, gone[1:])


def keys_stay(real: Callable[..., None]) -> Callable[..., None]:
    return lambda index, keys, blocks: None


PLANTED: list[tuple[str, Any, str, Callable[..., Any]]] = [
    ("the content of a page that is given away stays in the cache", _ChunkPool, "evict", evict_nothing),
    ("a chunk counts a reference that is gone", ChunkPages, "left", nobody_leaves),
    ("an evicted page is still found", HashIndex, "drop", keys_stay),
]


@pytest.mark.parametrize(
    ("owner", "name", "bug"), [each[1:] for each in PLANTED], ids=[each[0] for each in PLANTED]
)
def test_the_walks_notice_a_planted_bug(
    owner: Any, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug(getattr(owner, name)))
    with pytest.raises((AssertionError, CoreError, KeyError)):
        walk_all()


def walk_all() -> None:
    for setup in SETUPS:
        for seed in range(2):
            random_walk(setup, seed, 120, 0.4)


# -- the rules ---------------------------------------------------------------------------------------------


def chunks_of(pages: ChunkPages, taken: list[int]) -> set[int]:
    return {pages.span(0, page)[0] // pages.layout.chunk_bytes for page in taken}


def test_a_compatible_page_is_the_least_common_multiple() -> None:
    layout = separate_layout(
        [LayerSet(GroupKind.full, 2, 8), LayerSet(GroupKind.window, 3, 8, 7)], 4, pages=LCM
    )
    assert [group.page_bytes for group in layout.groups] == [64, 96]
    assert layout.chunk_bytes == 192


def test_small_pages_of_a_chunk_go_to_one_request_first() -> None:
    pages = ChunkPages(PAGES, 4)
    taken = {owner: pages.take([1, 0], owner)[0] for owner in (1, 2)}
    taken[1] += pages.take([1, 0], 1)[0]
    assert len(chunks_of(pages, taken[1])) == 1
    assert chunks_of(pages, taken[1]).isdisjoint(chunks_of(pages, taken[2]))


def test_small_pages_of_others_are_taken_before_content_is_evicted() -> None:
    pages = ChunkPages(PAGES, 1)
    (first,), (second,) = pages.take([1, 0], 1)[0], pages.take([1, 0], 2)[0]
    assert chunks_of(pages, [first]) == chunks_of(pages, [second])


def test_a_chunk_passes_to_the_other_group_once_it_is_empty() -> None:
    pages = ChunkPages(PAGES, 2)
    small = pages.take([4, 0], 1)[0]
    assert not pages.fits([0, 1])
    pages.pools[0].release(small)
    assert pages.fits([0, 2])
    assert len(pages.take([0, 2], 2)[1]) == 2


def test_a_page_in_use_keeps_its_chunk_from_the_other_group() -> None:
    pages = ChunkPages(PAGES, 2)
    small = pages.take([4, 0], 1)[0]
    pages.pools[0].release(small[1:])
    assert not pages.fits([0, 2])
    assert pages.stranded([0, 2]) == PAGES.page_slots(0)


def test_a_hit_takes_its_page_from_what_is_free() -> None:
    """A cached page is free for others, but not beside the request that refers to it."""
    pages = pages_of(PAGES, PAGES.page_counts(128, 48, 12))
    (page,) = pages.take([1, 0])[0]
    pages.pools[0].cache_full_blocks([page], [(0, 7)])
    pages.pools[0].release([page])
    assert pages.fits([0, 1], [[], []])
    assert not pages.fits([0, 1], [[page], []])


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    pages = ChunkPages(PAGES, 2)
    with pytest.raises(OutOfBlocksError, match="no room"):
        pages.take([5, 0])
    pages.check({})


# -- progress in the smallest memory -----------------------------------------------------------------------


def tight(seed: int) -> tuple[GroupSetup, list[Request]]:
    """Requests that share prefixes, and the smallest memory that can serve each of them alone."""
    draw = random.Random(seed)
    wide = LayerSet(GroupKind.full, draw.choice([1, 2, 3, 4, 8]), 8)
    narrow = LayerSet(GroupKind.window, draw.choice([1, 2, 3]), 8, draw.choice([5, 7, 9, 13]))
    every = draw.choice([0, None])
    setup = GroupSetup((wide, narrow), LCM, budget=draw.choice([5, 8, 13]), interval=every, whole=True)
    requests = []
    for rid in range(12):
        keyed = [(draw.choice([1, 2, 3]), draw.randint(3, 30)) for _ in range(draw.randint(0, 2))]
        segments = [*keyed, (None, draw.randint(1, 15))]
        prompt = sum(tokens for _, tokens in segments)
        identity = KeyIdentity(rid, segments)
        requests.append(Request(rid, prompt, draw.randint(1, 30), identity=identity))
    setup = replace(setup, longest=200, running=draw.choice([1, 2, 4]), memory=0)
    while True:
        setup = replace(setup, memory=setup.memory + setup.layout().chunk_bytes)
        if not any(map(setup.manager().never_fits, requests)):
            return setup, requests


# of them 6, 24, 35, 56 and 58 waited for ever: the pages of their hits lay in more chunks than they fill
@cases("seed", range(200), day=(6, 24))
def test_the_smallest_memory_that_refuses_nobody_serves_all(seed: int) -> None:
    setup, requests = tight(seed)
    scheduler, steps = Scheduler(setup.manager(), setup.limits()), 0
    for request in requests:
        scheduler.submit(request)
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.commit(plan, StepResult())
        steps += 1
        assert steps < 3000
    scheduler.manager.check()


def test_a_request_alone_fits_although_its_window_begins_inside_a_chunk() -> None:
    """Windows of 7 tokens hold up to four pages, which lie in two chunks of four."""
    sets = LayerSet(GroupKind.full, 8, 8), LayerSet(GroupKind.window, 2, 8, 7)
    request, steps = Request(0, 45, 28, identity=KeyIdentity(0, [(1, 45)])), 0
    setups = (GroupSetup(sets, LCM, budget=5, memory=256 * chunks, longest=200) for chunks in range(1, 40))
    setup = next(setup for setup in setups if setup.manager().never_fits(request) is None)
    scheduler = Scheduler(setup.manager(), setup.limits())
    scheduler.submit(request)
    while scheduler.has_work:
        scheduler.commit(scheduler.schedule(), StepResult())
        steps += 1
        assert steps < 1000


# -- what a policy is worth --------------------------------------------------------------------------------

GEMMA_3 = [LayerSet(GroupKind.full, 8, 8192), LayerSet(GroupKind.window, 40, 8192, 1024)]  # 12B


def layout_of(pages: GroupPages) -> GroupLayout:
    if pages is GroupPages.uniform:
        return uniform_layout(GEMMA_3, 16)
    return separate_layout(GEMMA_3, 16, pages=pages)


def most_at_once(pages: GroupPages, lengths: list[int], memory: int) -> int:
    """The most of these prompts that decode together in `memory` bytes; pools are split for 8,192 tokens."""
    layout = layout_of(pages)
    manager = PagedManager.of(pages_of(layout, layout.page_counts(memory, 8192, 512)), most_chunk=512)
    scheduler = Scheduler(manager, SchedulerLimits(512, 64))
    for rid, tokens in enumerate(lengths):
        scheduler.submit(Request(rid, tokens, 40, identity=KeyIdentity(rid, [(None, tokens)])))
    most = 0
    while scheduler.has_work:
        plan: StepPlan = scheduler.schedule()
        most = max(most, plan.running)
        scheduler.commit(plan, StepResult())
    manager.check()
    return most


def test_one_memory_serves_more_short_prompts_than_a_fixed_split() -> None:
    """The split is right for 8,192 tokens. Prompts of 500 need nearly as much of the windows as of the full layers."""
    memory, prompts = 2 * 2**30, [500] * 24
    fixed = most_at_once(GroupPages.separate, prompts, memory)
    assert fixed < most_at_once(LCM, prompts, memory)


def test_in_one_memory_a_request_holds_what_it_needs_and_a_page_of_each_group() -> None:
    """Jenga's 73.6 % of waste for Gemma-3 (test_published_groups.py) is gone but for the pages' own waste."""
    layout = layout_of(LCM)
    tokens = 7590 + 182
    chunks = layout.tokens_bytes(tokens, 512) // layout.chunk_bytes + 2
    manager = PagedManager.of(pages_of(layout, (chunks,)), most_chunk=512)
    scheduler = Scheduler(manager, SchedulerLimits(512, 4))
    scheduler.submit(Request(0, tokens - 8, 8))
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.commit(plan, StepResult())
    held = (plan.usage.token + plan.usage.reserved + plan.usage.internal) * layout.slot_bytes
    needed = 8 * 8192 * tokens + 40 * 8192 * 1024
    assert 0 <= held - needed <= 2 * sum(group.page_bytes for group in layout.groups)
    assert 1 - needed / (48 * 8192 * tokens) == pytest.approx(0.736, abs=0.02)
