"""The block manager of the lessons, and that it is no second manager: its counters are those of the real one."""

import random
from contextlib import suppress

import pytest

from engine.core import BlockManager, CoreError, OutOfBlocksError, UnknownSequenceError


@pytest.fixture
def blocks() -> BlockManager:
    return BlockManager(num_blocks=12, block_size=16)


def test_the_35_tokens_of_the_lesson_lie_where_it_says(blocks: BlockManager) -> None:
    for name in range(1, 13):
        blocks.allocate(name, 16)
    for name in (3, 12, 5):
        blocks.free(name)
    assert blocks.allocate("prompt", 35) == [5, 12, 3]
    assert blocks.get_slot_mapping("prompt", [0, 15, 16, 31, 32, 34]) == [80, 95, 192, 207, 48, 50]


def test_sharing_takes_no_block_and_adds_a_reference(blocks: BlockManager) -> None:
    blocks.allocate("a", 40)
    free = blocks.free_blocks
    assert blocks.share("a", "b") == blocks.table("a")
    assert blocks.free_blocks == free
    assert [blocks.references(block) for block in blocks.table("a")] == [2, 2, 2]


def test_cow_copies_a_shared_partial_block_once(blocks: BlockManager) -> None:
    blocks.allocate("a", 20)
    blocks.share("a", "b")
    assert blocks.cow("b") == (2, 3)
    assert blocks.cow("b") is None
    assert blocks.cow("a") is None  # the last reader writes in place


def test_cow_copies_no_full_block(blocks: BlockManager) -> None:
    blocks.allocate("a", 32)
    blocks.share("a", "b")
    assert blocks.cow("b") is None


def test_appending_copies_as_cow_does(blocks: BlockManager) -> None:
    blocks.allocate("a", 20)
    blocks.share("a", "b")
    assert blocks.allocate("b", 1) == [1, 3]
    assert blocks.manager.drain_copies() == [(2, 3)]


def test_free_gives_back_only_what_nobody_reads(blocks: BlockManager) -> None:
    blocks.allocate("a", 20)
    blocks.share("a", "b")
    assert blocks.free("a") == []
    assert blocks.free("b") == [1, 2]
    assert blocks.free_blocks == 12


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda blocks: blocks.allocate("a", 200), OutOfBlocksError, r"'a': 200 tokens need .* 10 of 12"),
        (lambda blocks: blocks.allocate("new", 200), OutOfBlocksError, "'new': 200 tokens need"),
        (lambda blocks: blocks.allocate("a", 0), CoreError, "'a': 0 tokens asked for"),
        (lambda blocks: blocks.share("a", "a"), CoreError, "'a' exists already"),
        (lambda blocks: blocks.share("x", "b"), UnknownSequenceError, "no sequence 'x'; there are: 'a'"),
        (lambda blocks: blocks.free("x"), UnknownSequenceError, "no sequence 'x'"),
        (lambda blocks: blocks.get_slot_mapping("a", [20]), CoreError, "tokens 0 to 19, not 20"),
        (lambda blocks: blocks.get_slot_mapping("a", [-1]), CoreError, "not -1"),
    ],
)
def test_a_refusal_says_why_and_changes_nothing(blocks: BlockManager, call, error, text) -> None:
    blocks.allocate("a", 20)
    before = (blocks.table("a"), blocks.usage())
    with pytest.raises(error, match=text):
        call(blocks)
    assert (blocks.table("a"), blocks.usage()) == before
    blocks.manager.check()


def test_an_append_that_needs_a_copy_and_a_block_has_both_or_neither() -> None:
    blocks = BlockManager(num_blocks=3, block_size=4)
    blocks.allocate("a", 6)
    blocks.share("a", "b")
    with pytest.raises(OutOfBlocksError):
        blocks.allocate("b", 3)  # a copy of the partial block, and a new one; one is free
    assert blocks.table("b") == [1, 2]
    assert blocks.manager.drain_copies() == []


def test_equal_prompts_share_their_full_blocks_and_appended_tokens_are_private() -> None:
    blocks = BlockManager(num_blocks=12, block_size=4, prefix_caching=True)
    assert blocks.allocate("a", range(10)) == [1, 2, 3]
    assert blocks.allocate("b", range(10)) == [1, 2, 4]
    blocks.allocate("b", 6)
    for name in "ab":
        blocks.free(name)
    assert blocks.manager.pool.cached_blocks == 2


@pytest.mark.parametrize("seed", range(5))
def test_the_invariants_of_the_manager_hold_under_random_operations(seed: int) -> None:
    draw = random.Random(seed)
    blocks = BlockManager(num_blocks=15, block_size=4)
    names: list[int] = []
    for step in range(300):
        with suppress(OutOfBlocksError):
            match draw.choice(["allocate", "allocate", "open", "share", "cow", "free"]):
                case "open":
                    blocks.allocate(step, draw.randint(1, 12))
                    names.append(step)
                case "share" if names:
                    blocks.share(draw.choice(names), step)
                    names.append(step)
                case "free" if names:
                    blocks.free(names.pop(draw.randrange(len(names))))
                case "cow" if names:
                    blocks.cow(draw.choice(names))
                case "allocate" if names:
                    blocks.allocate(draw.choice(names), draw.randint(1, 5))
        blocks.manager.check()
