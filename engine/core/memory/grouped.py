"""The KV cache manager of models whose layers keep different things: a block table for each group of layers.

A block whose tokens have all left the window is released while its sequence runs. A prefix is hit as far as every group
has what the next token needs: all blocks, those of the last window, or the state at the end. Facts of vLLM's
`HybridKVCacheCoordinator` and `SingleTypeKVCacheManager` (0.33) are named where they decide.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import count
from math import gcd
from typing import overload

from engine.core.calendar import DecodeCalendar
from engine.core.errors import CoreError, InvariantError, UnknownSequenceError
from engine.core.identity import BlockHash, BlockIdentity
from engine.core.memory.contiguous import NeverSwaps
from engine.core.memory.group_layout import GroupLayout, KVGroup
from engine.core.memory.group_pages import GroupKey, PoolPages
from engine.core.memory.manager import FastForwardColumns, beyond_end
from engine.core.options import GroupKind, WindowHits
from engine.core.plan import CopyList, SlotUsage, StaleList
from engine.core.request import Request
from engine.core.sequence import Group, ScheduledRow, SequenceState

NO_PAGE = 0
"""In a block table: a block that is not held, because its window has left it or a hit did not need it."""


class GroupTables(Sequence[int]):
    """The block tables of one sequence, one for each group; as a sequence of integers, one after the other.

    Entry i of a group's table is the page of tokens i x block_size and following, or NO_PAGE. `held` is the first
    entry of each table that may be a page, `hits` and `cached` say how many leading blocks came from the prefix cache
    and how many are in it. Below `due` computed tokens the next token needs no page and leaves none behind.
    """

    __slots__ = ("cached", "due", "groups", "held", "hits", "keys")

    def __init__(self, groups: list[list[int]], hits: list[int], keys: "GroupKeys | None") -> None:
        self.groups = groups
        self.held = [0] * len(groups)
        self.due = 0
        self.hits, self.cached = hits, list(hits)
        self.keys = keys

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return [page for table in self.groups for page in table][index]

    def pages(self, group: int) -> list[int]:
        """The pages that a group holds, in order."""
        return self.groups[group][self.held[group] :]


class GroupKeys(Sequence[BlockHash]):
    """The keys of a request's blocks in every group. As a sequence: the public hashes of its first group.

    Blocks of the prompt that others may have are keyed by their hash, all others by a number of this request alone.
    """

    def __init__(self, identity: BlockIdentity, groups: Sequence[KVGroup], number: int) -> None:
        self._sizes = [group.block_size for group in groups]
        self._public = {size: identity.prompt_hashes(size) for size in set(self._sizes)}
        self._number = number
        self._keys: list[list[GroupKey]] = [[] for _ in groups]

    def __len__(self) -> int:
        return len(self._public[self._sizes[0]])

    def __getitem__(self, index: int | slice) -> BlockHash | Sequence[BlockHash]:  # type: ignore[override]
        return self._public[self._sizes[0]][index]

    def upto(self, group: int, blocks: int) -> list[GroupKey]:
        """The keys of a group's leading blocks: at least the first `blocks`. Do not change the list."""
        keys = self._keys[group]
        if len(keys) < blocks:
            public = self._public[self._sizes[group]]
            for index in range(len(keys), blocks):
                keys.append((group, public[index] if index < len(public) else (self._number, index)))
        return keys


class PrefixHit(Sequence[int]):
    """A hit of whole match units: `pages` has for each group the leading blocks that it needs, the others NO_PAGE.

    As a sequence it has one entry for each match unit, their numbers.
    """

    def __init__(self, units: int, pages: Sequence[list[int]]) -> None:
        self.units, self.pages = units, pages

    def __len__(self) -> int:
        return self.units

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:  # type: ignore[override]
        return range(self.units)[index]


