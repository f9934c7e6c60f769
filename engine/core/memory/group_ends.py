"""Two kinds of pages that grow from both ends of one memory: the policy `two_ended`.

The first group's pages lie from the beginning on, the second's from the end. What lies between them is free for both.
A page cannot move, so a page in use far from its end keeps the other kind out of what lies before it.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from engine.core.errors import CoreError, InvariantError
from engine.core.memory.group_layout import GroupLayout
from engine.core.memory.group_memory import MemoryPages
from engine.core.options import GroupPages, Retention


class TwoEndedPages(MemoryPages):
    """Two kinds of pages in `memory` bytes.

    A page is taken from the lowest empty place of its kind, then from the middle, then from the kind's cached pages in
    their order of eviction, and last from the middle beyond cached pages of the other kind, which are evicted. Places
    that the other kind needs for the same taking are left to it.

    Raises CoreError unless the layout has two groups.
    """

    def __init__(
        self,
        layout: GroupLayout,
        memory: int,
        *,
        retention: Retention = Retention.lru,
        behind_first: bool = False,
    ) -> None:
        if layout.pages is not GroupPages.two_ended or len(layout.groups) != 2:
            raise CoreError(f"two ends serve two kinds of pages, not {len(layout.groups)} ({layout.pages})")
        super().__init__(layout, memory, retention=retention, behind_first=behind_first)
        self._sizes = [group.page_bytes for group in layout.groups]
        self._holes: list[list[int]] = [[], []]  # heaps of places that became empty; some are out of date
        self._used: list[set[int]] = [set(), set()]  # places with content
        self._live_places: list[set[int]] = [set(), set()]
        self._high: list[list[int]] = [[], []]  # heaps of minus a place with content, and
        self._high_live: list[list[int]] = [[], []]  # of minus a place with references; some are out of date

    def span(self, group: int, page: int) -> tuple[int, int]:
        """See `MemoryPages.span`."""
        start = self.place(group, page) * self._sizes[group]
        end = start + self._sizes[group]
        return (start, end) if group == 0 else (self.memory - end, self.memory - start)

    @staticmethod
    def _extent(heap: list[int], places: set[int]) -> int:
        """One more than the highest of `places`."""
        while heap and -heap[0] not in places:
            heappop(heap)
        return 1 - heap[0] if heap else 0

    def _live_extent(self, group: int) -> int:
        return self._extent(self._high_live[group], self._live_places[group])

    def _needed(self, needs: Sequence[int], hits: Sequence[Sequence[int]] | None = None) -> list[int]:
        """How far each kind reaches at least, in places, with `needs` pages more beside `hits`."""
        reach = []
        for group, need in enumerate(needs):
            revived = (
                {self.place(group, page) for page in self.unreferenced(group, hits[group])} if hits else set()
            )
            highest = max(revived, default=-1) + 1
            count = self.live[group] + len(revived) + need
            reach.append(max(self._live_extent(group), highest, count))
        return reach

    def fits(self, needs: Sequence[int], hits: Sequence[Sequence[int]] | None = None, spare: int = 0) -> bool:
        """See `MemoryPages.fits`."""
        reach = self._needed(needs, hits)
        kept = -(-spare * self.memory // self.num_pages)
        return sum(map(_product, reach, self._sizes)) + kept <= self.memory

    def stranded(self, needs: Sequence[int]) -> int:
        """See `MemoryPages.stranded`: empty places of a kind that has more of them than it needs."""
        if self.fits(needs):
            return 0
        lost = 0
        for group, need in enumerate(needs):
            extent = self._live_extent(group)
            empty = extent - sum(place < extent for place in self._used[group])
            lost += max(0, empty - need) * self.layout.page_slots(group)
        return lost

    def lacks_ever(self, needs: Sequence[int]) -> str | None:
        """See `MemoryPages.lacks_ever`."""
        size = sum(map(_product, needs, self._sizes))
        return None if size <= self.memory else f"needs {size} bytes of pages, the memory has {self.memory}"

    # -- taking ---------------------------------------------------------------------------------------------

    def _place(self, group: int, needs: Sequence[int], owner: int) -> list[int]:
        other = self._needed(needs)[1 - group] * self._sizes[1 - group]
        limit = (self.memory - other) // self._sizes[group]
        places: list[int] = []
        while len(places) < needs[group]:
            places.append(self._next(group, limit))
            self._fill(group, places[-1])
        for place in places:
            self._refer(group, place)
        return [self.page(group, place) for place in places]

    def _next(self, group: int, limit: int) -> int:
        extent = self._extent(self._high[group], self._used[group])
        holes = self._holes[group]
        while holes and not limit <= holes[0] < extent:
            place = heappop(holes)
            if place < extent and place not in self._used[group]:
                return place
        other = self._extent(self._high[1 - group], self._used[1 - group]) * self._sizes[1 - group]
        if extent < limit and (extent + 1) * self._sizes[group] + other <= self.memory:
            return extent
        for page in self.orders[group]:
            if self.place(group, page) < limit:
                self._drop(group, page)
                return self.place(group, page)
        if extent >= limit:
            raise CoreError(f"group {group} finds no page, although its pages fit")
        room = (self.memory - (extent + 1) * self._sizes[group]) // self._sizes[1 - group]
        beyond = [page for page in self.orders[1 - group] if self.place(1 - group, page) >= room]
        for page in beyond:
            self._drop(1 - group, page)
        return extent

    def _drop(self, group: int, page: int) -> None:
        self._evict(group, [page])
        self._used[group].remove(self.place(group, page))
        heappush(self._holes[group], self.place(group, page))

    def _fill(self, group: int, place: int) -> None:
        self._used[group].add(place)
        heappush(self._high[group], -place)

    def _refer(self, group: int, place: int) -> None:
        self._live_places[group].add(place)
        heappush(self._high_live[group], -place)

    # -- what becomes of pages ------------------------------------------------------------------------------

    def _emptied(self, group: int, pages: Sequence[int]) -> None:
        for page in pages:
            place = self.place(group, page)
            self._live_places[group].discard(place)
            self._used[group].remove(place)
            heappush(self._holes[group], place)

    def _idled(self, group: int, pages: Sequence[int]) -> None:
        self._live_places[group].difference_update(self.place(group, page) for page in pages)

    def _revived(self, group: int, pages: Sequence[int]) -> None:
        for page in pages:
            self._refer(group, self.place(group, page))

    def _check_places(self) -> None:
        for group, used in enumerate(self._used):
            live = {self.place(group, page) for page in self._refs if self._is_of(group, page)}
            cached = {self.place(group, page) for page in self.orders[group]}
            if self._live_places[group] != live or used != live | cached:
                raise InvariantError(f"kind {group}: the places in use are miscounted")
            extent = self._extent(self._high[group], used)
            if extent != max(used, default=-1) + 1:
                raise InvariantError(
                    f"kind {group} reaches to place {max(used, default=-1)}, counted {extent - 1}"
                )
            if not set(range(extent)) - used <= set(self._holes[group]):
                raise InvariantError(f"kind {group}: an empty place was lost")

    def _is_of(self, group: int, page: int) -> bool:
        return 0 <= self.place(group, page) < self.counts[group]


def _product(one: int, other: int) -> int:
    return one * other
