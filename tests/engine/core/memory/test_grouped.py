"""Caches with groups: random walks over every choice, planted bugs that the walks notice, and the rules one by one."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_driver import CoreDriver, random_arrival, random_walk
from group_driver import CHUNK, FULL, LATENT, SHORT, STATE, WINDOW, GroupSetup
from tiers import cases, tier

from engine.core.errors import CoreError, NeverFitsError
from engine.core.identity import KeyIdentity, TokenIdentity
from engine.core.memory import layer_groups
from engine.core.memory.block_tables import BlockTables
from engine.core.memory.group_layout import GroupLayout, KVGroup, LayerSet, separate_layout, uniform_layout
from engine.core.memory.group_pages import GroupWaste, PoolPages
from engine.core.memory.paged import PagedManager
from engine.core.memory.prefix_cache import GroupHits, PrefixCache
from engine.core.memory.swapping import Swapper
from engine.core.options import (
    Decoding,
    GroupKind,
    GroupPages,
    Preemption,
    Retention,
    SchedulerLimits,
    Scheduling,
    SpeculationMode,
    StateMode,
    WindowHits,
)
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request, Speculation
from engine.core.scheduling.scheduler import Scheduler

SEEDS = tier(3, 60)
SEPARATE = GroupPages.separate
SWAP = Preemption.swap
SMALL = LayerSet(GroupKind.state, 3, 16)  # a page for every two tokens of FULL
SETUPS = [
    GroupSetup(),
    GroupSetup(interval=None),
    GroupSetup(sets=(FULL, WINDOW, SHORT), memory=6000, interval=16),
    GroupSetup(sets=(FULL, WINDOW, SHORT), pages=SEPARATE, memory=3600),
    GroupSetup(sets=(FULL, STATE), size=2, memory=6000),
    GroupSetup(sets=(FULL, STATE), size=2, memory=6000, interval=None),
    GroupSetup(sets=(FULL, SMALL), size=2, memory=6000, budget=40),
    GroupSetup(sets=(FULL, STATE), memory=9000, unit=4),
    GroupSetup(sets=(FULL, SMALL, replace(FULL, layer_bytes=4)), memory=9000, unit=8, interval=None),
    GroupSetup(sets=(STATE, FULL), memory=9000, unit=2, preemption=SWAP, host=8000),
    GroupSetup(sets=(FULL, STATE), memory=9000, unit=4, retention=Retention.none),
    GroupSetup(sets=(FULL, SMALL, WINDOW), size=4, memory=6000, states=StateMode.every_block, interval=None),
    GroupSetup(sets=(FULL, STATE), size=2, memory=3000, states=StateMode.none, caching=False),
    GroupSetup(sets=(LATENT, STATE, WINDOW), pages=SEPARATE, state_every=8, memory=4800),
    GroupSetup(sets=(WINDOW, SHORT), behind_first=True, scheduling=Scheduling.priority, memory=2400),
    GroupSetup(hits=WindowHits.all, behind_first=True),
    GroupSetup(caching=False, memory=2400),
    GroupSetup(sets=(FULL,), memory=2400),
    GroupSetup(sets=(FULL, replace(WINDOW, window=1)), pages=SEPARATE, memory=2400),
    GroupSetup(sets=(FULL, WINDOW, SHORT), memory=5000, preemption=SWAP, host=12_000),
    GroupSetup(sets=(FULL, STATE), size=2, memory=5000, preemption=SWAP, host=8000),
    GroupSetup(sets=(LATENT, SHORT), pages=SEPARATE, memory=3000, preemption=Preemption.auto, host=6000),
    GroupSetup(sets=(FULL, WINDOW), memory=5000, retention=Retention.none, budget=40),
    GroupSetup(sets=(FULL, CHUNK), memory=5000),
    GroupSetup(sets=(CHUNK, FULL), memory=4000, preemption=SWAP, host=8000, scheduling=Scheduling.priority),
]


DENSE = [replace(setup, interval=None) for setup in SETUPS]


def walk_all(setups: list[GroupSetup] = SETUPS, seeds: int = 3, operations: int = 120) -> None:
    for setup in setups:
        for seed in range(seeds):
            random_walk(setup, seed, operations, 0.4)


@cases(
    "setup",
    SETUPS,
    day=SETUPS[8:9],
    ids=range(len(SETUPS)),
)
def test_random_walks_find_every_slot_as_it_was_written(setup: GroupSetup) -> None:
    for seed in range(SEEDS):
        random_walk(setup, seed, 120, 0.4)


@pytest.fixture(scope="module")
def plans() -> list[StepPlan]:
    """Of a walk over each setup."""
    return [plan for setup in SETUPS for plan in random_walk(setup, 1, 300, 0.4).model.plans]


WALKED: dict[str, Callable[[StepPlan], int]] = {  # else the walks would notice nothing
    "hits": lambda plan: plan.hit_tokens,
    "preemptions": lambda plan: len(plan.preempted),
    "pages behind windows": lambda plan: sum(t[:1] == [0] for row in plan.rows for t in row.table.groups),
    "branches behind windows": lambda plan: sum(
        t[:1] == [0] for row in plan.rows if row.branch for t in row.table.groups
    ),
    "copies on write": lambda plan: len(plan.copies),
    "drafts": lambda plan: sum(row.drafts for row in plan.rows),
    "rejected drafts": lambda plan: len(plan.stale),
    "saved pages": lambda plan: len(plan.swap_out),
    "pages brought back": lambda plan: len(plan.swap_in),
}


@pytest.mark.nightly
@pytest.mark.parametrize("what", WALKED)
def test_the_walks_have(what: str, plans: list[StepPlan]) -> None:
    assert sum(map(WALKED[what], plans)) > 40


# -- planted bugs ------------------------------------------------------------------------------------------


def one_token_early(real: Callable[..., int]) -> Callable[..., int]:
    return lambda group, computed: real(group, computed + 1)


def one_token_late(real: Callable[..., int]) -> Callable[..., int]:
    return lambda group, part: real(group, part) + 1


def lose_a_reference(real: Callable[..., None]) -> Callable[..., None]:
    def open_hits(tables: Any, part: Any, table: list[int], *source: int) -> None:
        real(tables, part, table, *source)
        if tables.group.window is not None and table[part.held :]:
            tables.pool.release(table[-1:])

    return open_hits


def hit_without_the_window_or_state(hits: Any, group: Any, index: int, tokens: int, needed: int) -> int:
    return tokens


def hit_without_the_other_blocks(hits: Any, group: Any, alike: Any, tokens: int) -> int:
    return tokens


def named_one_token_early(real: Callable[..., None]) -> Callable[..., None]:
    return lambda cache, part, end: real(cache, part, end + 1)


def written_where_the_cache_names_it(tables: Any, block: int) -> bool:
    return False


def keys_of_any_group(pool: Any, hashes: Any) -> list[Any]:
    return [(0, each) for each in hashes]


def cached_before_it_is_full(real: Callable[..., None]) -> Callable[..., None]:
    return lambda cache, part, tokens: real(cache, part, min(tokens + 1, len(part.table) * cache._size))


def keep_what_is_gone(tables: Any, part: Any, skipped: int) -> None:
    part.table[:skipped] = [0] * skipped
    part.held = skipped


def count_gone_twice(real: Callable[..., None]) -> Callable[..., None]:
    def drop(tables: Any, table: Any, computed: int, first: int, request: Any) -> None:
        real(tables, table, computed, first, request)
        tables.counters.written -= bool(tables.group.window)

    return drop


def window_of_the_root(real: Callable[..., None]) -> Callable[..., None]:
    def fork(tables: Any, parent: Any, child: Any) -> None:
        real(tables, parent, child)
        child.held = 0

    return fork


def beams_keep_their_window(real: Callable[..., Any]) -> Callable[..., Any]:
    def reparent(tables: Any, branches: Any, parents: Any) -> Any:
        sharing = real(tables, branches, parents)
        for branch in sharing:
            branch.table = branches[parents[branches.index(branch)]].table
        return sharing

    return reparent


def write_into_the_shared_page(tables: Any, sequence: Any, end: int) -> bool:
    return False


def cut_one_page_too_few(real: Callable[..., None]) -> Callable[..., None]:
    def truncate(tables: Any, part: Any, tokens: int) -> None:
        if tables.group.window is None:
            real(tables, part, tokens)

    return truncate


def mix_up_the_groups(real: Callable[..., None]) -> Callable[..., None]:
    def swap_in(swapper: Any, *told: Any) -> None:
        real(swapper, *told)
        hosts, devices = zip(*swapper.pending_in, strict=True)
        swapper.pending_in = list(zip(hosts, devices[::-1], strict=True))

    return swap_in


def lose_a_group_of_copies(real: Callable[..., None]) -> Callable[..., None]:
    def copy_tail(tables: Any, sequence: Any, copy: int) -> None:
        real(tables, sequence, copy)
        if tables.group.window is not None:
            del tables.work.copies[-1]

    return copy_tail


PLANTED: list[tuple[str, Any, str, Callable[..., Any], bool]] = [
    ("a window block is released one token early", KVGroup, "skipped", one_token_early, True),
    ("a group's reference is lost", BlockTables, "open_hits", lose_a_reference, True),
    ("a hit without its window or state", GroupHits, "_last_run", hit_without_the_window_or_state, False),
    ("a hit of blocks that are not cached", GroupHits, "_leading", hit_without_the_other_blocks, False),
    (
        "a part of a block is named before it is written",
        PrefixCache,
        "cache_inside",
        named_one_token_early,
        True,
    ),
    ("a named state is written", BlockTables, "is_cached_state", written_where_the_cache_names_it, False),
    ("a block of one group found by another", PrefixCache, "_keys", keys_of_any_group, False),
    ("a block is cached before it is full", PrefixCache, "cache_upto", cached_before_it_is_full, True),
    ("a block behind the window is never released", BlockTables, "drop_behind", keep_what_is_gone, False),
    ("a counter drifts", BlockTables, "drop", count_gone_twice, True),
    ("a branch holds what its window has left", BlockTables, "fork", window_of_the_root, True),
    ("a beam writes where another one does", BlockTables, "reparent", beams_keep_their_window, True),
    ("a branch writes into a shared page", BlockTables, "shares_tail", write_into_the_shared_page, False),
    ("copies of one group are lost", BlockTables, "copy_tail", lose_a_group_of_copies, True),
    ("drafts are cut in some groups alone", BlockTables, "truncate", cut_one_page_too_few, True),
    ("swapped into the wrong pages", Swapper, "swap_in", mix_up_the_groups, True),
]


# noticed late in the walks, after seconds
LATE = (
    "swapped into the wrong pages",
    "a named state is written",
    "a part of a block is named before it is written",
)


@cases(
    ("owner", "name", "bug", "wraps"),
    [each[1:] for each in PLANTED],
    day=[each[1:] for each in PLANTED if each[0] not in LATE],
    ids=[each[0] for each in PLANTED],
)
def test_the_walks_notice_a_planted_bug(
    owner: Any, name: str, bug: Callable[..., Any], wraps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug(getattr(owner, name)) if wraps else bug)
    with pytest.raises((AssertionError, CoreError)):  # a wrong slot, or the core refuses what the bug made
        walk_all([*SETUPS, *DENSE])


def test_the_walks_notice_a_page_taken_one_token_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_groups, "_next_change", one_token_late(layer_groups._next_change))
    with pytest.raises((AssertionError, CoreError)):
        walk_all()


# -- the layout --------------------------------------------------------------------------------------------


def counts(layout: GroupLayout) -> list[tuple[str, int, int, int]]:
    return [
        (str(group.kind), group.layers, group.padding_layers, group.block_size) for group in layout.groups
    ]


def test_gemma_3_has_one_full_group_and_five_of_windows() -> None:
    layout = uniform_layout(
        [LayerSet(GroupKind.full, 8, 8192), LayerSet(GroupKind.window, 40, 8192, 1024)], 16
    )
    assert counts(layout) == [("full", 8, 0, 16), *[("window", 8, 0, 16)] * 5]
    assert layout.groups[0].page_bytes == 8 * 16 * 8192


def test_uneven_layers_are_padded_to_the_smaller_set() -> None:
    """Gemma 3 27B has 10 full and 52 windowed layers: the last groups have empty places, as vLLM's log warns."""
    layout = uniform_layout(
        [LayerSet(GroupKind.full, 10, 8192), LayerSet(GroupKind.window, 52, 8192, 1024)], 16
    )
    assert [group.padding_layers for group in layout.groups] == [0, 1, 1, 1, 1, 2, 2]
    assert sum(group.layers for group in layout.groups) == 62


