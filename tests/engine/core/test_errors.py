"""Bad input to the policy core: typed errors that name the sequence and the numbers, the state as it was."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from engine.core.errors import CoreError, NeverFitsError, OutOfBlocksError, UnknownSequenceError
from engine.core.identity import TokenIdentity
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.contiguous import BuddyRuns, ContiguousManager, FreeRuns
from engine.core.memory.manager import KVCacheManager
from engine.core.memory.paged import PagedManager
from engine.core.memory.swapping import HostPool
from engine.core.options import Decoding, SchedulerLimits, SpeculationMode
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request, Speculation
from engine.core.scheduling.scheduler import Scheduler
from engine.core.sequence import Group, ScheduledRow, SequenceState

Print = object
SEEN_BY_NAME = (SequenceState, Group)


def fingerprint(thing: object) -> Print:
    """Everything that an object of the core consists of, however deep, as a comparable value.

    Cycles (a group and its calendar) end at the second visit.
    """
    return _print(thing, {})


def _print(thing: object, seen: dict[int, int]) -> Print:
    if isinstance(thing, str | bytes | int | float | None):
        return thing
    if callable(thing):  # methods of two objects are not equal
        return getattr(thing, "__qualname__", thing)
    if id(thing) in seen:
        return f"seen {seen[id(thing)]}"
    seen[id(thing)] = len(seen)
    if isinstance(thing, np.ndarray):
        return thing.tolist()
    if isinstance(thing, dict):
        return [(_print(key, seen), _print(value, seen)) for key, value in thing.items()]
    if isinstance(thing, set | frozenset):
        return sorted(str(_print(value, seen)) for value in thing)
    if hasattr(thing, "__iter__") and not hasattr(thing, "__dict__"):
        return [_print(value, seen) for value in thing]
    return type(thing).__name__, [(name, _print(getattr(thing, name), seen)) for name in _fields(thing)]


def _fields(thing: object) -> list[str]:
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return sorted({*slots, *getattr(thing, "__dict__", {})})


def refused(state: object, error: type[CoreError], match: str, action: Callable[[], object]) -> None:
    """`action` raises `error` with a message that matches, and `state` is what it was."""
    before = fingerprint(state)
    with pytest.raises(error, match=match):
        action()
    assert fingerprint(state) == before


@dataclass
class Under:
    """A manager with one request under way."""

    manager: PagedManager
    group: Group

    @property
    def root(self) -> SequenceState:
        return self.group.sequences[0]


def under_way(
    prompt: int = 10, blocks: int = 12, width: int = 1, mode: str = "greedy", **options: int
) -> Under:
    manager = PagedManager(blocks, 4, **options)  # type: ignore[arg-type]
    identity = TokenIdentity(7, np.arange(prompt))
    group = Group(Request(7, prompt, 5, width, Decoding(mode), identity))
    manager.admit(group, ())
    manager.extend(ScheduledRow(group.sequences[0], prompt, True))
    group.sequences[0].computed = prompt
    return Under(manager, group)


def running(request: Request, blocks: int = 40, steps: int = 1, **limits: int) -> tuple[Scheduler, StepPlan]:
    """A scheduler with a plan under way, `steps` after the request's prompt."""
    scheduler = Scheduler(PagedManager(blocks, 4), SchedulerLimits(64, 8, **limits))
    scheduler.submit(request)
    for _ in range(steps):
        scheduler.commit(scheduler.schedule(), StepResult(parents={request.request_id: [0] * request.width}))
    return scheduler, scheduler.schedule()


# -- the fingerprint itself ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it.manager.pool.share(it.root.table),
        lambda it: it.manager.pool.uncache(it.root.table[:1]),
        lambda it: it.manager.pool.take(1),
        lambda it: it.manager.release(it.root),
        lambda it: it.manager.extend(ScheduledRow(it.root, 1, True)),
        lambda it: it.manager.truncate(it.root, 9),
        lambda it: setattr(it.root, "computed", 9),
        lambda it: it.manager.work.copies.append((1, 2)),
    ],
)
def test_the_fingerprint_tells_every_change(change: Callable[[Under], object]) -> None:
    it = under_way()
    before = fingerprint(it)
    change(it)
    assert fingerprint(it) != before


