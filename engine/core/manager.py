"""What every KV cache manager can do, and the books that all of them keep: the states of slots."""

from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.core.plan import IntArray, SlotUsage
from engine.core.request import Request
from engine.core.sequence import Group, ScheduledRow, Sequence

CopyList = list[tuple[int, int]]


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
    block_size: int

    @classmethod
    def flat(cls, usage: SlotUsage, steps: int, block_size: int) -> "LeapColumns":
        """Columns in which nothing changes from `usage`."""

        def column(value: int) -> IntArray:
            return np.full(steps, value, dtype=np.int64)

        return cls(
            new_blocks=column(0),
            frees=column(0),
            physical_blocks=column(usage.physical_blocks),
            logical_blocks=column(usage.logical_blocks),
            cached=column(usage.cached),
            internal=column(usage.internal),
            external=column(usage.external),
            free=column(usage.free),
            block_size=block_size,
        )

    def block_taken(self, step: int, evicted: int, unfillable: int) -> None:
        """From `step` on (1 is the first after the scheduled one) one more block is live."""
        here, after = step - 1, slice(step - 1, None)
        self.new_blocks[here] += 1
        self.frees[here] += evicted
        self.physical_blocks[after] += 1
        self.logical_blocks[after] += 1
        self.internal[after] += unfillable
        (self.cached if evicted else self.free)[after] -= self.block_size


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