def test_nearly_equal_sets_are_padded_to_the_larger_one() -> None:
    """vllm#29303: 19 full and 18 windowed layers become two groups of 19 places."""
    layout = uniform_layout(
        [LayerSet(GroupKind.full, 19, 1024), LayerSet(GroupKind.window, 18, 1024, 128)], 16
    )
    assert counts(layout) == [("full", 19, 0, 16), ("window", 18, 1, 16)]


def test_a_smaller_page_holds_more_tokens_where_that_divides() -> None:
    layout = uniform_layout([LayerSet(GroupKind.full, 4, 512), LayerSet(GroupKind.window, 4, 2048, 64)], 16)
    assert counts(layout) == [("full", 4, 0, 64), ("window", 4, 0, 16)]
    assert layout.match_unit == 64


def test_a_page_that_does_not_divide_is_padded() -> None:
    layout = uniform_layout([LayerSet(GroupKind.full, 4, 1536), LayerSet(GroupKind.window, 4, 2048, 64)], 16)
    assert [group.padding for group in layout.groups] == [4 * 16 * 512, 0]


def test_a_latent_page_that_does_not_divide_is_refused() -> None:
    with pytest.raises(CoreError, match="latent page of 18432 bytes does not divide"):
        uniform_layout([LayerSet(GroupKind.latent, 4, 1152), LayerSet(GroupKind.full, 4, 2048)], 16)


