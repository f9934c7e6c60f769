"""The paged KV cache manager: block tables that grow block by block, share prefixes, and copy on write.

`PagedManager` comes first. Below it are its parts: how many blocks a request needs, forks and beams, fast-forward.
"""

from collections import defaultdict
from collections.abc import Sequence as Values
from dataclasses import dataclass
from itertools import islice

from engine.core.calendar import DecodeCalendar
from engine.core.errors import CoreError
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.block_tables import BlockTables
from engine.core.memory.eviction import EvictionQueue
from engine.core.memory.manager import CopyList, LeapColumns, StaleList, SwapList, check_parents
from engine.core.memory.prefix_cache import BlockNaming, LookupRecord
from engine.core.memory.swap import HostPool, Swapper
from engine.core.options import Retention, SpeculationMode
from engine.core.plan import SlotUsage
from engine.core.request import Request
from engine.core.sequence import Group, ScheduledRow, Sequence


class PagedManager:
    """Block tables over one pool.

    `host_blocks` is the room for swapped groups. With `copy_at_fork` branches never share a block: the comparison
    that shows what copy-on-write saves. `deduplicate` replaces a block whose content another block held first.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        retention: Retention = Retention.lru,
        deduplicate: bool = False,
        copy_at_fork: bool = False,
        host_blocks: int = 0,
        eviction: EvictionQueue | None = None,
        keep_events: bool = False,
        keep_lookups: bool = False,
    ) -> None:
        if block_size < 1:
            raise CoreError(f"block size is {block_size} tokens, must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.growth: int | None = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks, retention=retention, eviction=eviction, keep_events=keep_events)
        self.tables = BlockTables(self.pool, block_size)
        self.naming = BlockNaming(self.tables, prefix_caching, deduplicate, copying=copy_at_fork)
        self.swapper = Swapper(self.tables, self.naming, HostPool(host_blocks))
        self._copying = CopyAtFork(self.tables) if copy_at_fork else None
        self.sharing = BranchSharing(self.tables, self._copying)
        self.sizing = PagedSizing(block_size, shares=not copy_at_fork)
        self.lookups: list[LookupRecord] | None = [] if keep_lookups else None

    # -- what fits -----------------------------------------------------------------------------------------

    def never_fits(self, request: Request) -> str | None:
        """Why no schedule can serve `request`: at the end its blocks exceed the pool."""
        blocks = self.sizing.most_blocks(request)
        if blocks <= self.num_blocks:
            return None
        return f"needs {blocks} blocks of {self.block_size} tokens, the pool has {self.num_blocks}"

    def lookup(self, group: Group) -> list[int]:
        """Blocks of the longest cached prefix; at least one token is left to compute. A pure query."""
        asked = (group.root_target - 1) // self.block_size
        hits, missed = self.naming.find(group, asked)
        if self.lookups is not None and self.naming.names(group.request):
            self.lookups.append(LookupRecord(group.request.request_id, asked, len(hits), missed))
        return hits

    def can_admit(
        self, group: Group, hits: Values[int], spare_blocks: int, tokens: int | None = None
    ) -> bool:
        """Whether all known tokens of all branches fit (or the first `tokens`): unreferenced hits are used up too."""
        pool = self.pool
        if tokens is not None and tokens < group.root_target:
            need = self.tables.blocks_of(tokens)
        else:
            need = self.sizing.blocks(group.request, group.width, group.tokens)
        need += (pool.unreferenced(hits) - len(hits)) if hits else 0
        return need + spare_blocks <= pool.free_blocks

    def admit(self, group: Group, hits: Values[int]) -> None:
        """Refer to the hits before anything else is taken, so that a hit cannot be evicted by its own request."""
        (root,) = group.sequences
        books = self.tables.books
        if hits:
            books.written += self.pool.share(hits) * self.block_size
            books.entries += len(hits)
        root.computed = len(hits) * self.block_size
        self.naming.adopt(group, root, len(hits))
        self.tables.open(root, list(hits))

    # -- growth --------------------------------------------------------------------------------------------

    def can_extend(self, rows: Values[ScheduledRow]) -> bool:
        """Whether the new blocks and the copies of shared tails that `rows` need are free, all together."""
        size, need, request = self.block_size, 0, rows[0].sequence.request
        for sequence, query_len, _, _ in rows:
            need -= (-sequence.computed - query_len) // size + len(sequence.table)
        if self._copying is not None:
            need += self._copying.need(request)
        elif request.width > 1 or request.speculation is not None:
            need += self._tail_copies(rows)
        return need <= 0 or need <= self.pool.free_blocks

    def _tail_copies(self, rows: Values[ScheduledRow]) -> int:
        """Each writer of a shared tail copies it, but the last holder writes in place."""
        tails = [row.sequence.table[-1] for row in rows if row.sequence.computed % self.block_size]
        return sum(min(tails.count(block), self.pool.references(block) - 1) for block in set(tails))

    def extend(self, row: ScheduledRow) -> int:
        """Blocks for the row's tokens; a shared tail is replaced by a copy, unless this is its last holder."""
        sequence, query_len, _, drafts = row
        start, size, tables = sequence.computed, self.block_size, self.tables
        self.naming.deduplicate(sequence)
        taken = self._copying.settle(sequence.request) if self._copying is not None else 0
        end, table = start + query_len, tables.of(sequence)
        if start % size and self.pool.references(table[-1]) > 1:
            tables.copy_tail(sequence, table)
            taken += 1
        lacking = -(-end // size) - len(table)
        if lacking > 0:
            tables.append(sequence.request, table, lacking)
            taken += lacking
        tables.books.written += query_len
        self.naming.full(sequence, (end - drafts) // size)
        return taken

    def can_append(self, group: Group) -> bool:
        """Whether every branch of a steady group can have one more block."""
        return len(group.sequences) <= self.pool.free_blocks

    def append(self, group: Group) -> int:
        """One more block for every branch of a steady group; what the last ones hold is complete now."""
        tables = self.tables
        for sequence in group.sequences:
            table = tables.of(sequence)
            self.naming.deduplicate(sequence)
            self.naming.full(sequence, len(table))
            tables.append(sequence.request, table, 1)
        return len(group.sequences)

    def advance(self, tokens: int) -> None:
        """Steady groups write `tokens` tokens in the step that is being scheduled."""
        self.tables.books.written += tokens

    # -- sharing -------------------------------------------------------------------------------------------

    def fork(self, parent: Sequence, children: Values[Sequence]) -> None:
        """Children hold the parent's blocks too; a partial tail is copied by whoever writes first."""
        self.sharing.fork(parent, children)

    def reparent(self, branches: Values[Sequence], parents: Values[int]) -> None:
        """Refer for all children first and drop the parents without a child last: nothing is freed in between."""
        self.sharing.reparent(branches, parents)

    def promote(self, sequence: Sequence, child: Sequence) -> None:
        """`sequence` gives up what it holds and goes on with what `child` holds."""
        self._let_go(sequence)
        sequence.computed, sequence.named, sequence.names = child.computed, child.named, child.names
        self.tables.rename(child, sequence)

    def truncate(self, sequence: Sequence, tokens: int) -> int:
        """Keep at most `tokens` computed tokens; returns how many are kept (see `BlockTables.truncate`)."""
        return self.tables.truncate(sequence, tokens)

    def release(self, sequence: Sequence) -> None:
        """Drop all references. A prefix outlives its continuation in the cache."""
        self.naming.settle(sequence)
        self._let_go(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        if self._copying is not None:
            self._copying.forget(sequence)
        self.naming.forget(sequence)
        self.tables.close(sequence)

    # -- making room ---------------------------------------------------------------------------------------

    def preempt(self, group: Group) -> None:
        """Drop everything that the group holds; what the cache keeps of it is found again by the next lookup."""
        for sequence in group.sequences:
            self.naming.settle(sequence)
        self.naming.leave_trail(group)
        for sequence in reversed(group.holders):
            self._let_go(sequence)

    def can_swap_out(self, group: Group) -> bool:
        """Whether the host has room for the whole group."""
        return self.swapper.can_save(group)

    def swap_out(self, group: Group) -> None:
        """Save the whole group in host memory."""
        self.swapper.save(group)

    def can_swap_in(self, group: Group, spare_blocks: int) -> bool:
        """Whether the group's blocks and those of its next step fit, with `spare_blocks` left over."""
        copies = None if self._copying is None else self._copying.need(group.request)
        return self.swapper.blocks_needed(group, copies) + spare_blocks <= self.pool.free_blocks

    def swap_in(self, group: Group) -> None:
        """Bring the whole group back."""
        self.swapper.bring_back(group)

    def forget_swapped(self, group: Group) -> None:
        """A swapped group was dropped: its host blocks are free again."""
        self.swapper.forget(group)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; raises CoreError, with nothing changed, while a block is in use."""
        self.pool.reset()

    # -- fast-forward --------------------------------------------------------------------------------------

    def leap_limit(self, calendar: DecodeCalendar, steps: int) -> int:
        """The largest number of decode steps, at most `steps`, whose blocks are free."""
        return leap_limit(calendar, steps, self.block_size, self.pool.free_blocks)

    def leap(self, calendar: DecodeCalendar, steps: int, first: SlotUsage) -> LeapColumns:
        """Blocks of `steps` decode steps after the first, taken step by step and row by row as single steps would."""
        columns = leap_columns(self, calendar, steps, first)
        self.pool.drain_voided()  # evicted on the way, and counted in the columns
        return columns

    def usage(self, head: Request | None) -> SlotUsage:
        """Slots by state. Any free block serves any request, so nothing is external."""
        return self.tables.usage()

    def drain_copies(self) -> CopyList:
        """Copies of shared tails to run before the next forward pass."""
        copies, self.tables.copies = self.tables.copies, []
        return copies

    def drain_frees(self) -> list[int]:
        """Blocks released without a name, and evicted ones."""
        return self.pool.drain_voided()

    def drain_stale(self) -> StaleList:
        """Slots of blocks in use that became void."""
        stale, self.tables.stale = self.tables.stale, []
        return stale

    def drain_swaps(self) -> tuple[SwapList, SwapList]:
        """(device, host) blocks to save, (host, device) blocks to bring back."""
        swaps, self.swapper.out, self.swapper.back = (self.swapper.out, self.swapper.back), [], []
        return swaps

    def check(self) -> None:
        """Compare every counter with a recount over the live tables. Call it between steps."""
        self.tables.check()


@dataclass(frozen=True, slots=True)
class PagedSizing:
    """Blocks of `block_size` tokens; branches share the full blocks of their prompt where `shares`."""

    block_size: int
    shares: bool

    def blocks(self, request: Request, width: int, tokens: int) -> int:
        """Blocks of `width` branches at `tokens` each: full prompt blocks are shared, the rest counts as private."""
        shared = request.prompt_tokens // self.block_size if width > 1 and self.shares else 0
        return shared + width * (-(-tokens // self.block_size) - shared)

    def most_blocks(self, request: Request) -> int:
        """The most that the request ever holds: at its end, and with forked drafts a copy beside it."""
        blocks = self.blocks(request, request.width, request.final_kv_tokens)
        speculation = request.speculation
        if speculation is None or speculation.mode is not SpeculationMode.fork or request.output_tokens == 1:
            return blocks
        return blocks + (1 if self.shares else blocks)


class CopyAtFork:
    """What copy-on-write saves: here every branch owns all of its blocks.

    Children still refer to their parent's blocks, and get copies of them when the request is scheduled next.

    A fork is decided when a step is committed; its copies run with the next step, and so their blocks are taken with
    it too: until then nobody writes.
    """

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._owed: defaultdict[int, list[Sequence]] = defaultdict(list)

    def owe(self, child: Sequence) -> None:
        """`child` refers to blocks of another branch."""
        self._owed[child.request.request_id].append(child)

    def need(self, request: Request) -> int:
        """Blocks that the request's children lack."""
        owed = self._owed.get(request.request_id, ())
        return sum(len(child.table) for child in owed)

    def settle(self, request: Request) -> int:
        """Give all of them copies; returns how many blocks that took."""
        taken = 0
        for child in self._owed.pop(request.request_id, ()):
            table = self._tables.of(child)
            copies = self._tables.copied(request, table, child.computed)
            self._tables.drop(table, child.computed)
            child.table = copies
            taken += len(copies)
        return taken

    def forget(self, sequence: Sequence) -> None:
        """`sequence` lets go of its blocks: nothing is owed to it any more."""
        owed = self._owed.get(sequence.request.request_id, [])
        if sequence in owed:
            owed.remove(sequence)


class BranchSharing:
    """Forks and re-parented beams. `copying` None: blocks are shared until somebody writes."""

    def __init__(self, tables: BlockTables, copying: CopyAtFork | None) -> None:
        self._tables = tables
        self._copying = copying

    def fork(self, parent: Sequence, children: Values[Sequence]) -> None:
        """Children hold the parent's blocks too."""
        table = self._tables.of(parent)
        for child in children:
            child.names, child.named = parent.names, parent.named
            self._tables.open(child, self._tables.shared(table))
            if self._copying is not None:
                self._copying.owe(child)

    def reparent(self, branches: Values[Sequence], parents: Values[int]) -> None:
        """Branch i holds what branch `parents[i]` held; parents without a child are dropped last."""
        check_parents(branches, parents)
        tables = [self._tables.of(branch) for branch in branches]
        named = [branch.named for branch in branches]
        taken_over: set[int] = set()
        for branch, parent in zip(branches, parents, strict=True):
            branch.named = named[parent]
            if parent not in taken_over:
                branch.table = tables[parent]
                taken_over.add(parent)
                continue
            branch.table = self._tables.shared(tables[parent])
            if self._copying is not None:
                self._copying.owe(branch)
        for index, table in enumerate(tables):
            if index not in taken_over:
                self._tables.drop(table, branches[0].computed)


def leap_limit(calendar: DecodeCalendar, steps: int, block_size: int, free_blocks: int) -> int:
    """The largest number of decode steps, at least 1 and at most `steps`, whose blocks are free.

    The first step is scheduled already. Every row takes one block in `block_size` steps, so whole rounds are counted
    at once and only the last one is walked.
    """
    rounds = min(free_blocks // max(1, calendar.rows), (steps - 1) // block_size)
    allowed, left = 1 + rounds * block_size, free_blocks - rounds * calendar.rows
    for need in islice(calendar.due_rows(), min(steps - allowed, block_size)):
        left -= need
        if left < 0:
            break
        allowed += 1
    return allowed


def leap_columns(
    manager: "PagedManager", calendar: DecodeCalendar, steps: int, first: SlotUsage
) -> LeapColumns:
    """Take the blocks of `steps` decode steps after the first, step by step and row by row as single steps would."""
    taken = []
    pool, books = manager.pool, manager.tables.books
    for step in range(1, steps):
        for group in calendar.due(step):
            cached, internal = pool.cached_blocks, books.internal
            count = manager.append(group)
            taken.append((step, count, cached - pool.cached_blocks, books.internal - internal))
    manager.advance((steps - 1) * calendar.rows)
    return LeapColumns.of(first, steps - 1, manager.block_size, taken)
