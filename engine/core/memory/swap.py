"""Swapping: save all blocks of a preempted group in host memory, and bring them back.

A group is swapped whole or not at all. A block that several branches share moves once.
"""

from engine.core.errors import CoreError, OutOfBlocksError, UnknownSequenceError
from engine.core.memory.block_tables import BlockTables
from engine.core.memory.prefix_cache import BlockNaming
from engine.core.sequence import Group, Sequence

SwapList = list[tuple[int, int]]


class HostPool:
    """Host blocks 0 … `num_blocks - 1`, taken last in, first out."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise CoreError(f"a host pool cannot have {num_blocks} blocks")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        """Host blocks that hold nothing."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` host blocks; raises OutOfBlocksError, with nothing changed, when fewer are free."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} host blocks asked for, {len(self._free)} are free")
        return [self._free.pop() for _ in range(count)]

    def give(self, blocks: list[int]) -> None:
        """Give taken blocks back. Raises CoreError, with nothing changed, at one that is free."""
        twice = set(blocks) & set(self._free)
        if twice or len(set(blocks)) < len(blocks):
            raise CoreError(f"host blocks {sorted(twice) or blocks} are given back, but are not taken")
        self._free += reversed(blocks)


class Swapper:
    """Moves groups between device and host. A block that several branches share moves once."""

    def __init__(self, tables: BlockTables, naming: BlockNaming, host: HostPool) -> None:
        self.host = host
        self.out: SwapList = []  # (device, host), to be saved before the next step
        self.back: SwapList = []  # (host, device), to be brought back
        self._tables = tables
        self._naming = naming
        self._saved: dict[Group, dict[int, int]] = {}  # former device block -> host block

    def can_save(self, group: Group) -> bool:
        """Whether the host has room for all blocks of `group`."""
        blocks = {block for sequence in group.sequences for block in sequence.table}
        return 0 < len(blocks) <= self.host.free_blocks

    def save(self, group: Group) -> None:
        """Map every block of the group to the host and drop it on the device; the tables stay, to be mapped back."""
        for sequence in group.sequences:
            self._naming.settle(sequence)
            self._tables.trim(sequence)
        tables = [self._tables.of(sequence) for sequence in group.sequences]
        blocks = list(dict.fromkeys(block for table in tables for block in table))
        saved = dict(zip(blocks, self.host.take(len(blocks)), strict=True))
        for sequence in group.sequences:
            sequence.table = self._tables.close(sequence)
        self.out += saved.items()
        self._saved[group] = saved

    def blocks_needed(self, group: Group, copies: int | None) -> int:
        """Blocks that the group needs on the device to come back and take a step.

        `copies`: blocks that its branches are owed; None: a shared tail is copied by all writers but the last.
        """
        tails = [s.table[-1] for s in group.sequences if s.computed % self._tables.block_size]
        if copies is None:
            copies = len(tails) - len(set(tails))
        return len(self._of(group)) + len(group.sequences) - len(tails) + copies

    def bring_back(self, group: Group) -> None:
        """Blocks on the device again, shared by the branches as before."""
        saved = self._of(group)
        device = dict(zip(saved, self._tables.pool.take(len(saved)), strict=True))
        self.back += [(host, device[block]) for block, host in saved.items()]
        held: set[int] = set()
        for sequence in group.sequences:
            self._hold(sequence, [device[block] for block in sequence.table], held)
            self._naming.recount(sequence)
            self._naming.settle(sequence)
            self._naming.forget(sequence)  # its blocks are still on their way: no time to exchange them
        del self._saved[group]
        self.host.give(list(saved.values()))

    def _hold(self, sequence: Sequence, table: list[int], held: set[int]) -> None:
        """Open `table`, whose blocks in `held` another branch refers to already."""
        tables, size = self._tables, self._tables.block_size
        fresh = [block for block in table if block not in held]
        held.update(fresh)
        tables.pool.share([block for block in table if block not in fresh])
        tables.books.entries += len(table)
        tables.books.written += len(fresh) * size
        if fresh and fresh[-1] == table[-1]:
            tables.books.written -= len(table) * size - sequence.computed
            tables.books.block_taken(sequence.request, table[-1], len(table) - 1)
        tables.open(sequence, table)

    def forget(self, group: Group) -> None:
        """The group will not come back: its host blocks are free again."""
        self.host.give(list(self._of(group).values()))
        del self._saved[group]

    def _of(self, group: Group) -> dict[int, int]:
        if group not in self._saved:
            raise UnknownSequenceError(f"request {group.request.request_id} has nothing in host memory")
        return self._saved[group]