def test_attention_blocks_grow_until_a_page_holds_a_state() -> None:
    layout = uniform_layout([LayerSet(GroupKind.full, 6, 2048), LayerSet(GroupKind.state, 18, 1_050_000)], 16)
    assert counts(layout) == [("full", 6, 0, 528), *[("state", 6, 0, 528)] * 3]
    assert layout.groups[1].padding == 6 * (528 * 2048 - 1_050_000)


@pytest.mark.parametrize(("size", "block"), [(16, 1920), (64, 1920), (192, 1920)])
def test_latent_blocks_beside_a_state_are_multiples_of_128_tokens(size: int, block: int) -> None:
    """As `_align_hybrid_block_size` of vLLM 0.33 answers for latent vectors of 576 numbers in 16 bits."""
    layout = uniform_layout(
        [LayerSet(GroupKind.latent, 7, 1152), LayerSet(GroupKind.state, 20, 2_100_000)], size
    )
    assert {group.block_size for group in layout.groups} == {block}


def test_page_bytes_are_units_padding_and_imbalance() -> None:
    for setup in SETUPS:
        for group in setup.layout().groups:
            whole = group.units * group.unit_bytes + group.padding + group.imbalance
            assert whole == group.page_bytes


def test_fixed_shares_give_each_pool_room_for_equally_many_of_the_longest() -> None:
    layout = separate_layout([FULL, WINDOW], 4)
    counts_ = layout.page_counts(64_000, 48, 12)
    most = [group.most_blocks(48, 12) for group in layout.groups]
    assert [count // need for count, need in zip(counts_, most, strict=True)] == [
        64_000 // layout.tokens_bytes(48, 12)
    ] * 2


