"""The paged KV cache manager: block tables that grow block by block, share prefixes, and copy on write."""

from collections import Counter
from collections.abc import Sequence as Values

from engine.core.books import SlotBooks
from engine.core.errors import CoreError, InvariantError, UnknownSequenceError
from engine.core.identity import BlockName
from engine.core.leap import crossings, leap_limit
from engine.core.manager import CopyList, LeapColumns
from engine.core.plan import IntArray, SlotUsage
from engine.core.pool import BlockPool
from engine.core.request import Decoding, Request
from engine.core.sequence import Group, ScheduledRow, Sequence


class PagedManager:
    """Block tables over one pool.

    Full blocks enter the prefix cache when they are scheduled to be filled, so that a second request in the same step
    already hits. Beam hypotheses keep their generated blocks out of it: they are replaced too often to be found again.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        if block_size < 1:
            raise CoreError(f"block size is {block_size} tokens, must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks)
        self.books = SlotBooks(block_size)
        self._live: dict[Sequence, None] = {}
        self._copies: CopyList = []

    # -- what fits -----------------------------------------------------------------------------------------

    def never_fits(self, request: Request) -> str | None:
        """Why no schedule can serve `request`: at the end its blocks exceed the pool."""
        blocks = self._group_blocks(request, request.final_kv_tokens)
        if blocks <= self.num_blocks:
            return None
        return f"needs {blocks} blocks of {self.block_size} tokens, the pool has {self.num_blocks}"

    def _group_blocks(self, request: Request, tokens: int) -> int:
        """Blocks of all branches at `tokens` each: full prompt blocks are shared, the rest counts as private."""
        shared = request.prompt_tokens // self.block_size if request.width > 1 else 0
        return shared + request.width * (self._blocks(tokens) - shared)

    def lookup(self, group: Group) -> list[int]:
        """Blocks of the longest cached prefix; at least one token is left to compute. A pure query."""
        if not self.prefix_caching or group.request.identity is None:
            return []
        return self.pool.find(self._names(group)[: (group.root_target - 1) // self.block_size])

    def _names(self, group: Group) -> list[BlockName]:
        """Names of the first sequence's full blocks: the prompt's, and those a preemption left to compute again."""
        identity, (root,) = group.request.identity, group.sequences
        assert identity is not None
        if group.names is None:
            group.names = list(identity.prompt_names(self.block_size))
        root.names = group.names
        missing = range(len(group.names), group.root_target // self.block_size)
        return group.names + [identity.generated_name(0, block) for block in missing]

    def can_admit(self, group: Group, hits: Values[int], spare_blocks: int) -> bool:
        """Whether all known tokens of all branches fit: hits that nobody refers to are used up too."""
        need = self._group_blocks(group.request, group.tokens) - len(hits) + self.pool.unreferenced(hits)
        return need + spare_blocks <= self.pool.free_blocks

    def admit(self, group: Group, hits: Values[int]) -> None:
        """Refer to the hits before anything else is taken, so that a hit cannot be evicted by its own request."""
        (root,) = group.sequences
        self.books.written += self.pool.share(hits) * self.block_size
        self.books.entries += len(hits)
        root.table = list(hits)
        root.computed = len(hits) * self.block_size
        self._live[root] = None

    # -- growth --------------------------------------------------------------------------------------------

    def can_extend(self, rows: Values[ScheduledRow]) -> bool:
        """Whether the new blocks and the copies of shared tails that `rows` need are free, all together."""
        need = sum(
            self._blocks(row.sequence.computed + row.query_len) - len(row.sequence.table) for row in rows
        )
        if len(rows) > 1:
            need += self._tail_copies(rows)
        return not need or need <= self.pool.free_blocks

    def _tail_copies(self, rows: Values[ScheduledRow]) -> int:
        """Each writer of a shared tail copies it, but the last holder writes in place."""
        tails = [row.sequence.table[-1] for row in rows if row.sequence.computed % self.block_size]
        return sum(min(tails.count(block), self.pool.references(block) - 1) for block in set(tails))

    def extend(self, row: ScheduledRow) -> int:
        """Blocks for the row's tokens; a shared tail is replaced by a copy, unless this is its last holder."""
        sequence, size = row.sequence, self.block_size
        start, end = sequence.computed, sequence.computed + row.query_len
        table = self._table(sequence)
        taken = 0
        if start % size and self.pool.references(table[-1]) > 1:
            self._copy_tail(sequence, table)
            taken = 1
        if len(table) * size < end:
            taken += self._append(sequence.request, table, self._blocks(end) - len(table))
        self.books.written += row.query_len
        if self.prefix_caching and end // size > start // size:
            self._name_full(sequence, start // size, end // size)
        return taken

    def _copy_tail(self, sequence: Sequence, table: list[int]) -> None:
        source, (copy,) = table[-1], self.pool.take(1)
        self.pool.release([source])
        self._copies.append((source, copy))
        table[-1] = copy
        self.books.written += sequence.computed % self.block_size
        self.books.block_taken(sequence.request, copy, len(table) - 1)

    def _append(self, request: Request, table: list[int], count: int) -> int:
        table.extend(self.pool.take(count))
        self.books.entries += count
        self.books.block_taken(request, table[-1], len(table) - 1)  # only the last can have unfillable slots
        return count

    def _name_full(self, sequence: Sequence, first: int, end: int) -> None:
        request = sequence.request
        if request.identity is None:
            return
        for index in range(first, end):
            if index < len(sequence.names):
                self.pool.name(sequence.table[index], sequence.names[index])
            elif request.decoding is not Decoding.BEAM:
                self.pool.name(sequence.table[index], request.identity.generated_name(sequence.branch, index))

    # -- sharing -------------------------------------------------------------------------------------------

    def fork(self, parent: Sequence, children: Values[Sequence]) -> None:
        """Children hold the parent's blocks too; a partial tail is copied by whoever writes first."""
        for child in children:
            child.table = self._shared(parent.table)
            child.names = parent.names
            self._live[child] = None

    def _shared(self, table: Values[int]) -> list[int]:
        self.pool.share(table)
        self.books.entries += len(table)
        return list(table)

    def reparent(self, branches: Values[Sequence], parents: Values[int]) -> None:
        """Refer for all children first and drop the parents without a child last: nothing is freed in between."""
        tables = [branch.table for branch in branches]
        taken_over: set[int] = set()
        for branch, parent in zip(branches, parents, strict=True):
            branch.table = self._shared(tables[parent]) if parent in taken_over else tables[parent]
            taken_over.add(parent)
        for index, table in enumerate(tables):
            if index not in taken_over:
                self._release_table(table, branches[0].computed)

    def release(self, sequence: Sequence) -> None:
        """Drop the references in reverse table order, so that a prefix outlives its continuation in the cache."""
        if sequence not in self._live:
            raise UnknownSequenceError(f"{sequence} holds no blocks: never admitted, or released before")
        del self._live[sequence]
        self._release_table(sequence.table, sequence.computed)
        sequence.table = []

    def _release_table(self, table: Values[int], computed: int) -> None:
        """Only the last block can be partly written or hold slots that are never filled."""
        gone = self.pool.release(reversed(table))
        self.books.entries -= len(table)
        if not gone:
            return
        self.books.written -= self.block_size * len(gone)
        if gone[0] == table[-1]:
            self.books.written += len(table) * self.block_size - computed
            self.books.block_dropped(gone[0])

    # -- fast-forward --------------------------------------------------------------------------------------

    def leap_limit(self, context: IntArray, steps: int) -> int:
        """The largest number of decode steps, at most `steps`, whose blocks are free."""
        return leap_limit(context, steps, self.block_size, self.pool.free_blocks)

    def leap(self, sequences: Values[Sequence], steps: int) -> LeapColumns:
        """Blocks of `steps` decode steps after the first, taken step by step and row by row as single steps would."""
        before, taken = self.usage(None), []
        for step, row in crossings([sequence.computed for sequence in sequences], steps, self.block_size):
            cached, internal = self.pool.cached_blocks, self.books.internal
            self._append(sequences[row].request, self._table(sequences[row]), 1)
            taken.append((step, cached - self.pool.cached_blocks, self.books.internal - internal))
        for sequence in sequences:
            full = (sequence.computed + 1) // self.block_size, (sequence.computed + steps) // self.block_size
            if self.prefix_caching and full[1] > full[0]:
                self._name_full(sequence, *full)
        self.books.written += (steps - 1) * len(sequences)
        self.pool.drain_voided()  # evicted on the way, and counted in the columns
        return LeapColumns.of(before, steps - 1, self.block_size, taken)

    # -- books ---------------------------------------------------------------------------------------------

    def usage(self, head: Request | None) -> SlotUsage:
        """Slots by state. Any free block serves any request, so nothing is external."""
        size, live, cached = self.block_size, self.pool.live_blocks, self.pool.cached_blocks
        return SlotUsage(
            token=self.books.written,
            cached=cached * size,
            reserved=live * size - self.books.written - self.books.internal,
            internal=self.books.internal,
            external=0,
            free=(self.num_blocks - live - cached) * size,
            logical_blocks=self.books.entries,
            physical_blocks=live,
        )

    def drain_copies(self) -> CopyList:
        """Copies of shared tails to run before the next forward pass."""
        copies, self._copies = self._copies, []
        return copies

    def drain_frees(self) -> list[int]:
        """Blocks released without a name, and evicted ones."""
        return self.pool.drain_voided()

    def check(self) -> None:
        """Compare every counter with a recount over the live tables. Call it between steps."""
        entries = Counter(block for sequence in self._live for block in sequence.table)
        self.pool.check(dict(entries))
        fill: dict[int, int] = {}
        for sequence in self._live:
            if len(sequence.table) != self._blocks(sequence.computed):
                raise InvariantError(
                    f"{sequence}: {len(sequence.table)} blocks for {sequence.computed} tokens"
                )
            for index, block in enumerate(sequence.table):
                here = min(self.block_size, sequence.computed - index * self.block_size)
                fill[block] = max(fill.get(block, 0), here)
        found = (sum(fill.values()), entries.total(), self.books.internal)
        if self.books.totals() != found or not self.books.unfillable_blocks() <= set(entries):
            raise InvariantError(
                f"written slots, table entries, internal slots: books {self.books.totals()}, tables {found}"
            )
        usage = self.usage(None)
        if min(usage.reserved, usage.free) < 0 or usage.capacity != self.num_blocks * self.block_size:
            raise InvariantError(f"slot states do not add up: {usage}")

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _table(self, sequence: Sequence) -> list[int]:
        if sequence not in self._live:
            raise UnknownSequenceError(f"{sequence} holds no blocks: it must be admitted first")
        assert isinstance(sequence.table, list)
        return sequence.table
