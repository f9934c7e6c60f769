"""The pages of groups: which pool a group takes them from, and the order in which cached ones are evicted.

`PoolPages` keeps one `BlockPool` for all groups or one for each. Page numbers of all pools differ from each other.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.core.errors import CoreError
from engine.core.identity import BlockHash
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.eviction import LruQueue
from engine.core.memory.group_layout import GroupLayout
from engine.core.options import GroupPages, Retention

GroupKey = tuple[int, BlockHash]
"""The key of a cached page: its group, and the hash of the tokens up to the block's end."""


@dataclass(frozen=True, slots=True)
class PoolShare:
    """One pool of pages: the groups that take pages from it, and the number added to its page ids."""

    pool: BlockPool
    groups: tuple[int, ...]
    offset: int


class BehindFirstQueue:
    """Eviction order that knows groups: pages behind a window first, then the least recently used.

    A page that a window has left helps only a hit that ends inside of the prefix. So it is evicted before the pages
    that a hit on the whole prefix needs. Among each other both kinds are ordered as in `LruQueue`.
    """

    def __init__(self) -> None:
        self._behind, self._others = LruQueue(), LruQueue()
        self._is_behind: set[int] = set()
        self.pushes_behind = False  # whether the next pages are behind a window

    def __len__(self) -> int:
        return len(self._behind) + len(self._others)

    def push(self, blocks: Sequence[int]) -> None:
        """Add pages, in table order."""
        if self.pushes_behind:
            self._is_behind.update(blocks)
            self._behind.push(blocks)
        else:
            self._others.push(blocks)

    def remove(self, block: int) -> None:
        """Remove a page, because a sequence refers to it again."""
        if block in self._is_behind:
            self._is_behind.remove(block)
            self._behind.remove(block)
        else:
            self._others.remove(block)

    def pop(self, count: int) -> list[int]:
        """Remove and return the next `count` pages to evict."""
        first = self._behind.pop(min(count, len(self._behind)))
        self._is_behind.difference_update(first)
        return first + self._others.pop(count - len(first))

    def blocks(self) -> list[int]:
        """All pages in order of eviction."""
        return self._behind.blocks() + self._others.blocks()