def test_equal_states_have_equal_fingerprints() -> None:
    assert fingerprint(under_way()) == fingerprint(under_way())


# -- sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize(
    "make",
    [
        BlockPool,
        FreeRuns,
        BuddyRuns,
        lambda size: PagedManager(size, 16),
        lambda size: PagedManager(16, size),
        lambda size: PagedManager(16, 16, host_blocks=size - 1),
        lambda size: HostPool(size - 1),
        lambda size: ContiguousManager(size, 16),
        lambda size: ContiguousManager(16, size),
        lambda size: SchedulerLimits(size, 8),
        lambda size: SchedulerLimits(8, size),
        lambda size: SchedulerLimits(8, 8, long_prefill_tokens=size),
        lambda size: SchedulerLimits(8, 8, watermark=size - 0.5),
        lambda size: Request(1, size, 1),
        lambda size: Request(1, 1, size),
        lambda size: Request(1, 1, 1, size, Decoding.beam),
        lambda size: Speculation(size),
    ],
)
def test_sizes_below_the_smallest_are_refused_with_the_number(
    make: Callable[[int], object], size: int
) -> None:
    with pytest.raises(CoreError, match=r"-?\d"):
        make(size)


def test_a_wrong_request_is_named() -> None:
    with pytest.raises(CoreError, match=r"request 42: output_tokens is -3"):
        Request(42, 5, -3)


@pytest.mark.parametrize("ids", [[-1], [1 << 31]])
def test_token_ids_out_of_range_name_the_request_and_the_range(ids: list[int]) -> None:
    with pytest.raises(CoreError, match=rf"request 42: token ids run from {ids[0]}"):
        TokenIdentity(42, np.array(ids))


# -- the pool --------------------------------------------------------------------------------------------


def test_taking_more_blocks_than_are_free_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.take(1)
    refused(pool, OutOfBlocksError, "4 blocks asked for, 3 of 4 are free", lambda: pool.take(4))


def test_a_double_free_is_refused() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.release(blocks[:1])
    refused(
        pool,
        CoreError,
        f"block {blocks[0]} is released, but its reference count is 0",
        lambda: pool.release(blocks),
    )


def test_the_null_block_is_nobodys() -> None:
    pool = BlockPool(4)
    pool.cache_full_blocks(pool.take(4), [b"a", b"b", b"c", b"d"])
    refused(pool, CoreError, "block 0", lambda: pool.release([0]))
    refused(pool, CoreError, "block 0", lambda: pool.share([0]))


def test_a_block_that_holds_nothing_cannot_be_shared() -> None:
    pool = BlockPool(4)
    held = pool.take(1)
    refused(pool, CoreError, "block 3 is free and holds nothing", lambda: pool.share([*held, 3]))


def test_a_free_block_cannot_be_cached_and_a_cached_one_not_again() -> None:
    pool = BlockPool(4)
    held = pool.take(2)
    pool.cache_full_blocks(held[:1], [b"a"])
    refused(
        pool, CoreError, "block 4 cannot be cached: 0 references", lambda: pool.cache_full_blocks([4], [b"b"])
    )
    refused(
        pool,
        CoreError,
        f"block {held[0]} cannot be cached",
        lambda: pool.cache_full_blocks(held[::-1], [b"b", b"c"]),
    )


def test_a_free_block_is_not_uncached() -> None:
    pool = BlockPool(4)
    pool.take(1)
    refused(pool, CoreError, "a block with a reference", lambda: pool.uncache([2]))


def test_a_name_that_does_not_exist_is_a_miss_and_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.cache_full_blocks(pool.take(1), [b"a"])
    before = fingerprint(pool)
    assert pool.find([b"b", b"a"]) == []
    assert pool.first_block(b"b") is None
    assert fingerprint(pool) == before


def test_the_prefix_cache_is_not_emptied_while_blocks_are_in_use() -> None:
    it = under_way()
    refused(it, CoreError, "3 blocks are in use", it.manager.reset_prefix_cache)


