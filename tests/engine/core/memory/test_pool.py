import tracemalloc
from collections.abc import Sequence

import pytest

from engine.core.errors import CoreError, InvariantError, OutOfBlocksError
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.eviction import LruQueue
from engine.core.memory.swapping import HostPool


def test_blocks_are_taken_in_id_order_and_the_null_block_never() -> None:
    assert BlockPool(4).take(4) == [1, 2, 3, 4]


def test_taking_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(3)
    pool.take(2)
    with pytest.raises(OutOfBlocksError, match="2 blocks asked for, 1 of 3"):
        pool.take(2)
    assert pool.free_blocks == 1


def test_a_cached_block_stays_findable_after_its_release() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.cache_full_blocks([block], ["prefix"])
    pool.release([block])
    assert pool.find(["prefix"]) == [block]
    assert pool.cached_blocks == 1


def test_blocks_without_a_hash_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.cache_full_blocks([first], ["prefix"])
    pool.release([first])
    pool.release([second])
    assert pool.take(2) == [second, 3]
    assert pool.find(["prefix"]) == [first]


@pytest.mark.parametrize(
    "wrong", [[1, 1], [1], [1, 3], [1, 9], [1, -1]], ids=["twice", "too_few", "in_use", "above", "below"]
)
def test_a_rule_that_gives_wrong_blocks_is_refused_before_anything_changes(wrong: list[int]) -> None:
    class Wrong(LruQueue):
        def pop(self, count: int) -> list[int]:
            return wrong if count else []

    pool = BlockPool(3, eviction=Wrong())
    blocks = pool.take(3)
    pool.cache_full_blocks(blocks, ["a", "b", "c"])
    pool.release(blocks[:2])
    with pytest.raises(CoreError, match="2 blocks to evict were asked for, its rule gave"):
        pool.take(2)
    assert pool.find(["a", "b", "c"]) == blocks


def test_eviction_takes_the_least_recently_released_first() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block in blocks:
        pool.cache_full_blocks([block], [f"n{block}"])
    for block in (2, 1, 3):
        pool.release([block])
    assert pool.take(3) == [2, 1, 3]


def test_a_hit_on_a_released_block_protects_it_from_eviction() -> None:
    pool = BlockPool(2)
    one, two = pool.take(2)
    pool.cache_full_blocks([one], ["a"])
    pool.cache_full_blocks([two], ["b"])
    pool.release([one])
    pool.release([two])
    assert pool.share(pool.find(["a"])) == 1
    assert pool.take(1) == [two]
    assert pool.find(["b"]) == []


def test_lookup_stops_at_the_first_miss() -> None:
    pool = BlockPool(3)
    one, _, three = pool.take(3)
    pool.cache_full_blocks([one], ["a"])
    pool.cache_full_blocks([three], ["c"])
    assert pool.find(["a", "b", "c"]) == [one]


def test_lookup_changes_nothing() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.cache_full_blocks([block], ["a"])
    pool.release([block])
    pool.find(["a"])
    assert pool.references(block) == 0
    assert pool.cached_blocks == 1


def test_duplicates_share_a_hash_which_goes_with_the_last() -> None:
    pool = BlockPool(2)
    one, two = pool.take(2)
    pool.cache_full_blocks([one], ["a"])
    pool.cache_full_blocks([two], ["a"])
    assert pool.find(["a"]) == [one]
    pool.release([one])
    pool.take(1)
    assert pool.find(["a"]) == [two]
    pool.release([two])
    pool.take(1)
    assert pool.find(["a"]) == []


def test_the_last_of_three_references_frees() -> None:
    pool = BlockPool(1)
    blocks = pool.take(1)
    pool.share(blocks)
    pool.share(blocks)
    assert [pool.release([1]) for _ in range(3)] == [[], [], [1]]


def test_releasing_a_free_block_is_refused() -> None:
    pool = BlockPool(1)
    with pytest.raises(CoreError, match="block 1 is released, but its reference count is 0"):
        pool.release([1])


def test_voided_blocks_are_the_uncached_releases_and_the_evictions() -> None:
    pool = BlockPool(2)
    one, two = pool.take(2)
    pool.cache_full_blocks([one], ["a"])
    pool.release([one])
    pool.release([two])
    assert pool.drain_voided() == [two]
    pool.take(2)
    assert pool.drain_voided() == [one]
    assert pool.drain_voided() == []


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(CoreError, match="at least 1 block"):
        BlockPool(0)


