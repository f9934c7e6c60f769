"""The interface of all KV cache managers, and how the pool changes during fast-forward.

The scheduler uses only `KVCacheManager`. So it runs on paged and on contiguous memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.core.errors import CoreError
from engine.core.plan import NO_LOADS, CopyList, IntArray, Loads, SlotUsage, StaleList, SwapList
from engine.core.request import Request
from engine.core.sequence import DecodeCalendar, Group, ScheduledRow, SequenceState

# Step (1 is the first after the scheduled one), blocks allocated, blocks evicted for them, their unfillable slots.
BlocksTaken = tuple[int, int, int, int]


def check_parents(branches: Sequence[SequenceState], parents: Sequence[int]) -> None:
    """Raise CoreError unless each of `branches` has a parent that is an index into `branches`."""
    count = len(branches)
    if len(parents) != count or min(parents) < 0 or max(parents) >= count:
        request_id = branches[0].request.request_id
        raise CoreError(
            f"request {request_id} needs {count} parents, each below {count}; found {list(parents)}"
        )


def beyond_end(sequence: SequenceState, end: int) -> CoreError:
    """The error for a `sequence` that would have K and V of `end` tokens, which is more than its request computes."""
    request = sequence.request
    return CoreError(
        f"{sequence} is extended to {end} tokens, it computes {request.most_kv_tokens}: a prompt of "
        f"{request.prompt_tokens} and {request.output_tokens} output tokens, of which the last is not computed"
    )


@dataclass(frozen=True, slots=True)
class FastForwardColumns:
    """The pool in the steps of a fast-forward after the first, int64 `[steps - 1]`; entry j is for step j + 1.

    `new_blocks` and `frees` are counts of the step itself; the other columns are states while the step runs.
    """

    new_blocks: IntArray
    frees: IntArray
    physical_blocks: IntArray
    logical_blocks: IntArray
    cached: IntArray  # slots, like the next three
    internal: IntArray
    external: IntArray
    free: IntArray

    @classmethod
    def of(
        cls, usage: SlotUsage, steps: int, block_size: int, taken: Sequence[BlocksTaken]
    ) -> "FastForwardColumns":
        """Columns from the state `usage` in the first step and the blocks allocated in the later ones."""
        changes = np.zeros((3, steps), dtype=np.int64)
        for step, count, evicted, unfillable in taken:
            changes[:, step - 1] += (count, evicted, unfillable)
        blocks, evictions, unfilled = changes.cumsum(axis=1)
        return cls(
            new_blocks=changes[0],
            frees=changes[1],
            physical_blocks=usage.physical_blocks + blocks,
            logical_blocks=usage.logical_blocks + blocks,
            cached=usage.cached - evictions * block_size,
            internal=usage.internal + unfilled,
            external=np.full(steps, usage.external),
            free=usage.free - (blocks - evictions) * block_size,
        )


class KVCacheManager(Protocol):
    """Allocates KV memory. `can_*` methods change nothing; if one returns True, the matching operation cannot fail.

    One exception: with groups, `can_extend` and `can_append` release what the sequence's windows have left.

    In vLLM this is `KVCacheManager`: `lookup` is `get_computed_blocks`; `can_admit`, `admit`, `can_extend` and `extend`
    together are `allocate_slots`; `release` is `free`. A block is the unit of allocation and has `block_size` slots,
    one slot for each token. In the order of a step, the scheduler calls for a running group `can_extend` and `extend`
    (steady groups: `can_append` and `append`), for a new group `lookup`, `can_admit`, `admit` and `extend`, and at the
    end the `drain_*` methods, whose results go into the step plan.

    What has a body here is that of a manager that never swaps, has no tiers and takes a prompt's rows as they are.
    """

    block_size: int
    num_blocks: int
    growth: int | None  # tokens after which a decoding sequence needs a block; None: its memory is reserved

    def never_fits(self, request: Request) -> str | None:
        """Why no schedule can serve `request`, or None if one can."""

    def lookup(self, group: Group) -> Sequence[int]:
        """Blocks of the longest cached prefix of the group's first sequence. At least one token is left to compute."""

    def can_admit(
        self,
        group: Group,
        hits: Sequence[int],
        spare_blocks: int,
        tokens: int | None = None,
        chunk_end: int | None = None,
    ) -> bool:
        """Whether all known tokens of the group (or the first `tokens`) fit now and leave `spare_blocks` free.

        `chunk_end` is where its first chunk would end, for managers whose chunks can need more at once than lastingly.
        """

    def chunk_end(
        self, group: Group, start: int, end: int, most: int, hits: Sequence[int] | None = None
    ) -> int:
        """Where the row of a prompt ends that begins at token `start` and may go to `end`, at most `end`.

        No row at all where it is `start`. `most` is the largest chunk; `hits` are those of a group that is not admitted
        yet.
        """
        return end

    def admit(self, group: Group, hits: Sequence[int]) -> None:
        """Open a block table for the group's first sequence, which starts with the cached blocks `hits`."""

    def can_extend(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether enough blocks are free for all of `rows`, which belong to one group."""

    def extend(self, row: ScheduledRow) -> int:
        """Allocate what the row writes to: new blocks, and a copy of a shared last block. Returns how many blocks."""

    def can_append(self, group: Group) -> bool:
        """Whether enough blocks are free to give every sequence of a steady group one more."""

    def append(self, group: Group) -> int:
        """Give every sequence of a steady group its next block. Returns the number of new blocks."""

    def advance(self, calendar: DecodeCalendar) -> None:
        """Count the tokens that steady groups write in the step that is being scheduled, and cache blocks they fill.

        Call it when no group can be preempted in this step any more, and before the first lookup.
        """

    def fork(self, parent: SequenceState, children: Sequence[SequenceState]) -> None:
        """Give `children` the tokens of `parent`: shared blocks, or copies."""

    def reparent(self, branches: Sequence[SequenceState], parents: Sequence[int]) -> None:
        """Give branch i the tokens that branch `parents[i]` had."""

    def promote(self, sequence: SequenceState, child: SequenceState) -> None:
        """Give `sequence` the block table of `child`; `child` has none afterwards."""

    def truncate(self, sequence: SequenceState, tokens: int) -> int:
        """Keep at most the first `tokens` computed tokens; returns how many are kept."""

    def release(self, sequence: SequenceState) -> None:
        """Release all memory of the sequence. Raises UnknownSequenceError if it has none."""

    def preempt(self, group: Group, unseen: int = 0) -> None:
        """Release all memory of the group, which will be looked up and computed again.

        The step under way computes its last `unseen` tokens, which nobody has seen yet.
        """

    def can_swap_out(self, group: Group) -> bool:
        """Whether host memory has room for the group's blocks. The scheduler asks it before it swaps anything."""
        return False

    def swap_out(self, group: Group) -> None:
        """Save the group's blocks in host memory and release them on the device."""
        raise CoreError(f"request {group.request.request_id}: this memory is not swapped")

    def can_swap_in(self, group: Group, spare_blocks: int) -> bool:
        """Whether a swapped group and its next step fit now, and `spare_blocks` blocks stay free."""
        return False

    def swap_in(self, group: Group) -> None:
        """Allocate blocks for a swapped group and bring its content back."""
        self.swap_out(group)

    def forget_swapped(self, group: Group) -> None:
        """Release the host memory of a swapped group that will not come back."""
        self.swap_out(group)

    def fast_forward_limit(self, calendar: DecodeCalendar, steps: int) -> int:
        """How many identical decode steps, at most `steps`, the free blocks allow."""

    def fast_forward(self, calendar: DecodeCalendar, steps: int, first: SlotUsage) -> FastForwardColumns:
        """Allocate the blocks of `steps` decode steps except the first one, in which the pool has the state `first`."""

    def usage(self, head: Request | None) -> SlotUsage:
        """The slots by state. `head` is the request at the head of the waiting queue, None if no request waits."""

    def drain_copies(self) -> CopyList:
        """(source, destination) block copies to run before the next forward pass. Each call empties the list."""

    def drain_frees(self) -> list[int]:
        """Blocks whose content became void since the last call."""

    def drain_stale(self) -> StaleList:
        """Slots (block, first, end) of blocks in use whose content became void since the last call."""

    def drain_swaps(self) -> tuple[SwapList, SwapList]:
        """(device, host) blocks to save, and (host, device) blocks to bring back, since the last call."""
        return [], []

    def drain_loads(self) -> Loads:
        """What was read from tiers below the pool since the last call."""
        return NO_LOADS

    def check(self) -> None:
        """Verify every invariant. Raises InvariantError."""