def test_the_host_takes_and_gives_only_what_it_has() -> None:
    host = HostPool(2)
    refused(host, OutOfBlocksError, "3 host blocks asked for, 2 are free", lambda: host.take(3))
    refused(host, CoreError, r"host blocks \[1\]", lambda: host.give([1]))


@pytest.mark.parametrize("runs", [FreeRuns(8), BuddyRuns(8)], ids=["first_fit", "buddy"])
def test_runs_that_were_not_taken_are_not_given_back(runs: FreeRuns | BuddyRuns) -> None:
    refused(runs, CoreError, r"slots 1\.\.4", lambda: runs.give(range(1, 5)))
    refused(runs, OutOfBlocksError, "9", lambda: runs.take(9))


# -- sequences -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act",
    [
        lambda manager, one: manager.release(one),
        lambda manager, one: manager.extend(ScheduledRow(one, 1, True)),
        lambda manager, one: manager.truncate(one, 0),
        lambda manager, one: manager.fork(one, [SequenceState(one.request, 1)]),
        lambda manager, one: manager.reparent([one], [0]),
        lambda manager, one: manager.promote(one, SequenceState(one.request, 1)),
    ],
    ids=["release", "extend", "truncate", "fork", "reparent", "promote"],
)
@pytest.mark.parametrize("ended", [False, True], ids=["never admitted", "ended"])
def test_a_sequence_that_holds_nothing_is_named(
    act: Callable[[KVCacheManager, SequenceState], object], *, ended: bool
) -> None:
    it = under_way()
    one = it.root if ended else SequenceState(Request(9, 4, 4))
    if ended:
        it.manager.release(one)
    refused((it, one), UnknownSequenceError, r"sequence [79]\.0", lambda: act(it.manager, one))


@pytest.mark.parametrize("name", ["release", "extend", "fork", "truncate", "reparent"])
def test_contiguous_memory_names_a_sequence_that_holds_nothing(name: str) -> None:
    manager, one = ContiguousManager(64, 16), SequenceState(Request(9, 4, 4))
    act = {
        "release": lambda: manager.release(one),
        "extend": lambda: manager.extend(ScheduledRow(one, 1, True)),
        "fork": lambda: manager.fork(one, [SequenceState(one.request, 1)]),
        "truncate": lambda: manager.truncate(one, 0),
        "reparent": lambda: manager.reparent([one], [0]),
    }[name]
    refused((manager, one), UnknownSequenceError, r"sequence 9\.0", act)


def test_a_double_free_of_a_sequence_is_refused() -> None:
    it = under_way()
    it.manager.release(it.root)
    refused(it, UnknownSequenceError, r"sequence 7\.0 holds no blocks", lambda: it.manager.release(it.root))


@pytest.mark.parametrize("tokens", [-1, 11])
def test_a_cut_beyond_what_is_computed_is_refused(tokens: int) -> None:
    it = under_way()
    refused(
        it,
        CoreError,
        rf"sequence 7\.0: cut to {tokens} tokens, it has 10",
        lambda: it.manager.truncate(it.root, tokens),
    )


def test_an_extension_that_the_pool_cannot_serve_changes_nothing() -> None:
    it = under_way(blocks=3)
    row = ScheduledRow(it.root, 4, True)
    assert not it.manager.can_extend([row])
    refused(it, OutOfBlocksError, "1 blocks asked for, 0 of 3 are free", lambda: it.manager.extend(row))


def test_a_copy_that_the_pool_cannot_serve_changes_nothing() -> None:
    it = under_way(blocks=3, width=2, mode="sample")
    it.manager.fork(it.root, it.group.fork())
    row = ScheduledRow(it.root, 1, True)
    refused(it, OutOfBlocksError, "1 blocks asked for", lambda: it.manager.extend(row))


def test_hits_that_hold_nothing_are_not_admitted() -> None:
    it = under_way()
    other = Group(Request(8, 12, 2, identity=TokenIdentity(8, np.arange(12))))
    refused((it, other), CoreError, "block 12", lambda: it.manager.admit(other, [12]))


def test_a_swap_without_room_on_the_host_changes_nothing() -> None:
    it = under_way(host_blocks=2)
    assert not it.manager.can_swap_out(it.group)
    refused(
        it, OutOfBlocksError, "3 host blocks asked for, 2 are free", lambda: it.manager.swap_out(it.group)
    )


# -- requests --------------------------------------------------------------------------------------------


def scheduler_of(**limits: int) -> Scheduler:
    return Scheduler(PagedManager(8, 4), SchedulerLimits(16, 4, **limits))


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (Request(5, 30, 4), r"request 5 .* needs 9 blocks of 4 tokens, the pool has 8"),
        (Request(5, 4, 4, 6, Decoding.sample), r"request 5 .* 6 sequences, a step takes 4"),
        (Request(5, 10, 11), r"request 5 .* 21 tokens in all, the longest served is 20"),
    ],
)
def test_what_never_fits_is_refused_at_once_and_nothing_is_queued(request_: Request, match: str) -> None:
    scheduler = scheduler_of(max_model_len=20 if request_.prompt_tokens == 10 else 1000)
    refused(scheduler, NeverFitsError, match, lambda: scheduler.submit(request_))


def test_a_sequence_never_grows_beyond_the_model_length() -> None:
    """Replay pins lengths, so an append beyond the longest sequence is refused where it would begin: at submission."""
    scheduler = scheduler_of(max_model_len=12)
    refused(scheduler, NeverFitsError, "request 1 .* 13 tokens", lambda: scheduler.submit(Request(1, 9, 4)))
    scheduler.submit(Request(1, 9, 3))
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert all(row.context_len + row.query_len < 12 for row in plan.rows)
        scheduler.commit(plan, StepResult())


def test_a_second_submission_is_refused() -> None:
    scheduler = scheduler_of()
    scheduler.submit(Request(1, 4, 2))
    refused(
        scheduler, CoreError, "request 1 was submitted before", lambda: scheduler.submit(Request(1, 8, 2))
    )


def test_aborting_an_unknown_or_ended_request_is_refused() -> None:
    scheduler, plan = running(Request(1, 4, 2))
    refused(scheduler, CoreError, "request 9 is neither", lambda: scheduler.abort(9))
    scheduler.commit(plan, StepResult())
    refused(scheduler, CoreError, "request 1 is neither", lambda: scheduler.abort(1))


def test_a_step_without_work_is_refused() -> None:
    scheduler = scheduler_of()
    refused(scheduler, CoreError, "no step to schedule", scheduler.schedule)


# -- answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", SpeculationMode)
@pytest.mark.parametrize("accepted", [-1, 4])
def test_more_drafts_than_were_given_are_not_accepted(mode: SpeculationMode, accepted: int) -> None:
    scheduler, plan = running(Request(1, 9, 9, speculation=Speculation(3, mode)))
    refused(
        scheduler,
        CoreError,
        f"request 1 accepts {accepted} draft tokens, it had 3",
        lambda: scheduler.commit(plan, StepResult(accepted={1: accepted})),
    )


def test_drafts_of_a_request_without_any_are_not_accepted() -> None:
    scheduler, plan = running(Request(1, 9, 9))
    result = StepResult(accepted={1: 1})
    refused(
        scheduler,
        CoreError,
        "request 1 accepts 1 draft tokens, it had 0",
        lambda: scheduler.commit(plan, result),
    )


@pytest.mark.parametrize("parents", [{}, {1: [0]}, {1: [0, 2]}, {1: [-1, 0]}, {1: [0, 0, 0]}, {2: [0, 0]}])
def test_parents_that_cannot_be_are_refused(parents: dict[int, list[int]]) -> None:
    scheduler, plan = running(Request(1, 9, 9, 2, Decoding.beam))
    refused(
        scheduler,
        CoreError,
        "request 1 needs 2 parents, each below 2",
        lambda: scheduler.commit(plan, StepResult(parents=parents)),
    )


@pytest.mark.parametrize("num_steps", [0, -1, 2])
def test_steps_that_were_not_planned_are_refused(num_steps: int) -> None:
    scheduler, plan = running(Request(1, 9, 9))
    refused(
        scheduler,
        CoreError,
        f"{num_steps} steps taken, 1 to 1",
        lambda: scheduler.commit(plan, StepResult(num_steps)),
    )
