"""Several groups of layers as one: how their pages are admitted, grown, and released behind windows."""

from collections.abc import Sequence
from math import gcd

from engine.core.errors import CoreError
from engine.core.identity import BlockHash
from engine.core.memory.block_tables import GroupTable, GroupTables, tables_of
from engine.core.memory.group_layout import KVGroup
from engine.core.memory.group_pages import GroupAccount, PoolPages
from engine.core.memory.prefix_cache import GroupHits, PrefixCache, PrefixHit
from engine.core.options import GroupPages, WindowHits
from engine.core.request import Request
from engine.core.sequence import DecodeCalendar, Group, ScheduledRow, SequenceState


class LayerGroups:
    """What a manager knows of several groups of layers: their pages, hits, and the account of their bytes.

    `most_chunk` is the largest chunk of a prompt, in tokens: with it a sequence is known to hold no more of a window's
    layers than the window and a chunk.
    """

    def __init__(
        self, pages: PoolPages, caches: Sequence[PrefixCache], *, most_chunk: int, window_hits: WindowHits
    ) -> None:
        if most_chunk < 1:
            raise CoreError(f"the largest chunk is {most_chunk} tokens, must be at least 1")
        self.layout, self.pages = pages.layout, pages
        self.scatters = pages.layout.pages is GroupPages.lcm
        self.most_chunk = most_chunk
        self.hits = GroupHits(pages.layout, caches, window_hits)
        self.account = GroupAccount(pages, caches)
        cached = any(cache.enabled for cache in caches)
        self.aligned_tokens = next(
            (group.block_size for group in pages.layout.groups if group.aligned and cached), 0
        )
        self._caches, self._tables = caches, [cache.tables for cache in caches]
        self.states = [tables for tables in self._tables if tables.keeps_states]
        # keys of states that the step being scheduled writes
        self.fresh_states: set[BlockHash | None] = set()
        # pages of K and V that it writes, from which token on, where hits may end inside a block
        self.fresh_tokens: dict[int, int] = {}
        # pages that the rows of the group that is being scheduled need still
        self.expected = [0] * len(caches)

    @property
    def growth(self) -> int:
        """How often a steady sequence is looked at, in tokens: where a window may leave a block, at every one.

        A prompt's last chunk leaves blocks behind at once, so even windows of whole blocks cannot be looked at less
        often.
        """
        if any(group.forgets for group in self.layout.groups):
            return 1
        return gcd(*(group.block_size for group in self.layout.groups))

    # -- admission -----------------------------------------------------------------------------------------

    def needs(self, request: Request, width: int, tokens: int, ahead: int = 0) -> list[int]:
        """The most pages of each group for `width` branches of a request with `tokens` tokens each.

        A row keeps slots for `ahead` tokens behind it: vLLM's admission does not count them.
        """
        chunk = self.most_chunk + ahead
        return [tables.most_blocks(request, width, tokens, chunk=chunk) for tables in self._tables]

    def never_serves(self, request: Request, drafted: bool) -> str | None:
        """What of a request no cache with groups serves, or None. `drafted`: it has draft tokens."""
        if request.identity is not None and request.identity.shares_outputs:
            return "shares its outputs through the prefix cache, which a cache with groups does not serve"
        if drafted and self.states:
            return "has draft tokens, which a state cannot take back"
        return None

    def find(self, group: Group) -> PrefixHit:
        """The longest hit; none where its pages lie so scattered in chunks that the rest never fits beside them."""
        hit = self.hits.find(group)
        if hit.units and self.scatters and not self.pages.live_pages:
            whole = group.width, group.tokens
            return hit if self.can_admit(group, hit, 0, whole, None) else self.hits.nothing()
        return hit

    def hit_of(self, hits: Sequence[int]) -> PrefixHit:
        """`hits` as its lookup returned them."""
        if isinstance(hits, PrefixHit):
            return hits
        if len(hits):
            raise CoreError("a cache with groups is given hits that its lookup did not return")
        return self.hits.nothing()

    def can_admit(
        self, group: Group, hits: Sequence[int], spare: int, wanted: tuple[int, int], chunk_end: int | None
    ) -> bool:
        """Whether `wanted` (branches, and tokens of each) fits, and the first chunk, which ends at `chunk_end`."""
        hit = self.hit_of(hits)
        start = hit.units * self.layout.match_unit
        if self._writes_state_of(hit) or self._writes_source_of(hit, start):
            return False
        end = min(group.root_target, start + self.most_chunk) if chunk_end is None else chunk_end
        lasting: list[int] = []
        at_once: list[int] = []
        for tables, most in zip(self._tables, self.needs(group.request, *wanted), strict=True):
            had, inside = divmod(start, tables.block_size)
            if tables.aligned:  # the state that the first chunk ends with, and the copy that it begins with
                new = 1 + (inside > 0)
                states = wanted[0] - 1 + min(new, tables.blocks_of(wanted[1]) - had)
                # the state of a hit is one of those for which `never_fits` has found room
                lasting.append(min(states, most if inside or not had else most - 1))
                at_once.append(min(new, tables.blocks_of(end) - had))
                continue
            lasting.append(max(0, most - had))
            at_once.append(max(0, tables.blocks_of(end) - had))
        return all(self.pages.fits(needs, hit.pages, spare) for needs in (lasting, at_once))

    def _writes_state_of(self, hit: PrefixHit) -> bool:
        """Whether the step that is being scheduled writes a state that a hit ends with.

        The request waits for the next one then, as in vLLM: a row must begin with its state.
        """
        found = zip(self._tables, hit.pages, strict=True)
        ends = (tables.pool.hash_of(pages[-1]) for tables, pages in found if pages)
        return not self.fresh_states.isdisjoint(ends)

    def _writes_source_of(self, hit: PrefixHit, tokens: int) -> bool:
        """Whether that step writes K and V of the block inside which a hit of `tokens` ends.

        The request waits for the next one then: blocks are copied before the step. vLLM 0.33 does not wait, and copies
        what is not written yet.
        """
        found = zip(self._tables, hit.pages, strict=True)
        ends = (pages[-1] for tables, pages in found if pages and tokens % tables.block_size)
        return any(self.fresh_tokens.get(page, tokens) < tokens for page in ends)

    def open_hits(self, root: SequenceState, hits: Sequence[int]) -> None:
        """Open a table of `root` in each group, with the pages of a hit."""
        hit = self.hit_of(hits)
        full = [hit.units * self.layout.match_unit // tables.block_size for tables in self._tables]
        root.table = GroupTables([GroupTable(root, blocks, hit.junction) for blocks in full])
        for tables, part, pages in zip(self._tables, root.table.of, hit.pages, strict=True):
            part.held = next((place for place, page in enumerate(pages) if page), len(pages))
            tables.open_hits(part, pages[: part.hits], *pages[part.hits :])

    def chunk_end(
        self, group: Group, start: int, end: int, most: int, hits: Sequence[int] | None = None
    ) -> int:
        """Where a row of a prompt ends that begins at token `start` and may go to `end`.

        It ends where an aligned state can be kept: at the end of a block, at the last one before the prompt's end, at
        the prompt's last match unit, and at the junction. A block longer than `most`, the largest chunk, is computed in
        several. Source: `Scheduler._mamba_block_aligned_split` in vllm/v1/core/sched.
        """
        if not self.aligned_tokens:
            return end
        junction = (tables_of(group.sequences[0]).of[0] if hits is None else self.hit_of(hits)).junction
        size, known = self.aligned_tokens, group.root_target
        last = max(group.request.prompt_tokens, known - 1)
        if start >= last:
            return end
        if end < last:
            aligned = end // size * size
            if aligned > start or size <= most:
                end = aligned
        stops = [(known - 1) // size * size]
        unit = min(self.layout.match_unit, size)
        if stops[0] < (tail := (group.request.prompt_tokens - 1) // unit * unit):
            stops.append(tail)
        if start % size:
            stops.append((start // size + 1) * size)
        if start < junction < end:
            stops.append(start + (junction - start) // size * size)
        return max(start, min([stop for stop in stops if start < stop < end], default=end))

    # -- growth --------------------------------------------------------------------------------------------

    def can_extend(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether the rows of a request fit.

        Blocks behind windows are released at once where more are needed, also if the sequence is preempted then: so the
        order of eviction is vLLM's, whose `allocate_slots` calls `remove_skipped_blocks` before it counts what is free.
        """
        for row in rows:
            self.release_behind(row.sequence)
        ends = [row.sequence.computed + row.query_len + row.ahead for row in rows]
        self.expected = []
        for tables, *parts in zip(self._tables, *(tables_of(row.sequence).of for row in rows), strict=True):
            pairs = list(zip(parts, ends, strict=True))
            lacking = sum(tables.lacking(part.table, end) for part, end in pairs)
            tails = [part.table[-1] for part, end in pairs if tables.writes_tail(part, end)]
            self.expected.append(lacking + tables.copies_of(tails))
        return self.pages.fits(self.expected)

    def extend(self, row: ScheduledRow) -> int:
        """Take the pages of a row. What is generated is private, and cached when the sequence leaves it."""
        sequence, request = row.sequence, row.sequence.request
        start, end = sequence.computed, sequence.computed + row.query_len
        taken = self.grow(sequence, end + row.ahead)
        certain = min(end - row.drafts, request.prompt_tokens)
        for cache, part in zip(self._caches, tables_of(sequence).of, strict=True):
            cache.tables.wrote(row.query_len)
            before = part.cached_blocks
            cache.cache_inside(part, end)
            cache.cache_upto(part, certain)
            if cache.tables.keeps_states:
                written = filter(None, [*part.table[before : part.cached_blocks], part.table[-1]])
                self.fresh_states.update(set(map(cache.tables.pool.hash_of, written)) - {None})
            elif self.layout.inside:
                place, inside = divmod(start, cache.tables.block_size)
                copied = {target for _, target in cache.tables.work.copies}
                first = start - inside if part.table[place] in copied else start
                self.fresh_tokens.update(dict.fromkeys(part.table[place:], first))
        return taken

    def advance(self, calendar: DecodeCalendar) -> None:
        """Steady groups compute one token each; see `PagedManager.advance`."""
        for cache in self._caches:
            cache.tables.wrote(calendar.rows)
        for group in calendar.groups if self.layout.inside else ():
            for sequence in group.sequences:
                for cache, part in zip(self._caches, tables_of(sequence).of, strict=True):
                    cache.cache_inside(part, sequence.computed + 1)

    def grow(self, sequence: SequenceState, end: int) -> int:
        """Take the pages of a sequence for tokens up to `end` from all groups at once, copies of shared ones too."""
        self.release_behind(sequence)
        tables = tables_of(sequence)
        copies, needs = [], []
        for cache, part in zip(self._caches, tables.of, strict=True):
            copies.append(cache.tables.shares_tail(part, end))
            needs.append(copies[-1] + cache.tables.lacking(part.table, end))
        if any(needs):
            for cache, part, copied, pages in zip(
                self._caches, tables.of, copies, self.take(needs, sequence.request), strict=True
            ):
                if copied:
                    self.fresh_states.add(cache.tables.pool.hash_of(part.table[-1]))
                    cache.tables.copy_tail(part, pages.pop(0))
                if pages:
                    cache.tables.append_upto(part, pages, end)
        tables.due = min(map(_next_change, self.layout.groups, tables.of))
        return sum(needs)

    def release_behind(self, sequence: SequenceState) -> None:
        """Release the blocks that the next token does not see; full ones stay in the prefix cache."""
        start, unit = sequence.computed, self.layout.match_unit
        for cache, part in zip(self._caches, tables_of(sequence).of, strict=True):
            group = cache.tables.group
            if group is None or not group.forgets:
                continue
            skipped = min(group.skipped(start), len(part.table))
            if skipped > part.held:
                cache.cache_full(part, min(skipped, start // unit * unit // group.block_size))
                cache.tables.drop_behind(part, skipped)

    def take(self, needs: Sequence[int], request: Request) -> list[list[int]]:
        """Take pages of all groups for a request, those that its other rows need being left."""
        self.expected = [max(0, before - now) for before, now in zip(self.expected, needs, strict=True)]
        return self.pages.take(needs, request.request_id, self.expected)


def _next_change(group: KVGroup, part: GroupTable) -> int:
    """After how many tokens a sequence fills its table, or its window leaves the next block."""
    full, leaves = len(part.table) * group.block_size, group.leaves(part.held)
    return full if leaves is None else min(full, leaves)
