"""The paged KV cache manager: block tables that grow block by block, share prefixes, and copy on write.

A plain model has one group of layers. Where layers keep different things, each group has block tables of its own, and
a block whose tokens have all left the window is released while its sequence runs.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import islice, takewhile

from engine.core.errors import CoreError, InvariantError
from engine.core.memory.block_pool import BlockPool, ResidencySampler, SampledPool
from engine.core.memory.block_tables import BlockTables, BlockWork, GroupTable, GroupTables, tables_of
from engine.core.memory.eviction import CheckpointRule, EvictionPolicy, LruQueue
from engine.core.memory.group_pages import PoolPages
from engine.core.memory.layer_groups import LayerGroups
from engine.core.memory.manager import FastForwardColumns, KVCacheManager, beyond_end, check_parents
from engine.core.memory.prefix_cache import LookupRecord, PrefixCache, RecentHits
from engine.core.memory.swapping import CopyAtFork, HostPool, Swapper
from engine.core.memory.tiers import SpillingQueue, TierHit, Tiers
from engine.core.options import Retention, SpeculationMode, WindowHits
from engine.core.plan import NO_LOADS, CopyList, Loads, SlotUsage, StaleList, SwapList
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
    * `tiers`: host memory and disk below the pool, which keep what it loses.
    * `residency`: follows a share of the blocks; None follows none.

    `of` makes one for layers in groups. `caches` has the prefix cache of each group, with its tables.
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
        eviction: EvictionPolicy | None = None,
        keep_events: bool = False,
        keep_lookups: bool = False,
        residency: ResidencySampler | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        if block_size < 1:
            raise CoreError(f"block size is {block_size} tokens, must be at least 1")
        if tiers is not None:
            eviction = SpillingQueue(LruQueue() if eviction is None else eviction, tiers)
        new_pool = BlockPool if residency is None else SampledPool
        self.residency = residency
        self.pool = new_pool(num_blocks, retention=retention, eviction=eviction, keep_events=keep_events)
        if residency is not None and isinstance(self.pool, SampledPool):
            self.pool.sampler = residency
        if eviction is not None:
            eviction.facts.block_size = block_size
        self._deduplicate, self._keeps_beams, self.tiers = deduplicate, keeps_beams, tiers
        self.lookups: list[LookupRecord] | None = [] if keep_lookups else None
        tables = BlockTables(self.pool, block_size)
        self._set_up([PrefixCache(tables, prefix_caching, deduplicate)], num_blocks, block_size, host_blocks)
        self.prefix_caching = prefix_caching
        self._copying = CopyAtFork(tables, self.pool) if copy_at_fork else None

    def _set_up(self, caches: list[PrefixCache], num_blocks: int, block_size: int, host_blocks: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.growth: int | None = block_size
        self.groups: LayerGroups | None = None
        self.caches = caches
        self.prefix_cache, self.tables = caches[0], caches[0].tables
        self.work = BlockWork()
        for cache in caches:
            cache.tables.work = self.work
        self.swapper = Swapper(caches, HostPool(host_blocks))
        self.recent_hits = RecentHits()
        self._looked_up: dict[Group, LookupRecord] = {}  # the last lookup, until its group is admitted
        self._numbers = 0  # that private blocks may have, given out so far

    @staticmethod
    def of(
        pages: PoolPages,
        *,
        most_chunk: int,
        prefix_caching: bool = True,
        window_hits: WindowHits = WindowHits.window,
        retention_interval: int | None = 0,
        host_slots: int = 0,
    ) -> "PagedManager":
        """A manager of layers in groups, over `pages`; see `LayerGroups`. `host_slots`: host memory for swapped groups.

        `retention_interval`: what of windows and states stays in the prefix cache, see `CheckpointRule`.
        `block_size` is the match unit then, `num_blocks` the pages of all pools. Draft tokens are refused beside
        states, which cannot be taken back, and requests that share their outputs. Nothing is fast-forwarded: a decode
        step can release a block behind a window, and then a request that waits may fit.
        """
        layout, manager = pages.layout, _OfGroups()
        manager.residency = manager.lookups = manager._copying = manager.tiers = None
        manager._deduplicate = manager._keeps_beams = False
        caches, rule = [], CheckpointRule(retention_interval, layout)
        for index, group in enumerate(layout.groups):
            keeps = partial(rule.kept, group, group.hit_blocks(window_hits))
            tables = BlockTables(pages.pools[index], group.block_size, group, pages.orders[index])
            cache = PrefixCache(tables, prefix_caching, index=index, unit=layout.match_unit, keeps=keeps)
            caches.append(cache)
        manager._set_up(caches, pages.num_pages, layout.match_unit, host_slots)
        manager.prefix_caching = prefix_caching
        manager.groups = LayerGroups(pages, caches, most_chunk=most_chunk, window_hits=window_hits)
        manager.growth = manager.groups.growth
        return manager

    def _parts(self, sequence: SequenceState) -> Sequence[SequenceState]:
        """What a sequence has in each group: of a plain model, the sequence itself."""
        return (sequence,) if self.groups is None else tables_of(sequence).of

    # -- admission -----------------------------------------------------------------------------------------

    def never_fits(self, request: Request) -> str | None:
        """Why no schedule can serve `request`, or None: at its end it needs more blocks than the pool has.

        A forked child with draft tokens needs more beside its parent.
        """
        speculation = request.speculation
        drafted = speculation is not None and (speculation.whole or request.output_tokens > 1)
        most = 2 * request.most_kv_tokens - request.final_kv_tokens
        needs = self._needs(request, request.width, most)
        if drafted and speculation and speculation.mode is SpeculationMode.fork:
            needs = [need + (1 if self._copying is None else need) for need in needs]
        if self.groups is None:
            if needs[0] <= self.num_blocks:
                return None
            return f"needs {needs[0]} blocks of {self.block_size} tokens, the pool has {self.num_blocks}"
        copies = self.groups.layout.inside  # a block inside which a hit ends is held beside its copy
        needs = [need + copies for need in needs]
        return self.groups.never_serves(request, drafted) or self.groups.pages.lacks_ever(needs)

    def _needs(self, request: Request, width: int, tokens: int) -> list[int]:
        """The most blocks of each group of layers for `width` branches of a request with `tokens` tokens each."""
        if self.groups is not None:
            return self.groups.needs(request, width, tokens, request.most_kv_tokens - request.final_kv_tokens)
        return [self.tables.most_blocks(request, width, tokens, shares=self._copying is None)]

    def lookup(self, group: Group) -> Sequence[int]:
        """Blocks of the longest cached prefix. At least one token is left to compute.

        It changes no block. Where lookups are kept, the last one before an admission is noted in `lookups`.
        """
        if self.groups is not None:
            return self.groups.find(group)
        asked = (group.root_target - 1) // self.block_size
        hits, missed = self.prefix_cache.find(group, asked)
        if self.lookups is not None and self.prefix_cache.serves(group.request):
            self._looked_up = {group: LookupRecord(group.request.request_id, asked, len(hits), missed)}
        if self.tiers is not None and len(hits) < asked:
            names = self.prefix_cache.names(group)
            if group.private:
                names = self.tiers.named(names, group.private, asked)
            return self.tiers.find(names, hits, asked)
        return hits

    def can_admit(
        self,
        group: Group,
        hits: Sequence[int],
        spare_blocks: int,
        tokens: int | None = None,
        chunk_end: int | None = None,
    ) -> bool:
        """Whether all known tokens of all branches (or the first `tokens`) fit. Hits that are free now count too.

        With groups the first chunk, which ends at `chunk_end`, must fit too, with the blocks that its windows leave.
        """
        width, whole = group.width, group.tokens
        if tokens is not None and tokens < group.root_target:
            width, whole = 1, tokens
        if self.groups is not None:
            return self.groups.can_admit(group, hits, spare_blocks, (width, whole), chunk_end)
        whole = max(whole, chunk_end or 0)  # draft tokens go further
        pool, (need,) = self.pool, self._needs(group.request, width, whole)
        held = hits.pool if type(hits) is TierHit else hits  # quicker than of an abstract class
        need += (pool.unreferenced(held) - len(held)) if held else 0
        return need + spare_blocks <= pool.free_blocks

    def admit(self, group: Group, hits: Sequence[int]) -> None:
        """Open tables with the hits. They get a reference first, so that the request cannot evict its own hits."""
        (root,) = group.sequences
        if type(hits) is TierHit:
            self._open_loaded(group, root, hits)
        elif self.groups is None:
            self.tables.open_hits(root, list(hits))
        else:
            self.groups.open_hits(root, hits)
        root.computed = len(hits) * self.block_size
        if served := self.prefix_cache.serves(group.request):
            private = group.private[-1] if group.private else self._new_numbers(group.request)
            for cache, own in zip(self.caches, self._parts(root), strict=True):
                cache.adopt(group, own, len(own.table), private)
        if self.lookups is not None and group in self._looked_up:
            self.lookups.append(self._looked_up.pop(group))
        if served and not group.lost:
            self.recent_hits.note(group.tokens, root.computed)

    def _open_loaded(self, group: Group, root: SequenceState, hit: TierHit) -> None:
        """Open a table with what the pool has, and blocks for what tiers have; those enter the prefix cache again."""
        assert self.tiers is not None
        self.tables.open_hits(root, list(hit.pool))
        loaded = self.tiers.load(hit, group.request, lambda: self.pool.take(hit.loaded))
        self.tables.append(group.request, self.tables.get(root), loaded)
        self.tables.wrote(len(loaded) * self.block_size)
        self.pool.cache_full_blocks(loaded, hit.keys[len(hit.pool) :])

    def _new_numbers(self, request: Request) -> int:
        """Numbers for the blocks of a request: as many for the prompt as for each branch, all that it could need."""
        first = self._numbers
        self._numbers += (1 + request.width) * request.final_kv_tokens
        return first

    # -- growth --------------------------------------------------------------------------------------------

    def can_extend(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether enough blocks are free for all new blocks and all copies of shared last blocks that `rows` need.

        With groups it releases what the windows of the sequences have left.
        """
        if self.groups is not None:
            return self.groups.can_extend(rows)
        size, need, request = self.block_size, 0, rows[0].sequence.request
        for sequence, query_len, _, _, ahead, _ in rows:
            need -= (-sequence.computed - query_len - ahead) // size + len(sequence.table)
        if self._copying is not None:
            need += self._copying.blocks_needed(request)
        elif request.width > 1 or request.speculation is not None:
            need += self.tables.copies_needed([row.sequence for row in rows])
        return need <= 0 or need <= self.pool.free_blocks

    def extend(self, row: ScheduledRow) -> int:
        """Allocate blocks for the row's tokens, and copy a shared partial last block. Returns how many blocks.

        With groups it first releases what the windows have left. Raises CoreError, and changes nothing, beyond the last
        token that the sequence computes.
        """
        sequence, query_len, _, drafts, ahead, unseen = row
        start, size, tables = sequence.computed, self.block_size, self.tables
        end = start + query_len
        if end > sequence.request.most_kv_tokens:
            raise beyond_end(sequence, end)
        if self.groups is not None:
            return self.groups.extend(row)
        if self._deduplicate:
            self.prefix_cache.deduplicate(sequence)
        taken = self._copying.copy_tables(sequence.request) if self._copying is not None else 0
        table = tables.get(sequence)
        if start % size and self.pool.references(table[-1]) > 1:
            tables.copy_tail(sequence, self.pool.take_one())
            taken += 1
        lacking = -((-end - ahead) // size) - len(table)
        if lacking == 1:
            tables.append_one(sequence.request, table, self.pool.take_one())
            taken += 1
        elif lacking > 0:
            tables.append(sequence.request, table, self.pool.take(lacking))
            taken += lacking
        tables.counters.written += query_len
        self.prefix_cache.cache_full(sequence, (end - drafts - unseen) // size)
        return taken

    def chunk_end(
        self, group: Group, start: int, end: int, most: int, hits: Sequence[int] | None = None
    ) -> int:
        """With groups, where a state can be kept. See `KVCacheManager.chunk_end`."""
        return end if self.groups is None else self.groups.chunk_end(group, start, end, most, hits)

    def can_append(self, group: Group) -> bool:
        """Whether every branch of a steady group can have what its next token needs. Releases as `can_extend` does."""
        if self.groups is None:
            return len(group.sequences) <= self.pool.free_blocks
        if all(sequence.computed < tables_of(sequence).due for sequence in group.sequences):
            return True
        return self.groups.can_extend([ScheduledRow(sequence, 1, True) for sequence in group.sequences])

    def append(self, group: Group) -> int:
        """Append a block to every branch of a steady group, whose last blocks are full; returns how many blocks.

        With groups a branch takes what it lacks. Raises CoreError, and changes nothing, beyond the last token that the
        group computes.
        """
        request, sequences = group.request, group.sequences
        if self.groups is not None:
            end = sequences[0].computed + 1
            if end > request.final_kv_tokens:
                raise beyond_end(sequences[0], end)
            return sum(self.groups.grow(each, end) for each in sequences if end > tables_of(each).due)
        tables, end = self.tables, len(sequences[0].table) * self.block_size + 1
        if end > request.final_kv_tokens:
            raise beyond_end(sequences[0], end)
        for sequence in sequences:
            table = tables.get(sequence)
            if self._deduplicate:
                self.prefix_cache.deduplicate(sequence)
            tables.append_one(request, table, self.pool.take_one())
        return len(sequences)

    def advance(self, calendar: DecodeCalendar) -> None:
        """Count the tokens that steady groups write in the step that is being scheduled, and cache blocks they fill.

        Other requests hit these blocks in the same step, as they do those of prompts. Blocks of private outputs are
        cached when they are released: only their own request could find them.
        """
        if self.groups is None:
            self.tables.counters.written += calendar.rows
        else:
            self.groups.advance(calendar)
        if not calendar.sharing:
            return
        for group in calendar.due(1):
            if group.shares_outputs:
                for sequence in group.sequences:
                    self.prefix_cache.cache_full(sequence, len(sequence.table))

    # -- sharing -------------------------------------------------------------------------------------------

    def fork(self, parent: SequenceState, children: Sequence[SequenceState]) -> None:
        """Let children share the parent's blocks. A partial last block is copied when a branch writes to it."""
        parts = self._parts(parent)
        for child in children:
            if self.groups is not None:
                tables = tables_of(parent)
                copies = [GroupTable(child, part.hits, part.junction) for part in tables.of]
                child.table = GroupTables(copies, tables.due)
            for cache, part, own in zip(self.caches, parts, self._parts(child), strict=True):
                part.branch = parent.branch  # that of a root is settled when it forks
                cache.tables.fork(part, own)
            if self._copying is not None:
                self._copying.add(child)

    def reparent(self, branches: Sequence[SequenceState], parents: Sequence[int]) -> None:
        """Give branch i the blocks of branch `parents[i]`. Tables of parents without a child are dropped last."""
        check_parents(branches, parents)
        if self._keeps_beams:
            return
        for cache, *parts in zip(self.caches, *map(self._parts, branches), strict=True):
            for branch in cache.tables.reparent(parts, parents):
                if self._copying is not None:
                    self._copying.add(branch)

    def promote(self, sequence: SequenceState, child: SequenceState) -> None:
        """Release the blocks of `sequence` and give it the table of `child`."""
        self._release_table(sequence, ends=False)
        sequence.computed = child.computed
        if self.groups is None:
            self.tables.take_over(child, sequence)
            return
        tables = tables_of(child)
        for part in tables.of:
            part.sequence, part.branch = sequence, sequence.branch
        sequence.table, child.table = tables, ()

    def truncate(self, sequence: SequenceState, tokens: int) -> int:
        """Keep at most the first `tokens` computed tokens. Later blocks are dropped, later slots become void.

        A shared partial last block is dropped whole, because the other sequences still need its slots. Returns the
        number of tokens kept, the new `sequence.computed`. Raises CoreError if `tokens` is out of range, or where a
        window or a state cannot be brought back.
        """
        computed, caches = sequence.computed, self.caches
        parts = self._parts(sequence)
        tables = [cache.tables for cache in caches]
        tables[0].get(parts[0])
        if not 0 <= tokens <= computed:
            raise CoreError(f"{sequence}: cut to {tokens} tokens, it has {computed}")
        if tokens == computed:
            return tokens
        kept, wanted = tokens, tokens + 1
        while kept < wanted:
            wanted = kept
            kept = min(each.kept(part, kept) for each, part in zip(tables, parts, strict=True))
        for each, part in zip(tables, parts, strict=True):
            if each.keeps_states or (each.group and each.group.skipped(kept) < part.held):
                raise CoreError(
                    f"{sequence}: cut to {kept} tokens; what a window or a state has left cannot come back"
                )
        for each, part in zip(tables, parts, strict=True):
            each.truncate(part, kept)
        sequence.computed = kept
        return kept

    def release(self, sequence: SequenceState) -> None:
        """Drop all references, group by group. In the cache, the first blocks of a table are evicted last."""
        self._cache_computed(sequence)
        self._release_table(sequence)

    def _cache_computed(self, sequence: SequenceState, unseen: int = 0) -> None:
        if self.groups is None:
            self.prefix_cache.cache_computed(sequence, unseen)
            return
        for cache, part in zip(self.caches, self._parts(sequence), strict=True):
            cache.cache_computed(part)

    def _release_table(self, sequence: SequenceState, *, ends: bool = True) -> None:
        if self._copying is not None:
            self._copying.forget(sequence)
        if self._deduplicate:
            self.prefix_cache.forget(sequence)
        if self.tiers is not None and ends:
            known = map(self.pool.hash_of, sequence.table[: sequence.cached_blocks])
            hashes = list(takewhile(lambda each: each is not None, known))
            self.tiers.released(hashes, sequence.table, sequence.request)
        for cache, part in zip(self.caches, self._parts(sequence), strict=True):
            cache.tables.close(part)
        sequence.table = []

    # -- making room ---------------------------------------------------------------------------------------

    def preempt(self, group: Group, unseen: int = 0) -> None:
        """Release all blocks of the group. The next lookup finds again what is still cached.

        Of chunks nothing is, where nobody else had a page: cached pages that lie scattered were in its way.
        """
        for sequence in group.sequences:
            self._cache_computed(sequence, unseen)
        root = self._parts(group.sequences[0])
        private = self.groups or any(part.cached_blocks > len(part.block_hashes) for part in root)
        if private and root[0].private not in group.private:
            group.private.append(root[0].private)
        for sequence in reversed(group.holders):
            self._release_table(sequence)
        if self.groups is not None and self.groups.scatters and not self.groups.pages.live_pages:
            self.groups.pages.reset()

    def _by_group(self, group: Group) -> list[Sequence[SequenceState]]:
        """What the sequences have, by group of layers."""
        return list(zip(*map(self._parts, group.sequences), strict=True))

    def _sizes(self) -> list[int]:
        """Host memory of a block of each group."""
        if self.groups is None:
            return [1]
        return [self.groups.layout.page_slots(index) for index in range(len(self.caches))]

    def can_swap_out(self, group: Group) -> bool:
        """Whether host memory has room for the whole group."""
        return self.swapper.can_swap_out(self._by_group(group), self._sizes())

    def swap_out(self, group: Group) -> None:
        """Save the whole group in host memory, without what its windows have left."""
        if self.groups is not None:
            for sequence in group.sequences:
                self.groups.release_behind(sequence)
        self.swapper.swap_out(group, self._by_group(group), self._sizes())

    def can_swap_in(self, group: Group, spare_blocks: int) -> bool:
        """Whether the group's blocks and those of its next step fit, with `spare_blocks` left over."""
        copies = None if self._copying is None else self._copying.blocks_needed(group.request)
        needs = self.swapper.blocks_needed(group, self._by_group(group), copies)
        if self.groups is not None:
            return self.groups.pages.fits(needs, None, spare_blocks)
        return needs[0] + spare_blocks <= self.pool.free_blocks

    def swap_in(self, group: Group) -> None:
        """Bring the whole group back."""
        counts = self.swapper.saved_blocks(group)
        if self.groups is None:
            taken = [self.pool.take(counts[0])]
        else:
            self.groups.expected = [0] * len(counts)
            taken = self.groups.take(counts, group.request)
        self.swapper.swap_in(group, self._by_group(group), taken)

    def forget_swapped(self, group: Group) -> None:
        """Free the host blocks of a swapped group that will not come back."""
        self.swapper.forget(group)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; raises CoreError, with nothing changed, while a block is in use."""
        if self.groups is None:
            self.pool.reset()
            if self.tiers is not None:
                self.tiers.reset()
        else:
            self.groups.pages.reset()

    # -- fast-forward --------------------------------------------------------------------------------------

    def fast_forward_limit(self, calendar: DecodeCalendar, steps: int) -> int:
        """How many decode steps, at least 1 and at most `steps`, can run with the free blocks; with groups always 1.

        The first step is scheduled already. Every row needs one block per `block_size` steps. So full rounds of
        `block_size` steps are counted at once, and only the last round is counted step by step.
        """
        if self.groups is not None:
            return 1
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
        """Allocate the blocks of `steps` decode steps except the first, in the same order as single steps do.

        Raises CoreError with groups.
        """
        if self.groups is not None:
            raise CoreError(f"{steps} steps at once: a cache with groups takes one step at a time")
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

    # -- what a step tells ---------------------------------------------------------------------------------

    def usage(self, head: Request | None) -> SlotUsage:
        """Slots by state. In one pool any free block serves any request, so nothing is external.

        With groups: in slots of `layout.slot_bytes`; free pages of a pool are external where another is full.
        """
        if self.groups is not None:
            needs = None if head is None else self.groups.needs(head, 1, head.prompt_tokens)
            return self.groups.account.usage(needs)
        size, counters, pool = self.block_size, self.tables.counters, self.pool
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

    def drain_copies(self) -> CopyList:
        """(source, destination) copies of blocks to run before the next forward pass.

        The step is planned: states that it writes can be hit from now on.
        """
        if self.groups is not None:
            self.groups.fresh_states.clear()
            self.groups.fresh_tokens.clear()
            for cache in self.caches:
                cache.tables.release_copied()
        copies, self.work.copies = self.work.copies, []
        return copies

    def drain_frees(self) -> list[int]:
        """Blocks that were released without a hash, and evicted blocks."""
        return self.pool.drain_voided() if self.groups is None else self.groups.pages.drain_voided()

    def drain_stale(self) -> StaleList:
        """Slots (block, first, end) of blocks in use that became void."""
        stale, self.work.stale = self.work.stale, []
        return stale

    def drain_loads(self) -> Loads:
        """What was read from tiers."""
        return NO_LOADS if self.tiers is None else self.tiers.drain_loads()

    def drain_swaps(self) -> tuple[SwapList, SwapList]:
        """(device, host) blocks to save, (host, device) blocks to bring back: of swapped groups, then of a tier."""
        swapper = self.swapper
        saved, brought = swapper.pending_out, swapper.pending_in
        swapper.pending_out, swapper.pending_in = [], []
        if self.tiers is not None:
            written, read = self.tiers.drain_copies()
            return saved + written, brought + read
        return saved, brought

    def check(self) -> None:
        """Compare every counter with a recount over the live tables. Call it between steps. Raises InvariantError."""
        entries: Counter[int] = Counter()
        for cache in self.caches:
            entries += cache.tables.check()
        usage = self.usage(None)
        if self.tiers is not None:
            self.tiers.check()
        if self.groups is None:
            self.pool.check(dict(entries))
            whole = self.pool.num_blocks * self.block_size
        else:
            self.groups.pages.check(entries)
            whole = self.groups.pages.slots()[0]
        if min(usage.reserved, usage.free) < 0 or usage.capacity != whole:
            raise InvariantError(f"slot states do not add up to {whole}: {usage}")


class _OfGroups(PagedManager):
    """What `PagedManager.of` fills: mypyc makes no object without its constructor."""

    def __init__(self) -> None: ...


def layer_groups(manager: KVCacheManager) -> LayerGroups | None:
    """The groups of layers that `manager` serves, None where a sequence has one table."""
    return manager.groups if isinstance(manager, PagedManager) else None


def host_memory(manager: KVCacheManager) -> int:
    """The blocks of host memory that copies of `manager` name: of swapped groups, and of a tier."""
    if not isinstance(manager, PagedManager):
        return 0
    return manager.swapper.host.num_blocks + (0 if manager.tiers is None else manager.tiers.host_blocks)
