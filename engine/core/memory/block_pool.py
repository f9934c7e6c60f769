"""The block pool: reference counts, the free queue, and the index of block hashes (the prefix cache).

It follows the block pool of vLLM's v1 core. A block whose count falls to 0 keeps its hash and can be found until it is
taken again (lazy eviction). Free blocks without a hash are taken first, last in first out. Cached blocks follow, in
the order of the eviction queue. Block 0 is the null block: it is never given out and never counted.
`check_pool` recounts everything and verifies the invariants. Events report what the cache stored and removed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.core.errors import CoreError, InvariantError, OutOfBlocksError
from engine.core.identity import BlockName
from engine.core.memory.eviction import EvictionQueue, LruQueue
from engine.core.options import Retention


class NameIndex:
    """Several blocks may carry one name; a lookup finds the one that was entered first."""

    def __init__(self) -> None:
        self._first: dict[BlockName, int] = {}
        self._others: dict[BlockName, list[int]] = {}

    def add(self, names: Sequence[BlockName], blocks: Sequence[int]) -> None:
        """Enter `blocks` under `names`, which differ from each other."""
        if self._first.keys().isdisjoint(names):
            self._first.update(zip(names, blocks, strict=True))
            return
        for name, block in zip(names, blocks, strict=True):
            if self._first.setdefault(name, block) != block:
                self._others.setdefault(name, []).append(block)

    def drop(self, names: Sequence[BlockName], blocks: Sequence[int]) -> None:
        """Take `blocks` out; a name goes with its last block."""
        first = self._first
        if not self._others:
            for name in names:
                del first[name]
            return
        for name, block in zip(names, blocks, strict=True):
            self._drop_one(name, block)

    def _drop_one(self, name: BlockName, block: int) -> None:
        others = self._others.get(name)
        if others is None:
            del self._first[name]
            return
        if self._first[name] == block:
            self._first[name] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._others[name]

    def first(self, name: BlockName) -> int | None:
        """The block that was entered first under `name`, or None."""
        return self._first.get(name)

    def find(self, names: Sequence[BlockName]) -> list[int]:
        """Blocks of the longest leading run of `names` that is in the index. A pure query."""
        blocks: list[int] = []
        first = self._first
        for name in names:
            block = first.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def clear(self) -> None:
        """Forget every name."""
        self._first.clear()
        self._others.clear()

    def pairs(self) -> list[tuple[int, BlockName]]:
        """Every (block, name), sorted by block."""
        more = [(block, name) for name, blocks in self._others.items() for block in blocks]
        return sorted(
            [*((block, name) for name, block in self._first.items()), *more], key=lambda pair: pair[0]
        )


NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 … `num_blocks`, their reference counts, and the index of block names (the prefix cache).

    Two structures make one free queue: a stack of unnamed blocks and an eviction queue of named ones. Every operation
    works on whole tables and costs O(1) a block; none depends on the size of the pool.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        retention: Retention = Retention.lru,
        eviction: EvictionQueue | None = None,
        keep_events: bool = False,
    ) -> None:
        if num_blocks < 1:
            raise CoreError(f"a pool needs at least 1 block, found {num_blocks}")
        self.num_blocks = num_blocks
        self.retention = retention
        self.events: list[CacheEvent] | None = [] if keep_events else None
        self._refs = [0] * (num_blocks + 1)
        self._unnamed = list(range(num_blocks, 0, -1))
        self._evictable = LruQueue() if eviction is None else eviction
        self._name_of: list[BlockName | None] = [None] * (num_blocks + 1)
        self._index = NameIndex()
        self._voided: list[int] = []

    # -- what there is -------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody refers to, cached ones included."""
        return len(self._unnamed) + len(self._evictable)

    @property
    def cached_blocks(self) -> int:
        """Unreferenced blocks that hold a reusable prefix."""
        return len(self._evictable)

    @property
    def live_blocks(self) -> int:
        """Blocks that at least one sequence refers to."""
        return self.num_blocks - self.free_blocks

    def references(self, block: int) -> int:
        """How many tables refer to `block`."""
        return self._refs[block]

    def unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody refers to: a hit on those uses up free blocks."""
        refs = self._refs
        return [refs[block] for block in blocks].count(0)

    # -- who holds what ------------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """`count` blocks with reference count 1, unnamed; cached blocks are evicted only when no others are left.

        Raises OutOfBlocksError, with nothing changed, when fewer are free.
        """
        if count < 0:
            raise CoreError(f"{count} blocks asked for, must be at least 0")
        if count > self.free_blocks:
            raise OutOfBlocksError(
                f"{count} blocks asked for, {self.free_blocks} of {self.num_blocks} are free"
            )
        stack = self._unnamed
        fresh = min(count, len(stack))
        blocks = stack[: -fresh - 1 : -1]
        del stack[len(stack) - fresh :]
        if fresh < count:
            blocks += self._evict(count - fresh)
        refs = self._refs
        for block in blocks:
            refs[block] = 1
        return blocks

    def take_one(self) -> int:
        """`take(1)`, the way of every decoding sequence whose last block is full."""
        if not self._unnamed:
            return self.take(1)[0]
        block = self._unnamed.pop()
        self._refs[block] = 1
        return block

    def _evict(self, count: int) -> list[int]:
        victims = self._evictable.pop(count)
        self._forget(victims)
        self._voided += victims
        return victims

    def share(self, blocks: Sequence[int]) -> int:
        """Refer to `blocks` once more (a hit or a fork); returns how many of them nobody referred to before.

        Raises CoreError, with nothing changed, at a block that is free and unnamed: it holds nothing.
        """
        refs = self._refs
        revived = [block for block in blocks if not refs[block]]
        for block in revived:
            if self._name_of[block] is None:
                raise CoreError(f"block {block} is free and holds nothing: it cannot be shared")
        for block in revived:
            self._evictable.remove(block)
        for block in blocks:
            refs[block] += 1
        return len(revived)

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Drop one reference to each of a table's `blocks` (head first); returns those that nobody refers to any more.

        A block with a name stays findable. Raises CoreError, with nothing changed, at a block that nobody holds.
        """
        refs = self._refs
        counts = [refs[block] for block in blocks]
        if counts.count(1) == len(counts):
            for block in blocks:
                refs[block] = 0
            gone = list(blocks)
        else:
            if 0 in counts:
                block = blocks[counts.index(0)]
                raise CoreError(f"block {block} is released, but nobody holds it (pool of {self.num_blocks})")
            for block in blocks:
                refs[block] -= 1
            gone = [block for block, count in zip(blocks, counts, strict=True) if count == 1]
        self._free(gone)
        return gone

    def _free(self, gone: list[int]) -> None:
        name_of = self._name_of
        names = [name_of[block] for block in gone]
        if None not in names and self.retention is Retention.lru:
            self._evictable.push(gone)
            return
        named = [block for block, name in zip(gone, names, strict=True) if name is not None]
        if self.retention is Retention.none:
            self._forget(named)
            named = []
        self._evictable.push(named)
        unnamed = [block for block in reversed(gone) if name_of[block] is None]
        self._unnamed += unnamed
        self._voided += unnamed

    def drain_voided(self) -> list[int]:
        """Blocks whose content became void since the last call, in order; their slots may be poisoned."""
        voided, self._voided = self._voided, []
        return voided

    # -- the prefix cache ----------------------------------------------------------------------------------

    def name(self, blocks: Sequence[int], names: Sequence[BlockName]) -> None:
        """Enter full, referenced blocks into the prefix cache. Several blocks may carry one name.

        Raises CoreError, with nothing changed, when a block has a name already or nobody holds it.
        """
        self._enter(blocks, names)
        self._index.add(names, blocks)
        if self.events is not None:
            self.events.append(BlocksStored(tuple(names), tuple(blocks)))

    def name_private(self, blocks: Sequence[int], first: int) -> None:
        """Mark full, referenced blocks as reusable by their owner alone, who remembers them; names from `first` on."""
        self._enter(blocks, range(first, first + len(blocks)))

    def _enter(self, blocks: Sequence[int], names: Sequence[BlockName]) -> None:
        refs, name_of = self._refs, self._name_of
        if len(names) != len(blocks):
            raise CoreError(f"{len(blocks)} blocks cannot carry {len(names)} names")
        bad = [block for block in blocks if not refs[block] or name_of[block] is not None]
        if bad:
            raise CoreError(
                f"block {bad[0]} cannot be named: {refs[bad[0]]} references, "
                f"named before: {name_of[bad[0]] is not None}"
            )
        for block, name in zip(blocks, names, strict=True):
            name_of[block] = name

    def unname(self, blocks: Sequence[int]) -> None:
        """Take referenced blocks out of the prefix cache: they are about to be rewritten. Unnamed ones stay so.

        Raises CoreError, with nothing changed, at a block that nobody holds.
        """
        if self.unreferenced(blocks):
            raise CoreError("only a block that somebody holds can be rewritten")
        self._forget([block for block in blocks if self._name_of[block] is not None])

    def _forget(self, blocks: Sequence[int]) -> None:
        """Take named blocks out of the cache; private ones stand in no index."""
        name_of = self._name_of
        names = [name_of[block] for block in blocks]
        for block in blocks:
            name_of[block] = None
        if len(names) == 1 and type(names[0]) is int:
            return
        if int in set(map(type, names)):
            public = [pair for pair in zip(names, blocks, strict=True) if type(pair[0]) is not int]
            names, blocks = [name for name, _ in public], [block for _, block in public]
        self._index.drop(names, blocks)
        if names and self.events is not None:
            self.events.append(BlocksRemoved(tuple(names), tuple(blocks)))

    def name_of(self, block: int) -> BlockName | None:
        """The name of `block`, None if it is not in the prefix cache."""
        return self._name_of[block]

    def find(self, names: Sequence[BlockName]) -> list[int]:
        """Blocks of the longest leading run of `names` that is in the cache. A pure query."""
        return self._index.find(names)

    def first_holder(self, name: BlockName) -> int | None:
        """The block that was entered first under `name`, or None."""
        return self._index.first(name)

    def reset(self) -> None:
        """Empty the prefix cache. Raises CoreError, with nothing changed, while a block is in use."""
        if self.live_blocks:
            raise CoreError(f"the prefix cache cannot be emptied while {self.live_blocks} blocks are in use")
        cached = self._evictable.pop(len(self._evictable))
        for block in cached:
            self._name_of[block] = None
        self._index.clear()
        self._unnamed += reversed(cached)  # the order of eviction stays
        self._voided += cached
        if self.events is not None:
            self.events.append(CacheCleared())

    def check(self, references: dict[int, int]) -> None:
        """Verify every invariant, given how often each block stands in the live tables. Raises InvariantError."""
        check_pool(self._refs, self._unnamed, self._evictable, self._name_of, self._index, references)