class PoolPages:
    """Pages of all groups, in one pool (`GroupPages.uniform`) or in one for each group (`separate`).

    `counts` are the pages of each pool. Methods take the index of a group; pages are named by numbers that no other
    pool has, from 1 on. With `behind_first`, pages that a window has left are evicted before all others.
    """

    def __init__(
        self,
        layout: GroupLayout,
        counts: Sequence[int],
        *,
        retention: Retention = Retention.lru,
        behind_first: bool = False,
    ) -> None:
        groups = len(layout.groups)
        shared = layout.pages is GroupPages.uniform
        owners = [tuple(range(groups))] if shared else [(group,) for group in range(groups)]
        if len(counts) != len(owners):
            raise CoreError(f"{len(counts)} numbers of pages for {len(owners)} pools")
        self.layout = layout
        self.shares: list[PoolShare] = []
        self._queues = [BehindFirstQueue() if behind_first else None for _ in owners]
        for count, owned, queue in zip(counts, owners, self._queues, strict=True):
            pool = BlockPool(count, retention=retention, eviction=queue)
            self.shares.append(PoolShare(pool, owned, sum(share.pool.num_blocks for share in self.shares)))
        self._share_of = [index for index, owned in enumerate(owners) for _ in owned]

    # -- counts --------------------------------------------------------------------------------------------

    @property
    def page_counts(self) -> tuple[int, ...]:
        """Pages of each pool, as `GroupLayout.page_counts` has them."""
        return tuple(share.pool.num_blocks for share in self.shares)

    @property
    def num_pages(self) -> int:
        """Pages of all pools."""
        return sum(share.pool.num_blocks for share in self.shares)

    @property
    def live_pages(self) -> int:
        """Pages that at least one table refers to."""
        return sum(share.pool.live_blocks for share in self.shares)

    @property
    def cached_pages(self) -> int:
        """Pages of the prefix cache that no table refers to."""
        return sum(share.pool.cached_blocks for share in self.shares)

    def slots(self) -> tuple[int, int, int]:
        """Slots of all pages, of cached ones without a reference, and of free ones without content."""
        whole = cached = free = 0
        for share in self.shares:
            size = self.layout.page_slots(share.groups[0])
            whole += share.pool.num_blocks * size
            cached += share.pool.cached_blocks * size
            free += (share.pool.free_blocks - share.pool.cached_blocks) * size
        return whole, cached, free

    def fits(self, needs: Sequence[int], hits: Sequence[Sequence[int]] | None = None, spare: int = 0) -> bool:
        """Whether `needs` pages of each group can be taken beside `hits`, and `spare` stay free.

        `hits` are cached pages of each group that the taker refers to first. Of several pools each keeps its share of
        the spare pages.
        """
        if hits is not None:
            revived = map(self.unreferenced, range(len(needs)), hits)
            needs = [need + len(pages) for need, pages in zip(needs, revived, strict=True)]
        return not any(self._lack(share, needs, spare) for share in self.shares)

    def _lack(self, share: PoolShare, needs: Sequence[int], spare: int) -> bool:
        pool = share.pool
        need = sum(needs[group] for group in share.groups)
        kept = -(-spare * pool.num_blocks // self.num_pages) if spare else 0
        return need + kept > pool.free_blocks

    def stranded(self, needs: Sequence[int]) -> int:
        """Free slots without content that a request of `needs` pages cannot use, because another pool lacks pages."""
        lacking = [self._lack(share, needs, 0) for share in self.shares]
        if not any(lacking):
            return 0
        return sum(
            (share.pool.free_blocks - share.pool.cached_blocks) * self.layout.page_slots(share.groups[0])
            for share, lacks in zip(self.shares, lacking, strict=True)
            if not lacks
        )

    def lacks_ever(self, needs: Sequence[int]) -> str | None:
        """Why `needs` pages fit not even into empty pools, or None."""
        for share in self.shares:
            need = sum(needs[group] for group in share.groups)
            if need > share.pool.num_blocks:
                whose = "" if len(self.shares) == 1 else f" of group {share.groups[0]}"
                return f"needs {need} pages{whose}, its pool has {share.pool.num_blocks}"
        return None

    # -- pages ---------------------------------------------------------------------------------------------

    def take(self, needs: Sequence[int], owner: int = 0) -> list[list[int]]:
        """Take `needs` pages of each group, which must fit. The pages of a pool are alike: `owner` does not count.

        Raises OutOfBlocksError where they are not free; then those of earlier groups are taken.
        """
        return [self._take(group, need) if need else [] for group, need in enumerate(needs)]

    def _take(self, group: int, count: int) -> list[int]:
        share = self.shares[self._share_of[group]]
        return [block + share.offset for block in share.pool.take(count)]

    def share(self, group: int, pages: Sequence[int]) -> int:
        """Add a reference to each of `pages`; returns how many had none."""
        share = self.shares[self._share_of[group]]
        return share.pool.share([page - share.offset for page in pages]) if pages else 0

    def release(self, group: int, pages: Sequence[int], *, behind: bool = False) -> list[int]:
        """Drop a reference to each of `pages`, in table order; returns those that have none now.

        `behind`: a window has left them, and no other request has found them yet.
        """
        if not pages:
            return []
        share, queue = self.shares[self._share_of[group]], self._queues[self._share_of[group]]
        if queue is not None:
            queue.pushes_behind = behind
        return [page + share.offset for page in share.pool.release([page - share.offset for page in pages])]

    def references(self, group: int, page: int) -> int:
        """How many tables refer to a page."""
        share = self.shares[self._share_of[group]]
        return share.pool.references(page - share.offset)

    def unreferenced(self, group: int, pages: Iterable[int]) -> list[int]:
        """Those of `pages` that no table refers to; NO_PAGE is none."""
        share = self.shares[self._share_of[group]]
        return [page for page in pages if page and not share.pool.references(page - share.offset)]

    # -- the prefix cache ----------------------------------------------------------------------------------

    def cache(self, group: int, pages: Sequence[int], keys: Sequence[GroupKey]) -> None:
        """Enter full pages into the prefix cache under their keys."""
        share = self.shares[self._share_of[group]]
        share.pool.cache_full_blocks([page - share.offset for page in pages], keys)

    def first(self, group: int, key: GroupKey) -> int | None:
        """The oldest cached page with `key`, or None."""
        share = self.shares[self._share_of[group]]
        page = share.pool.first_block(key)
        return None if page is None else page + share.offset

    def live_duplicates(self) -> list[set[int]]:
        """For each group the live pages that hold what another live page of it holds too; one of them is left."""
        found: list[set[int]] = [set() for _ in self.layout.groups]
        for share in self.shares:
            for key, blocks in share.pool.copies():
                live = [block + share.offset for block in blocks if share.pool.references(block)]
                found[key[0]].update(live[1:])  # type: ignore[index]  # a key of ours
        return found

    def cached_by_group(self) -> list[int]:
        """The cached pages of each group that no table refers to. It costs a look at each of them."""
        found = [0] * len(self.layout.groups)
        for share in self.shares:
            for block in share.pool.cached_without_reference():
                found[share.pool.hash_of(block)[0]] += 1  # type: ignore[index]  # a key of ours
        return found

    def reset(self) -> None:
        """Empty the prefix cache. Raises CoreError, and changes nothing, while a page is in use."""
        if self.live_pages:
            raise CoreError(f"the prefix cache cannot be emptied while {self.live_pages} pages are in use")
        for share in self.shares:
            share.pool.reset()

    def drain_voided(self) -> list[int]:
        """Pages whose content became void since the last call."""
        return [block + share.offset for share in self.shares for block in share.pool.drain_voided()]

    def check(self, entries: Mapping[int, int]) -> None:
        """Verify each pool; `entries` has how often the tables name each page. Raises InvariantError."""
        for share in self.shares:
            numbers = range(share.offset + 1, share.offset + share.pool.num_blocks + 1)
            own = Counter({page - share.offset: entries[page] for page in numbers if page in entries})
            share.pool.check(dict(own))
