"""Pages of different sizes in one memory: what they hold, who refers to them, and which are evicted first.

Where a page lies is decided by a subclass, `ChunkPages` (in chunks of one compatible size). A page is named by a number
that no other group has: the first number of its group, and its place.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from engine.core.errors import CoreError, InvariantError, OutOfBlocksError
from engine.core.memory.block_pool import HashIndex
from engine.core.memory.group_layout import GroupLayout
from engine.core.memory.group_pages import GroupKey
from engine.core.options import Retention


class EvictionOrder:
    """The cached pages of a group that no table refers to, the one to evict first at the front.

    Least recently released first, within a table the last block first. With `behind_first` pages that a window has
    left come before all others, as in `BehindFirstQueue`.
    """

    def __init__(self, *, behind_first: bool) -> None:
        self._behind: OrderedDict[int, None] = OrderedDict()
        self._others: OrderedDict[int, None] = OrderedDict()
        self._behind_first = behind_first

    def __len__(self) -> int:
        return len(self._behind) + len(self._others)

    def __contains__(self, page: object) -> bool:
        return page in self._others or page in self._behind

    def __iter__(self) -> Iterator[int]:
        yield from self._behind
        yield from self._others

    def push(self, pages: Sequence[int], *, behind: bool) -> None:
        """Add pages, in table order."""
        queue = self._behind if behind and self._behind_first else self._others
        queue.update(dict.fromkeys(reversed(pages)))

    def remove(self, page: int) -> None:
        """Remove a page, because a sequence refers to it again or it is evicted."""
        if page in self._behind:
            del self._behind[page]
        else:
            del self._others[page]


class MemoryPages(ABC):
    """Pages of all groups in one memory of `memory` bytes. The methods are those of `PoolPages`.

    A cached page is evicted when its bytes are needed, by its own group or by another. `counts` says how many pages of
    each group the whole memory would hold.
    """

    def __init__(
        self,
        layout: GroupLayout,
        memory: int,
        *,
        retention: Retention = Retention.lru,
        behind_first: bool = False,
    ) -> None:
        self.layout, self.memory = layout, memory
        self.counts = [memory // group.page_bytes for group in layout.groups]
        self._firsts = [1 + sum(self.counts[:index]) for index in range(len(layout.groups))]
        self._retention = retention
        self._refs: dict[int, int] = {}
        self._keys: dict[int, GroupKey] = {}
        self._index = HashIndex()
        self._voided: list[int] = []
        self.orders = [EvictionOrder(behind_first=behind_first) for _ in layout.groups]
        self.live = [0] * len(layout.groups)
        self.cached = [0] * len(layout.groups)

    # -- where pages lie ------------------------------------------------------------------------------------

    @abstractmethod
    def span(self, group: int, page: int) -> tuple[int, int]:
        """The first byte of a page in the memory, and the one behind its last."""

    @abstractmethod
    def fits(self, needs: Sequence[int], hits: Sequence[Sequence[int]] | None = None, spare: int = 0) -> bool:
        """Whether `needs` pages of each group can be taken beside `hits`, and `spare` of `num_pages` pages stay.

        `hits` are cached pages of each group that the taker refers to first; NO_PAGE and pages in use do not count.
        """

    @abstractmethod
    def _place(self, group: int, needs: Sequence[int], owner: int) -> list[int]:
        """Choose places for `needs[group]` pages and evict what lies there; returns the numbers of the pages.

        `needs` has what is left to take of each group; all of it fits, and fits afterwards.
        """

    @abstractmethod
    def _emptied(self, group: int, pages: Sequence[int]) -> None:
        """Pages hold nothing any more."""

    @abstractmethod
    def _idled(self, group: int, pages: Sequence[int]) -> None:
        """Pages have no reference any more and stay cached."""

    @abstractmethod
    def _revived(self, group: int, pages: Sequence[int]) -> None:
        """Cached pages are referred to again."""

    @abstractmethod
    def stranded(self, needs: Sequence[int]) -> int:
        """Free slots without content that a request of `needs` pages cannot use where they lie; 0 if it fits."""

    @abstractmethod
    def lacks_ever(self, needs: Sequence[int]) -> str | None:
        """Why `needs` pages fit not even into empty memory, or None."""

    @abstractmethod
    def _check_places(self) -> None:
        """Verify what the subclass keeps. Raises InvariantError."""

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

    @property
    def cached_pages(self) -> int:
        """Pages of the prefix cache that no table refers to."""
        return sum(self.cached)

    def slots(self) -> tuple[int, int, int]:
        """Slots of the memory, of cached pages without a reference, and of free bytes without content."""
        sizes = [group.page_bytes // self.layout.slot_bytes for group in self.layout.groups]
        whole = self.memory // self.layout.slot_bytes
        cached = sum(count * size for count, size in zip(self.cached, sizes, strict=True))
        live = sum(count * size for count, size in zip(self.live, sizes, strict=True))
        return whole, cached, whole - cached - live

    # -- pages ----------------------------------------------------------------------------------------------

    def take(self, needs: Sequence[int], owner: int = 0) -> list[list[int]]:
        """Take `needs` pages of each group for a request; raises OutOfBlocksError, with nothing changed, if they lack.

        `owner` names the request: pages that lie together are given to one request where that is possible.
        """
        if not self.fits(needs):
            raise OutOfBlocksError(f"{list(needs)} pages asked for, the memory has no room for them")
        left = list(needs)
        taken = []
        for group, need in enumerate(needs):
            pages = self._place(group, left, owner) if need else []
            left[group] = 0
            self._refs.update(dict.fromkeys(pages, 1))
            self.live[group] += need
            taken.append(pages)
        return taken

    def share(self, group: int, pages: Sequence[int]) -> int:
        """Add a reference to each of `pages`; returns how many had none."""
        revived = [page for page in pages if page not in self._refs]
        if any(page not in self._keys for page in revived):
            raise CoreError(
                f"pages {revived} of group {group} are free and hold nothing: they cannot be shared"
            )
        for page in revived:
            self.orders[group].remove(page)
        self.cached[group] -= len(revived)
        self.live[group] += len(revived)
        for page in pages:
            self._refs[page] = self._refs.get(page, 0) + 1
        self._revived(group, revived)
        return len(revived)

    def release(self, group: int, pages: Sequence[int], *, behind: bool = False) -> list[int]:
        """Drop a reference to each of `pages`, in table order; returns those that have none now.

        `behind`: a window has left them, and no other request has found them yet.
        """
        gone = []
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
        self.cached[group] += len(cached)
        self.orders[group].push(cached, behind=behind)
        self._idled(group, cached)
        empty = [page for page in gone if page not in self._keys]
        self._voided += empty
        self._emptied(group, empty)
        return gone

    def _evict(self, group: int, pages: Sequence[int]) -> None:
        """Cached pages lose their content; a subclass notes what that means for their places."""
        self._forget(pages)
        for page in pages:
            self.orders[group].remove(page)
        self.cached[group] -= len(pages)
        self._voided += pages

    def _forget(self, pages: Sequence[int]) -> None:
        self._index.drop([self._keys.pop(page) for page in pages], pages)

    def references(self, group: int, page: int) -> int:
        """How many tables refer to a page."""
        return self._refs.get(page, 0)

    def unreferenced(self, group: int, pages: Iterable[int]) -> list[int]:
        """Those of `pages` that no table refers to; NO_PAGE is none."""
        return [page for page in pages if page and page not in self._refs]

    # -- the prefix cache -----------------------------------------------------------------------------------

    def cache(self, group: int, pages: Sequence[int], keys: Sequence[GroupKey]) -> None:
        """Enter full pages into the prefix cache under their keys."""
        bad = [page for page in pages if page not in self._refs or page in self._keys]
        if bad:
            raise CoreError(
                f"page {bad[0]} of group {group} cannot be cached: not in use, or in the cache already"
            )
        self._keys.update(zip(pages, keys, strict=True))
        self._index.add(keys, list(pages))

    def first(self, group: int, key: GroupKey) -> int | None:
        """The oldest cached page with `key`, or None."""
        return self._index.first(key)

    def cached_by_group(self) -> list[int]:
        """The cached pages of each group that no table refers to."""
        return list(self.cached)

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
            if (len(live), len(order)) != (self.live[group], self.cached[group]):
                raise InvariantError(
                    f"group {group}: {len(live)} live and {len(order)} cached pages were miscounted"
                )
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
