"""Hits that end inside a block (`prefix_match_unit`): what is named, what is copied, and what is refused."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from group_driver import FULL, STATE, WINDOW, GroupSetup, GroupSlotModel
from tiers import cases, tier

from engine.core import Request, Scheduler, SchedulerLimits, StepResult, TokenIdentity
from engine.core.errors import CoreError, NeverFitsError
from engine.core.memory.group_layout import GroupLayout, LayerSet, separate_layout, uniform_layout
from engine.core.memory.group_pages import PoolPages
from engine.core.memory.paged import PagedManager
from engine.core.options import GroupKind, GroupPages, StateMode
from engine.core.plan import StepPlan
from engine.core.sequence import Group

BLOCK, UNIT = 16, 4  # tokens of a block in `STATES`, whose pages have 256 bytes
STATES = GroupSetup(sets=(FULL, STATE), unit=UNIT)
NARROW = LayerSet(GroupKind.full, 3, 4)  # a page has twice as many of its tokens


def scheduler_of(pages: int = 60, unit: int | None = UNIT, budget: int = 64) -> Scheduler:
    layout = replace(uniform_layout((FULL, STATE), 4), unit=unit)
    assert {group.block_size for group in layout.groups} == {BLOCK}
    return Scheduler(
        PagedManager.of(PoolPages(layout, (pages,)), most_chunk=budget), SchedulerLimits(budget, 8)
    )


def submit(scheduler: Scheduler, number: int, prompt: Sequence[int], output: int = 1) -> None:
    identity = TokenIdentity(number, list(prompt))
    scheduler.submit(Request(number, len(prompt), output, identity=identity))


def run(scheduler: Scheduler) -> list[StepPlan]:
    plans = []
    while scheduler.has_work:
        plans.append(scheduler.schedule())
        scheduler.commit(plans[-1], StepResult())
        scheduler.manager.check()
    return plans


def served(scheduler: Scheduler, number: int, prompt: Sequence[int], output: int = 1) -> list[StepPlan]:
    submit(scheduler, number, prompt, output)
    return run(scheduler)


def hit(scheduler: Scheduler, number: int, prompt: Sequence[int]) -> int:
    return served(scheduler, number, prompt)[0].hit_tokens


# -- which boundaries are named ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "found"), [(27, 24), (25, 24), (24, 20), (17, 16), (14, 12), (4, 0), (5, 4)]
)
def test_a_prompt_sent_again_hits_to_its_last_unit(prompt: int, found: int) -> None:
    scheduler = scheduler_of()
    served(scheduler, 0, range(prompt))
    assert hit(scheduler, 1, range(prompt)) == found


def test_without_the_option_hits_end_with_blocks() -> None:
    scheduler = scheduler_of(unit=None)
    served(scheduler, 0, range(27))
    assert hit(scheduler, 1, range(27)) == 16


def test_the_next_turn_of_a_chat_goes_on_inside_the_block() -> None:
    scheduler = scheduler_of()
    served(scheduler, 0, range(27), output=3)
    assert hit(scheduler, 1, range(60)) == 24


def test_a_shared_beginning_is_hit_at_the_ends_of_prompts_alone() -> None:
    """vLLM names the last unit of each prompt, and no other one inside a block."""
    scheduler = scheduler_of()
    served(scheduler, 0, range(27))
    assert hit(scheduler, 1, [*range(22), 99, 99]) == 16  # the end of a block, and not 20


def test_a_prompt_is_cut_at_its_last_unit() -> None:
    plans = served(scheduler_of(), 0, range(27))
    assert [row.query_len for plan in plans for row in plan.rows] == [16, 8, 3]


def test_a_name_is_found_after_the_block_is_full() -> None:
    scheduler = scheduler_of()
    served(scheduler, 0, range(27), output=20)  # the decoder fills the second block
    assert hit(scheduler, 1, range(27)) == 24


def test_a_preempted_request_finds_its_own_last_unit() -> None:
    scheduler = scheduler_of()
    submit(scheduler, 0, range(27), 8)
    for _ in range(4):
        scheduler.commit(scheduler.schedule(), StepResult())
    (group,) = scheduler.running
    scheduler.manager.preempt(group)
    assert len(scheduler.manager.lookup(group)) * UNIT == 24


# -- what is copied ----------------------------------------------------------------------------------------


def test_the_row_behind_a_named_state_copies_it() -> None:
    """The cache keeps the page of the state; K and V of the prompt go on in theirs."""
    plans = served(scheduler_of(), 0, range(27))
    states = len(uniform_layout((FULL, STATE), 4).groups) - 1
    assert [len(plan.copies) for plan in plans] == [0, 0, states]


def test_a_hit_inside_a_block_copies_a_page_of_each_group() -> None:
    scheduler = scheduler_of()
    served(scheduler, 0, range(27))
    (plan,) = served(scheduler, 1, range(27))
    groups = len(uniform_layout((FULL, STATE), 4).groups)
    assert len(plan.copies) == plan.new_blocks == groups
    sources, copies = ({pair[side] for pair in plan.copies} for side in (0, 1))
    assert sources.isdisjoint(copies)


def test_pages_that_a_step_copies_are_not_taken_in_it() -> None:
    """A request that needs every page but those that are copied waits, though nothing refers to these."""
    scheduler = scheduler_of(pages=9)
    served(scheduler, 0, range(27))
    submit(scheduler, 1, range(27))
    submit(scheduler, 2, range(500, 527))
    plan = scheduler.schedule()
    assert plan.admitted == [1]
    scheduler.commit(plan, StepResult())
    run(scheduler)


def test_a_hit_is_admitted_where_its_pages_and_their_copies_fit() -> None:
    scheduler = scheduler_of(pages=60)
    served(scheduler, 0, range(27))
    manager, group = scheduler.manager, Group(Request(1, 40, 1, identity=TokenIdentity(1, range(40))))
    hits = manager.lookup(group)
    found = 2 + 2  # two blocks of K and V, and the state of both groups
    new = 2 + 2 * 2  # K and V of the copy and one block more; of each state a copy, and the next one
    assert manager.can_admit(group, hits, 60 - found - new)
    assert not manager.can_admit(group, hits, 61 - found - new)


def test_a_request_waits_for_the_state_that_a_step_writes() -> None:
    scheduler = scheduler_of()
    submit(scheduler, 0, range(11))
    submit(scheduler, 1, range(11))
    plans = run(scheduler)
    assert [plan.admitted for plan in plans[:3]] == [
        [0],
        [],
        [1],
    ]  # written in the first, copied in the second
    assert plans[2].hit_tokens == 8


def test_a_request_waits_for_the_block_that_a_step_writes_and_that_it_would_copy() -> None:
    """The second finds the whole block of the first, which is written in the same step, and a state inside it."""
    scheduler = scheduler_of()
    served(scheduler, 0, range(30))
    submit(scheduler, 1, range(60))
    submit(scheduler, 2, [*range(32), 99, 99])
    plans = run(scheduler)
    assert [(plan.admitted, plan.hit_tokens) for plan in plans[:2]] == [([1], 28), ([2], 28)]


def test_a_block_that_one_copies_and_another_hits_is_counted_once() -> None:
    scheduler = scheduler_of()
    served(scheduler, 0, range(14))
    served(scheduler, 1, range(40))
    submit(scheduler, 2, [*range(20), 99, 99])  # copies the first block behind the state of the first prompt
    submit(scheduler, 3, range(40))
    plans = run(scheduler)
    assert (plans[0].admitted, plans[0].hit_tokens) == ([2, 3], 12 + 36)


def test_the_copy_counts_where_it_is_asked_whether_a_request_can_ever_be_served() -> None:
    needs = 2 + 2 * 2  # of 27 tokens: two blocks, and two states of each group
    scheduler = scheduler_of(pages=needs)
    with pytest.raises(NeverFitsError, match=f"needs {needs + 3} pages"):
        submit(scheduler, 0, range(27))
    served(scheduler_of(pages=needs + 3), 0, range(27))
    served(scheduler_of(pages=needs, unit=None), 0, range(27))


def nested_walk(setup: GroupSetup, seed: int) -> GroupSlotModel:
    """Random prompts, most of which go on behind an earlier one, beside a model of all slots and states."""
    draw, model, prompts = random.Random(seed), setup.model(seed), [[0]]
    for number in range(60):
        prompt = list(draw.choice(prompts)) if draw.random() < 0.8 else []
        more = draw.randint(0 if prompt else 1, 14)
        prompt = [*prompt, *(draw.randrange(1 << 20) for _ in range(more))][:44]
        prompts.append(prompt)
        request = Request(number, len(prompt), draw.randint(1, 20), identity=TokenIdentity(number, prompt))
        if model.scheduler.never_fits(request) is None:
            model.submit(request, prompt)
        for _ in range(draw.randint(0, 5)):
            if model.scheduler.has_work:
                model.step()
    model.run()
    return model


@pytest.mark.nightly
@cases("memory", [5000, 12_000], day=1)
@cases("sets", [(FULL, STATE), (STATE, NARROW, FULL)], day=1)
def test_random_prompts_hit_inside_blocks_and_read_what_was_written(
    sets: tuple[LayerSet, ...], memory: int
) -> None:
    found, preempted = [], 0
    for seed in range(tier(3, 60)):
        plans = nested_walk(replace(STATES, sets=sets, memory=memory), seed).plans
        rows = (row for plan in plans for row in plan.rows if row.request_id in plan.admitted)
        found += [row.context_len for row in rows]
        preempted += sum(len(plan.preempted) for plan in plans)
    assert sum(context % BLOCK > 0 for context in found) > 20
    assert all(context % UNIT == 0 for context in found)
    assert preempted or memory > 5000


# -- what is refused ---------------------------------------------------------------------------------------


def refused(layout: GroupLayout, unit: int) -> str:
    with pytest.raises(CoreError, match=f"a match unit of {unit} tokens") as error:
        replace(layout, unit=unit)
    return str(error.value)


def test_a_unit_divides_the_blocks_of_all_groups() -> None:
    assert "must divide the blocks of all groups, of 16 tokens" in refused(
        uniform_layout((FULL, STATE), 4), 6
    )


def test_a_unit_needs_aligned_states_and_no_windows() -> None:
    for sets in ((FULL,), (FULL, WINDOW), (FULL, STATE, WINDOW)):
        assert "beside aligned states" in refused(uniform_layout(sets, 4), 2)
    assert "beside aligned states" in refused(uniform_layout((FULL, STATE), 4, StateMode.every_block), 2)
    assert "in pages of one size" in refused(separate_layout((FULL, STATE), 4, pages=GroupPages.separate), 2)


def test_a_unit_as_long_as_the_blocks_changes_nothing() -> None:
    assert not replace(uniform_layout((FULL, STATE), 4), unit=BLOCK).inside
    assert replace(uniform_layout((FULL,), 4), unit=4).match_unit == 4
    longer = replace(
        uniform_layout((FULL, STATE, NARROW), 4), unit=BLOCK
    )  # K and V in blocks of 16 and of 32
    assert (longer.inside, longer.match_unit) == (False, 2 * BLOCK)
