"""The interface of every KV cache manager, and how the pool changes during fast-forward.

The scheduler knows only `KVCacheManager`. So it runs on paged and on contiguous memory alike.
"""

from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.core.calendar import DecodeCalendar
from engine.core.errors import CoreError
from engine.core.plan import IntArray, SlotUsage
from engine.core.request import Request
from engine.core.sequence import Group, ScheduledRow, Sequence

CopyList = list[tuple[int, int]]
StaleList = list[tuple[int, int, int]]
SwapList = list[tuple[int, int]]
BlocksTaken = tuple[
    int, int, int, int
]  # step (1 is the first after the scheduled one), blocks, blocks evicted for them, their unfillable slots


def check_parents(branches: Values[Sequence], parents: Values[int]) -> None:
    """Raise CoreError unless each branch has a parent among them."""
    count = len(branches)
    if len(parents) != count or min(parents) < 0 or max(parents) >= count:
        request_id = branches[0].request.request_id
        raise CoreError(
            f"request {request_id} needs {count} parents, each below {count}; found {list(parents)}"
        )


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
    def of(cls, usage: SlotUsage, steps: int, block_size: int, taken: Values[BlocksTaken]) -> "LeapColumns":
        """From the state in the first step and the blocks taken in the others; each counts from its step on."""
        changes = np.zeros((3, steps), dtype=np.int64)
        for step, count, evicted, unfillable in taken:
            changes[:, step - 1] += (count, evicted, unfillable)
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
    growth: (
        int | None
    )  # tokens after which a decoding sequence needs more memory; None: never, it is reserved

    def never_fits(self, request: Request) -> str | None:
        """Why no schedule can serve `request`, or None."""
        ...

    def lookup(self, group: Group) -> Values[int]:
        """Blocks of the longest cached prefix of the group's first sequence, leaving at least one token to compute."""
        ...

    def can_admit(
        self, group: Group, hits: Values[int], spare_blocks: int, tokens: int | None = None
    ) -> bool:
        """Whether all of the group's known tokens (or the first `tokens`) fit now, with `spare_blocks` left over."""
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

    def can_append(self, group: Group) -> bool:
        """Whether every sequence of a steady group can have the memory that it is due."""
        ...

    def append(self, group: Group) -> int:
        """Give every sequence of a steady group the block that it is due. Returns the number of new blocks."""
        ...

    def advance(self, tokens: int) -> None:
        """Steady groups write `tokens` tokens in the step that is being scheduled."""
        ...

    def fork(self, parent: Sequence, children: Values[Sequence]) -> None:
        """Let `children` hold what `parent` holds."""
        ...

    def reparent(self, branches: Values[Sequence], parents: Values[int]) -> None:
        """Let branch i hold what branch `parents[i]` held."""
        ...

    def promote(self, sequence: Sequence, child: Sequence) -> None:
        """Let `sequence` hold what `child` holds, and `child` nothing."""
        ...

    def truncate(self, sequence: Sequence, tokens: int) -> int:
        """Keep at most `tokens` computed tokens; returns how many are kept."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Take all of the sequence's memory back. Raises UnknownSequenceError when it holds none."""
        ...

    def preempt(self, group: Group) -> None:
        """Take all of the group's memory back; it will be looked up and computed again."""
        ...

    def can_swap_out(self, group: Group) -> bool:
        """Whether the group's memory can be saved in the host's."""
        ...

    def swap_out(self, group: Group) -> None:
        """Save the group's memory in the host's and take it back."""
        ...

    def can_swap_in(self, group: Group, spare_blocks: int) -> bool:
        """Whether a saved group fits now, with its next step and `spare_blocks` left over."""
        ...

    def swap_in(self, group: Group) -> None:
        """Give a saved group its memory again."""
        ...

    def forget_swapped(self, group: Group) -> None:
        """A saved group was dropped."""
        ...

    def leap_limit(self, calendar: DecodeCalendar, steps: int) -> int:
        """The largest number of identical decode steps, at most `steps`, that the free blocks allow."""
        ...

    def leap(self, calendar: DecodeCalendar, steps: int, first: SlotUsage) -> LeapColumns:
        """Take the blocks that `steps` decode steps would, the first not counted: its slot states were `first`."""
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

    def drain_stale(self) -> StaleList:
        """Slots (block, first, end) of blocks in use that became void since the last call."""
        ...

    def drain_swaps(self) -> tuple[SwapList, SwapList]:
        """(device, host) blocks to save, and (host, device) blocks to bring back."""
        ...

    def check(self) -> None:
        """Verify every invariant; raises InvariantError."""
        ...
