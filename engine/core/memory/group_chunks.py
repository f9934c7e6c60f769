"""Pages of several sizes in chunks of one compatible size: the policy `lcm`.

A chunk has the least common multiple of all page sizes, so it holds a whole number of pages of any group, and those of
one group at a time. A chunk without content belongs to nobody, so memory moves between the groups.

Source: Jenga (Zhang et al., SOSP 2025): a compatible page with small pages nested in it, and small pages of
one large page given to one request first, so that it becomes free as a whole when the request ends. The order in which
pages are taken is our reading of it: empty pages of other requests are used before content is evicted.

A page is named by a number that no other group has: the first number of its group, and its place. A cached page is
evicted when its bytes are needed, by its own group or by another. So each group has a pool as if the memory were its
own alone, and `ChunkPages` says which of its pages are taken and evicted.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import add, mul
from typing import Any

from engine.core.errors import CoreError, InvariantError, OutOfBlocksError
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.eviction import EvictionOrder, Released
from engine.core.memory.group_layout import GroupLayout
from engine.core.memory.group_pages import PoolPages
from engine.core.options import GroupPages, Retention


class _ChunkPool(BlockPool):
    """The pages of one group. Which of them have bytes without content is known to the chunks."""

    names_inside = False

    def __init__(
        self, count: int, chunks: "ChunkPages", order: EvictionOrder, retention: Retention, offset: int
    ) -> None:
        super().__init__(count, eviction=order, retention=retention, offset=offset)
        self._chunks, self._group, self.order = chunks, len(chunks._pools), order
        self._extend(count)
        self._uncached.clear()

    def occupy(self, page: int) -> None:
        """An empty page gets a reference."""
        self._refs[page] = 1
        self.free_blocks -= 1

    def evict(self, pages: Sequence[int]) -> None:
        """Cached pages lose their content."""
        self.order.reuse((), pages)
        self._remove_hashes(pages)
        self._void(pages)

    def share(self, blocks: Sequence[int]) -> int:
        """As `BlockPool.share`."""
        revived = [page for page in blocks if not self._refs[page]]
        super().share(blocks)
        self._chunks.revived(self._group, revived)
        return len(revived)

    def _free(self, gone: list[int], table: Released) -> None:
        super()._free(gone, table)
        self._uncached.clear()
        self._chunks.left(self._group, gone)

    def reset(self) -> None:
        """As `BlockPool.reset`."""
        cached = self.cached_without_reference()
        super().reset()
        self._uncached.clear()
        self._chunks.left(self._group, cached)

    def check(self, references: dict[int, int]) -> None:
        """As `BlockPool.check`; a page is in no queue where it has neither references nor content."""
        pages = range(self.offset + 1, len(self._refs))
        self._uncached += [page for page in pages if not self._refs[page] and self._hash_of[page] is None]
        super().check(references)
        self._uncached.clear()


class ChunkPages(PoolPages):
    """Pages of all groups in one memory of `count` chunks. Each pool has as many as the whole memory would hold.

    A page is taken from, in this order:

    an empty page in a chunk of the same request, a free chunk, an empty page of the group anywhere, a chunk without
    references (the one that was released first loses its cached pages), the group's cached page to evict.

    Raises CoreError for other layouts.
    """

    def __init__(self, layout: GroupLayout, count: int, **options: Any) -> None:
        if layout.pages is not GroupPages.lcm:
            raise CoreError(f"chunks serve lcm, not {layout.pages}")
        self.memory, self.chunks = count * layout.chunk_bytes, count
        self._pools: list[_ChunkPool] = []
        super().__init__(layout, [self.memory // group.page_bytes for group in layout.groups], **options)
        self._nested = [layout.chunk_bytes // group.page_bytes for group in layout.groups]
        self._free = list(range(count - 1, -1, -1))
        self._group_of: dict[int, int] = {}  # chunk: the group whose pages it holds
        self._live_in: dict[int, int] = {}  # chunk: pages with references, where there are any
        self._idle: OrderedDict[int, None] = OrderedDict()  # chunks with cached pages alone, longest so first
        self._empty: list[OrderedDict[int, None]] = [OrderedDict() for _ in layout.groups]
        self._empty_in: dict[int, set[int]] = {}  # chunk: its empty places
        self._owner_of: dict[int, int] = {}  # chunk: the request that it was taken for
        # group, request: chunks with empty places
        self._owned: dict[tuple[int, int], OrderedDict[int, None]] = {}
        self._busy = [0] * len(layout.groups)  # chunks of each group with references

    def _new_pool(self, count: int, queue: EvictionOrder | None, **options: Any) -> BlockPool:
        assert queue is not None
        self._pools.append(_ChunkPool(count, self, queue, **options))
        return self._pools[-1]

    # -- where pages lie ------------------------------------------------------------------------------------

    def span(self, group: int, page: int) -> tuple[int, int]:
        """The first byte of a page in the memory, and the one behind its last."""
        size = self.layout.groups[group].page_bytes
        start = self.place(group, page) * size
        return start, start + size

    def _chunk(self, group: int, page: int) -> int:
        return self.place(group, page) // self._nested[group]

    # -- what fits ------------------------------------------------------------------------------------------

    def _chunks_needed(self, needs: Sequence[int], busy: Sequence[int], live: Sequence[int]) -> list[int]:
        """Chunks that each group needs beside those with references, where all other places in these are used."""
        return [
            -(-max(0, need - (chunks * nested - pages)) // nested)
            for need, chunks, pages, nested in zip(needs, busy, live, self._nested, strict=True)
        ]

    def fits(self, needs: Sequence[int], hits: Sequence[Sequence[int]] | None = None, spare: int = 0) -> bool:
        """Whether `needs` pages of each group can be taken beside `hits`, and `spare` of `num_pages` pages stay.

        `hits` are cached pages of each group that the taker refers to first; NULL_BLOCK and pages in use do not count.
        """
        busy, live = list(self._busy), self._live()
        for group, pages in enumerate(hits or ()):
            revived = {page for page in pages if page and not self.pools[group].references(page)}
            live[group] += len(revived)
            busy[group] += len({self._chunk(group, page) for page in revived} - self._live_in.keys())
        used = sum(busy) + sum(self._chunks_needed(needs, busy, live))
        return used + -(-spare * self.chunks // self.num_pages) <= self.chunks

    def stranded(self, needs: Sequence[int]) -> int:
        """Free slots without content that a request of `needs` pages cannot use where they lie, 0 if it fits.

        They are empty pages in chunks of groups that have enough of them.
        """
        if self.fits(needs):
            return 0
        lacking = self._chunks_needed(needs, self._busy, self._live())
        return sum(
            max(0, len(empty) - need) * self.layout.page_slots(group)
            for group, (empty, need) in enumerate(zip(self._empty, needs, strict=True))
            if not lacking[group]
        )

    def lacks_ever(self, needs: Sequence[int]) -> str | None:
        """Why `needs` pages fit not even into empty memory, or None. Pages of a window may begin inside a chunk."""
        of = zip(needs, self._nested, self.layout.groups, strict=True)
        chunks = sum(-(-(need + (nested - 1) * group.forgets) // nested) for need, nested, group in of)
        if chunks <= self.chunks:
            return None
        return f"needs {chunks} compatible pages of {self.layout.chunk_bytes} bytes, the memory has {self.chunks}"

    # -- taking ---------------------------------------------------------------------------------------------

    def _place(self, group: int, count: int, needs: Sequence[int], owner: int) -> list[int]:
        lacking = self._chunks_needed(needs, self._busy, self._live())
        others = sum(lacking) - lacking[group]
        most = self._busy[group] + self.chunks - sum(self._busy) - others  # the other groups need the rest
        places: list[int] = []
        while len(places) < count:
            places.append(self._next(group, owner, may_open=self._busy[group] < most))
            self._occupy(group, places[-1])
        return [self.page(group, place) for place in places]

    def _next(self, group: int, owner: int, *, may_open: bool) -> int:
        """The place to take; `may_open`: it may lie in a chunk without references."""
        own = self._owned.get((group, owner), ())
        usable = next((chunk for chunk in own if may_open or chunk in self._live_in), None)
        if usable is not None:
            return min(self._empty_in[usable])
        if may_open and self._free:
            return self._open(group, owner)
        for place in self._empty[group]:
            if may_open or place // self._nested[group] in self._live_in:
                return place
        if may_open and self._idle:
            return self._reopen(group, owner)
        for page in self._pools[group].order:
            chunk = self._chunk(group, page)
            if may_open or chunk in self._live_in:
                self._pools[group].evict([page])
                self._make_empty(group, self.place(group, page))
                return self.place(group, page)
        raise CoreError(f"group {group} finds no page, although its pages fit")

    def _open(self, group: int, owner: int) -> int:
        """Give a free chunk to a group and a request; returns its first place."""
        chunk = self._free.pop()
        self._group_of[chunk], self._owner_of[chunk] = group, owner
        first = chunk * self._nested[group]
        for place in range(first, first + self._nested[group]):
            self._make_empty(group, place)
        return first

    def _reopen(self, group: int, owner: int) -> int:
        """Evict all pages of the chunk that has been without references the longest, and give it to a group."""
        chunk = next(iter(self._idle))
        other = self._group_of[chunk]
        first, pool = self.page(other, chunk * self._nested[other]), self._pools[other]
        pages = [page for page in range(first, first + self._nested[other]) if page in pool.order]
        pool.evict(pages)
        for page in pages:
            self._make_empty(other, self.place(other, page))
        self._close_if_empty(other, chunk)
        return self._open(group, owner)

    def _make_empty(self, group: int, place: int) -> None:
        chunk = place // self._nested[group]
        self._empty[group][place] = None
        self._empty_in.setdefault(chunk, set()).add(place)
        self._owned.setdefault((group, self._owner_of[chunk]), OrderedDict())[chunk] = None

    def _occupy(self, group: int, place: int) -> None:
        """An empty place gets a page with a reference."""
        chunk = place // self._nested[group]
        del self._empty[group][place]
        self._empty_in[chunk].remove(place)
        if not self._empty_in[chunk]:
            del self._empty_in[chunk]
            self._disown(group, chunk)
        self._pools[group].occupy(self.page(group, place))
        self.revived(group, [self.page(group, place)])

    def _disown(self, group: int, chunk: int) -> None:
        """A chunk has no empty place for its request any more."""
        key = group, self._owner_of[chunk]
        del self._owned[key][chunk]
        if not self._owned[key]:
            del self._owned[key]

    def _close_if_empty(self, group: int, chunk: int) -> None:
        """A chunk whose places are all empty becomes free."""
        if len(self._empty_in.get(chunk, ())) < self._nested[group]:
            return
        for place in self._empty_in.pop(chunk):
            del self._empty[group][place]
        self._disown(group, chunk)
        self._idle.pop(chunk, None)
        del self._group_of[chunk], self._owner_of[chunk]
        self._free.append(chunk)

    # -- what becomes of pages ------------------------------------------------------------------------------

    def left(self, group: int, pages: Sequence[int]) -> None:
        """Pages have lost their references, or their content; a chunk whose last one goes is idle from now on."""
        empty = dict.fromkeys(page for page in pages if self._pools[group].hash_of(page) is None)
        for page in sorted(pages, key=empty.__contains__):
            chunk = self._chunk(group, page)
            if chunk not in self._live_in:
                continue
            self._live_in[chunk] -= 1
            if not self._live_in[chunk]:
                del self._live_in[chunk]
                self._busy[group] -= 1
                self._idle[chunk] = None
        for page in empty:
            self._make_empty(group, self.place(group, page))
        for chunk in dict.fromkeys(self._chunk(group, page) for page in empty):
            self._close_if_empty(group, chunk)

    def revived(self, group: int, pages: Sequence[int]) -> None:
        """Pages have their first reference."""
        for page in pages:
            chunk = self._chunk(group, page)
            if chunk not in self._live_in:
                self._live_in[chunk] = 0
                self._busy[group] += 1
                self._idle.pop(chunk, None)  # it may have been free
            self._live_in[chunk] += 1

    def _check_places(self) -> None:
        chunks = [*self._free, *self._idle, *self._live_in]
        if sorted(chunks) != list(range(self.chunks)):
            raise InvariantError(f"{len(chunks)} free, idle and busy chunks are not the {self.chunks}")
        for group, nested in enumerate(self._nested):
            own = [chunk for chunk, owner in self._group_of.items() if owner == group]
            busy = [chunk for chunk in own if chunk in self._live_in]
            if len(busy) != self._busy[group]:
                raise InvariantError(
                    f"group {group} has {len(busy)} chunks with references, counted {self._busy[group]}"
                )
            whole = len(own) * nested
            pool = self._pools[group]
            if whole != pool.live_blocks + pool.cached_blocks + len(self._empty[group]):
                raise InvariantError(f"group {group}: the {whole} places of its chunks are miscounted")

    def place(self, group: int, page: int) -> int:
        """The place of a page among those of its group."""
        return page - self.pools[group].offset - 1

    def page(self, group: int, place: int) -> int:
        """The number of the page of a group at a place."""
        return self.pools[group].offset + 1 + place

    # -- counts ---------------------------------------------------------------------------------------------

    @property
    def page_counts(self) -> tuple[int, ...]:
        """The size of the memory, as `GroupLayout.page_counts` has it."""
        return self.layout.page_counts(self.memory, 1, 1)

    @property
    def num_pages(self) -> int:
        """Pages of the largest kind that the memory holds."""
        return min(pool.num_blocks for pool in self.pools)

    def slots(self) -> tuple[int, int, int]:
        """Slots of the memory, of cached pages without a reference, and of free bytes without content."""
        sizes = [group.page_bytes // self.layout.slot_bytes for group in self.layout.groups]
        whole = self.memory // self.layout.slot_bytes
        cached = sum(map(mul, [pool.cached_blocks for pool in self.pools], sizes))
        return whole, cached, whole - cached - sum(map(mul, self._live(), sizes))

    def _live(self) -> list[int]:
        return [pool.live_blocks for pool in self.pools]

    # -- pages ----------------------------------------------------------------------------------------------

    def take(
        self, needs: Sequence[int], owner: int = 0, later: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Take `needs` pages of each group for a request; raises OutOfBlocksError, with nothing changed, if they lack.

        `owner` names the request: pages that lie together are given to one request where that is possible. `later`:
        pages that must still fit afterwards.
        """
        if not self.fits(needs):
            raise OutOfBlocksError(f"{list(needs)} pages asked for, the memory has no room for them")
        left = list(needs) if later is None else list(map(add, needs, later))
        taken = []
        for group, need in enumerate(needs):
            taken.append(self._place(group, need, left, owner) if need else [])
            left[group] -= need
        return taken

    def check(self, entries: Mapping[int, int]) -> None:
        """Verify references, counters, the cache, and that no two pages overlap. Raises InvariantError."""
        super().check(entries)
        spans = []
        for group, pool in enumerate(self._pools):
            pages = range(pool.offset + 1, pool.offset + 1 + pool.num_blocks)
            used = [page for page in pages if pool.references(page)]
            spans += [self.span(group, page) for page in (*used, *pool.order)]
        spans.sort()
        if any(end > start for (_, end), (start, _) in pairwise(spans)):
            raise InvariantError("two pages overlap")
        if spans and (spans[0][0] < 0 or spans[-1][1] > self.memory):
            raise InvariantError("a page lies outside of the memory")
        self._check_places()


def pages_of(
    layout: GroupLayout,
    counts: Sequence[int],
    *,
    retention: Retention = Retention.lru,
    behind_first: bool = False,
) -> PoolPages:
    """Empty pages of a layout; `counts` as `GroupLayout.page_counts` has them."""
    if layout.pages is GroupPages.lcm:
        return ChunkPages(layout, counts[0], retention=retention, behind_first=behind_first)
    return PoolPages(layout, counts, retention=retention, behind_first=behind_first)
