"""Block tables over one pool, and the counters that are kept with them.

A table lists the blocks of one sequence. Tables grow, are shared, copied, cut and dropped here. Every operation
updates the reference counts, the table entries and the written slots together, so reading the slot usage is cheap.
"""

from collections import Counter
from collections.abc import Sequence

from engine.core.errors import CoreError, InvariantError, UnknownSequenceError
from engine.core.memory.block_pool import BlockPool
from engine.core.plan import CopyList, SlotUsage, StaleList
from engine.core.request import Request
from engine.core.sequence import SequenceState


class SlotCounters:
    """Counters of the live tables: written slots, table entries, and slots that will never be filled (`internal`).

    `written` counts a shared slot once, and already includes the step that is being scheduled. A replay knows the
    final length of every sequence. So the slots of a last block that will never be filled are known when the block is
    allocated.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.written = 0
        self.entries = 0
        self.internal = 0
        self._unfillable: dict[int, int] = {}

    def block_taken(self, request: Request, block: int, index: int) -> None:
        """`block` was put at position `index` of a table of `request`."""
        unfillable = (index + 1) * self.block_size - request.final_kv_tokens
        if unfillable > 0:
            self._unfillable[block] = unfillable
            self.internal += unfillable

    def block_dropped(self, block: int) -> None:
        """`block` was the last of its table and has no reference any more."""
        self.internal -= self._unfillable.pop(block, 0)

    def unfillable_blocks(self) -> set[int]:
        """The blocks with slots that will never be filled."""
        return set(self._unfillable)

    def totals(self) -> tuple[int, int, int]:
        """Written slots, table entries, and unfillable slots (summed again), for `check()`."""
        return self.written, self.entries, sum(self._unfillable.values())


class BlockTables:
    """The block tables of live sequences. Every method keeps references, table entries and written slots consistent.

    A sequence is live from `open` to `close`. `copies` and `stale` collect work for the executor's next step.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.counters = SlotCounters(block_size)
        self.copies: CopyList = []
        self.stale: StaleList = []
        self._live: dict[SequenceState, None] = {}

    def blocks_of(self, tokens: int) -> int:
        """How many blocks `tokens` tokens need."""
        return -(-tokens // self.block_size)

    # -- one table -----------------------------------------------------------------------------------------

    def get(self, sequence: SequenceState) -> list[int]:
        """The table of a live sequence; raises UnknownSequenceError for another one."""
        if sequence not in self._live:
            raise UnknownSequenceError(f"{sequence} holds no blocks: never admitted, or released before")
        assert isinstance(sequence.table, list)
        return sequence.table

    def open(self, sequence: SequenceState, table: list[int]) -> None:
        """Make `sequence` live with `table`, whose entries were counted before."""
        self._live[sequence] = None
        sequence.table = table

    def append(self, request: Request, table: list[int], count: int) -> None:
        """Append `count` new blocks to `table`; only the last of them can have slots that are never filled."""
        if count == 1:
            self.append_one(request, table)
            return
        table += self.pool.take(count)
        self.counters.entries += count
        self.counters.block_taken(request, table[-1], len(table) - 1)

    def append_one(self, request: Request, table: list[int]) -> None:
        """The same as `append` with one block, but faster."""
        block = self.pool.take_one()
        table.append(block)
        counters = self.counters
        counters.entries += 1
        if len(table) * self.block_size > request.final_kv_tokens:
            counters.block_taken(request, block, len(table) - 1)

    def copy_tail(self, sequence: SequenceState, table: list[int]) -> None:
        """Copy on write: `sequence` is about to write into a shared partial last block, so give it a copy."""
        source, copy = table[-1], self.pool.take_one()
        self.pool.leave(source)
        self.copies.append((source, copy))
        table[-1] = copy
        self.counters.written += sequence.computed % self.block_size
        self.counters.block_taken(sequence.request, copy, len(table) - 1)

    def share_table(self, table: Sequence[int]) -> list[int]:
        """A second table that refers to the same blocks."""
        self.pool.share(table)
        self.counters.entries += len(table)
        return list(table)

    def copy_table(self, request: Request, table: Sequence[int], computed: int) -> list[int]:
        """A second table with new blocks, to which the content of `table` (`computed` tokens) is copied."""
        copy: list[int] = []
        self.append(request, copy, len(table))
        self.copies += zip(table, copy, strict=True)
        self.counters.written += computed
        return copy

    def close(self, sequence: SequenceState) -> list[int]:
        """End the life of `sequence` and drop its references; returns the table that it had."""
        table = self.get(sequence)
        del self._live[sequence]
        self.drop(table, sequence.computed)
        sequence.table = []
        return table

    def move_table(self, child: SequenceState, sequence: SequenceState) -> None:
        """Move the table of `child` to `sequence`, which must have none; `child` is not live afterwards."""
        table = self.get(child)
        del self._live[child]
        child.table = ()
        self.open(sequence, table)

    def drop(self, table: Sequence[int], computed: int) -> None:
        """Drop one reference to each block. Only the last can be partly written or have slots that are never filled."""
        gone = self.pool.release(table)
        self.counters.entries -= len(table)
        if not gone:
            return
        self.counters.written -= self.block_size * len(gone)
        if gone[-1] == table[-1]:
            self.counters.written += len(table) * self.block_size - computed
            self.counters.block_dropped(gone[-1])

    def trim(self, sequence: SequenceState) -> None:
        """Drop blocks that were allocated for a step that will not run."""
        table, keep = self.get(sequence), self.blocks_of(sequence.computed)
        if keep < len(table):
            self.drop(table[keep:], 0)
            del table[keep:]

    def truncate(self, sequence: SequenceState, tokens: int) -> int:
        """Keep at most the first `tokens` computed tokens. Later blocks are dropped, later slots become void.

        A shared partial last block is dropped whole, because the other sequences still need its slots. Returns the
        number of tokens kept, the new `sequence.computed`. Raises CoreError if `tokens` is out of range.
        """
        table, size, computed = self.get(sequence), self.block_size, sequence.computed
        if not 0 <= tokens <= computed:
            raise CoreError(f"{sequence}: cut to {tokens} tokens, it has {computed}")
        if tokens == computed:
            return tokens
        if tokens % size and self.pool.references(table[tokens // size]) > 1:
            tokens -= tokens % size
        keep = self.blocks_of(tokens)
        if keep < len(table):
            self.drop(table[keep:], computed - keep * size)
            del table[keep:]
        sequence.cached_blocks = min(sequence.cached_blocks, tokens // size)
        if tokens % size:
            self._void_tail(sequence, tokens % size, min(size, computed - (keep - 1) * size))
        sequence.computed = tokens
        return tokens

    def _void_tail(self, sequence: SequenceState, first: int, end: int) -> None:
        """Slots `first` … `end - 1` of the last block become void, and the block leaves the prefix cache."""
        block = sequence.table[-1]
        self.pool.uncache([block])
        if end > first:
            self.stale.append((block, first, end))
            self.counters.written -= end - first

    # -- counters ---------------------------------------------------------------------------------------------

    def usage(self) -> SlotUsage:
        """Slots by state. Any free block serves any request, so nothing is external."""
        size, counters, pool = self.block_size, self.counters, self.pool
        free, cached = pool.free_blocks, pool.cached_blocks
        live = pool.num_blocks - free
        return SlotUsage(
            counters.written,
            cached * size,
            live * size - counters.written - counters.internal,
            counters.internal,
            0,
            (free - cached) * size,
            counters.entries,
            live,
        )

    def check(self) -> None:
        """Compare every counter with a recount over the live tables. Call it between steps."""
        entries = Counter(block for sequence in self._live for block in sequence.table)
        self.pool.check(dict(entries))
        fill: dict[int, int] = {}
        for sequence in self._live:
            self._check_table(sequence)
            for index, block in enumerate(sequence.table):
                here = min(self.block_size, sequence.computed - index * self.block_size)
                fill[block] = max(fill.get(block, 0), here)
        found = (sum(fill.values()), entries.total(), self.counters.internal)
        if self.counters.totals() != found or not self.counters.unfillable_blocks() <= set(entries):
            raise InvariantError(
                f"written slots, table entries, internal slots: counters {self.counters.totals()}, tables {found}"
            )
        usage = self.usage()
        if min(usage.reserved, usage.free) < 0 or usage.capacity != self.pool.num_blocks * self.block_size:
            raise InvariantError(f"slot states do not add up: {usage}")

    def _check_table(self, sequence: SequenceState) -> None:
        if len(sequence.table) != self.blocks_of(sequence.computed):
            raise InvariantError(f"{sequence}: {len(sequence.table)} blocks for {sequence.computed} tokens")
        if sequence.cached_blocks > sequence.computed // self.block_size:
            raise InvariantError(
                f"{sequence}: {sequence.cached_blocks} blocks are cached, {sequence.computed} tokens fill fewer blocks"
            )
