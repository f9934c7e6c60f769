"""Block tables over one pool, and the counters that are kept with them.

A table lists the blocks of one sequence in one group of layers; a plain model has one group. Tables grow, are shared,
copied, cut and dropped here. Every operation updates the reference counts, the table entries and the written slots
together, so reading the slot usage is cheap.
"""

from collections import Counter
from collections.abc import Sequence

from engine.core.errors import InvariantError, UnknownSequenceError
from engine.core.identity import InnerHash
from engine.core.memory.block_pool import NULL_BLOCK, BlockPool
from engine.core.memory.eviction import EvictionOrder
from engine.core.memory.group_layout import KVGroup
from engine.core.options import GroupKind
from engine.core.plan import CopyList, StaleList
from engine.core.request import Request
from engine.core.sequence import SequenceState


class GroupTable(SequenceState):
    """What a sequence has in one of several groups of layers: its table there, and what of it is cached.

    `hits`: leading blocks that came from the prefix cache. `junction`: where a longer hit of the first groups ended at
    the admission, in tokens; 0: nowhere. `inner` names the block inside which the last match unit of the prompt ends.
    """

    __slots__ = ("hits", "inner", "junction", "sequence")

    def __init__(self, sequence: SequenceState, hits: int = 0, junction: int = 0) -> None:
        super().__init__(sequence.request, sequence.branch)
        self.sequence = sequence
        self.hits, self.junction = hits, junction
        self.inner: InnerHash | None = None

    @property
    def checkpoints(self) -> tuple[int, int]:
        """Positions in tokens where a later prompt may resume."""
        return self.request.prompt_tokens - 1, self.junction

    @property  # type: ignore[misc]  # nobody sets it
    def computed(self) -> int:
        """Those of the sequence."""
        return self.sequence.computed


class GroupTables(Sequence[int]):
    """The block tables of one sequence, one for each group; as a sequence of integers, one after the other.

    Entry i of a group's table is the page of tokens i x block_size and following, or the null block. Below
    `due` computed tokens the next token needs no page and leaves none behind.
    """

    __slots__ = ("due", "of")

    def __init__(self, of: Sequence[GroupTable], due: int = 0) -> None:
        self.of = of
        self.due = due

    @property
    def groups(self) -> list[list[int]]:
        """The table of each group."""
        return [each.table for each in self.of]  # type: ignore[misc]  # lists

    @property
    def held(self) -> list[int]:
        """The first entry of each table that may be a page."""
        return [each.held for each in self.of]

    def __len__(self) -> int:
        return sum(len(each.table) for each in self.of)

    def __getitem__(self, index: int | slice) -> int | list[int]:  # type: ignore[override]
        return [page for each in self.of for page in each.table][index]


def tables_of(sequence: SequenceState) -> GroupTables:
    """What a live sequence has in several groups; raises UnknownSequenceError for another one."""
    tables = sequence.table
    if not isinstance(tables, GroupTables):
        raise UnknownSequenceError(f"{sequence} holds no pages: never admitted, or released before")
    return tables


class SlotCounters:
    """Counters of the live tables: written slots, entries, blocks, and slots that will never be filled (`internal`).

    `written` counts a shared slot once, and already includes the step that is being scheduled. A replay knows the
    final length of every sequence. So the slots of a last block that will never be filled are known when the block is
    allocated.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.written = 0
        self.entries = 0
        self.blocks = 0
        self.internal = 0
        self.unfillable: dict[int, int] = {}

    def block_taken(self, request: Request, block: int, index: int) -> bool:
        """`block` was put at position `index` of a table of `request`. Returns whether no slot of it will be filled."""
        unfillable = (index + 1) * self.block_size - request.most_kv_tokens
        if unfillable <= 0:
            return False
        self.unfillable[block] = unfillable = min(unfillable, self.block_size)
        self.internal += unfillable
        return unfillable == self.block_size

    def blocks_taken(self, request: Request, table: Sequence[int], first: int) -> None:
        """The entries of `table` from `first` on are new. With drafts several may be beyond the last token."""
        index = len(table) - 1
        while index >= first and self.block_taken(request, table[index], index):
            index -= 1

    def blocks_dropped(self, blocks: Sequence[int]) -> None:
        """`blocks` were the last of their table and have no reference any more."""
        for block in reversed(blocks):
            unfillable = self.unfillable.pop(block, 0)
            self.internal -= unfillable
            if unfillable < self.block_size:
                return

    def totals(self) -> tuple[int, int, int, int]:
        """Written slots, table entries, blocks, and unfillable slots (summed again), for `check()`."""
        return self.written, self.entries, self.blocks, sum(self.unfillable.values())


class BlockWork:
    """Work on blocks for the executor's next step: copies, and slots of blocks in use that became void."""

    def __init__(self) -> None:
        self.copies: CopyList = []
        self.stale: StaleList = []


class BlockTables:
    """The block tables of live sequences. Every method keeps references, table entries and written slots consistent.

    A sequence is live from `open` to `close`. `work` is for the executor's next step. `group`
    says what the layers keep, None: K and V of every token. A block of states has one slot, written when it is taken.
    Between the aligned states that a row begins and ends with, its table has gaps.
    A hit that ends inside a block is copied: `sources` has that block until the sequence takes its own. `copied` blocks
    keep their reference until the step is planned, so that none of it takes them.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        group: KVGroup | None = None,
        order: EvictionOrder | None = None,
    ) -> None:
        self.pool = pool
        self._order = order
        self.block_size = block_size
        self.group = group
        self.keeps_states = group is not None and group.kind is GroupKind.state
        self.aligned = group is not None and group.aligned
        self.block_slots = 1 if self.keeps_states else block_size
        self.counters = SlotCounters(block_size)
        self.work = BlockWork()
        self._live: dict[SequenceState, None] = {}
        self.sources: dict[SequenceState, int] = {}
        self.copied: list[int] = []

    def blocks_of(self, tokens: int) -> int:
        """How many blocks `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def most_blocks(
        self, request: Request, width: int, tokens: int, *, chunk: int = 0, shares: bool = True
    ) -> int:
        """The most blocks of `width` branches of a request with `tokens` tokens each, in chunks of at most `chunk`.

        They share full blocks of the prompt, unless `shares` is False: then none.
        """
        whole = most = self.blocks_of(tokens)
        if self.group is not None:
            most = self.group.most_blocks(tokens, chunk)
        if width == 1:
            return most
        shared = request.prompt_tokens // self.block_size if shares else 0
        return min(shared + width * (whole - shared), width * most)

    # -- one table -----------------------------------------------------------------------------------------

    def get(self, sequence: SequenceState) -> list[int]:
        """The table of a live sequence; raises UnknownSequenceError for another one."""
        if sequence not in self._live:
            raise UnknownSequenceError(f"{sequence} holds no blocks: never admitted, or released before")
        assert isinstance(sequence.table, list)
        return sequence.table

    @property
    def live(self) -> list[SequenceState]:
        """The live sequences."""
        return list(self._live)

    def open(self, sequence: SequenceState, table: list[int]) -> None:
        """Make `sequence` live with `table`, whose entries were counted before."""
        self._live[sequence] = None
        sequence.table = table

    def open_hits(self, sequence: SequenceState, table: list[int], source: int = NULL_BLOCK) -> None:
        """Make `sequence` live with full cached blocks, to which it gets references; it will copy `source`."""
        held = sequence.held
        if source:
            self.pool.share([source])
            self.sources[sequence] = source
        if held < len(table):
            blocks = table[held:]
            unlisted = self._unlisted(blocks) if self.copied else ()
            revived = self.pool.share(blocks) + len(unlisted)
            self.counters.blocks += revived
            self.counters.written += revived * self.block_slots
            self.counters.entries += len(table) - held
        self.open(sequence, table)

    def open_again(self, sequence: SequenceState, table: list[int], seen: set[int]) -> None:
        """Make `sequence` live with blocks that were just taken. Other branches refer to those in `seen` already."""
        blocks, size = table[sequence.held :], self.block_size
        fresh = [block for block in blocks if block not in seen]
        seen.update(fresh)
        self.pool.share([block for block in blocks if block not in fresh])
        counters = self.counters
        counters.entries += len(blocks)
        counters.blocks += len(fresh)
        counters.written += len(fresh) * self.block_slots
        if fresh and fresh[-1] == table[-1] and not self.keeps_states:
            counters.written -= len(table) * size - sequence.computed
            counters.blocks_taken(sequence.request, table, len(table) - 1)
        self.open(sequence, table)

    def lacking(self, table: Sequence[int], end: int) -> int:
        """How many blocks a table lacks for a row that ends at token `end`."""
        blocks = self.blocks_of(end) - len(table)
        return min(blocks, 1) if self.aligned and blocks > 0 else max(blocks, 0)

    def append_upto(self, sequence: SequenceState, blocks: list[int], end: int) -> None:
        """Append the blocks that `lacking` said, behind a gap where it left some out."""
        table = self.get(sequence)
        table += [NULL_BLOCK] * (self.blocks_of(end) - len(table) - len(blocks))
        self.append(sequence.request, table, blocks)
        if source := self.sources.pop(sequence, NULL_BLOCK):
            copy, filled = blocks[0], sequence.computed % self.block_size
            self.work.copies.append((source, copy))
            self.copied.append(source)
            if not self.keeps_states:
                self.counters.written += filled

    def append(self, request: Request, table: list[int], blocks: list[int]) -> None:
        """Append new blocks to `table`."""
        table += blocks
        counters = self.counters
        counters.entries += len(blocks)
        counters.blocks += len(blocks)
        if self.keeps_states:
            counters.written += len(blocks)
        elif len(table) * self.block_size > request.most_kv_tokens:
            counters.blocks_taken(request, table, len(table) - len(blocks))

    def append_one(self, request: Request, table: list[int], block: int) -> None:
        """The same as `append` with one block of tokens, but faster."""
        table.append(block)
        counters = self.counters
        counters.entries += 1
        counters.blocks += 1
        if len(table) * self.block_size > request.most_kv_tokens:
            counters.block_taken(request, block, len(table) - 1)

    def wrote(self, tokens: int) -> None:
        """Rows write so many tokens; states were counted when their blocks were taken."""
        if not self.keeps_states:
            self.counters.written += tokens

    def writes_tail(self, sequence: SequenceState, end: int) -> bool:
        """Whether a row up to token `end` writes into the last block, which is partly written."""
        if sequence.computed % self.block_size == 0:
            return False
        return (end if self.aligned else sequence.computed) <= len(sequence.table) * self.block_size

    def shares_tail(self, sequence: SequenceState, end: int) -> bool:
        """Whether a row up to token `end` writes into the last block, and another table or the cache needs it."""
        return self.writes_tail(sequence, end) and self.copies_of(sequence.table[-1:]) > 0

    def is_cached_state(self, block: int) -> bool:
        """Whether a block has an aligned state that the prefix cache names: a row that goes on from it copies it."""
        return self.aligned and self.pool.hash_of(block) is not None

    def copies_needed(self, sequences: Sequence[SequenceState]) -> int:
        """Copies of shared partial last blocks: each writer copies, but the last one to refer to it writes in place."""
        return self.copies_of([s.table[-1] for s in sequences if s.computed % self.block_size])

    def copies_of(self, tails: Sequence[int]) -> int:
        """Copies of last blocks to which as many rows write as they are named."""
        needing = {block: self.pool.references(block) + self.is_cached_state(block) for block in tails}
        return sum(min(tails.count(block), others - 1) for block, others in needing.items())

    def copy_tail(self, sequence: SequenceState, copy: int) -> None:
        """Copy on write: `sequence` is about to write into a shared partial last block, so give it the block `copy`."""
        table = self.get(sequence)
        source = table[-1]
        self.work.copies.append((source, copy))
        table[-1] = copy
        if self.is_cached_state(source):
            self.copied.append(source)
            if self._unlisted([source]):
                return
        else:
            self.pool.leave(source)
        self.counters.blocks += 1
        if self.keeps_states:
            self.counters.written += 1
        else:
            self.counters.written += sequence.computed % self.block_size
            self.counters.block_taken(sequence.request, copy, len(table) - 1)

    def share_table(self, table: Sequence[int], held: int) -> list[int]:
        """A second table that refers to the same blocks, from entry `held` on."""
        shared = self._blocks(table, held)
        self.pool.share(shared)
        self.counters.entries += len(shared)
        return list(table)

    def _blocks(self, table: Sequence[int], first: int, end: int | None = None) -> Sequence[int]:
        """The blocks from entry `first` to before `end`, without gaps."""
        blocks = table[first:end] if first or end is not None else table
        return list(filter(None, blocks)) if self.aligned else blocks

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """Let `child` share the blocks of `parent`."""
        child.block_hashes, child.cached_blocks = parent.block_hashes, parent.cached_blocks
        child.private, child.held = parent.private, parent.held
        self.open(child, self.share_table(self.get(parent), parent.held))

    def copy_table(
        self, request: Request, table: Sequence[int], blocks: list[int], computed: int
    ) -> list[int]:
        """A second table of new `blocks`, to which the content of `table` (`computed` tokens) is copied."""
        copy: list[int] = []
        self.append(request, copy, blocks)
        self.work.copies += zip(table, copy, strict=True)
        self.counters.written += computed
        return copy

    def close(self, sequence: SequenceState) -> list[int]:
        """End the life of `sequence` and drop its references; returns the table that it had."""
        table = self.get(sequence)
        del self._live[sequence]
        self.drop(table, sequence.computed, sequence.held, sequence.request)
        if self.sources:
            self.copied += filter(None, [self.sources.pop(sequence, NULL_BLOCK)])
        return table

    def _unlisted(self, blocks: Sequence[int]) -> list[int]:
        """Those of `blocks` that no table has, and that copies of this step refer to."""
        references = self.pool.references
        return [block for block in blocks if 0 < references(block) == self.copied.count(block)]

    def release_copied(self) -> None:
        """The step is planned: the blocks that it copies may be taken from now on, in this order."""
        for block in self.copied:
            self.pool.release([block])
        self.copied.clear()

    def reparent(self, branches: Sequence[SequenceState], parents: Sequence[int]) -> list[SequenceState]:
        """Give branch i the table of branch `parents[i]`; returns those that share it with an earlier branch.

        Tables of parents without a child are dropped last.
        """
        tables = [self.get(branch) for branch in branches]
        before = [(branch.cached_blocks, branch.held) for branch in branches]
        taken_over: set[int] = set()
        sharing = []
        for branch, parent in zip(branches, parents, strict=True):
            branch.cached_blocks, branch.held = before[parent]
            if parent not in taken_over:
                branch.table = tables[parent]
                taken_over.add(parent)
                continue
            branch.table = self.share_table(tables[parent], branch.held)
            sharing.append(branch)
        for index, table in enumerate(tables):
            if index not in taken_over:
                self.drop(table, branches[0].computed, before[index][1], branches[0].request)
        return sharing

    def take_over(self, child: SequenceState, sequence: SequenceState) -> None:
        """Give the table of `child` to `sequence`, which must have none; `child` is not live afterwards."""
        table = self.get(child)
        del self._live[child]
        child.table = ()
        sequence.cached_blocks, sequence.block_hashes = child.cached_blocks, child.block_hashes
        sequence.held = child.held
        self.open(sequence, table)

    def drop(self, table: Sequence[int], computed: int, first: int, request: Request) -> None:
        """Drop one reference to each block from entry `first` on, of a table of `request` with `computed` tokens.

        Only the last that is written can be so in part; those behind it are reserved for drafts.
        """
        dropped = self._blocks(table, first)
        gone = self.pool.release(dropped, first, request)
        if self.copied:
            gone = [block for block in dropped if block in gone or self._unlisted([block])]
        counters = self.counters
        counters.entries -= len(dropped)
        if not gone:
            return
        counters.blocks -= len(gone)
        counters.written -= self.block_slots * len(gone)
        if gone[-1] == table[-1] and not self.keeps_states:
            counters.written += len(table) * self.block_size - computed
            counters.blocks_dropped(gone)
        if self.group is not None and not self.keeps_states:
            for place, block in enumerate(dropped, first):
                if isinstance(self.pool.hash_of(block), InnerHash) and block in gone:
                    self.pool.filled[block] = min(self.block_size, computed - place * self.block_size)

    def drop_behind(self, sequence: GroupTable, skipped: int) -> None:
        """Drop the references to full blocks before entry `skipped`, which its window has left."""
        table, held = self.get(sequence), sequence.held
        found = min(max(held, sequence.hits), skipped)  # blocks before it were hits: they have been of use
        for first, last, behind in ((found, skipped, True), (held, found, False)):  # the last block first
            if self._order is not None:
                self._order.pushes_behind = behind
            dropped = self._blocks(table, first, last)
            gone = len(self.pool.release(dropped))
            gone += len(self._unlisted(dropped)) if self.copied else 0
            self.counters.entries -= len(dropped)
            self.counters.blocks -= gone
            self.counters.written -= self.block_slots * gone
        table[held:skipped] = [NULL_BLOCK] * (skipped - held)
        sequence.held = skipped

    def trim(self, sequence: SequenceState) -> None:
        """Drop blocks that were allocated for a step that will not run."""
        table, keep = self.get(sequence), self.blocks_of(sequence.computed)
        if keep < len(table):
            self.drop(table, keep * self.block_size, keep, sequence.request)
            del table[keep:]

    def kept(self, sequence: SequenceState, tokens: int) -> int:
        """How many of the first `tokens` computed tokens `truncate` keeps: no part of a block that others need."""
        part = tokens % self.block_size
        return (
            tokens - part
            if part and self.pool.references(sequence.table[tokens // self.block_size]) > 1
            else tokens
        )

    def truncate(self, sequence: SequenceState, tokens: int) -> None:
        """Keep the first `tokens` computed tokens, as many as `kept` said. Later blocks are dropped, later slots become
        void. With drafts past the end the blocks stay, for the next drafts, unless a full one of the cache is cut.
        """
        table, size, computed = self.get(sequence), self.block_size, sequence.computed
        speculation = sequence.request.speculation
        if speculation is not None and speculation.whole and tokens >= sequence.cached_blocks * size:
            self._void(table, tokens, computed)
            return
        keep = self.blocks_of(tokens)
        if keep < len(table):
            self.drop(table, computed, keep, sequence.request)
            del table[keep:]
        sequence.cached_blocks = min(sequence.cached_blocks, tokens // size)
        if tokens % size:
            self._void_tail(sequence, tokens % size, min(size, computed - (keep - 1) * size))

    def _void(self, table: Sequence[int], tokens: int, computed: int) -> None:
        """The slots of tokens `tokens` … `computed - 1`, which are in no full block of the cache, become void."""
        size = self.block_size
        for index in range(tokens // size, self.blocks_of(computed)):
            first, end = max(0, tokens - index * size), min(size, computed - index * size)
            self.work.stale.append((table[index], first, end))
        self.counters.written -= computed - tokens

    def _void_tail(self, sequence: SequenceState, first: int, end: int) -> None:
        """Slots `first` … `end - 1` of the last block become void, and the block leaves the prefix cache."""
        block = sequence.table[-1]
        self.pool.uncache([block])
        if end > first:
            self.work.stale.append((block, first, end))
            self.counters.written -= end - first

    # -- counters ---------------------------------------------------------------------------------------------

    def check(self) -> Counter[int]:
        """Compare the counters with a recount over the live tables; returns how often these name each block."""
        entries = Counter(
            block for sequence in self._live for block in self._blocks(sequence.table, sequence.held)
        )
        fill: dict[int, int] = {}
        for sequence in self._live:
            self._check_table(sequence)
            for index in range(sequence.held, len(sequence.table)):
                block = sequence.table[index]
                if not block:
                    continue
                here = max(0, min(self.block_size, sequence.computed - index * self.block_size))
                fill[block] = max(fill.get(block, 0), 1 if self.keeps_states else here)
        found = (sum(fill.values()), entries.total(), len(fill), self.counters.internal)
        if self.counters.totals() != found or not self.counters.unfillable.keys() <= set(entries):
            raise InvariantError(
                f"written slots, entries, blocks, internal slots: counters {self.counters.totals()}, tables {found}"
            )
        return entries

    def _check_table(self, sequence: SequenceState) -> None:
        table, held, computed = sequence.table, sequence.held, sequence.computed
        spare = len(table) - self.blocks_of(computed)
        if spare < 0 or (spare and sequence.request.most_kv_tokens == sequence.request.final_kv_tokens):
            raise InvariantError(f"{sequence}: {len(table)} blocks for {computed} tokens")
        if sequence.cached_blocks > computed // self.block_size:
            raise InvariantError(
                f"{sequence}: {sequence.cached_blocks} blocks are cached, {computed} tokens fill fewer blocks"
            )
        gaps = bool(table) and not table[-1] if self.aligned else not all(table[held:])
        if any(table[:held]) or gaps:
            raise InvariantError(f"{sequence}: the blocks do not begin at entry {held}: {table}")
        if held and held > (self.group.skipped(computed) if self.group else 0):
            raise InvariantError(f"{sequence}: block {held - 1} was released, and token {computed} sees it")