# -- the rules ---------------------------------------------------------------------------------------------


def served(setup: GroupSetup, *lengths: tuple[int, int]) -> Scheduler:
    """A scheduler that has served prompts (shared, unique), one after the other."""
    scheduler = Scheduler(setup.manager(), setup.limits())
    for rid, (shared, unique) in enumerate(lengths):
        keys = [(7, shared), (None, unique)]
        scheduler.submit(Request(rid, shared + unique, 2, identity=KeyIdentity(rid, keys)))
        while scheduler.has_work:
            scheduler.commit(scheduler.schedule(), StepResult())
    return scheduler


def hits_of(setup: GroupSetup, *lengths: tuple[int, int]) -> list[int]:
    scheduler = Scheduler(setup.manager(), setup.limits())
    found = []
    for rid, (shared, unique) in enumerate(lengths):
        keys = [(7, shared), (None, unique)]
        scheduler.submit(Request(rid, shared + unique, 2, identity=KeyIdentity(rid, keys)))
        total = 0
        while scheduler.has_work:
            plan = scheduler.schedule()
            total += plan.hit_tokens
            scheduler.commit(plan, StepResult())
        found.append(total)
    return found


@pytest.mark.parametrize("width", [1, 2, 4])
def test_branches_that_begin_with_the_state_of_a_hit_fit_into_the_pool_that_fits_them_without(
    width: int,
) -> None:
    pools = GroupSetup(sets=(FULL, STATE), pages=SEPARATE, state_every=8, memory=1200)
    scheduler = served(pools, (8, 1))
    assert scheduler.manager.groups.pages.page_counts[1] == 2  # states
    scheduler.submit(Request(1, 16, 1, width, Decoding.sample, KeyIdentity(1, [(7, 8), (None, 8)])))
    plan = scheduler.schedule()
    assert plan.hit_tokens == 8
    assert scheduler.commit(plan, StepResult()).finished == [1]


