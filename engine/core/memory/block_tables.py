"""Block tables over one pool, and the counters that are kept with them.

A table lists the blocks of one sequence. Tables grow, are shared, copied, cut and dropped here. Every operation
updates the reference counts, the table entries and the written slots together, so slot usage costs nothing to read.
"""

from collections import Counter
from collections.abc import Sequence as Values

from engine.core.errors import CoreError, InvariantError, UnknownSequenceError
from engine.core.memory.block_pool import BlockPool
from engine.core.plan import SlotUsage
from engine.core.request import Request
from engine.core.sequence import Sequence


class SlotBooks:
    """Written slots, table entries, and the slots of last blocks that their owner will never fill.

    `written` counts a shared slot once and is ahead of the tensors by the step under way. The final length of every
    sequence is known in replay, so an unfillable slot is known when its block is taken.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.written = 0
        self.entries = 0
        self.internal = 0
        self._unfillable: dict[int, int] = {}

    def block_taken(self, request: Request, block: int, index: int) -> None:
        """`block` stands at position `index` of a table of `request`."""
        unfillable = (index + 1) * self.block_size - request.final_kv_tokens
        if unfillable > 0:
            self._unfillable[block] = unfillable
            self.internal += unfillable

    def block_dropped(self, block: int) -> None:
        """The last reference to a table's last block is gone."""
        self.internal -= self._unfillable.pop(block, 0)

    def unfillable_blocks(self) -> set[int]:
        """Blocks with slots that will never be filled."""
        return set(self._unfillable)

    def totals(self) -> tuple[int, int, int]:
        """Written slots, table entries, and the unfillable slots summed anew: what `check()` compares."""
        return self.written, self.entries, sum(self._unfillable.values())


CopyList = list[tuple[int, int]]
StaleList = list[tuple[int, int, int]]


class BlockTables:
    """Tables of live sequences. Every move leaves references, table entries and written slots in agreement."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.books = SlotBooks(block_size)
        self.copies: CopyList = []
        self.stale: StaleList = []
        self._live: dict[Sequence, None] = {}

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    # -- one table -----------------------------------------------------------------------------------------

    def of(self, sequence: Sequence) -> list[int]:
        """The sequence's table; raises UnknownSequenceError where it has none."""
        if sequence not in self._live:
            raise UnknownSequenceError(f"{sequence} holds no blocks: never admitted, or released before")
        assert isinstance(sequence.table, list)
        return sequence.table

    def open(self, sequence: Sequence, table: list[int]) -> None:
        """`sequence` is live from now on, with `table`, which is counted already."""
        self._live[sequence] = None
        sequence.table = table

    def append(self, request: Request, table: list[int], count: int) -> None:
        """`count` new blocks at the end of `table`; only the last of them can have slots that are never filled."""
        table += self.pool.take(count) if count > 1 else (self.pool.take_one(),)
        self.books.entries += count
        self.books.block_taken(request, table[-1], len(table) - 1)

    def copy_tail(self, sequence: Sequence, table: list[int]) -> None:
        """Give `sequence`, about to write into a shared partial block, a copy of it."""
        source, (copy,) = table[-1], self.pool.take(1)
        self.pool.release([source])
        self.copies.append((source, copy))
        table[-1] = copy
        self.books.written += sequence.computed % self.block_size
        self.books.block_taken(sequence.request, copy, len(table) - 1)

    def shared(self, table: Values[int]) -> list[int]:
        """A second table with the same blocks."""
        self.pool.share(table)
        self.books.entries += len(table)
        return list(table)

    def copied(self, request: Request, table: Values[int], computed: int) -> list[int]:
        """A second table with blocks of its own, to which the first one's content is copied."""
        copy: list[int] = []
        self.append(request, copy, len(table))
        self.copies += zip(table, copy, strict=True)
        self.books.written += computed
        return copy

    def close(self, sequence: Sequence) -> list[int]:
        """Drop all references of `sequence`, which is not live any more; returns the table that it had."""
        table = self.of(sequence)
        del self._live[sequence]
        self.drop(table, sequence.computed)
        sequence.table = []
        return table

    def rename(self, child: Sequence, sequence: Sequence) -> None:
        """`sequence`, which holds nothing, is live with the table of `child`, which is not live any more."""
        table = self.of(child)
        del self._live[child]
        child.table = ()
        self.open(sequence, table)

    def drop(self, table: Values[int], computed: int) -> None:
        """Drop one reference to each block; only the last can be partly written or hold slots that are never filled."""
        gone = self.pool.release(table)
        self.books.entries -= len(table)
        if not gone:
            return
        self.books.written -= self.block_size * len(gone)
        if gone[-1] == table[-1]:
            self.books.written += len(table) * self.block_size - computed
            self.books.block_dropped(gone[-1])

    def trim(self, sequence: Sequence) -> None:
        """Drop blocks that were taken for a step that will not run."""
        table, keep = self.of(sequence), self.blocks_of(sequence.computed)
        if keep < len(table):
            self.drop(table[keep:], 0)
            del table[keep:]

    def truncate(self, sequence: Sequence, tokens: int) -> int:
        """Keep at most the first `tokens` computed tokens: later blocks are dropped, later slots of the last are void.

        A partial last block that others hold too is given up whole, so that what it holds stays theirs. Returns the
        number of tokens kept, which is `sequence.computed` from then on.
        """
        table, size, computed = self.of(sequence), self.block_size, sequence.computed
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
        sequence.named = min(sequence.named, tokens // size)
        if tokens % size:
            self._void_tail(sequence, tokens % size, min(size, computed - (keep - 1) * size))
        sequence.computed = tokens
        return tokens

    def _void_tail(self, sequence: Sequence, first: int, end: int) -> None:
        """Slots `first` … `end - 1` of the last block hold nothing any more; what was findable there is not."""
        block = sequence.table[-1]
        self.pool.unname([block])
        if end > first:
            self.stale.append((block, first, end))
            self.books.written -= end - first

    # -- the books -----------------------------------------------------------------------------------------

    def usage(self) -> SlotUsage:
        """Slots by state. Any free block serves any request, so nothing is external."""
        size, books, pool = self.block_size, self.books, self.pool
        free, cached = pool.free_blocks, pool.cached_blocks
        live = pool.num_blocks - free
        return SlotUsage(
            books.written,
            cached * size,
            live * size - books.written - books.internal,
            books.internal,
            0,
            (free - cached) * size,
            books.entries,
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
        found = (sum(fill.values()), entries.total(), self.books.internal)
        if self.books.totals() != found or not self.books.unfillable_blocks() <= set(entries):
            raise InvariantError(
                f"written slots, table entries, internal slots: books {self.books.totals()}, tables {found}"
            )
        usage = self.usage()
        if min(usage.reserved, usage.free) < 0 or usage.capacity != self.pool.num_blocks * self.block_size:
            raise InvariantError(f"slot states do not add up: {usage}")

    def _check_table(self, sequence: Sequence) -> None:
        if len(sequence.table) != self.blocks_of(sequence.computed):
            raise InvariantError(f"{sequence}: {len(sequence.table)} blocks for {sequence.computed} tokens")
        if sequence.named > sequence.computed // self.block_size:
            raise InvariantError(
                f"{sequence}: {sequence.named} blocks are cached, {sequence.computed} tokens fill fewer"
            )
