"""Pages of several sizes in chunks of one compatible size: the policy `lcm`.

A chunk has the least common multiple of all page sizes, so it holds a whole number of pages of any group, and those of
one group at a time. A chunk without content belongs to nobody, so memory moves between the groups.

Source: Jenga (Zhang et al., SOSP 2025): a compatible page with small pages nested in it, and small pages of
one large page given to one request first, so that it becomes free as a whole when the request ends. The order in which
pages are taken is our reading of it: empty pages of other requests are used before content is evicted.
"""

from collections import OrderedDict
from collections.abc import Sequence

from engine.core.errors import CoreError, InvariantError
from engine.core.memory.group_layout import GroupLayout
from engine.core.memory.group_memory import MemoryPages
from engine.core.options import GroupPages, Retention


class ChunkPages(MemoryPages):
    """`count` chunks. A page is taken from, in this order:

    an empty page in a chunk of the same request, a free chunk, an empty page of the group anywhere, a chunk without
    references (the one that was released first loses its cached pages), the group's cached page to evict.

    Raises CoreError for other layouts.
    """

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
        super().__init__(layout, count * layout.chunk_bytes, retention=retention, behind_first=behind_first)
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

    # -- where pages lie ------------------------------------------------------------------------------------

    def span(self, group: int, page: int) -> tuple[int, int]:
        """See `MemoryPages.span`."""
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
        """See `MemoryPages.fits`."""
        busy, live = list(self._busy), list(self.live)
        for group, pages in enumerate(hits or ()):
            revived = set(self.unreferenced(group, pages))
            live[group] += len(revived)
            busy[group] += len({self._chunk(group, page) for page in revived} - self._live_in.keys())
        used = sum(busy) + sum(self._chunks_needed(needs, busy, live))
        return used + -(-spare * self.chunks // self.num_pages) <= self.chunks

    def stranded(self, needs: Sequence[int]) -> int:
        """See `MemoryPages.stranded`: empty pages in chunks of groups that have enough of them."""
        if self.fits(needs):
            return 0
        lacking = self._chunks_needed(needs, self._busy, self.live)
        return sum(
            max(0, len(empty) - need) * self.layout.page_slots(group)
            for group, (empty, need) in enumerate(zip(self._empty, needs, strict=True))
            if not lacking[group]
        )

    def lacks_ever(self, needs: Sequence[int]) -> str | None:
        """See `MemoryPages.lacks_ever`."""
        chunks = sum(-(-need // nested) for need, nested in zip(needs, self._nested, strict=True))
        if chunks <= self.chunks:
            return None
        return f"needs {chunks} compatible pages of {self.layout.chunk_bytes} bytes, the memory has {self.chunks}"

    # -- taking ---------------------------------------------------------------------------------------------

    def _place(self, group: int, needs: Sequence[int], owner: int) -> list[int]:
        lacking = self._chunks_needed(needs, self._busy, self.live)
        others = sum(lacking) - lacking[group]
        most = self._busy[group] + self.chunks - sum(self._busy) - others  # the other groups need the rest
        places: list[int] = []
        while len(places) < needs[group]:
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
        self._fill(group, place)
        if chunk not in self._live_in:
            self._live_in[chunk] = 0
            self._busy[group] += 1
            self._idle.pop(chunk, None)
        self._live_in[chunk] += 1

    def _fill(self, group: int, place: int) -> None:
        chunk = place // self._nested[group]
        del self._empty[group][place]
        self._empty_in[chunk].remove(place)
        if not self._empty_in[chunk]:
            del self._empty_in[chunk]
            self._disown(group, chunk)

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

    def _idled(self, group: int, pages: Sequence[int]) -> None:
        self._leave(group, pages)

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
                del self._idle[chunk]
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
            if whole != self.live[group] + self.cached[group] + len(self._empty[group]):
                raise InvariantError(f"group {group}: the {whole} places of its chunks are miscounted")