def test_a_hit_needs_no_block_before_the_last_window() -> None:
    setup = GroupSetup(memory=64_000)
    assert hits_of(setup, (24, 4), (24, 4)) == [0, 24]


def test_a_shared_prefix_is_kept_from_the_second_request_on_that_missed_there() -> None:
    setup = GroupSetup(memory=64_000)
    assert hits_of(setup, (24, 9), (24, 9), (24, 9)) == [0, 0, 24]


def test_without_a_retention_interval_every_window_is_kept() -> None:
    setup = GroupSetup(memory=64_000, interval=None)
    assert hits_of(setup, (24, 9), (24, 9)) == [0, 24]


def test_a_retention_interval_keeps_the_windows_before_its_multiples() -> None:
    setup = GroupSetup(memory=64_000, interval=16)
    assert hits_of(setup, (27, 9), (27, 9), (27, 9)) == [0, 16, 24]


def test_a_retention_interval_that_is_no_multiple_of_the_match_unit_is_refused() -> None:
    with pytest.raises(CoreError, match="retention interval 6: must be 0 or a multiple of 4 tokens"):
        GroupSetup(interval=6).manager()


def test_of_a_single_kind_of_window_no_junction_is_known() -> None:
    """Nothing else says how much of a prefix two requests share."""
    setup = GroupSetup(sets=(WINDOW,), memory=64_000)
    assert hits_of(setup, (24, 9), (24, 9), (24, 9)) == [0, 0, 0]


def test_the_first_blocks_of_a_window_are_not_held_by_a_hit() -> None:
    setup = GroupSetup(memory=64_000)
    scheduler = served(setup, (24, 4))
    scheduler.submit(Request(9, 28, 2, identity=KeyIdentity(9, [(7, 24), (None, 4)])))
    (row,) = scheduler.schedule().rows
    assert [page == 0 for page in row.table.groups[1]] == [True] * 4 + [False] * 3