def check_pool(
    refs: Sequence[int],
    unnamed: Sequence[int],
    evictable: EvictionQueue,
    name_of: Sequence[BlockName | None],
    index: NameIndex,
    references: Mapping[int, int],
) -> None:
    """Counts equal table entries; free means count 0; named and free means evictable; names and index agree."""
    everyone = range(1, len(refs))
    wrong = next((block for block in everyone if refs[block] != references.get(block, 0)), None)
    if wrong is not None:
        raise InvariantError(f"block {wrong}: count {refs[wrong]}, tables {references.get(wrong, 0)}")
    cached = evictable.blocks()
    free = sorted([*unnamed, *cached])
    if free != [block for block in everyone if not refs[block]] or len(cached) != len(evictable):
        raise InvariantError(
            f"the free queue holds {len(free)} blocks, unreferenced or doubled ones differ from it"
        )
    named = {block for block in everyone if name_of[block] is not None}
    if not named >= set(cached) or not named.isdisjoint(unnamed):
        raise InvariantError("a free block is in the wrong half of the free queue")
    public = [(block, name_of[block]) for block in sorted(named) if type(name_of[block]) is not int]
    if index.pairs() != public:
        raise InvariantError(f"{len(public)} blocks have a name, the index disagrees with them")


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks became findable under `names`, in prefix order. Blocks private to a request are not announced."""

    names: tuple[BlockName, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are no longer findable: they were evicted, or their names were dropped."""

    names: tuple[BlockName, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Every name was dropped at once."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared
