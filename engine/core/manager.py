"""What every KV cache manager can do, and the books that all of them keep: the states of slots."""

from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.core.plan import IntArray, SlotUsage
from engine.core.request import Request
from engine.core.sequence import Group, ScheduledRow, Sequence

CopyList = list[tuple[int, int]]
BlockTaken = tuple[
    int, int, int
]  # step (1 is the first after the scheduled one), blocks evicted for it, its unfillable slots


@dataclass(frozen=True, slots=True)
class LeapColumns:
    """The pool in the steps of a fast-forward after the first: int64 `[steps - 1]` each, entry j for step j + 1."""

    new_blocks: IntArray
    frees: IntArray
    physical_blocks: IntArray
    logical_blocks: IntArray
    cached: IntArray  # slots, like the next three
    internal: IntArray
    external: IntArray
    free: IntArray

    @classmethod
    def of(cls, usage: SlotUsage, steps: int, block_size: int, taken: Values[BlockTaken]) -> "LeapColumns":
        """From the state in the first step and the blocks taken in the others; each counts from its step on."""
        changes = np.zeros((3, steps), dtype=np.int64)
        for step, evicted, unfillable in taken:
            changes[:, step - 1] += (1, evicted, unfillable)
        blocks, evictions, unfillable = changes.cumsum(axis=1)
        return cls(
            new_blocks=changes[0],
            frees=changes[1],
            physical_blocks=usage.physical_blocks + blocks,
            logical_blocks=usage.logical_blocks + blocks,
            cached=usage.cached - evictions * block_size,
            internal=usage.internal + unfillable,
            external=np.full(steps, usage.external),
            free=usage.free - (blocks - evictions) * block_size,
        )


class KVCacheManager(Protocol):
    """Hands out KV memory. Every `can_*` is a pure query, and what it allows cannot fail."""

    block_size: int
    num_blocks: int

    def never_fits(self, request: Request) -> str | None:
        """Why no schedule can serve `request`, or None."""
        ...

    def lookup(self, group: Group) -> Values[int]:
        """Blocks of the longest cached prefix of the group's first sequence, leaving at least one token to compute."""
        ...

    def can_admit(self, group: Group, hits: Values[int], spare_blocks: int) -> bool:
        """Whether all of the group's known tokens fit now, with `spare_blocks` left over."""
        ...

    def admit(self, group: Group, hits: Values[int]) -> None:
        """Give the group's first sequence its cached prefix."""
        ...

    def can_extend(self, rows: Values[ScheduledRow]) -> bool:
        """Whether all of `rows` can be written now."""
        ...

    def extend(self, row: ScheduledRow) -> int:
        """Make the row's slots writable: new blocks, a copy of a shared tail. Returns the number of new blocks."""
        ...

    def fork(self, parent: Sequence, children: Values[Sequence]) -> None:
        """Let `children` hold what `parent` holds."""
        ...

    def reparent(self, branches: Values[Sequence], parents: Values[int]) -> None:
        """Let branch i hold what branch `parents[i]` held."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Take all of the sequence's memory back. Raises UnknownSequenceError when it holds none."""
        ...

    def leap_limit(self, context: IntArray, steps: int) -> int:
        """The largest number of identical decode steps, at most `steps`, that the free blocks allow."""
        ...

    def leap(self, sequences: Values[Sequence], steps: int) -> LeapColumns:
        """Take the blocks that `steps` decode steps after the first would take, in the order they would."""
        ...

    def usage(self, head: Request | None) -> SlotUsage:
        """Slots by state; `head` is the request at the head of the queue, None when nothing waits."""
        ...

    def drain_copies(self) -> CopyList:
        """Block copies to run before the next forward pass."""
        ...

    def drain_frees(self) -> list[int]:
        """Blocks whose content became void since the last call."""
        ...

    def check(self) -> None:
        """Verify every invariant; raises InvariantError."""
        ...