def test_a_prompt_shorter_than_the_match_unit_is_never_hit() -> None:
    setup = GroupSetup(sets=(FULL, STATE), pages=SEPARATE, state_every=16, size=4, memory=64_000)
    assert hits_of(setup, (15, 0), (15, 0)) == [0, 0]
    assert hits_of(setup, (17, 0), (17, 0)) == [0, 16]


def test_a_window_holds_no_more_than_itself_and_a_chunk() -> None:
    setup = GroupSetup(memory=64_000, longest=1000)
    scheduler = Scheduler(setup.manager(), setup.limits())
    scheduler.submit(Request(0, 200, 100))
    most = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        most = max(most, *(sum(map(bool, table)) for table in next(iter(plan.rows)).table.groups[1:]))
        scheduler.commit(plan, StepResult())
    layout = setup.layout()
    assert (
        most == layout.groups[1].most_blocks(299, setup.budget) - 1
    )  # chunks begin at multiples of the block size


def test_blocks_behind_the_window_leave_before_others_where_eviction_knows_groups() -> None:
    """A prefix of 24 tokens, then prompts of their own that fill the pool: with plain LRU the prefix's windows go."""
    prompts = [(24, 4), *[(0, 24)] * 4, (24, 4)]
    plain = GroupSetup(memory=2304, running=1)
    assert hits_of(replace(plain, behind_first=True), *prompts)[-1] >= hits_of(plain, *prompts)[-1]


def test_separate_pools_strand_what_the_other_group_lacks() -> None:
    layout = separate_layout([FULL, WINDOW], 4)
    manager = PagedManager.of(PoolPages(layout, (4, 40)), most_chunk=12)
    scheduler = Scheduler(manager, SchedulerLimits(64, 8))
    for rid in range(2):
        scheduler.submit(Request(rid, 12, 4))
    usage = scheduler.schedule().usage
    assert usage.external == (40 - 3) * layout.page_slots(1)
    assert usage.capacity == manager.groups.pages.slots()[0]


def test_the_smallest_pool_that_does_not_refuse_drafts_serves_them() -> None:
    """Rows keep slots for the next drafts, so a window holds more than itself and a chunk."""
    layout, steps = uniform_layout([LayerSet(GroupKind.window, 2, 8, window=9)], 4), 0
    request = Request(0, 30, 40, speculation=Speculation(5))
    pools = (PagedManager.of(PoolPages(layout, (pages,)), most_chunk=7) for pages in range(1, 20))
    manager = next(manager for manager in pools if manager.never_fits(request) is None)
    scheduler = Scheduler(manager, SchedulerLimits(7, 4))
    scheduler.submit(request)
    while scheduler.has_work:
        scheduler.commit(scheduler.schedule(), StepResult())
        steps += 1
        assert steps < 300


def test_draft_tokens_beside_states_are_refused() -> None:
    scheduler = Scheduler(GroupSetup(sets=(FULL, STATE), memory=64_000).manager(), SchedulerLimits())
    with pytest.raises(NeverFitsError, match="draft tokens, which a state cannot take back"):
        scheduler.submit(Request(0, 4, 4, speculation=Speculation(2)))


def test_outputs_that_others_may_find_are_refused() -> None:
    scheduler = Scheduler(GroupSetup(memory=64_000).manager(), SchedulerLimits())
    with pytest.raises(NeverFitsError, match="shares its outputs"):
        scheduler.submit(Request(0, 4, 4, identity=TokenIdentity(0, np.arange(4), share_outputs=True)))


def test_preempted_requests_find_each_what_it_generated() -> None:
    """Both have the same prompt of two blocks, and know four more when they are preempted."""
    scheduler = Scheduler(GroupSetup(memory=64_000, interval=None).manager(), SchedulerLimits())
    for rid in range(2):
        scheduler.submit(Request(rid, 8, 40, identity=KeyIdentity(rid, [(7, 8)])))
    for _ in range(18):
        scheduler.commit(scheduler.schedule(), StepResult())
    found = []
    for group in scheduler.running:
        scheduler.manager.preempt(group)
        group.restart()
        found.append(scheduler.manager.lookup(group))
    assert [len(hit) for hit in found] == [6, 6]
    (one, *_), (other, *_) = (hit.pages for hit in found)
    assert set(one[2:]).isdisjoint(other[2:])


