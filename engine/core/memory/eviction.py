"""The eviction order: which cached free block is taken first. The default is least recently used."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from engine.core.errors import OutOfBlocksError


class EvictionQueue(Protocol):
    """The cached blocks with reference count 0, in the order in which they are evicted.

    A user's own order (`cache.eviction=module:Class`) has these methods. Each block is in the queue at most once.
    """

    def __len__(self) -> int:
        """The number of blocks in the queue."""
        ...

    def push(self, blocks: Sequence[int]) -> None:
        """Add blocks of one table, which were just released, in table order."""
        ...

    def remove(self, block: int) -> None:
        """Remove `block`, because a sequence refers to it again."""
        ...

    def pop(self, count: int) -> list[int]:
        """Remove and return the next `count` blocks to evict, in order of eviction."""
        ...

    def blocks(self) -> list[int]:
        """All blocks in order of eviction."""
        ...


class LruQueue:
    """Least recently released table first; within a table, the last block first.

    A released table is kept as one run, so pushing and popping are cheap per block. A block that is used again stays
    in its run as a stale entry, which `pop` skips. The runs are rewritten when there are more stale entries than live
    ones. So all operations are O(1) amortised in time and space.
    """

    def __init__(self) -> None:
        self._runs: deque[list[int]] = deque()
        self._stale: dict[int, int] = {}
        self._stale_entries = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, blocks: Sequence[int]) -> None:
        """Add one run. Its last block is evicted first."""
        if blocks:
            self._runs.append(list(blocks))
            self._size += len(blocks)

    def remove(self, block: int) -> None:
        """Mark the block's oldest entry as stale."""
        self.remove_all((block,))

    def remove_all(self, blocks: Sequence[int]) -> None:
        """Mark the oldest entry of each of `blocks`, which are different, as stale."""
        stale = self._stale
        if stale.keys().isdisjoint(blocks):
            stale.update(dict.fromkeys(blocks, 1))
        else:
            for block in blocks:
                stale[block] = stale.get(block, 0) + 1
        self._stale_entries += len(blocks)
        self._size -= len(blocks)
        if self._stale_entries > 64 + 2 * self._size:
            self._rewrite()

    def pop(self, count: int) -> list[int]:
        """Remove and return blocks from the oldest runs.

        Raises OutOfBlocksError, and changes nothing, if the queue has fewer than `count` blocks.
        """
        if count > self._size:
            raise OutOfBlocksError(f"{count} blocks to evict were asked for, {self._size} are in the queue")
        victims: list[int] = []
        while len(victims) < count:
            run = self._runs[0]
            if self._stale:
                self._pop_fresh(run, victims)
            else:
                short = count - len(victims)
                victims += run[: -short - 1 : -1]
                del run[-short:]
            if not run:
                self._runs.popleft()
        self._size -= count
        return victims

    def _pop_fresh(self, run: list[int], victims: list[int]) -> None:
        block = run.pop()
        if not self._skip(block):
            victims.append(block)

    def _skip(self, block: int) -> bool:
        """Whether the next entry of `block` is stale; if so, that entry is counted off."""
        stale = self._stale.get(block, 0)
        if not stale:
            return False
        self._stale_entries -= 1
        if stale == 1:
            del self._stale[block]
        else:
            self._stale[block] = stale - 1
        return True

    def _rewrite(self) -> None:
        kept = self.blocks()
        self._runs, self._stale, self._stale_entries, self._size = deque(), {}, 0, 0
        self.push(kept[::-1])

    def blocks(self) -> list[int]:
        """All live entries in order of eviction."""
        stale, kept = dict(self._stale), []
        for run in self._runs:
            for block in reversed(run):
                if stale.get(block, 0):
                    stale[block] -= 1
                else:
                    kept.append(block)
        return kept
