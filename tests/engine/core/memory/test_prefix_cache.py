"""When blocks enter the prefix cache, and what the manager refuses or notes on the way."""

import numpy as np
import pytest
from slot_model import SlotModel

from engine.core.errors import CoreError
from engine.core.identity import TokenIdentity
from engine.core.memory.block_pool import BlockPool, BlocksStored, CacheEvent
from engine.core.memory.contiguous import ContiguousManager
from engine.core.memory.paged import PagedManager
from engine.core.memory.prefix_cache import RecentHits
from engine.core.options import Decoding, SchedulerLimits, SpeculationMode
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request, Speculation
from engine.core.scheduling.scheduler import Scheduler
from engine.core.sequence import Group, ScheduledRow


def after_two_steps(width: int = 1) -> tuple[Scheduler, TokenIdentity]:
    """A prompt of 30 tokens with shared outputs, two of which are known; blocks of 16."""
    scheduler = Scheduler(PagedManager(64, 16), SchedulerLimits(512, 16))
    identity = TokenIdentity(0, np.arange(30), share_outputs=True)
    decoding = Decoding.greedy if width == 1 else Decoding.sample
    scheduler.submit(Request(0, 30, 40, width, decoding, identity))
    for token in (100, 101):
        scheduler.commit(scheduler.schedule(), StepResult())
        for branch in range(width):
            identity.extend(branch, [token + 10 * branch])
    return scheduler, identity


def joined(scheduler: Scheduler, outputs: list[int]) -> StepPlan:
    """The next plan, with a request of the same prompt, these outputs and ten more tokens."""
    tokens = np.array([*range(30), *outputs, *range(200, 210)])
    scheduler.submit(Request(1, 42, 2, identity=TokenIdentity(1, tokens)))
    return scheduler.schedule()


def test_a_block_that_a_steady_decoder_fills_is_hit_in_the_same_step() -> None:
    scheduler, _ = after_two_steps()
    assert joined(scheduler, [100, 101]).hit_tokens == 32


def test_a_block_that_a_steady_branch_fills_is_hit_in_the_same_step() -> None:
    scheduler, _ = after_two_steps(width=2)
    assert joined(scheduler, [110, 111]).hit_tokens == 32


def test_nothing_is_fast_forwarded_while_outputs_are_shared() -> None:
    scheduler, _ = after_two_steps()
    assert scheduler.schedule(max_steps=8).num_steps == 1


def test_what_is_cut_from_a_prompt_with_drafts_past_its_end_leaves_the_cache() -> None:
    manager = PagedManager(16, 4)
    scheduler = Scheduler(manager, SchedulerLimits(9, 4))
    drafts = Speculation(3, SpeculationMode.whole)
    scheduler.submit(Request(0, 12, 8, identity=TokenIdentity(0, np.arange(12)), speculation=drafts))
    scheduler.commit(scheduler.schedule(), StepResult())
    (sequence,) = scheduler.running[0].sequences
    assert (sequence.computed, sequence.cached_blocks) == (8, 2)
    assert manager.truncate(sequence, 6) == 6
    manager.check()
    assert len(manager.lookup(Group(Request(1, 12, 2, identity=TokenIdentity(1, np.arange(12)))))) == 1


def test_an_admission_without_a_lookup_caches_blocks_for_others() -> None:
    manager = PagedManager(8, 4)
    first, second = (Group(Request(rid, 9, 2, identity=TokenIdentity(rid, np.arange(9)))) for rid in (0, 1))
    manager.admit(first, [])
    manager.extend(ScheduledRow(first.sequences[0], 9, True))
    assert len(manager.lookup(second)) == 2


def test_an_extension_beyond_the_last_computed_token_is_refused() -> None:
    manager = PagedManager(16, 4)
    group = Group(Request(7, 4, 3))
    manager.admit(group, [])
    with pytest.raises(CoreError, match=r"sequence 7\.0 is extended to 7 tokens, it computes 6"):
        manager.extend(ScheduledRow(group.sequences[0], 7, True))
    assert manager.usage(None).token == 0


def test_a_block_beyond_the_last_computed_token_is_refused() -> None:
    manager = PagedManager(16, 4)
    group = Group(Request(7, 4, 1))
    manager.admit(group, [])
    manager.extend(ScheduledRow(group.sequences[0], 4, True))
    with pytest.raises(CoreError, match=r"sequence 7\.0 is extended to 5 tokens, it computes 4"):
        manager.append(group)


