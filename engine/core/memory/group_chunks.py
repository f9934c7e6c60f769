"""Pages of several sizes in chunks of one compatible size: the policy `lcm`.

A chunk has the least common multiple of all page sizes, so it holds a whole number of pages of any group, and those of
one group at a time. A chunk without content belongs to nobody, so memory moves between the groups.

Source: Jenga (Zhang et al., SOSP 2025): a compatible page with small pages nested in it, and small pages of
one large page given to one request first, so that it becomes free as a whole when the request ends. The order in which
pages are taken is our reading of it: empty pages of other requests are used before content is evicted.

A page is named by a number that no other group has: the first number of its group, and its place. A cached page is
evicted when its bytes are needed, by its own group or by another.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import add, mul

from engine.core.errors import CoreError, InvariantError, OutOfBlocksError
from engine.core.identity import BlockHash
from engine.core.memory.block_pool import UNKNOWN_ORIGIN, BlockOrigin, CacheEvent, HashIndex
from engine.core.memory.eviction import EvictionOrder
from engine.core.memory.group_layout import GroupLayout
from engine.core.options import GroupPages, Retention
from engine.core.request import Request


class ChunkPages:
    """Pages of all groups in one memory of `count` chunks. The methods are those of `PoolPages` and of a pool.

    `counts` says how many pages of each group the whole memory would hold. A page is taken from, in this order:

    an empty page in a chunk of the same request, a free chunk, an empty page of the group anywhere, a chunk without
    references (the one that was released first loses its cached pages), the group's cached page to evict.

    Raises CoreError for other layouts.
    """

    events: list[CacheEvent] | None = None  # none are kept

    def __init__(
        self,
        layout: GroupLayout,
        count: int,
        *,
        retention: Retention = Retention.lru,
        behind_first: bool = False,
    ) -> None:
        if layout.pages is not GroupPages.lcm:
            raise CoreError(f"chunks serve lcm, not {layout.pages}")
        memory = count * layout.chunk_bytes
        self.layout, self.memory = layout, memory
        self.counts = [memory // group.page_bytes for group in layout.groups]
        self._firsts = [1 + sum(self.counts[:index]) for index in range(len(layout.groups))]
        self._retention = retention
        self._refs: dict[int, int] = {}
        self._keys: dict[int, BlockHash] = {}
        self._index = HashIndex()
        self._voided: list[int] = []
        self.orders = [EvictionOrder(behind_first=behind_first) for _ in layout.groups]
        self.live = [0] * len(layout.groups)
        self.chunks = count
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

    @property
    def pools(self) -> list["ChunkPages"]:
        """Where each group releases its pages."""
        return [self] * len(self.layout.groups)

    def _group(self, page: int) -> int:
        return bisect_right(self._firsts, page) - 1

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
        busy, live = list(self._busy), list(self.live)
        for group, pages in enumerate(hits or ()):
            revived = set(self.unreferenced(group, pages))
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
        lacking = self._chunks_needed(needs, self._busy, self.live)
        return sum(
            max(0, len(empty) - need) * self.layout.page_slots(group)
            for group, (empty, need) in enumerate(zip(self._empty, needs, strict=True))
            if not lacking[group]
        )

    def lacks_ever(self, needs: Sequence[int]) -> str | None:
        """Why `needs` pages fit not even into empty memory, or None."""
        chunks = sum(-(-need // nested) for need, nested in zip(needs, self._nested, strict=True))
        if chunks <= self.chunks:
            return None
        return f"needs {chunks} compatible pages of {self.layout.chunk_bytes} bytes, the memory has {self.chunks}"

    # -- taking ---------------------------------------------------------------------------------------------

    def _place(self, group: int, count: int, needs: Sequence[int], owner: int) -> list[int]:
        lacking = self._chunks_needed(needs, self._busy, self.live)
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
        for page in self.orders[group]:
            chunk = self._chunk(group, page)
            if may_open or chunk in self._live_in:
                self._evict(group, [page])
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
        first = chunk * self._nested[other]
        places = range(first, first + self._nested[other])
        pages = [page for page in (self.page(other, place) for place in places) if page in self.orders[other]]
        self._evict(other, pages)
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
        self._revived(group, [self.page(group, place)])

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

    def _emptied(self, group: int, pages: Sequence[int]) -> None:
        self._leave(group, [page for page in pages if self._chunk(group, page) in self._live_in])
        for page in pages:
            self._make_empty(group, self.place(group, page))
        for chunk in dict.fromkeys(self._chunk(group, page) for page in pages):
            self._close_if_empty(group, chunk)

    def _leave(self, group: int, pages: Sequence[int]) -> None:
        """Pages have lost their references; a chunk whose last one goes is idle from now on."""
        for page in pages:
            chunk = self._chunk(group, page)
            self._live_in[chunk] -= 1
            if not self._live_in[chunk]:
                del self._live_in[chunk]
                self._busy[group] -= 1
                self._idle[chunk] = None

    def _revived(self, group: int, pages: Sequence[int]) -> None:
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
            raise InvariantError(
                f"{len(chunks)} free, idle and busy chunks are not exactly the {self.chunks}"
            )
        for group, nested in enumerate(self._nested):
            own = [chunk for chunk, owner in self._group_of.items() if owner == group]
            busy = [chunk for chunk in own if chunk in self._live_in]
            if len(busy) != self._busy[group]:
                raise InvariantError(
                    f"group {group} has {len(busy)} chunks with references, counted {self._busy[group]}"
                )
            whole = len(own) * nested
            if whole != self.live[group] + len(self.orders[group]) + len(self._empty[group]):
                raise InvariantError(f"group {group}: the {whole} places of its chunks are miscounted")

    def place(self, group: int, page: int) -> int:
        """The place of a page among those of its group."""
        return page - self._firsts[group]

    def page(self, group: int, place: int) -> int:
        """The number of the page of a group at a place."""
        return self._firsts[group] + place

    # -- counts ---------------------------------------------------------------------------------------------

    @property
    def page_counts(self) -> tuple[int, ...]:
        """The size of the memory, as `GroupLayout.page_counts` has it."""
        return self.layout.page_counts(self.memory, 1, 1)

    @property
    def num_pages(self) -> int:
        """Pages of the largest kind that the memory holds."""
        return min(self.counts)

    @property
    def live_pages(self) -> int:
        """Pages that at least one table refers to."""
        return sum(self.live)

    def slots(self) -> tuple[int, int, int]:
        """Slots of the memory, of cached pages without a reference, and of free bytes without content."""
        sizes = [group.page_bytes // self.layout.slot_bytes for group in self.layout.groups]
        whole = self.memory // self.layout.slot_bytes
        cached, live = sum(map(mul, map(len, self.orders), sizes)), sum(map(mul, self.live, sizes))
        return whole, cached, whole - cached - live

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
            pages = self._place(group, need, left, owner) if need else []
            left[group] -= need
            self._refs.update(dict.fromkeys(pages, 1))
            self.live[group] += need
            taken.append(pages)
        return taken

    def share(self, pages: Sequence[int]) -> int:
        """Add a reference to each of `pages`, of one group; returns how many had none."""
        if not pages:
            return 0
        group = self._group(pages[0])
        revived = [page for page in pages if page not in self._refs]
        if any(page not in self._keys for page in revived):
            raise CoreError(
                f"pages {revived} of group {group} are free and hold nothing: they cannot be shared"
            )
        for page in revived:
            self.orders[group].remove(page)
        self.live[group] += len(revived)
        for page in pages:
            self._refs[page] = self._refs.get(page, 0) + 1
        self._revived(group, revived)
        return len(revived)

    def leave(self, page: int) -> None:
        """Drop one of several references to a page."""
        if self.references(page) < 2:
            raise CoreError(f"page {page} has {self.references(page)} references: it cannot be left")
        self._refs[page] -= 1

    def release(self, pages: Sequence[int], first: int = 0, request: Request | None = None) -> list[int]:
        """Drop a reference to each of `pages`, of one group in table order; returns those that have none now.

        The order of eviction of groups does not ask where they stood, nor in whose table.
        """
        if not pages:
            return []
        gone, group = [], self._group(pages[0])
        for page in pages:
            if page not in self._refs:
                raise CoreError(f"page {page} of group {group} is released, but nothing refers to it")
            self._refs[page] -= 1
            if not self._refs[page]:
                del self._refs[page]
                gone.append(page)
        self.live[group] -= len(gone)
        if self._retention is Retention.none:
            self._forget([page for page in gone if page in self._keys])
        cached = [page for page in gone if page in self._keys]
        self.orders[group].push(cached)
        self._leave(group, cached)
        empty = [page for page in gone if page not in self._keys]
        self._voided += empty
        self._emptied(group, empty)
        return gone

    def _evict(self, group: int, pages: Sequence[int]) -> None:
        """Cached pages lose their content; a subclass notes what that means for their places."""
        self._forget(pages)
        for page in pages:
            self.orders[group].remove(page)
        self._voided += pages

    def _forget(self, pages: Sequence[int]) -> None:
        self._index.drop([self._keys.pop(page) for page in pages], pages)

    def references(self, page: int) -> int:
        """How many tables refer to a page."""
        return self._refs.get(page, 0)

    def unreferenced(self, group: int, pages: Iterable[int]) -> list[int]:
        """Those of `pages` that no table refers to; the null block is none."""
        return [page for page in pages if page and page not in self._refs]

    # -- the prefix cache -----------------------------------------------------------------------------------

    def cache_full_blocks(
        self, pages: Sequence[int], keys: Sequence[BlockHash], origin: BlockOrigin = UNKNOWN_ORIGIN
    ) -> None:
        """Enter full pages into the prefix cache under their keys; `origin` is for events, which are not kept."""
        bad = [page for page in pages if page not in self._refs or page in self._keys]
        if bad:
            raise CoreError(f"page {bad[0]} cannot be cached: not in use, or in the cache already")
        self._keys.update(zip(pages, keys, strict=True))
        self._index.add(keys, list(pages))

    def first_block(self, key: BlockHash) -> int | None:
        """The oldest cached page with `key`, or None."""
        return self._index.first(key)

    def uncache(self, pages: Sequence[int]) -> None:
        """Pages are about to be rewritten: remove their keys, where they have any."""
        self._forget([page for page in pages if page in self._keys])

    def find(self, keys: Sequence[BlockHash]) -> list[int]:
        """The pages of the longest prefix of `keys` that is cached."""
        return self._index.find(keys)

    def hash_of(self, page: int) -> BlockHash | None:
        """The key of a page, None if it is not cached."""
        return self._keys.get(page)

    def page_bytes(self, page: int) -> int:
        """Bytes of a page, by its number."""
        return self.layout.groups[self._group(page)].page_bytes

    def cached_units(self) -> list[int]:
        """Tokens, or states, in the cached pages of each group without a reference."""
        units = [group.units for group in self.layout.groups]
        return list(map(mul, map(len, self.orders), units))

    def live_duplicates(self) -> list[set[int]]:
        """For each group the live pages that hold what another live page of it holds too; one of them is left."""
        found: list[set[int]] = [set() for _ in self.layout.groups]
        for key, pages in self._index.copies():
            found[key[0]].update([page for page in pages if page in self._refs][1:])  # type: ignore[index]
        return found

    def reset(self) -> None:
        """Empty the prefix cache. Raises CoreError, and changes nothing, while a page is in use."""
        if self._refs:
            raise CoreError(f"the prefix cache cannot be emptied while {self.live_pages} pages are in use")
        for group, order in enumerate(self.orders):
            pages = list(order)
            self._evict(group, pages)
            self._emptied(group, pages)

    def drain_voided(self) -> list[int]:
        """Pages whose content became void since the last call."""
        voided, self._voided = self._voided, []
        return voided

    def check(self, entries: Mapping[int, int]) -> None:
        """Verify references, counters, the cache, and that no two pages overlap. Raises InvariantError.

        `entries` has how often the tables name each page.
        """
        if self._refs != dict(entries):
            raise InvariantError("the references of the pages are not those of the tables")
        spans = []
        for group, order in enumerate(self.orders):
            own = range(self._firsts[group], self._firsts[group] + self.counts[group])
            live = [page for page in self._refs if page in own]
            if len(live) != self.live[group]:
                raise InvariantError(f"group {group}: {len(live)} live pages were miscounted")
            if any(page in self._refs or page not in self._keys for page in order):
                raise InvariantError(f"group {group}: a page to be evicted is in use, or holds nothing")
            spans += [self.span(group, page) for page in (*live, *order)]
        if self._index.pairs() != sorted(self._keys.items()):
            raise InvariantError("the keys of the pages and the index differ")
        spans.sort()
        if any(end > start for (_, end), (start, _) in pairwise(spans)):
            raise InvariantError("two pages overlap")
        if spans and (spans[0][0] < 0 or spans[-1][1] > self.memory):
            raise InvariantError("a page lies outside of the memory")
        self._check_places()