def test_one_name_of_the_private_blocks_of_all_requests_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedManager, "_new_numbers", lambda manager, request: 0)
    with pytest.raises(AssertionError):
        test_preempted_requests_find_each_what_it_generated()


def steps_of(
    setup: GroupSetup, request: Request, accepted: int = 0
) -> list[tuple[StepPlan, list[list[int]]]]:
    """The steps of a request alone, with the lengths of each row's tables."""
    scheduler, plans = Scheduler(setup.manager(), setup.limits()), []
    scheduler.submit(request)
    while scheduler.has_work:
        plan = scheduler.schedule()
        plans.append((plan, [list(map(len, row.table.groups)) for row in plan.rows]))
        drafted = {row.request_id: min(accepted, row.drafts) for row in plan.rows if row.drafts}
        scheduler.commit(plan, StepResult(accepted=drafted))
    return plans


def test_samples_copy_the_last_page_of_every_group_and_share_the_others() -> None:
    setup = GroupSetup(sets=(FULL, WINDOW), memory=64_000)
    plans = steps_of(setup, Request(0, 10, 4, 3, Decoding.sample))
    groups = len(setup.layout().groups)
    assert [len(plan.copies) for plan, _ in plans] == [0, 2 * groups, 0, 0]


@pytest.mark.parametrize("mode", [SpeculationMode.lookahead, SpeculationMode.fork])
def test_rejected_drafts_leave_as_many_pages_as_their_tokens_need(mode: SpeculationMode) -> None:
    setup = GroupSetup(sets=(FULL, WINDOW), memory=64_000)
    groups = setup.layout().groups
    request = Request(0, 10, 12, speculation=Speculation(3, mode))
    for plan, (lengths,) in steps_of(setup, request, accepted=1):
        (row,) = plan.rows
        end = row.context_len + row.query_len
        assert lengths == [group.blocks(end) for group in groups]


def test_a_swapped_group_comes_back_with_the_pages_of_its_windows_alone() -> None:
    setup = GroupSetup(sets=(FULL, WINDOW), memory=64_000, host=64_000)
    scheduler = Scheduler(setup.manager(), setup.limits())
    scheduler.submit(Request(0, 40, 8))
    for _ in range(5):
        scheduler.commit(scheduler.schedule(), StepResult())
    manager, (group,) = scheduler.manager, scheduler.running
    (root,) = group.sequences
    held = [len([*filter(None, table)]) for table in root.table.groups]
    manager.swap_out(group)
    manager.swap_in(group)
    (saved, back) = manager.drain_swaps()
    assert len(saved) == len(back) == sum(held) < sum(len(part.table) for part in root.table.of)


def test_a_request_that_needs_more_pages_than_a_pool_has_never_fits() -> None:
    scheduler = Scheduler(GroupSetup(pages=SEPARATE, memory=1200).manager(), SchedulerLimits(12))
    with pytest.raises(NeverFitsError, match="pages of group"):
        scheduler.submit(Request(0, 200, 4))


def test_a_layer_set_with_impossible_values_is_refused() -> None:
    with pytest.raises(CoreError, match="window of at least 1 token"):
        LayerSet(GroupKind.full, 2, 8, window=4)
    with pytest.raises(CoreError, match="both must be at least 1"):
        LayerSet(GroupKind.full, 0, 8)
    with pytest.raises(CoreError, match="states alone"):
        uniform_layout([STATE], 16)


# -- where the bytes go ------------------------------------------------------------------------------------


def causes(
    layout: GroupLayout, counts: tuple[int, ...], lengths: list[tuple[int, int]], steps: int
) -> GroupWaste:
    """The waste after so many steps of requests (prompt, output)."""
    manager = PagedManager.of(PoolPages(layout, counts), most_chunk=64)
    scheduler = Scheduler(manager, SchedulerLimits(64, 8))
    for rid, (prompt, output) in enumerate(lengths):
        scheduler.submit(Request(rid, prompt, output))
    for _ in range(steps):
        plan = scheduler.schedule()
        waste = manager.groups.account.waste(plan.usage)
        scheduler.commit(plan, StepResult())
    return waste