def test_a_block_released_twice_in_one_call_is_refused() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    with pytest.raises(CoreError, match="block 1 is released twice in one call"):
        pool.release([block, block])
    pool.release([block])
    assert sorted(pool.take(3)) == [1, 2, 3]


@pytest.mark.parametrize("released", [[1, 1], [1, 1, 1], [1, 2, 1]])
def test_a_shared_block_that_loses_its_last_reference_twice_is_refused(released: list[int]) -> None:
    pool = BlockPool(3)
    blocks = pool.take(2)
    pool.share(blocks[:1])
    with pytest.raises(CoreError, match="block 1 is released twice in one call"):
        pool.release(released)
    assert [pool.references(block) for block in blocks] == [2, 1]


def test_a_cached_block_shared_twice_in_one_call_is_refused() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.cache_full_blocks([block], ["a"])
    pool.release([block])
    with pytest.raises(CoreError, match="block 1 is shared twice in one call"):
        pool.share([block, block])
    assert (pool.cached_blocks, pool.references(block)) == (1, 0)


def test_an_eviction_queue_asked_for_more_than_it_has_keeps_all() -> None:
    queue = LruQueue()
    queue.push([1, 2])
    with pytest.raises(OutOfBlocksError, match="3 blocks to evict were asked for, 2 are in the queue"):
        queue.pop(3)
    assert queue.blocks() == [2, 1]


def test_no_event_tells_of_private_blocks() -> None:
    pool = BlockPool(4, keep_events=True)
    blocks = pool.take(2)
    pool.cache_full_blocks(blocks, range(7, 9))
    pool.release(blocks)
    pool.take(4)
    assert (pool.find(range(7, 9)), pool.drain_events()) == ([], [])


def test_void_blocks_that_nobody_asks_for_take_bounded_memory() -> None:
    pool = BlockPool(4)
    for _ in range(1000):
        pool.release(pool.take(4))
    assert len(pool.drain_voided()) <= 4 * 4


def test_a_large_pool_takes_the_memory_of_the_blocks_that_are_used() -> None:
    tracemalloc.start()
    pool = BlockPool(10**9)
    pool.release(pool.take(1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 10**6
    assert pool.free_blocks == 10**9


def test_blocks_of_a_large_pool_are_taken_in_id_order_across_chunks() -> None:
    pool = BlockPool(200_000)
    first = pool.take(65_000)
    assert [*first, *pool.take(100_000), pool.take_one()] == list(range(1, 165_002))
    assert pool.live_blocks == 165_001


def test_a_freed_block_is_taken_before_one_that_was_never_used() -> None:
    pool = BlockPool(200_000)
    blocks = pool.take(65_536)
    pool.release(blocks[-1:])
    assert pool.take(2) == [65_536, 65_537]


def test_a_block_that_was_never_taken_has_no_reference_and_no_hash() -> None:
    pool = BlockPool(200_000)
    assert (pool.references(150_000), pool.hash_of(150_000)) == (0, None)


def test_a_large_host_pool_takes_the_memory_of_the_blocks_that_are_used() -> None:
    tracemalloc.start()
    host = HostPool(10**9)
    host.give(host.take(1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6
    assert host.free_blocks == 10**9
    assert host.take(1) == [0]


def test_a_block_of_one_table_is_not_left_to_another() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    with pytest.raises(CoreError, match=f"block {block} has 1 references: it cannot be left"):
        pool.leave(block)
    pool.share([block])
    pool.leave(block)
    assert pool.references(block) == 1


def test_an_eviction_policy_is_told_of_each_use_and_of_new_content() -> None:
    told: list[tuple[str, list[int]]] = []

    class Watched(LruQueue):
        def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
            told.extend((("used", list(blocks)), ("queued", list(queued))))
            super().reuse(blocks, queued)

        def forget(self, blocks: Sequence[int]) -> None:
            told.append(("forget", list(blocks)))

    pool = BlockPool(4, eviction=Watched())
    blocks = pool.take(2)
    pool.cache_full_blocks(blocks, [b"one", b"two"])
    pool.release(blocks[1:])
    pool.share(blocks)
    pool.uncache(blocks[:1])
    assert told == [("used", blocks), ("queued", blocks[1:]), ("forget", blocks[:1])]


def test_a_wrong_count_of_free_blocks_is_noticed() -> None:
    pool = BlockPool(4)
    pool.free_blocks -= 1
    with pytest.raises(InvariantError, match="4 blocks have reference count 0, 3 were counted"):
        pool.check({})
