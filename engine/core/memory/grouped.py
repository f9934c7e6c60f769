"""The KV cache manager of models whose layers keep different things: a block table for each group of layers.

A block whose tokens have all left the window is released while its sequence runs. A prefix is hit as far as every group
has what the next token needs: all blocks, those of the last window, or the state at the end. Facts of vLLM's
`HybridKVCacheCoordinator` and `SingleTypeKVCacheManager` (0.33) are named where they decide.
"""

from collections import Counter
from collections.abc import Container, Sequence
from itertools import count
from math import gcd

from engine.core.errors import CoreError, InvariantError, UnknownSequenceError
from engine.core.memory.contiguous import NeverSwaps
from engine.core.memory.eviction import CheckpointRule
from engine.core.memory.group_chunks import ChunkPages
from engine.core.memory.group_layout import GroupLayout, KVGroup
from engine.core.memory.group_memory import MemoryPages
from engine.core.memory.group_pages import (
    NO_PAGE,
    GroupCounters,
    GroupKey,
    GroupKeys,
    GroupTables,
    GroupUsage,
    GroupWaste,
    PoolPages,
    PrefixHit,
    check_table,
)
from engine.core.memory.manager import FastForwardColumns, beyond_end
from engine.core.options import GroupKind, GroupPages, Retention, WindowHits
from engine.core.plan import CopyList, SlotUsage, StaleList
from engine.core.request import Request
from engine.core.sequence import DecodeCalendar, Group, ScheduledRow, SequenceState


def pages_of(
    layout: GroupLayout,
    counts: Sequence[int],
    *,
    retention: Retention = Retention.lru,
    behind_first: bool = False,
) -> PoolPages | MemoryPages:
    """Empty pages of a layout; `counts` as `GroupLayout.page_counts` has them."""
    if layout.pages is GroupPages.lcm:
        return ChunkPages(layout, counts[0], retention=retention, behind_first=behind_first)
    return PoolPages(layout, counts, retention=retention, behind_first=behind_first)