@pytest.mark.nightly
def test_every_byte_of_the_pools_has_a_cause() -> None:
    for setup in SETUPS:
        driver = CoreDriver(setup, 3)
        manager, wastes = driver.manager, list[GroupWaste]()
        usage = manager.usage
        manager.usage = lambda head: (use := usage(head), wastes.append(manager.groups.account.waste(use)))[0]  # noqa: B023
        rng = random.Random(3)
        for _ in range(60):
            driver.submit(random_arrival(rng))
            driver.step()
        pools = manager.groups.pages.slots()[0] * manager.groups.layout.slot_bytes
        assert {sum(waste) for waste in wastes} == {pools}
        assert min(map(min, wastes)) >= 0


def test_tokens_that_a_window_has_left_in_its_first_block_are_behind_it() -> None:
    """Window 7, block 4: the token after 12 sees tokens 6 to 12, so two of the block of tokens 4 to 7 are behind."""
    found = causes(uniform_layout([FULL, WINDOW], 4), (40,), [(12, 3)], 2)
    groups = uniform_layout([FULL, WINDOW], 4).groups
    assert found.behind_window == sum(2 * group.unit_bytes for group in groups if group.window)


def test_all_tokens_before_the_chunk_of_a_sequence_that_waits_are_behind_it() -> None:
    """Attention in chunks of 8: the token after 8 sees none of them, and its blocks are released at its next row."""
    layout = uniform_layout([FULL, LayerSet(GroupKind.chunk, 2, 8, 8)], 4)
    manager = PagedManager.of(PoolPages(layout, (40,)), most_chunk=64)
    scheduler = Scheduler(manager, SchedulerLimits(64, 8, mixed_steps=False))
    scheduler.submit(Request(0, 7, 9))
    for _ in range(2):
        scheduler.commit(scheduler.schedule(), StepResult())
    scheduler.submit(Request(1, 5, 2))
    plan = scheduler.schedule()
    assert [row.request_id for row in plan.rows] == [1]
    assert manager.groups.account.waste(plan.usage).behind_window == 8 * layout.groups[1].unit_bytes


def test_slots_after_the_last_token_are_a_tail() -> None:
    layout = uniform_layout([FULL], 4)
    found = causes(layout, (40,), [(9, 2)], 1)  # 10 tokens are written in the end, in three blocks
    assert (found.tail, found.reserved, found.token) == (2 * 16, 1 * 16, 9 * 16)


def test_a_state_that_is_smaller_than_its_page_is_padded() -> None:
    layout = uniform_layout([FULL, LayerSet(GroupKind.state, 2, 100)], 4)
    found = causes(layout, (40,), [(3, 2)], 1)
    assert found.padding == layout.groups[1].padding == 2 * (128 - 100)


def test_places_of_padding_layers_are_imbalance() -> None:
    layout = uniform_layout([LayerSet(GroupKind.full, 4, 8), LayerSet(GroupKind.window, 5, 8, 7)], 4)
    assert causes(layout, (40,), [(3, 2)], 1).imbalance == 1 * 4 * 8


def test_a_prefix_that_is_computed_twice_is_a_duplicate() -> None:
    """A prompt of whole blocks computes its last block again, because one token must be left to compute."""
    layout = uniform_layout([FULL], 4)
    manager = PagedManager.of(PoolPages(layout, (40,)), most_chunk=64)
    scheduler = Scheduler(manager, SchedulerLimits(64, 8))
    for rid in range(2):
        scheduler.submit(Request(rid, 8, 4, identity=KeyIdentity(rid, [(1, 8)])))
    assert manager.groups.account.waste(scheduler.schedule().usage).duplicate == 4 * 16
