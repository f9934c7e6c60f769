"""Swapping: save all blocks of a preempted group in host memory, and bring them back later.

A group is swapped completely or not at all. A block that several branches share is copied once.
"""

from engine.core.errors import CoreError, OutOfBlocksError, UnknownSequenceError
from engine.core.memory.block_tables import BlockTables
from engine.core.memory.prefix_cache import PrefixCache
from engine.core.plan import SwapList
from engine.core.sequence import Group, SequenceState


class HostPool:
    """Host blocks 0 … `num_blocks - 1`; the block that was freed last is allocated first."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise CoreError(f"a host pool cannot have {num_blocks} blocks")
        self.num_blocks = num_blocks
        self._free: list[int] = []  # freed blocks; those from `_next` on were never given out
        self._next = 0
        self._taken: set[int] = set()

    @property
    def free_blocks(self) -> int:
        """The number of free host blocks."""
        return self.num_blocks - len(self._taken)

    def take(self, count: int) -> list[int]:
        """Allocate `count` host blocks. Raises OutOfBlocksError, and changes nothing, when fewer are free."""
        if count > self.free_blocks:
            raise OutOfBlocksError(f"{count} host blocks asked for, {self.free_blocks} are free")
        again = min(count, len(self._free))
        blocks = [self._free.pop() for _ in range(again)]
        blocks += range(self._next, self._next + count - again)
        self._next += count - again
        self._taken.update(blocks)
        return blocks

    def give(self, blocks: list[int]) -> None:
        """Free allocated blocks. Raises CoreError, and changes nothing, if one is free already."""
        foreign = set(blocks) - self._taken
        if foreign or len(set(blocks)) < len(blocks):
            raise CoreError(f"host blocks {sorted(foreign) or blocks} are freed, but are not allocated")
        self._taken.difference_update(blocks)
        self._free += reversed(blocks)


class Swapper:
    """Moves groups between device and host memory. `pending_out` and `pending_in` are work for the next step."""

    def __init__(self, tables: BlockTables, prefix_cache: PrefixCache, host: HostPool) -> None:
        self.host = host
        self.pending_out: SwapList = []  # (device, host), to be saved before the next step
        self.pending_in: SwapList = []  # (host, device), to be brought back
        self._tables = tables
        self._prefix_cache = prefix_cache
        self._saved: dict[Group, dict[int, int]] = {}  # former device block -> host block

    def can_swap_out(self, group: Group) -> bool:
        """Whether host memory has room for all blocks of `group`."""
        blocks = {block for sequence in group.sequences for block in sequence.table}
        return 0 < len(blocks) <= self.host.free_blocks

    def swap_out(self, group: Group) -> None:
        """Allocate a host block for every block of the group and release the device blocks.

        The sequences keep their old tables, so that `swap_in` knows which branches shared a block.
        """
        for sequence in group.sequences:
            self._prefix_cache.cache_computed(sequence)
            self._tables.trim(sequence)
        tables = [self._tables.get(sequence) for sequence in group.sequences]
        blocks = list(dict.fromkeys(block for table in tables for block in table))
        saved = dict(zip(blocks, self.host.take(len(blocks)), strict=True))
        for sequence in group.sequences:
            sequence.table = self._tables.close(sequence)
        self.pending_out += saved.items()
        self._saved[group] = saved

    def blocks_needed(self, group: Group, copies: int | None) -> int:
        """How many device blocks the group needs to come back and take one step.

        `copies`: how many blocks must still be copied for its branches. None: each branch but the last one copies a
        shared partial last block.
        """
        tails = [s.table[-1] for s in group.sequences if s.computed % self._tables.block_size]
        if copies is None:
            copies = len(tails) - len(set(tails))
        return len(self._of(group)) + len(group.sequences) - len(tails) + copies

    def swap_in(self, group: Group) -> None:
        """Allocate device blocks for the group again; its branches share them as before."""
        saved = self._of(group)
        device = dict(zip(saved, self._tables.pool.take(len(saved)), strict=True))
        self.pending_in += [(host, device[block]) for block, host in saved.items()]
        held: set[int] = set()
        for sequence in group.sequences:
            self._hold(sequence, [device[block] for block in sequence.table], held)
            self._prefix_cache.recount(sequence)
            self._prefix_cache.cache_computed(sequence)
            self._prefix_cache.forget(sequence)  # its content is not on the device yet: replace no blocks
        del self._saved[group]
        self.host.give(list(saved.values()))

    def _hold(self, sequence: SequenceState, table: list[int], held: set[int]) -> None:
        """Open `table` for `sequence`. Another branch refers to the blocks in `held` already."""
        tables, size = self._tables, self._tables.block_size
        fresh = [block for block in table if block not in held]
        held.update(fresh)
        tables.pool.share([block for block in table if block not in fresh])
        tables.counters.entries += len(table)
        tables.counters.written += len(fresh) * size
        if fresh and fresh[-1] == table[-1]:
            tables.counters.written -= len(table) * size - sequence.computed
            tables.counters.block_taken(sequence.request, table[-1], len(table) - 1)
        tables.open(sequence, table)

    def forget(self, group: Group) -> None:
        """Free the host blocks of a group that will not come back."""
        self.host.give(list(self._of(group).values()))
        del self._saved[group]

    def _of(self, group: Group) -> dict[int, int]:
        if group not in self._saved:
            raise UnknownSequenceError(f"request {group.request.request_id} has nothing in host memory")
        return self._saved[group]
