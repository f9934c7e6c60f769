"""Blocks: who holds them, which are free, and which free ones still hold a reusable prefix.

Behaviour follows the block pool of vLLM's v1 core: reference counts; a block whose count falls to 0 keeps its name
and stays findable until it is taken again (lazy eviction); victims are unnamed blocks first (last in, first out),
then named ones, least recently released first. Block 0 is the null block: never handed out, never counted.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.core.errors import CoreError, InvariantError, OutOfBlocksError
from engine.core.identity import BlockName

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 … `num_blocks`, their reference counts, and the index of block names (the prefix cache).

    Two structures make one free queue: a stack of unnamed blocks and an ordered map of named ones. Taking, releasing
    and removing from the middle are O(1).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise CoreError(f"a pool needs at least 1 block, found {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * (num_blocks + 1)
        self._unnamed = list(range(num_blocks, 0, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._name_of: dict[int, BlockName] = {}
        self._first: dict[BlockName, int] = {}
        self._others: dict[BlockName, list[int]] = {}
        self._voided: list[int] = []

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

    def take(self, count: int) -> list[int]:
        """`count` blocks with reference count 1, unnamed; cached blocks are evicted only when no others are left.

        Raises OutOfBlocksError, with nothing changed, when fewer are free.
        """
        if count > self.free_blocks:
            raise OutOfBlocksError(
                f"{count} blocks asked for, {self.free_blocks} of {self.num_blocks} are free"
            )
        fresh = min(count, len(self._unnamed))
        blocks = self._unnamed[: -fresh - 1 : -1]
        del self._unnamed[len(self._unnamed) - fresh :]
        if fresh < count:
            blocks += [self._evict() for _ in range(count - fresh)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self._forget_name(block)
        self._voided.append(block)
        return block

    def _forget_name(self, block: int) -> None:
        name = self._name_of.pop(block)
        others = self._others.get(name)
        if self._first[name] != block:
            assert others is not None
            others.remove(block)
        elif others:
            self._first[name] = others.pop(0)
        else:
            del self._first[name]
        if others is not None and not others:
            self._others.pop(name, None)

    def share(self, blocks: Iterable[int]) -> int:
        """Refer to `blocks` once more (a hit or a fork); returns how many of them nobody referred to before."""
        refs, revived = self._refs, 0
        for block in blocks:
            if refs[block] == 0:
                if block not in self._evictable:
                    raise CoreError(f"block {block} is free and holds nothing: it cannot be shared")
                del self._evictable[block]
                revived += 1
            refs[block] += 1
        return revived

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Drop one reference to each of `blocks`; returns those that nobody refers to any more, in order.

        A block with a name stays findable. Raises CoreError at a block that nobody holds; the earlier ones are dropped.
        """
        refs, gone = self._refs, []
        for block in blocks:
            if not 0 < block <= self.num_blocks or not refs[block]:
                raise CoreError(f"block {block} is released, but nobody holds it (pool of {self.num_blocks})")
            refs[block] -= 1
            if not refs[block]:
                gone.append(block)
                if block in self._name_of:
                    self._evictable[block] = None
                else:
                    self._unnamed.append(block)
                    self._voided.append(block)
        return gone

    def name(self, block: int, name: BlockName) -> None:
        """Enter a full, referenced block into the prefix cache. Several blocks may carry one name."""
        if self._refs[block] < 1 or block in self._name_of:
            raise CoreError(f"block {block} cannot be named: {self._refs[block]} references, named before: "
                            f"{block in self._name_of}")  # fmt: skip
        self._name_of[block] = name
        if self._first.setdefault(name, block) != block:
            self._others.setdefault(name, []).append(block)

    def is_named(self, block: int) -> bool:
        """Whether `block` is in the prefix cache."""
        return block in self._name_of

    def find(self, names: Sequence[BlockName]) -> list[int]:
        """Blocks of the longest leading run of `names` that is in the cache. A pure query."""
        blocks: list[int] = []
        for name in names:
            block = self._first.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody refers to: a hit on those uses up free blocks."""
        return sum(not self._refs[block] for block in blocks)

    def drain_voided(self) -> list[int]:
        """Blocks whose content became void since the last call, in order; their slots may be poisoned."""
        voided, self._voided = self._voided, []
        return voided

    def check(self, references: dict[int, int]) -> None:
        """Verify every invariant, given how often each block stands in the live tables. Raises InvariantError."""
        wrong = [b for b in range(1, self.num_blocks + 1) if self._refs[b] != references.get(b, 0)]
        if wrong:
            raise InvariantError(
                f"block {wrong[0]}: count {self._refs[wrong[0]]}, tables {references.get(wrong[0], 0)}"
            )
        free = sorted([*self._unnamed, *self._evictable])
        if free != [b for b in range(1, self.num_blocks + 1) if not self._refs[b]]:
            raise InvariantError(
                f"the free queue holds {len(free)} blocks, unreferenced or doubled ones differ from it"
            )
        if any((b in self._name_of) != (b in self._evictable) for b in free):
            raise InvariantError("a free block is in the wrong half of the free queue")
        indexed = sorted([*self._first.values(), *(b for blocks in self._others.values() for b in blocks)])
        if indexed != sorted(self._name_of):
            raise InvariantError(f"{len(indexed)} blocks are indexed by name, {len(self._name_of)} have one")
