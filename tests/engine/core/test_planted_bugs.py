"""Planted bugs: each is one that block managers have had, and the random walks must notice every one of them."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from core_driver import Setup, random_walk
from tiers import cases

from engine.core import identity
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.block_tables import BlockTables
from engine.core.memory.contiguous import BuddyRuns
from engine.core.memory.eviction import LruQueue
from engine.core.memory.paged import PagedManager
from engine.core.memory.prefix_cache import PrefixCache
from engine.core.memory.swapping import CopyAtFork, HostPool, Swapper
from engine.core.options import Placement, Preemption, Reservation, Scheduling
from engine.core.sequence import DecodeCalendar

SETUPS = [
    Setup(),
    Setup(preemption=Preemption.swap, deduplicate=True),
    Setup(
        preemption=Preemption.swap,
        size=8,
        blocks=10,
        host_blocks=30,
        budget=200,
        running=5,
        scheduling=Scheduling.priority,
    ),
    Setup(budget=5),
    Setup(preemption=Preemption.auto, copy_at_fork=True, size=1, blocks=90, host_blocks=60),
    Setup(paged=False, reservation=Reservation.pow2, placement=Placement.buddy, blocks=50),
]
SEEDS = range(4)


def walk_all(setups: Iterable[Setup] = SETUPS) -> None:
    for setup in setups:
        for seed in SEEDS:
            random_walk(setup, seed, 150)


def test_the_walks_pass_without_a_planted_bug() -> None:
    walk_all()


def release_twice(real: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def release(pool: BlockPool, blocks: Any, *table: Any) -> list[int]:
        twice = [block for block in blocks if pool.references(block) > 1]
        return real(pool, blocks, *table) + real(pool, twice, *table)

    return release


def share_nothing(pool: BlockPool, blocks: Any) -> int:
    return 0


def keep_the_hash(pool: BlockPool, blocks: Any) -> None:
    """A block that is about to be rewritten stays findable."""


def take_a_live_block(real: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def take(pool: BlockPool, count: int) -> list[int]:
        live = next((b for b in range(1, pool.num_blocks + 1) if pool.references(b) > 1), None)
        return [live] if count == 1 and live is not None else real(pool, count)

    return take


def evict_silently(pool: BlockPool, count: int) -> list[int]:
    victims = pool._evictable.pop(count)
    pool._voided += victims
    return victims


def drop_hashes_at_release(real: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def release(pool: BlockPool, blocks: Any, *table: Any) -> list[int]:
        gone = real(pool, blocks, *table)
        pool._remove_hashes([block for block in gone if pool._hash_of[block] is not None])
        return gone

    return release


def write_into_the_shared_tail(tables: BlockTables, sequence: Any, copy: int) -> None:
    """No copy on write."""


def lose_the_copies(manager: PagedManager) -> list[tuple[int, int]]:
    manager.work.copies = []
    return []


def hit_anything(real: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def find(pool: BlockPool, hashes: Any) -> list[int]:
        found = real(pool, hashes)
        cached = [b for b in range(1, pool.num_blocks + 1) if pool._hash_of[b] is not None and b not in found]
        return [*found, *cached][: len(hashes)]

    return find


def compute_nothing(manager: PagedManager, group: Any) -> list[int]:
    return manager.prefix_cache.find(group, group.root_target // manager.block_size)[0]


def forget_stale_drafts(manager: PagedManager) -> list[tuple[int, int, int]]:
    manager.work.stale = []
    return []


def swap_in_mixed_up(real: Callable[..., None]) -> Callable[..., None]:
    def swap_in(swapper: Swapper, *told: Any) -> None:
        real(swapper, *told)
        hosts, devices = zip(*swapper.pending_in, strict=True)
        swapper.pending_in = list(zip(hosts, devices[::-1], strict=True))

    return swap_in


def leak_host_blocks(host: HostPool, blocks: list[int]) -> None:
    """Host blocks never come back."""


def forget_who_is_due(real: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def due(calendar: DecodeCalendar, later: int = 0) -> list[Any]:
        return real(calendar, later)[:-1]

    return due


def fast_forward_too_far(real: Callable[..., int]) -> Callable[..., int]:
    def fast_forward_limit(manager: PagedManager, calendar: DecodeCalendar, steps: int) -> int:
        return min(steps, real(manager, calendar, steps) + manager.block_size + 1)

    return fast_forward_limit


def need_no_copies(tables: BlockTables, sequences: Any) -> int:
    return 0


def ignore_the_adapter(salt: str, adapter: str | None, epoch: int) -> bytes:
    return salt.encode()


def cache_too_much(real: Callable[..., None]) -> Callable[..., None]:
    def cache_full(cache: PrefixCache, sequence: Any, blocks: int) -> None:
        real(cache, sequence, min(len(sequence.table), blocks + 1))

    return cache_full


def merge_with_anyone(buddy: BuddyRuns, run: range) -> None:
    start = run.start - 1
    size = buddy._taken.pop(start) * 2
    buddy.free += size // 2
    buddy._free.setdefault(size, []).append(start & ~(size - 1))


def stay_in_the_queue(queue: LruQueue, blocks: list[int], queued: list[int]) -> None:
    queue._size -= len(queued)


def miscount_written(real: Callable[..., None]) -> Callable[..., None]:
    def truncate(tables: BlockTables, sequence: Any, tokens: int) -> None:
        lost = sequence.computed - tokens
        real(tables, sequence, tokens)
        tables.counters.written += lost

    return truncate


def owe_nothing(copying: CopyAtFork, child: Any) -> None:
    """Branches go on sharing although every one should own its blocks."""


def trim_nothing(tables: BlockTables, sequence: Any) -> None:
    """A block that was never written is saved in host memory."""


PLANTED: dict[str, tuple[object, str, Any]] = {
    "double free": (BlockPool, "release", release_twice(BlockPool.release)),
    "missing reference on a hit or a fork": (BlockPool, "share", share_nothing),
    "hash kept on a rewritten block": (BlockPool, "uncache", keep_the_hash),
    "a live block handed out": (BlockPool, "take", take_a_live_block(BlockPool.take)),
    "hash kept on an evicted block": (BlockPool, "_evict", evict_silently),
    "hash lost, block left among the cached": (
        BlockPool,
        "release",
        drop_hashes_at_release(BlockPool.release),
    ),
    "write into a shared tail": (BlockTables, "copy_tail", write_into_the_shared_tail),
    "copy list lost": (PagedManager, "drain_copies", lose_the_copies),
    "hit on another prefix": (BlockPool, "find", hit_anything(BlockPool.find)),
    "no token left to compute": (PagedManager, "lookup", compute_nothing),
    "rejected drafts left in place": (PagedManager, "drain_stale", forget_stale_drafts),
    "swapped into the wrong blocks": (Swapper, "swap_in", swap_in_mixed_up(Swapper.swap_in)),
    "host blocks leaked": (HostPool, "give", leak_host_blocks),
    "a full block not noticed": (DecodeCalendar, "due", forget_who_is_due(DecodeCalendar.due)),
    "fast-forward past the last free block": (
        PagedManager,
        "fast_forward_limit",
        fast_forward_too_far(PagedManager.fast_forward_limit),
    ),
    "copies not reserved": (BlockTables, "copies_needed", need_no_copies),
    "adapters share a cache": (identity, "_root", ignore_the_adapter),
    "a partial block cached": (PrefixCache, "cache_full", cache_too_much(PrefixCache.cache_full)),
    "buddies merged without asking": (BuddyRuns, "give", merge_with_anyone),
    "a hit block left in the eviction queue": (LruQueue, "reuse", stay_in_the_queue),
    "rejected drafts counted as written": (BlockTables, "truncate", miscount_written(BlockTables.truncate)),
    "an unwritten block saved": (BlockTables, "trim", trim_nothing),
}


@cases("bug", PLANTED, day=[bug for bug in PLANTED if bug != "buddies merged without asking"])
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement = PLANTED[bug]
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises((AssertionError, ValueError, LookupError)):
        walk_all()