class GroupedManager(NeverSwaps):
    """The KV cache manager with groups. See `KVCacheManager` for the methods.

    `block_size` is the match unit, `num_blocks` the pages of all pools. `most_chunk` is the largest chunk of a prompt,
    in tokens: with it a window's sequence is known to hold no more than its window and a chunk. Requests have one
    sequence, without drafts; others are refused. Nothing is fast-forwarded: a decode step can release a block behind a
    window, and then a request that waits may fit.
    """

    def __init__(
        self,
        layout: GroupLayout,
        pages: PoolPages,
        *,
        most_chunk: int,
        prefix_caching: bool = True,
        window_hits: WindowHits = WindowHits.window,
    ) -> None:
        if most_chunk < 1:
            raise CoreError(f"the largest chunk is {most_chunk} tokens, must be at least 1")
        self.layout, self.pages = layout, pages
        self.num_blocks = pages.num_pages
        self.block_size = layout.match_unit
        self.growth: int | None = _due_every(layout.groups)
        self.prefix_caching = prefix_caching
        self._most_chunk = most_chunk
        self._window_hits = window_hits
        self._tables: dict[SequenceState, GroupTables] = {}
        self._numbers = count(1)
        self._states = [i for i, group in enumerate(layout.groups) if group.kind is GroupKind.state]
        self._fresh_states: set[int] = set()  # pages of states that the step being scheduled writes
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
        tokens = self._hit_tokens(keys, (group.root_target - 1) // self.block_size * self.block_size)
        return PrefixHit(tokens // self.block_size, self._hit_pages(keys, tokens))

    def _hit_tokens(self, keys: GroupKeys, asked: int) -> int:
        """The longest hit of at most `asked` tokens: each group in turn shortens it, until none does."""
        tokens = asked
        needed = [group.hit_blocks(self._window_hits) for group in self.layout.groups]
        for index in (i for i, blocks in enumerate(needed) if blocks is None):
            size = self.layout.groups[index].block_size
            found = self._leading(keys, index, tokens // size) * size
            tokens = found // self.block_size * self.block_size
        windows = [(index, blocks) for index, blocks in enumerate(needed) if blocks is not None]
        settled = False
        while tokens and not settled:
            settled = True
            for index, blocks in windows:
                shorter = self._last_run(keys, index, tokens, blocks)
                if shorter < tokens:
                    tokens, settled = shorter, False
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
        if self._fresh_states and any(
            hit.pages[index][-1:] and hit.pages[index][-1] in self._fresh_states for index in self._states
        ):
            return False
        whole = group.root_target if tokens is None else min(tokens, group.root_target)
        start = len(hits) * self.block_size
        lasting: list[int] = []
        at_once: list[int] = []
        end = min(whole, start + self._most_chunk if chunk_end is None else chunk_end)
        for index, each in enumerate(self.layout.groups):
            had = start // each.block_size
            revived = self.pages.unreferenced(index, (page for page in hit.pages[index] if page))
            lasting.append(max(0, each.most_blocks(whole, self._most_chunk) - had) + revived)
            at_once.append(max(0, each.blocks(end) - had) + revived)
        return self.pages.fits(lasting, spare=spare_blocks) and self.pages.fits(at_once, spare=spare_blocks)

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
        tables = GroupTables([list(pages) for pages in hit.pages], list(map(len, hit.pages)), keys)
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

    def _growth(self, tables: GroupTables, start: int, end: int) -> tuple[list[int], list[int]]:
        """Pages that each group lacks for tokens `start` to `end - 1`, and those that become free before."""
        needs, freed = [], []
        for index, group in enumerate(self.layout.groups):
            table = tables.groups[index]
            needs.append(max(0, group.blocks(end) - len(table)))
            held, skipped = tables.held[index], min(group.skipped(start), len(table))
            freed.append(sum(self.pages.references(index, page) == 1 for page in table[held:skipped]))
        return needs, freed

    def can_extend(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether the pages that the rows need are free, once those behind their windows are released."""
        (row,) = rows
        start = row.sequence.computed
        return self.pages.fits(*self._growth(self._of(row.sequence), start, start + row.query_len))

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
        before = [tables.cached[index] for index in self._states]
        self._cache_full(tables, min(end, sequence.request.prompt_tokens))
        for index, first in zip(self._states, before, strict=True):
            self._fresh_states.update(tables.groups[index][first : tables.cached[index]])
        return taken

    def _grow(self, sequence: SequenceState, tables: GroupTables, end: int) -> int:
        self._release_behind(sequence, tables)
        taken = 0
        for index, group in enumerate(self.layout.groups):
            table = tables.groups[index]
            lacking = group.blocks(end) - len(table)
            if lacking > 0:
                table += self.pages.take(index, lacking)
                self.counters.took(index, lacking, table[-1], len(table), sequence.request.final_kv_tokens)
                taken += lacking
        tables.due = min(map(self._next_change, self.layout.groups, tables.groups, tables.held))
        return taken

    @staticmethod
    def _next_change(group: KVGroup, table: Sequence[int], held: int) -> int:
        """How many computed tokens fill the table of a group, or let its window leave the next block."""
        full = len(table) * group.block_size
        return full if group.keeps is None else min(full, (held + 1) * group.block_size + group.keeps - 1)

    def _release_behind(self, sequence: SequenceState, tables: GroupTables) -> None:
        """Release the blocks that the next token does not see; full ones stay in the prefix cache."""
        start = sequence.computed
        for index, group in enumerate(self.layout.groups):
            table, held = tables.groups[index], tables.held[index]
            skipped = min(group.skipped(start), len(table))
            if skipped <= held:
                continue
            self._cache_group(tables, index, min(skipped, self._whole_units(start) // group.block_size))
            self._drop_behind(tables, index, held, skipped)

    def _drop_behind(self, tables: GroupTables, index: int, held: int, skipped: int) -> None:
        table, hits = tables.groups[index], tables.hits[index]
        found = min(max(held, hits), skipped)  # blocks before it were hits: they have been of use
        for first, last, behind in ((held, found, False), (found, skipped, True)):
            gone = self.pages.release(index, table[first:last], behind=behind)
            self.counters.dropped(index, last - first, gone, self.layout.groups[index].units * len(gone))
        table[held:skipped] = [NO_PAGE] * (skipped - held)
        tables.held[index] = skipped

    def can_append(self, group: Group) -> bool:
        """Whether the pages are free that a steady sequence needs for its next token."""
        (sequence,) = group.sequences
        computed, tables = sequence.computed, self._of(sequence)
        return computed < tables.due or self.pages.fits(*self._growth(tables, computed, computed + 1))

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

    def _cache_full(self, tables: GroupTables, tokens: int) -> None:
        """Enter the blocks of the first `tokens` tokens that lie in whole match units into the prefix cache.

        No hit ends inside a unit, so blocks behind the last whole one are worth nothing (vLLM: `_align_cacheable`).
        """
        whole = self._whole_units(tokens)
        for index, group in enumerate(self.layout.groups):
            self._cache_group(tables, index, whole // group.block_size)

    def _whole_units(self, tokens: int) -> int:
        return tokens // self.block_size * self.block_size

    def _cache_group(self, tables: GroupTables, index: int, blocks: int) -> None:
        first, keys = tables.cached[index], tables.keys
        if keys is None or blocks <= first:
            return
        first = max(first, tables.held[index])
        self.pages.cache(index, tables.groups[index][first:blocks], keys.upto(index, blocks)[first:blocks])
        tables.cached[index] = blocks

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
        external = self.pages.stranded(self._first_needs(head)) if head is not None else 0
        reserved = whole - cached - free - token - internal
        live = self.pages.live_pages
        return SlotUsage(
            token, cached, reserved, internal, external, free - external, self.counters.entries, live
        )

    def _first_needs(self, request: Request) -> list[int]:
        return [group.most_blocks(request.prompt_tokens, self._most_chunk) for group in self.layout.groups]

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
                _check_table(sequence, tables, index, group)
                pages = tables.pages(index)
                entries.update(pages)
                for place, page in enumerate(pages, tables.held[index]):
                    here = min(group.block_size, sequence.computed - place * group.block_size)
                    units = 1 if group.kind is GroupKind.state else here
                    filled[index][page] = max(filled[index].get(page, 0), units)
        self.pages.check(entries)
        self.counters.check(entries.total(), [sum(found.values()) for found in filled])
        usage, whole = self.usage(None), self.pages.slots()[0]
        if min(usage.reserved, usage.free) < 0 or usage.capacity != whole:
            raise InvariantError(f"slot states do not add up to {whole}: {usage}")


def _check_table(sequence: SequenceState, tables: GroupTables, index: int, group: KVGroup) -> None:
    """Raise InvariantError unless the table has the blocks of its tokens, and those that the next token needs."""
    table, held, computed = tables.groups[index], tables.held[index], sequence.computed
    if len(table) != group.blocks(computed):
        raise InvariantError(f"{sequence}, group {index}: {len(table)} blocks for {computed} tokens")
    if any(table[:held]) or not all(table[held:]):
        raise InvariantError(f"{sequence}, group {index}: the pages do not begin at block {held}: {table}")
    if held > group.skipped(computed):
        raise InvariantError(
            f"{sequence}, group {index}: block {held - 1} was released, and token {computed} sees it"
        )


def _due_every(groups: Sequence[KVGroup]) -> int:
    """How often a steady sequence is looked at, in tokens: where a window may leave a block, at every one.

    A prompt's last chunk leaves blocks behind at once, so even windows of whole blocks cannot be looked at less often.
    """
    if any(group.keeps is not None for group in groups):
        return 1
    return gcd(*(group.block_size for group in groups))


class GroupCounters:
    """Counters of the live tables: table entries, pages and written units of each group, and what is never filled.

    A unit is a token, or a whole state. Written units include the step that is being scheduled; a shared page counts
    once.
    """

    def __init__(self, layout: GroupLayout) -> None:
        self._groups = layout.groups
        slot = layout.slot_bytes
        self._unit_slots = [group.unit_bytes // slot for group in layout.groups]
        self._lost_slots = [
            (group.page_bytes - group.units * group.unit_bytes) // slot for group in layout.groups
        ]
        self._are_states = [group.kind is GroupKind.state for group in layout.groups]
        self.entries = 0
        self.pages = [0] * len(layout.groups)
        self.written = [0] * len(layout.groups)
        self.unfillable = [0] * len(layout.groups)
        self._unfillable: dict[int, tuple[int, int]] = {}  # page: group, units

    def wrote(self, tokens: int) -> None:
        """Rows write `tokens` tokens in every group; a state page counts as written when it is taken."""
        for index, is_state in enumerate(self._are_states):
            if not is_state:
                self.written[index] += tokens

    def shared(self, index: int, entries: int, revived: int) -> None:
        """A table got `entries` full pages of the cache, of which `revived` had no reference."""
        self.entries += entries
        self.pages[index] += revived
        self.written[index] += revived * self._groups[index].units

    def took(self, index: int, pages: int, last: int, blocks: int, final_tokens: int) -> None:
        """A table got new pages, the last one as its entry number `blocks`, of a sequence of `final_tokens` tokens."""
        self.entries += pages
        self.pages[index] += pages
        if self._are_states[index]:
            self.written[index] += pages
            return
        units = blocks * self._groups[index].block_size - final_tokens
        if units > 0:
            self._unfillable[last] = index, units
            self.unfillable[index] += units

    def dropped(self, index: int, entries: int, gone: Sequence[int], units: int) -> None:
        """A table lost `entries` pages; those of `gone`, with `units` written units, have no reference any more."""
        self.entries -= entries
        self.pages[index] -= len(gone)
        self.written[index] -= units
        if gone and gone[-1] in self._unfillable:
            self.unfillable[index] -= self._unfillable.pop(gone[-1])[1]

    def slots(self) -> tuple[int, int]:
        """Slots that are written, and slots of live pages that never will be."""
        written = sum(map(_product, self.written, self._unit_slots))
        lost = sum(map(_product, self.unfillable, self._unit_slots))
        return written, lost + sum(map(_product, self.pages, self._lost_slots))

    def check(self, entries: int, written: Sequence[int]) -> None:
        """Compare with a recount; raises InvariantError."""
        unfillable = [0] * len(self._groups)
        for index, units in self._unfillable.values():
            unfillable[index] += units
        if (self.entries, self.written, self.unfillable) != (entries, list(written), unfillable):
            raise InvariantError(
                f"table entries, written units, unfillable units: counters {self.entries}, {self.written}, "
                f"{self.unfillable}; tables {entries}, {list(written)}, {unfillable}"
            )


def _product(one: int, other: int) -> int:
    return one * other
