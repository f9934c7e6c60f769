"""Parts of the paged manager that move blocks: copies at forks, and swapping.

All blocks of a preempted group are saved in host memory, completely or not at all, and come back later.
"""

from collections import defaultdict
from collections.abc import Sequence
from operator import mul

from engine.core.errors import CoreError, OutOfBlocksError, UnknownSequenceError
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.block_tables import BlockTables
from engine.core.memory.prefix_cache import PrefixCache
from engine.core.plan import SwapList
from engine.core.request import Request
from engine.core.sequence import Group, SequenceState


class CopyAtFork:
    """Gives every branch blocks of its own, for comparison with copy-on-write.

    A fork happens when a step is committed, but copies run with the next step. So a child refers to its parent's
    blocks at first, and gets copies when the request is scheduled next. No branch writes before that.
    """

    def __init__(self, tables: BlockTables, pool: BlockPool) -> None:
        self._tables = tables
        self._pool = pool
        self._pending: defaultdict[int, list[SequenceState]] = defaultdict(list)

    def add(self, child: SequenceState) -> None:
        """Note that `child` refers to blocks of another branch and needs copies."""
        self._pending[child.request.request_id].append(child)

    def blocks_needed(self, request: Request) -> int:
        """How many blocks the copies for the request's children need."""
        return sum(len(child.table) for child in self._pending.get(request.request_id, ()))

    def copy_tables(self, request: Request) -> int:
        """Give all children of the request copies; returns how many blocks were allocated."""
        taken = 0
        for child in self._pending.pop(request.request_id, ()):
            table = self._tables.get(child)
            blocks = self._pool.take(len(table))
            copies = self._tables.copy_table(request, table, blocks, child.computed)
            self._tables.drop(table, child.computed, 0, child.request)
            child.table = copies
            taken += len(copies)
        return taken

    def forget(self, sequence: SequenceState) -> None:
        """`sequence` releases its blocks and needs no copies any more."""
        pending = self._pending.get(sequence.request.request_id, [])
        if sequence in pending:
            pending.remove(sequence)


class HostPool:
    """Host memory for `num_blocks` blocks; blocks of groups take as many of them as their pages have slots.

    A block has the lowest number that was never given out, or that of the block that was freed last.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise CoreError(f"a host pool cannot have {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.free_blocks = num_blocks  # do not set it
        self._free: list[int] = []  # freed blocks; those from `_next` on were never given out
        self._next = 0
        self._taken: dict[int, int] = {}  # block: its size

    def take(self, count: int, size: int = 1) -> list[int]:
        """Allocate `count` host blocks. Raises OutOfBlocksError, and changes nothing, when fewer are free."""
        if count * size > self.free_blocks:
            raise OutOfBlocksError(f"{count * size} host blocks asked for, {self.free_blocks} are free")
        again = min(count, len(self._free))
        blocks = [self._free.pop() for _ in range(again)]
        blocks += range(self._next, self._next + count - again)
        self._next += count - again
        self._taken.update(dict.fromkeys(blocks, size))
        self.free_blocks -= count * size
        return blocks

    def give(self, blocks: list[int]) -> None:
        """Free allocated blocks. Raises CoreError, and changes nothing, if one is free already."""
        foreign = set(blocks) - self._taken.keys()
        if foreign or len(set(blocks)) < len(blocks):
            raise CoreError(f"host blocks {sorted(foreign) or blocks} are freed, but are not allocated")
        self.free_blocks += sum(self._taken.pop(block) for block in blocks)
        self._free += reversed(blocks)


_Parts = Sequence[Sequence[SequenceState]]  # by group of layers: what each sequence of a request has there


class Swapper:
    """Moves groups between device and host memory. `pending_out` and `pending_in` are work for the next step."""

    def __init__(self, caches: Sequence[PrefixCache], host: HostPool) -> None:
        self.host = host
        self.pending_out: SwapList = []  # (device, host), to be saved before the next step
        self.pending_in: SwapList = []  # (host, device), to be brought back
        self._caches = caches
        # by group of layers: former device block -> host block
        self._saved: dict[Group, list[dict[int, int]]] = {}

    def can_swap_out(self, parts: _Parts, sizes: Sequence[int]) -> bool:
        """Whether host memory has room for all blocks of a group."""
        blocks = [{block for part in own for block in part.table[part.held :] if block} for own in parts]
        needed: int = sum(map(mul, map(len, blocks), sizes))
        return 0 < needed <= self.host.free_blocks

    def swap_out(self, group: Group, parts: _Parts, sizes: Sequence[int]) -> None:
        """Allocate a host block for every block of the group and release the device blocks.

        The sequences keep their old tables, so that `swap_in` knows which branches shared a block.
        """
        everything = []
        for cache, own, size in zip(self._caches, parts, sizes, strict=True):
            for part in own:
                cache.cache_computed(part)
                cache.tables.trim(part)
            blocks = list(dict.fromkeys(block for part in own for block in part.table[part.held :]))
            saved = dict(zip(blocks, self.host.take(len(blocks), size), strict=True))
            for part in own:
                cache.tables.close(part)
            self.pending_out += saved.items()
            everything.append(saved)
        self._saved[group] = everything

    def saved_blocks(self, group: Group) -> list[int]:
        """How many blocks of each group of layers are saved."""
        return list(map(len, self._of(group)))

    def blocks_needed(self, group: Group, parts: _Parts, copies: int | None) -> list[int]:
        """How many device blocks the group needs to come back and take one step, in each group of layers.

        `copies`: how many blocks must still be copied for its branches. None: each branch but the last one copies a
        shared partial last block.
        """
        needs = []
        for cache, own, saved in zip(self._caches, parts, self._of(group), strict=True):
            tails = [part.table[-1] for part in own if part.computed % cache.tables.block_size]
            copied = len(tails) - len(set(tails)) if copies is None else copies
            needs.append(len(saved) + len(own) - len(tails) + copied)
        return needs

    def swap_in(self, group: Group, parts: _Parts, taken: Sequence[Sequence[int]]) -> None:
        """The group gets device blocks, `taken`, again; its branches share them as before."""
        for cache, own, saved, blocks in zip(self._caches, parts, self._of(group), taken, strict=True):
            device = dict(zip(saved, blocks, strict=True))
            self.pending_in += [(host, device[block]) for block, host in saved.items()]
            seen: set[int] = set()
            for part in own:
                table = [*part.table[: part.held], *(device[block] for block in part.table[part.held :])]
                cache.tables.open_again(part, table, seen)
                cache.recount(part)
                cache.cache_computed(part)
                cache.forget(part)  # its content is not on the device yet: replace no blocks
        self.forget(group)

    def forget(self, group: Group) -> None:
        """Free the host blocks of a group."""
        for saved in self._of(group):
            self.host.give(list(saved.values()))
        del self._saved[group]

    def _of(self, group: Group) -> list[dict[int, int]]:
        if group not in self._saved:
            raise UnknownSequenceError(f"request {group.request.request_id} has nothing in host memory")
        return self._saved[group]