class GroupedManager(NeverSwaps):
    """The KV cache manager with groups. See `KVCacheManager` for the methods.

    `block_size` is the match unit, `num_blocks` the pages of all pools. `most_chunk` is the largest chunk of a prompt,
    in tokens: with it a window's sequence is known to hold no more than its window and a chunk. `retention_interval`:
    what of windows and states stays in the prefix cache, see `CheckpointRule`. Requests have one
    sequence, without drafts; others are refused. Nothing is fast-forwarded: a decode step can release a block behind a
    window, and then a request that waits may fit.
    """

    def __init__(
        self,
        layout: GroupLayout,
        pages: PoolPages | MemoryPages,
        *,
        most_chunk: int,
        prefix_caching: bool = True,
        window_hits: WindowHits = WindowHits.window,
        retention_interval: int | None = 0,
    ) -> None:
        if most_chunk < 1:
            raise CoreError(f"the largest chunk is {most_chunk} tokens, must be at least 1")
        self.layout, self.pages = layout, pages
        self.num_blocks = pages.num_pages
        self.block_size = layout.match_unit
        self.growth: int | None = _due_every(layout.groups)
        self.prefix_caching = prefix_caching
        self._most_chunk = most_chunk
        self._needed = [group.hit_blocks(window_hits) for group in layout.groups]
        self._checkpoints = CheckpointRule(retention_interval, layout.match_unit)
        whole = [index for index, needed in enumerate(self._needed) if needed is None]
        self._order = whole, [index for index in range(len(layout.groups)) if index not in whole]
        first = layout.groups[(whole or self._order[1])[0]]
        self._first = [index for index, group in enumerate(layout.groups) if group.keeps_as(first)]
        self._tables: dict[SequenceState, GroupTables] = {}
        self._numbers = count(1)
        self._aligned_tokens = next((g.block_size for g in layout.groups if g.aligned and prefix_caching), 0)
        self._states = [i for i, group in enumerate(layout.groups) if group.kind is GroupKind.state]
        self._fresh_states: set[GroupKey] = set()  # of states that the step being scheduled writes
        self.counters = GroupCounters(layout)

    # -- admission -----------------------------------------------------------------------------------------

    def never_fits(self, request: Request) -> str | None:
        """Why no schedule can serve `request`, or None: several sequences, drafts, or too many pages at its end."""
        if request.width > 1 or request.speculation is not None:
            what = f"has {request.width} sequences" if request.width > 1 else "has draft tokens"
            return f"{what}, which a cache with groups does not serve"
        if request.identity is not None and request.identity.shares_outputs:
            return "shares its outputs through the prefix cache, which a cache with groups does not serve"
        final = request.final_kv_tokens
        return self.pages.lacks_ever(
            [group.most_blocks(final, self._most_chunk) for group in self.layout.groups]
        )

    def lookup(self, group: Group) -> PrefixHit:
        """The longest prefix of which every group has what it needs. At least one token is left to compute."""
        identity = group.request.identity
        if not self.prefix_caching or identity is None:
            return PrefixHit(0, [[] for _ in self.layout.groups])
        keys = group.block_hashes
        if not isinstance(keys, GroupKeys):
            keys = group.block_hashes = GroupKeys(identity, self.layout.groups, next(self._numbers))
        asked = (group.root_target - 1) // self.block_size * self.block_size
        tokens, longest = self._hit_tokens(keys, asked)
        junction = longest if longest > tokens else 0
        return PrefixHit(tokens // self.block_size, self._hit_pages(keys, tokens), junction)

    def _hit_tokens(self, keys: GroupKeys, asked: int) -> tuple[int, int]:
        """The longest hit of at most `asked` tokens, and the longest of the groups that are looked up first.

        Each group in turn shortens it, until none does. First are those that keep the same as the first of those that
        keep all, else of the windows.
        """
        tokens = longest = asked
        whole, windows = self._order
        for index in whole:
            size = self.layout.groups[index].block_size
            tokens = self._leading(keys, index, tokens // size) * size // self.block_size * self.block_size
            if index in self._first:
                longest = tokens
        if not whole:
            tokens = longest = self._settled(keys, tokens, self._first)
        return self._settled(keys, tokens, windows), longest

    def _settled(self, keys: GroupKeys, tokens: int, windows: Sequence[int]) -> int:
        """The longest hit, at most `tokens`, for which each of `windows` has what it needs."""
        before = 0
        while tokens != before:
            before = tokens
            for index in windows:
                tokens = self._last_run(keys, index, tokens, self._needed[index] or 0)
        return tokens

    def _leading(self, keys: GroupKeys, index: int, blocks: int) -> int:
        """How many leading blocks of a group are cached, at most `blocks`."""
        first = self.pages.first
        for found, key in enumerate(keys.upto(index, blocks)[:blocks]):
            if first(index, key) is None:
                return found
        return blocks

    def _last_run(self, keys: GroupKeys, index: int, tokens: int, needed: int) -> int:
        """The longest hit, at most `tokens`, whose last `needed` blocks of a group (or all) are cached."""
        size, first, unit = self.layout.groups[index].block_size, self.pages.first, self.block_size
        known = keys.upto(index, tokens // size)
        end = tokens
        block = end // size - 1
        while block >= max(0, end // size - needed):
            if first(index, known[block]) is None:  # no hit ends behind this block and needs it
                end = block * size // unit * unit
                block = end // size
            block -= 1
        return end

    def _hit_pages(self, keys: GroupKeys, tokens: int) -> list[list[int]]:
        """For each group the pages of the first `tokens` tokens that the next token needs."""
        found = []
        for index, group in enumerate(self.layout.groups):
            blocks, skipped = tokens // group.block_size, group.skipped(tokens)
            needed = (self.pages.first(index, key) for key in keys.upto(index, blocks)[skipped:blocks])
            found.append([*([NO_PAGE] * skipped), *(page for page in needed if page is not None)])
        return found

    def can_admit(
        self,
        group: Group,
        hits: Sequence[int],
        spare_blocks: int,
        tokens: int | None = None,
        chunk_end: int | None = None,
    ) -> bool:
        """Whether all known tokens (or the first `tokens`) fit, and the first chunk, which ends at `chunk_end`.

        A hit on a state that another request writes in this step waits for the next one, as in vLLM: a row must begin
        with its state.
        """
        hit = self._hit_of(hits)
        if self._fresh_states and isinstance(group.block_hashes, GroupKeys):
            ends = ((index, len(hit.pages[index])) for index in self._states if hit.pages[index])
            if any(group.block_hashes.upto(index, end)[end - 1] in self._fresh_states for index, end in ends):
                return False
        whole = group.root_target if tokens is None else min(tokens, group.root_target)
        start = len(hits) * self.block_size
        lasting: list[int] = []
        at_once: list[int] = []
        end = min(whole, start + self._most_chunk if chunk_end is None else chunk_end)
        for each in self.layout.groups:
            if each.aligned:  # the state that the first chunk ends with
                lasting.append(1)
                at_once.append(1)
                continue
            had = start // each.block_size
            lasting.append(max(0, each.most_blocks(whole, self._most_chunk) - had))
            at_once.append(max(0, each.blocks(end) - had))
        return all(self.pages.fits(needs, hit.pages, spare_blocks) for needs in (lasting, at_once))

    def _hit_of(self, hits: Sequence[int]) -> PrefixHit:
        if isinstance(hits, PrefixHit):
            return hits
        if len(hits):
            raise CoreError("a cache with groups is given hits that its lookup did not return")
        return PrefixHit(0, [[] for _ in self.layout.groups])

    def admit(self, group: Group, hits: Sequence[int]) -> None:
        """Open block tables with the hits. All groups refer to theirs first, so that none evicts another's."""
        (root,) = group.sequences
        hit = self._hit_of(hits)
        keys = group.block_hashes if isinstance(group.block_hashes, GroupKeys) else None
        resumes = group.request.prompt_tokens - 1, hit.junction
        tables = GroupTables([list(pages) for pages in hit.pages], list(map(len, hit.pages)), keys, resumes)
        for index, pages in enumerate(hit.pages):
            held = next((place for place, page in enumerate(pages) if page), len(pages))
            tables.held[index] = held
            revived = self.pages.share(index, pages[held:])
            self.counters.shared(index, len(pages) - held, revived)
        root.computed = len(hits) * self.block_size
        root.table = self._tables[root] = tables

    # -- growth --------------------------------------------------------------------------------------------

    def _of(self, sequence: SequenceState) -> GroupTables:
        if sequence not in self._tables:
            raise UnknownSequenceError(f"{sequence} holds no pages: never admitted, or released before")
        return self._tables[sequence]

    def _fits(self, sequence: SequenceState, tables: GroupTables, end: int) -> bool:
        """Whether the pages for tokens up to `end` are free, once those behind the windows are released.

        They are released at once where more pages are needed, also if the sequence is preempted then: so the order of
        eviction is vLLM's, whose `allocate_slots` calls `remove_skipped_blocks` before it counts what is free.
        """
        self._release_behind(sequence, tables)
        return self.pages.fits(self._lacking(tables, end))

    def _lacking(self, tables: GroupTables, end: int) -> list[int]:
        """Pages that each group lacks for tokens up to `end`."""
        lacking = (
            max(0, group.blocks(end) - len(table))
            for group, table in zip(self.layout.groups, tables.groups, strict=True)
        )
        groups = zip(lacking, self.layout.groups, strict=True)
        return [min(1, blocks) if group.aligned else blocks for blocks, group in groups]

    def can_extend(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether the pages that the rows need are free. Releases what the windows of the sequence have left."""
        (row,) = rows
        sequence = row.sequence
        return self._fits(sequence, self._of(sequence), sequence.computed + row.query_len)

    def extend(self, row: ScheduledRow) -> int:
        """Release what the windows have left, take pages for the row's tokens; returns how many pages.

        Raises CoreError, and changes nothing, beyond the last token that the sequence computes.
        """
        sequence, query_len = row.sequence, row.query_len
        end = sequence.computed + query_len
        if end > sequence.request.final_kv_tokens:
            raise beyond_end(sequence, end)
        tables = self._of(sequence)
        taken = self._grow(sequence, tables, end)
        self.counters.wrote(query_len)
        self._fresh_states.update(self._cache_full(tables, min(end, sequence.request.prompt_tokens)))
        return taken

    def _grow(self, sequence: SequenceState, tables: GroupTables, end: int) -> int:
        self._release_behind(sequence, tables)
        request = sequence.request
        needs = self._lacking(tables, end)
        for index, pages in enumerate(self.pages.take(needs, request.request_id) if any(needs) else ()):
            if pages:
                table, group = tables.groups[index], self.layout.groups[index]
                if group.aligned:
                    table += [NO_PAGE] * (group.blocks(end) - 1 - len(table))
                table += pages
                self.counters.took(index, len(pages), table[-1], len(table), request.final_kv_tokens)
        tables.due = min(map(self._next_change, self.layout.groups, tables.groups, tables.held))
        return sum(needs)

    @staticmethod
    def _next_change(group: KVGroup, table: Sequence[int], held: int) -> int:
        """How many computed tokens fill the table of a group, or let its window leave the next block."""
        full = len(table) * group.block_size
        return full if group.keeps is None else min(full, (held + 1) * group.block_size + group.keeps - 1)

    def chunk_end(
        self, group: Group, start: int, end: int, most: int, hits: Sequence[int] | None = None
    ) -> int:
        """See `KVCacheManager.chunk_end`. Source: `Scheduler._mamba_block_aligned_split` in vllm/v1/core/sched.

        A chunk ends where a state can be kept: at the end of a block, at the last one before the prompt's end, and at
        the junction. A block longer than the largest chunk is computed in several.
        """
        size = self._aligned_tokens
        request = group.request
        known = group.root_target
        last = max(request.prompt_tokens, known - 1)
        if not size or start >= last:
            return end
        if end < last:
            aligned = end // size * size
            if aligned > start or size <= most:
                end = aligned
        junction = 0
        if isinstance(hits, PrefixHit):
            junction = hits.junction
        elif hits is None:
            junction = self._of(group.sequences[0]).checkpoints[1]
        stops = [(known - 1) // size * size]
        if start % size:
            stops.append((start // size + 1) * size)
        if start < junction < end:
            stops.append(start + (junction - start) // size * size)
        return max(start, min([stop for stop in stops if start < stop < end], default=end))

    def _release_behind(self, sequence: SequenceState, tables: GroupTables) -> None:
        """Release the blocks that the next token does not see; full ones stay in the prefix cache."""
        start = sequence.computed
        whole = start // self.block_size * self.block_size
        for index, group in enumerate(self.layout.groups):
            table, held = tables.groups[index], tables.held[index]
            skipped = min(group.skipped(start), len(table))
            if skipped <= held:
                continue
            self._cache_group(tables, index, min(skipped, whole // group.block_size))
            self._drop_behind(tables, index, held, skipped)

    def _drop_behind(self, tables: GroupTables, index: int, held: int, skipped: int) -> None:
        table, hits = tables.groups[index], tables.hits[index]
        found = min(max(held, hits), skipped)  # blocks before it were hits: they have been of use
        for first, last, behind in ((found, skipped, True), (held, found, False)):  # the last block first
            pages = [page for page in table[first:last] if page]
            gone = self.pages.release(index, pages, behind=behind)
            self.counters.dropped(index, len(pages), gone, self.layout.groups[index].units * len(gone))
        table[held:skipped] = [NO_PAGE] * (skipped - held)
        tables.held[index] = skipped

    def can_append(self, group: Group) -> bool:
        """Whether the pages are free that a steady sequence needs for its next token. Releases as `can_extend` does."""
        (sequence,) = group.sequences
        computed, tables = sequence.computed, self._of(sequence)
        return computed < tables.due or self._fits(sequence, tables, computed + 1)

    def append(self, group: Group) -> int:
        """Release what the windows of a steady sequence have left, take pages for its next token; returns how many.

        Raises CoreError, and changes nothing, beyond the last token that the sequence computes.
        """
        (sequence,) = group.sequences
        end = sequence.computed + 1
        if end > group.request.final_kv_tokens:
            raise beyond_end(sequence, end)
        tables = self._of(sequence)
        return self._grow(sequence, tables, end) if end > tables.due else 0

    def advance(self, calendar: DecodeCalendar) -> None:
        """Count the tokens that steady sequences write in the step that is being scheduled."""
        self.counters.wrote(calendar.rows)

    # -- the prefix cache ----------------------------------------------------------------------------------

    def _cache_full(self, tables: GroupTables, tokens: int) -> list[GroupKey]:
        """Enter the blocks of the first `tokens` tokens that lie in whole match units into the prefix cache.

        Returns the keys of the states among them.

        No hit ends inside a unit, so blocks behind the last whole one are worth nothing (vLLM: `_align_cacheable`).
        """
        whole = tokens // self.block_size * self.block_size
        states: list[GroupKey] = []
        for index, group in enumerate(self.layout.groups):
            entered = self._cache_group(tables, index, whole // group.block_size)
            if group.kind is GroupKind.state:
                states += entered
        return states

    def _cache_group(self, tables: GroupTables, index: int, blocks: int) -> list[GroupKey]:
        first, keys = tables.cached[index], tables.keys
        if keys is None or blocks <= first:
            return []
        first, group, table = max(first, tables.held[index]), self.layout.groups[index], tables.groups[index]
        kept = self._checkpoints.kept(group, self._needed[index], first, blocks, tables.checkpoints)
        known, kept = keys.upto(index, blocks), [block for block in kept if table[block]]
        entered = [known[block] for block in kept]
        self.pages.cache(index, [table[block] for block in kept], entered)
        tables.cached[index] = blocks
        return entered

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; raises CoreError, with nothing changed, while a page is in use."""
        self.pages.reset()

    # -- the end -------------------------------------------------------------------------------------------

    def release(self, sequence: SequenceState) -> None:
        """Drop all pages, group by group. In the cache, the first blocks of a table are evicted last."""
        tables = self._of(sequence)
        self._cache_full(tables, sequence.computed)
        for index, group in enumerate(self.layout.groups):
            pages = tables.pages(index)
            gone = self.pages.release(index, pages)
            units = len(gone) * group.units
            if gone and gone[-1] == pages[-1] and group.kind is not GroupKind.state:
                units -= len(tables.groups[index]) * group.block_size - sequence.computed
            self.counters.dropped(index, len(pages), gone, units)
        del self._tables[sequence]
        sequence.table = ()

    def preempt(self, group: Group) -> None:
        """Release all pages of the group. The next lookup finds again what is still cached."""
        for sequence in group.sequences:
            self.release(sequence)

    # -- refused -------------------------------------------------------------------------------------------

    def fork(self, parent: SequenceState, children: Sequence[SequenceState]) -> None:
        """Raises CoreError: requests with several sequences are never accepted."""
        raise CoreError(f"{parent} is forked: a cache with groups serves single sequences")

    def reparent(self, branches: Sequence[SequenceState], parents: Sequence[int]) -> None:
        """Raises CoreError: beams are never accepted."""
        raise CoreError(f"{branches[0]} gets a parent: a cache with groups serves single sequences")

    def promote(self, sequence: SequenceState, child: SequenceState) -> None:
        """Raises CoreError: drafts are never accepted."""
        raise CoreError(f"{child} was never forked: a cache with groups has no drafts")

    def truncate(self, sequence: SequenceState, tokens: int) -> int:
        """Raises CoreError unless nothing is cut: what a window has left cannot be brought back."""
        self._of(sequence)
        if tokens != sequence.computed:
            raise CoreError(f"{sequence}: cut to {tokens} tokens; a cache with groups cuts nothing")
        return tokens

    def fast_forward_limit(self, calendar: DecodeCalendar, steps: int) -> int:
        """Always 1."""
        return 1

    def fast_forward(self, calendar: DecodeCalendar, steps: int, first: SlotUsage) -> FastForwardColumns:
        """Raises CoreError: no plan covers several steps."""
        raise CoreError(f"{steps} steps at once: a cache with groups takes one step at a time")

    # -- counters ------------------------------------------------------------------------------------------

    def usage(self, head: Request | None) -> SlotUsage:
        """Slots by state, in slots of `layout.slot_bytes`. Free pages of a pool are external where another is full."""
        whole, cached, free = self.pages.slots()
        token, internal = self.counters.slots()
        external = 0
        if head is not None:
            most = [group.most_blocks(head.prompt_tokens, self._most_chunk) for group in self.layout.groups]
            external = self.pages.stranded(most)
        reserved = whole - cached - free - token - internal
        entries, live = self.counters.entries, self.pages.live_pages
        usage = GroupUsage(token, cached, reserved, internal, external, free - external, entries, live)
        usage.written_units = self._written_units
        return usage

    def _written_units(self) -> list[int]:
        cached = self.pages.cached_by_group()
        return [
            written + pages * group.units
            for written, pages, group in zip(self.counters.written, cached, self.layout.groups, strict=True)
        ]

    def held_bytes(self) -> tuple[int, ...]:
        """Bytes of the pages of each group that are in use."""
        live = zip(self.counters.pages, self.layout.groups, strict=True)
        return tuple(pages * group.page_bytes for pages, group in live)

    def waste(self, usage: SlotUsage) -> GroupWaste:
        """Where the bytes of a step go that is scheduled and not committed yet; `usage` is that of its plan."""
        slot, groups, live = self.layout.slot_bytes, self.layout.groups, self.counters.pages
        padding = sum(pages * group.padding for pages, group in zip(live, groups, strict=True))
        imbalance = sum(pages * group.imbalance for pages, group in zip(live, groups, strict=True))
        copies = self.pages.live_duplicates()
        duplicate = sum(
            len(pages) * group.units * group.unit_bytes for pages, group in zip(copies, groups, strict=True)
        )
        behind = sum(
            self._behind_tokens(index, copies[index]) * group.unit_bytes
            for index, group in enumerate(groups)
            if group.window is not None
        )
        return GroupWaste(
            token=usage.token * slot - behind - duplicate,
            behind_window=behind,
            duplicate=duplicate,
            reserved=usage.reserved * slot,
            tail=usage.internal * slot - padding - imbalance,
            padding=padding,
            imbalance=imbalance,
            cached=usage.cached * slot,
            external=usage.external * slot,
            free=usage.free * slot,
        )

    def _behind_tokens(self, index: int, copies: Container[int]) -> int:
        """Tokens of a windowed group that no sequence sees any more, in the blocks where windows begin.

        A page counts where all of its sequences have left tokens behind, as often as the last of them. `copies` are
        duplicates as a whole.
        """
        group = self.layout.groups[index]
        found: dict[int, list[int]] = {}
        for sequence, tables in self._tables.items():
            held, table = tables.held[index], tables.groups[index]
            left = sequence.computed - (group.window or 0) + 1 - held * group.block_size
            if held < len(table) and left > 0:
                found.setdefault(table[held], []).append(min(left, group.block_size))
        return sum(
            min(behind)
            for page, behind in found.items()
            if page not in copies and len(behind) == self.pages.references(index, page)
        )

    def drain_copies(self) -> CopyList:
        """Always empty: nothing is copied. The step is planned: its states can be hit from now on."""
        self._fresh_states.clear()
        return []

    def drain_frees(self) -> list[int]:
        """Pages that were released without a key, and evicted ones."""
        return self.pages.drain_voided()

    def drain_stale(self) -> StaleList:
        """Always empty: nothing is cut."""
        return []

    def check(self) -> None:
        """Compare tables, pools and counters with a recount. Call it between steps. Raises InvariantError."""
        entries: Counter[int] = Counter()
        filled: list[dict[int, int]] = [{} for _ in self.layout.groups]
        for sequence, tables in self._tables.items():
            for index, group in enumerate(self.layout.groups):
                check_table(sequence, tables, index, group)
                pages = tables.pages(index)
                entries.update(pages)
                for place, page in enumerate(pages, tables.held[index]):
                    here = min(group.block_size, sequence.computed - place * group.block_size)
                    units = 1 if group.kind is GroupKind.state else here  # of states the places do not count
                    filled[index][page] = max(filled[index].get(page, 0), units)
        self.pages.check(entries)
        self.counters.check(entries.total(), [sum(found.values()) for found in filled])
        usage, whole = self.usage(None), self.pages.slots()[0]
        if min(usage.reserved, usage.free) < 0 or usage.capacity != whole:
            raise InvariantError(f"slot states do not add up to {whole}: {usage}")


def _due_every(groups: Sequence[KVGroup]) -> int:
    """How often a steady sequence is looked at, in tokens: where a window may leave a block, at every one.

    A prompt's last chunk leaves blocks behind at once, so even windows of whole blocks cannot be looked at less often.
    """
    if any(group.keeps is not None for group in groups):
        return 1
    return gcd(*(group.block_size for group in groups))
