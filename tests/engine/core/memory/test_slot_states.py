"""The slot states of the design, on examples small enough to count by hand."""

import numpy as np
from slot_model import SlotModel

from engine.core.identity import TokenIdentity
from engine.core.memory.contiguous import ContiguousManager
from engine.core.memory.paged import PagedManager
from engine.core.options import SchedulerLimits
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler

TOKENS = np.arange(9)


def test_paged_block_tail_is_reserved_until_the_last_block_and_then_internal() -> None:
    model = SlotModel(Scheduler(PagedManager(4, 8), SchedulerLimits(64, 4)))
    model.submit(Request(0, 5, 7), list(range(5)))  # 11 slots in the end: 8 + 3 of the second block
    first = model.step().usage
    assert (first.token, first.reserved, first.internal, first.free) == (5, 3, 0, 24)
    for _ in range(4):
        last = model.step().usage
    assert (last.token, last.reserved, last.internal, last.free) == (9, 2, 5, 16)


def test_contiguous_reservation_is_split_as_in_figure_3_of_the_paper() -> None:
    """Kwon et al. 2023: 7 prompt tokens and 1 generated, 2 to come, of 2048 reserved: 2038 are internal."""
    model = SlotModel(Scheduler(ContiguousManager(2560, 2048), SchedulerLimits(64, 4)))
    model.submit(Request(0, 7, 4), list(range(7)))
    model.step()
    usage = model.step().usage
    assert (usage.token, usage.reserved, usage.internal) == (8, 2, 2038)


def test_a_hole_too_short_for_the_waiting_request_is_external() -> None:
    model = SlotModel(Scheduler(ContiguousManager(2560, 2048), SchedulerLimits(64, 4)))
    model.submit(Request(0, 7, 4), list(range(7)))
    assert model.step().usage.external == 0
    model.submit(Request(1, 7, 4), list(range(7)))
    usage = model.step().usage
    assert (usage.external, usage.free) == (512, 0)


def test_reserve_max_holds_seven_requests_in_the_papers_pool() -> None:
    """Kwon et al. 2023, Fig 13: OPT-13B's 12 GB hold 15,728 slots, Orca (Max) batches 7.00 requests."""
    model = SlotModel(Scheduler(ContiguousManager(15_728, 2048), SchedulerLimits(512, 64)))
    for rid in range(12):
        model.submit(Request(rid, 16, 4), list(range(16)))
    assert model.step().running == 7


def test_released_prefix_blocks_are_cached_and_shared_ones_count_once() -> None:
    model = SlotModel(Scheduler(PagedManager(8, 4), SchedulerLimits(64, 4)))
    for rid in range(2):
        model.submit(Request(rid, 9, 2 + rid, identity=TokenIdentity(rid, TOKENS)), TOKENS.tolist())
    usage = model.step().usage
    assert (usage.token, usage.logical_blocks, usage.physical_blocks) == (8 + 1 + 1, 6, 4)
    model.run()
    after = model.scheduler.manager.usage(None)
    assert (after.cached, after.token) == (8, 0)