def test_a_contiguous_extension_beyond_the_last_computed_token_is_refused() -> None:
    manager = ContiguousManager(64, 32)
    group = Group(Request(7, 4, 3))
    manager.admit(group, [])
    with pytest.raises(CoreError, match=r"sequence 7\.0 is extended to 7 tokens, it computes 6"):
        manager.extend(ScheduledRow(group.sequences[0], 7, True))
    assert manager.usage(None).token == 0


def test_a_lookup_is_noted_once_however_often_the_head_of_the_queue_retries() -> None:
    manager = PagedManager(4, 4, keep_lookups=True)
    model = SlotModel(Scheduler(manager, SchedulerLimits(64, 8)))
    for rid in (0, 1):
        tokens = np.arange(100 * rid, 100 * rid + 9)
        model.submit(Request(rid, 9, 4, identity=TokenIdentity(rid, tokens)), tokens.tolist())
    model.run()
    assert manager.lookups is not None
    assert [(record.request_id, record.asked_blocks) for record in manager.lookups] == [(0, 2), (1, 2)]


def test_originals_that_no_table_has_are_found_after_a_preemption() -> None:
    manager = PagedManager(32, 4, copy_at_fork=True)
    tokens = np.arange(9)
    group = Group(Request(0, 9, 6, 2, Decoding.sample, TokenIdentity(0, tokens)))
    group.block_hashes = {None: []}  # as of a prompt that no other request has
    manager.admit(group, [])
    root = group.sequences[0]
    manager.extend(ScheduledRow(root, 9, True))
    root.computed = 9
    manager.fork(root, group.fork())
    for sequence in group.sequences:
        manager.extend(ScheduledRow(sequence, 1, True))
        sequence.computed = 10
    originals = list(root.table[:2])
    manager.release(group.drop(0))
    manager.preempt(group)
    group.restart()
    assert manager.lookup(group) == originals


def events_of(salt: str = "", adapter: str | None = None) -> list[CacheEvent]:
    """The events of a prompt of 6 blocks in two chunks."""
    manager = PagedManager(16, 4, keep_events=True)
    identity = TokenIdentity(0, np.arange(100, 125), salt, adapter=adapter)
    scheduler = Scheduler(manager, SchedulerLimits(16, 4))
    scheduler.submit(Request(0, 25, 2, identity=identity))
    for _ in range(2):
        scheduler.commit(scheduler.schedule(), StepResult())
    return manager.pool.drain_events()


def test_an_event_carries_the_parent_and_the_tokens_of_its_blocks() -> None:
    one, other = events_of()
    assert isinstance(one, BlocksStored)
    assert isinstance(other, BlocksStored)
    assert (one.origin.parent, list(one.origin.token_ids)) == (None, list(range(100, 116)))
    assert (other.origin.parent, list(other.origin.token_ids)) == (one.hashes[-1], list(range(116, 124)))


def test_an_event_carries_tenant_and_adapter() -> None:
    (stored, _) = events_of("tenant", "lora")
    assert isinstance(stored, BlocksStored)
    assert (stored.origin.salt, stored.origin.adapter) == ("tenant", "lora")


def test_events_are_drained_once() -> None:
    pool = BlockPool(2, keep_events=True)
    pool.cache_full_blocks(pool.take(1), ["a"])
    assert len(pool.drain_events()) == 1
    assert pool.drain_events() == []


def test_the_hit_rate_is_that_of_the_recent_requests() -> None:
    recent = RecentHits(requests=2)
    assert recent.rate is None
    for asked, hit in ((100, 100), (10, 0), (30, 10)):
        recent.note(asked, hit)
    assert recent.rate == 10 / 40


def test_an_admission_counts_for_the_recent_hit_rate() -> None:
    manager = PagedManager(16, 4)
    scheduler = Scheduler(manager, SchedulerLimits(64, 4))
    for rid in range(2):
        scheduler.submit(Request(rid, 10, 2, identity=TokenIdentity(rid, np.arange(10))))
    scheduler.schedule()
    assert manager.recent_hits.rate == 8 / 20


def test_what_a_preempted_request_finds_again_does_not_count() -> None:
    manager, admitted = PagedManager(5, 4), list[int]()
    scheduler = Scheduler(manager, SchedulerLimits(64, 4))
    for rid in range(2):
        scheduler.submit(Request(rid, 7, 8, identity=TokenIdentity(rid, 100 * rid + np.arange(7))))
    while scheduler.has_work:
        plan = scheduler.schedule()
        admitted += plan.admitted
        scheduler.commit(plan, StepResult())
    assert len(admitted) > 2
    assert manager.recent_hits.rate == 0
