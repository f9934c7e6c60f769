"""The paged KV cache manager: block tables that grow block by block, share prefixes, and copy on write.

`PagedManager` comes first. Below it are its parts: copies at forks, and swapping: all blocks of a
preempted group are saved in host memory, completely or not at all, and come back later.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import islice

from engine.core.errors import CoreError, OutOfBlocksError, UnknownSequenceError
from engine.core.memory.block_pool import BlockPool, ResidencySampler, SampledPool
from engine.core.memory.block_tables import BlockTables
from engine.core.memory.eviction import EvictionQueue, KeepQueue
from engine.core.memory.manager import FastForwardColumns, beyond_end, check_parents
from engine.core.memory.prefix_cache import LookupRecord, PrefixCache, RecentHits
from engine.core.options import Retention, SpeculationMode
from engine.core.plan import CopyList, SlotUsage, StaleList, SwapList
from engine.core.request import Request
from engine.core.sequence import DecodeCalendar, Group, ScheduledRow, SequenceState


class PagedManager:
    """The KV cache manager with paged memory: block tables over one pool. See `KVCacheManager` for the methods.

    * `num_blocks`, `block_size`: blocks in the pool, and tokens per block.
    * `prefix_caching`, `retention`, `eviction`: whether released blocks stay findable, how long, and in which order
      they are evicted (None: least recently used).
    * `deduplicate`: replace a new block by an older one with the same hash.
    * `copy_at_fork`: branches never share a block. The comparison shows what copy-on-write saves.
    * `keeps_beams`: beams share their prompt alone and keep the blocks that they write, whoever their parent is. An
      indirection table would say whose tokens a beam continues; there is none, so this is for predictions.
    * `host_blocks`: blocks of host memory for swapped groups.
    * `keep_events`, `keep_lookups`: record changes of the prefix cache (`pool.drain_events`) and lookups (`lookups`).
    * `residency`: follows a share of the blocks; None follows none.
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
        keeps_beams: bool = False,
        host_blocks: int = 0,
        eviction: EvictionQueue | None = None,
        keep_events: bool = False,
        keep_lookups: bool = False,
        residency: ResidencySampler | None = None,
    ) -> None:
        if block_size < 1:
            raise CoreError(f"block size is {block_size} tokens, must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.growth: int | None = block_size
        self.prefix_caching = prefix_caching
        self._deduplicate = deduplicate
        new_pool = BlockPool if residency is None else partial(SampledPool, sampler=residency)
        self.residency = residency
        self.pool = new_pool(num_blocks, retention=retention, eviction=eviction, keep_events=keep_events)
        self.keeping = eviction if isinstance(eviction, KeepQueue) else None
        self.tables = BlockTables(self.pool, block_size)
        self.prefix_cache = PrefixCache(self.tables, prefix_caching, deduplicate, copying=copy_at_fork)
        self.swapper = Swapper(self.tables, self.prefix_cache, HostPool(host_blocks))
        self._copying = CopyAtFork(self.tables) if copy_at_fork else None
        self._keeps_beams = keeps_beams
        self.lookups: list[LookupRecord] | None = [] if keep_lookups else None
        self.recent_hits = RecentHits()
        self._looked_up: dict[Group, LookupRecord] = {}  # the last lookup, until its group is admitted

    # -- admission -----------------------------------------------------------------------------------------

    def never_fits(self, request: Request) -> str | None:
        """Why no schedule can serve `request`, or None: at its end it needs more blocks than the pool has.

        A forked child with draft tokens needs more beside its parent.
        """
        blocks = self._blocks(request, request.width, request.final_kv_tokens)
        speculation = request.speculation
        if speculation and speculation.mode is SpeculationMode.fork and request.output_tokens > 1:
            blocks += 1 if self._copying is None else blocks
        if blocks <= self.num_blocks:
            return None
        return f"needs {blocks} blocks of {self.block_size} tokens, the pool has {self.num_blocks}"

    def _blocks(self, request: Request, width: int, tokens: int) -> int:
        """Blocks of `width` branches with `tokens` tokens each. Branches share only the full blocks of their prompt."""
        shared = request.prompt_tokens // self.block_size if width > 1 and self._copying is None else 0
        return shared + width * (-(-tokens // self.block_size) - shared)

    def lookup(self, group: Group) -> list[int]:
        """Blocks of the longest cached prefix. At least one token is left to compute.

        It changes no block. Where lookups are kept, the last one before an admission is noted in `lookups`.
        """
        asked = (group.root_target - 1) // self.block_size
        hits, missed = self.prefix_cache.find(group, asked)
        if self.lookups is not None and self.prefix_cache.serves(group.request):
            self._looked_up = {group: LookupRecord(group.request.request_id, asked, len(hits), missed)}
        return hits

    def can_admit(
        self,
        group: Group,
        hits: Sequence[int],
        spare_blocks: int,
        tokens: int | None = None,
        chunk_end: int | None = None,
    ) -> bool:
        """Whether all known tokens of all branches (or the first `tokens`) fit. Hits that are free now count too."""
        pool = self.pool
        if tokens is not None and tokens < group.root_target:
            need = self.tables.blocks_of(tokens)
        else:
            need = self._blocks(group.request, group.width, group.tokens)
        need += (pool.unreferenced(hits) - len(hits)) if hits else 0
        return need + spare_blocks <= pool.free_blocks

    def admit(self, group: Group, hits: Sequence[int]) -> None:
        """Open a table with the hits. They get a reference first, so that the request cannot evict its own hits."""
        (root,) = group.sequences
        counters = self.tables.counters
        if hits:
            counters.written += self.pool.share(hits) * self.block_size
            counters.entries += len(hits)
        root.computed = len(hits) * self.block_size
        self.prefix_cache.adopt(group, root, len(hits))
        self.tables.open(root, list(hits))
        if self.lookups is not None and group in self._looked_up:
            self.lookups.append(self._looked_up.pop(group))
        if self.prefix_cache.serves(group.request):
            self.recent_hits.note(group.tokens, len(hits) * self.block_size)

    # -- growth --------------------------------------------------------------------------------------------

    def can_extend(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether enough blocks are free for all new blocks and all copies of shared last blocks that `rows` need."""
        size, need, request = self.block_size, 0, rows[0].sequence.request
        for sequence, query_len, _, _ in rows:
            need -= (-sequence.computed - query_len) // size + len(sequence.table)
        if self._copying is not None:
            need += self._copying.blocks_needed(request)
        elif request.width > 1 or request.speculation is not None:
            need += self._tail_copies(rows)
        return need <= 0 or need <= self.pool.free_blocks

    def _tail_copies(self, rows: Sequence[ScheduledRow]) -> int:
        """Copies of shared partial last blocks: each writer copies, but the last one to refer to it writes in place."""
        tails = [row.sequence.table[-1] for row in rows if row.sequence.computed % self.block_size]
        return sum(min(tails.count(block), self.pool.references(block) - 1) for block in set(tails))

    def extend(self, row: ScheduledRow) -> int:
        """Allocate blocks for the row's tokens, and copy a shared partial last block. Returns how many blocks.

        Raises CoreError, and changes nothing, beyond the last token that the sequence computes.
        """
        sequence, query_len, _, drafts = row
        start, size, tables = sequence.computed, self.block_size, self.tables
        if start + query_len > sequence.request.final_kv_tokens:
            raise beyond_end(sequence, start + query_len)
        if self._deduplicate:
            self.prefix_cache.deduplicate(sequence)
        taken = self._copying.copy_tables(sequence.request) if self._copying is not None else 0
        end, table = start + query_len, tables.get(sequence)
        if start % size and self.pool.references(table[-1]) > 1:
            tables.copy_tail(sequence, table)
            taken += 1
        lacking = -(-end // size) - len(table)
        if lacking > 0:
            tables.append(sequence.request, table, lacking)
            taken += lacking
        tables.counters.written += query_len
        self.prefix_cache.cache_full(sequence, (end - drafts) // size)
        return taken

    def can_append(self, group: Group) -> bool:
        """Whether every branch of a steady group can have one more block."""
        return len(group.sequences) <= self.pool.free_blocks

    def append(self, group: Group) -> int:
        """Append a block to every branch of a steady group, whose last blocks are full.

        Raises CoreError, and changes nothing, beyond the last token that the group computes.
        """
        tables, request, sequences = self.tables, group.request, group.sequences
        end = len(sequences[0].table) * self.block_size + 1
        if end > request.final_kv_tokens:
            raise beyond_end(sequences[0], end)
        for sequence in sequences:
            table = tables.get(sequence)
            if self._deduplicate:
                self.prefix_cache.deduplicate(sequence)
            tables.append_one(request, table)
        return len(sequences)

    def advance(self, calendar: DecodeCalendar) -> None:
        """Count the tokens that steady groups write in the step that is being scheduled, and cache blocks they fill.

        Other requests hit these blocks in the same step, as they do those of prompts. Blocks of private outputs are
        cached when they are released: only their own request could find them.
        """
        self.tables.counters.written += calendar.rows
        if not calendar.sharing:
            return
        for group in calendar.due(1):
            if group.shares_outputs:
                for sequence in group.sequences:
                    self.prefix_cache.cache_full(sequence, len(sequence.table))

    # -- sharing -------------------------------------------------------------------------------------------

    def fork(self, parent: SequenceState, children: Sequence[SequenceState]) -> None:
        """Let children share the parent's blocks. A partial last block is copied when a branch writes to it."""
        table = self.tables.get(parent)
        for child in children:
            child.block_hashes, child.cached_blocks = parent.block_hashes, parent.cached_blocks
            self.tables.open(child, self.tables.share_table(table))
            if self._copying is not None:
                self._copying.add(child)

    def reparent(self, branches: Sequence[SequenceState], parents: Sequence[int]) -> None:
        """Give branch i the blocks of branch `parents[i]`. Tables of parents without a child are dropped last."""
        check_parents(branches, parents)
        if self._keeps_beams:
            return
        tables = [self.tables.get(branch) for branch in branches]
        cached = [branch.cached_blocks for branch in branches]
        taken_over: set[int] = set()
        for branch, parent in zip(branches, parents, strict=True):
            branch.cached_blocks = cached[parent]
            if parent not in taken_over:
                branch.table = tables[parent]
                taken_over.add(parent)
                continue
            branch.table = self.tables.share_table(tables[parent])
            if self._copying is not None:
                self._copying.add(branch)
        for index, table in enumerate(tables):
            if index not in taken_over:
                self.tables.drop(table, branches[0].computed)

    def promote(self, sequence: SequenceState, child: SequenceState) -> None:
        """Release the blocks of `sequence` and give it the table of `child`."""
        self._release_table(sequence)
        sequence.computed, sequence.cached_blocks = child.computed, child.cached_blocks
        sequence.block_hashes = child.block_hashes
        self.tables.move_table(child, sequence)

    def truncate(self, sequence: SequenceState, tokens: int) -> int:
        """Keep at most `tokens` computed tokens; returns how many are kept (see `BlockTables.truncate`)."""
        return self.tables.truncate(sequence, tokens)

    def release(self, sequence: SequenceState) -> None:
        """Drop all references. In the cache, the first blocks of the table are evicted last."""
        self.prefix_cache.cache_computed(sequence)
        self._release_table(sequence)

    def _release_table(self, sequence: SequenceState) -> None:
        if self._copying is not None:
            self._copying.forget(sequence)
        self.prefix_cache.forget(sequence)
        if self.keeping is not None:
            self.keeping.owner = sequence.request
        self.tables.close(sequence)

    # -- making room ---------------------------------------------------------------------------------------

    def preempt(self, group: Group) -> None:
        """Release all blocks of the group. The next lookup finds again what is still cached."""
        for sequence in group.sequences:
            self.prefix_cache.cache_computed(sequence)
        self.prefix_cache.remember_private_blocks(group)
        for sequence in reversed(group.holders):
            self._release_table(sequence)

    def can_swap_out(self, group: Group) -> bool:
        """Whether host memory has room for the whole group."""
        return self.swapper.can_swap_out(group)

    def swap_out(self, group: Group) -> None:
        """Save the whole group in host memory."""
        self.swapper.swap_out(group)

    def can_swap_in(self, group: Group, spare_blocks: int) -> bool:
        """Whether the group's blocks and those of its next step fit, with `spare_blocks` left over."""
        copies = None if self._copying is None else self._copying.blocks_needed(group.request)
        return self.swapper.blocks_needed(group, copies) + spare_blocks <= self.pool.free_blocks

    def swap_in(self, group: Group) -> None:
        """Bring the whole group back."""
        self.swapper.swap_in(group)

    def forget_swapped(self, group: Group) -> None:
        """Free the host blocks of a swapped group that will not come back."""
        self.swapper.forget(group)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; raises CoreError, with nothing changed, while a block is in use."""
        self.pool.reset()

    # -- fast-forward --------------------------------------------------------------------------------------

    def fast_forward_limit(self, calendar: DecodeCalendar, steps: int) -> int:
        """How many decode steps, at least 1 and at most `steps`, can run with the free blocks.

        The first step is scheduled already. Every row needs one block per `block_size` steps. So full rounds of
        `block_size` steps are counted at once, and only the last round is counted step by step.
        """
        size, free_blocks = self.block_size, self.pool.free_blocks
        rounds = min(free_blocks // max(1, calendar.rows), (steps - 1) // size)
        allowed, left = 1 + rounds * size, free_blocks - rounds * calendar.rows
        for need in islice(calendar.due_rows(), min(steps - allowed, size)):
            left -= need
            if left < 0:
                break
            allowed += 1
        return allowed

    def fast_forward(self, calendar: DecodeCalendar, steps: int, first: SlotUsage) -> FastForwardColumns:
        """Allocate the blocks of `steps` decode steps except the first, in the same order as single steps do."""
        taken = []
        pool, counters = self.pool, self.tables.counters
        for step in range(1, steps):
            for group in calendar.due(step):
                cached, internal = pool.cached_blocks, counters.internal
                count = self.append(group)
                taken.append((step, count, cached - pool.cached_blocks, counters.internal - internal))
        counters.written += (steps - 1) * calendar.rows
        pool.drain_voided()  # blocks evicted during the fast-forward; the columns count them
        return FastForwardColumns.of(first, steps - 1, self.block_size, taken)

    def usage(self, head: Request | None) -> SlotUsage:
        """Slots by state. Any free block serves any request, so nothing is external."""
        return self.tables.usage()

    def drain_copies(self) -> CopyList:
        """(source, destination) copies of blocks to run before the next forward pass."""
        copies, self.tables.copies = self.tables.copies, []
        return copies

    def drain_frees(self) -> list[int]:
        """Blocks that were released without a hash, and evicted blocks."""
        return self.pool.drain_voided()

    def drain_stale(self) -> StaleList:
        """Slots (block, first, end) of blocks in use that became void."""
        stale, self.tables.stale = self.tables.stale, []
        return stale

    def chunk_end(
        self, group: Group, start: int, end: int, most: int, hits: Sequence[int] | None = None
    ) -> int:
        """As far as it may go."""
        return end

    def drain_swaps(self) -> tuple[SwapList, SwapList]:
        """(device, host) blocks to save, (host, device) blocks to bring back."""
        swapper = self.swapper
        swaps = swapper.pending_out, swapper.pending_in
        swapper.pending_out, swapper.pending_in = [], []
        return swaps

    def check(self) -> None:
        """Compare every counter with a recount over the live tables. Call it between steps."""
        self.tables.check()


class CopyAtFork:
    """Gives every branch blocks of its own, for comparison with copy-on-write.

    A fork happens when a step is committed, but copies run with the next step. So a child refers to its parent's
    blocks at first, and gets copies when the request is scheduled next. No branch writes before that.
    """

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._pending: defaultdict[int, list[SequenceState]] = defaultdict(list)

    def add(self, child: SequenceState) -> None:
        """Note that `child` refers to blocks of another branch and needs copies."""
        self._pending[child.request.request_id].append(child)

    def blocks_needed(self, request: Request) -> int:
        """How many blocks the copies for the request's children need."""
        pending = self._pending.get(request.request_id, ())
        return sum(len(child.table) for child in pending)

    def copy_tables(self, request: Request) -> int:
        """Give all children of the request copies; returns how many blocks were allocated."""
        taken = 0
        for child in self._pending.pop(request.request_id, ()):
            table = self._tables.get(child)
            copies = self._tables.copy_table(request, table, child.computed)
            self._tables.drop(table, child.computed)
            child.table = copies
            taken += len(copies)
        return taken

    def forget(self, sequence: SequenceState) -> None:
        """`sequence` releases its blocks and needs no copies any more."""
        pending = self._pending.get(sequence.request.request_id, [])
        if sequence in pending:
            pending.remove(sequence)


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
