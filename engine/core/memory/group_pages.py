"""The pages of groups: which pool a group takes them from, which are evicted first, and where their bytes go.

`PoolPages` keeps one `BlockPool` for all groups or one for each. Page numbers of all pools differ from each other.
`GroupAccount` says what the bytes of all pages are.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from operator import add, mul
from typing import Any, NamedTuple

from engine.core.errors import CoreError
from engine.core.identity import InnerHash
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.eviction import EvictionOrder
from engine.core.memory.group_layout import GroupLayout
from engine.core.memory.prefix_cache import PrefixCache
from engine.core.options import GroupPages, Retention
from engine.core.plan import SlotUsage


@dataclass(frozen=True, slots=True)
class PoolShare:
    """One pool of pages, and the groups that take pages from it."""

    pool: BlockPool
    groups: tuple[int, ...]


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
        ordered = behind_first or layout.pages is GroupPages.lcm
        queues = [EvictionOrder(behind_first=behind_first) if ordered else None for _ in owners]
        for count, owned, queue in zip(counts, owners, queues, strict=True):
            before = sum(share.pool.num_blocks for share in self.shares)
            pool = self._new_pool(count, queue, retention=retention, offset=before)
            self.shares.append(PoolShare(pool, owned))
        share_of = [index for index, owned in enumerate(owners) for _ in owned]
        self.pools = [self.shares[index].pool for index in share_of]  # of each group
        self.orders = [queues[index] for index in share_of]

    def _new_pool(self, count: int, queue: EvictionOrder | None, **options: Any) -> BlockPool:
        return BlockPool(count, eviction=queue, **options)

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

    def slots(self) -> tuple[int, int, int]:
        """Slots of all pages, of cached ones without a reference, and of free ones without content."""
        pools = [(share.pool, self.layout.page_slots(share.groups[0])) for share in self.shares]
        whole = sum(pool.num_blocks * size for pool, size in pools)
        cached = sum(pool.cached_blocks * size for pool, size in pools)
        return whole, cached, sum(pool.free_blocks * size for pool, size in pools) - cached

    def fits(self, needs: Sequence[int], hits: Sequence[Sequence[int]] | None = None, spare: int = 0) -> bool:
        """Whether `needs` pages of each group can be taken beside `hits`, and `spare` stay free.

        `hits` are cached pages of each group that the taker refers to first. Of several pools each keeps its share of
        the spare pages.
        """
        if hits is not None:
            needs = [
                need + pool.unreferenced(list(filter(None, pages)))
                for pool, need, pages in zip(self.pools, needs, hits, strict=True)
            ]
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

    def take(
        self, needs: Sequence[int], owner: int = 0, later: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Take `needs` pages of each group, which must fit. The pages of a pool are alike: `owner` does not count.

        Raises OutOfBlocksError where they are not free; then those of earlier groups are taken.
        """
        return [pool.take(need) if need else [] for pool, need in zip(self.pools, needs, strict=True)]

    # -- the prefix cache ----------------------------------------------------------------------------------

    def page_bytes(self, page: int) -> int:
        """Bytes of a page, by its number."""
        share = next(share for share in self.shares if page <= share.pool.offset + share.pool.num_blocks)
        return self.layout.groups[share.groups[0]].page_bytes

    def live_duplicates(self) -> list[set[int]]:
        """For each group the live pages that hold what another live page of it holds too; one of them is left."""
        found: list[set[int]] = [set() for _ in self.layout.groups]
        for share in self.shares:
            for key, blocks in share.pool.copies():
                live = [block for block in blocks if share.pool.references(block)]
                if not isinstance(key, InnerHash):  # such blocks differ behind what it names
                    found[key[0]].update(live[1:])  # type: ignore[index]  # a key of ours
        return found

    def cached_units(self) -> list[int]:
        """Tokens, or states, in the cached pages of each group without a reference. It costs a look at each."""
        found, groups = [0] * len(self.layout.groups), self.layout.groups
        for share in self.shares:
            for block in share.pool.cached_without_reference():
                name = share.pool.hash_of(block)
                units = groups[name[0]].units  # type: ignore[index]  # a key of ours
                in_part = isinstance(name, InnerHash) and units > 1
                found[name[0]] += share.pool.filled[block] if in_part else units  # type: ignore[index]
        return found

    def reset(self) -> None:
        """Empty the prefix cache. Raises CoreError, and changes nothing, while a page is in use."""
        if self.live_pages:
            raise CoreError(f"the prefix cache cannot be emptied while {self.live_pages} pages are in use")
        for share in self.shares:
            share.pool.reset()

    def drain_voided(self) -> list[int]:
        """Pages whose content became void since the last call."""
        return [block for share in self.shares for block in share.pool.drain_voided()]

    def check(self, entries: Mapping[int, int]) -> None:
        """Verify each pool; `entries` has how often the tables name each page. Raises InvariantError."""
        for share in self.shares:
            first = share.pool.offset + 1
            numbers = range(first, first + share.pool.num_blocks)
            share.pool.check({page: entries[page] for page in numbers if page in entries})


class GroupWaste(NamedTuple):
    """The bytes of all pools by what they are, while a step runs; they sum to the pools.

    Of pages that sequences refer to: `token` is needed by a next token (a state, too), `behind_window` is written and
    no longer seen (a block behind its window as a whole is released at its next row), `duplicate` holds what another
    such page holds,
    `reserved` will be written, `tail` never will, `padding` is lost to the one page size, `imbalance` to places of
    padding layers. Of the others: `cached` is a prefix to be hit, `external` is free, and of no use to the request at
    the head of the queue because another pool lacks pages, `free` is the rest.
    """

    token: int
    behind_window: int
    duplicate: int
    reserved: int
    tail: int
    padding: int
    imbalance: int
    cached: int
    external: int
    free: int


def held_bytes(layout: GroupLayout, live: Sequence[Any]) -> tuple[Any, ...]:
    """Bytes of the pages of each group, of which `live` are in use: numbers, or arrays over steps."""
    return tuple(map(mul, live, [group.page_bytes for group in layout.groups]))


def waste_of(
    layout: GroupLayout, usage: SlotUsage, behind: Sequence[Any], copies: Sequence[Any], live: Sequence[Any]
) -> GroupWaste:
    """Where the bytes go. Of each group `behind` are the tokens behind windows, `copies` the duplicates and `live` the
    pages in use: numbers, or arrays over steps, as those of `usage`.
    """
    slot, groups = layout.slot_bytes, layout.groups
    padding = sum(map(mul, live, [group.padding for group in groups]))
    imbalance = sum(map(mul, live, [group.imbalance for group in groups]))
    behind_window = sum(map(mul, behind, [group.unit_bytes for group in groups]))
    duplicate = sum(map(mul, copies, [group.units * group.unit_bytes for group in groups]))
    return GroupWaste(
        token=usage.token * slot - behind_window - duplicate,
        behind_window=behind_window,
        duplicate=duplicate,
        reserved=usage.reserved * slot,
        tail=usage.internal * slot - padding - imbalance,
        padding=padding,
        imbalance=imbalance,
        cached=usage.cached * slot,
        external=usage.external * slot,
        free=usage.free * slot,
    )


class GroupUsage(SlotUsage):
    """The slot states of a cache with groups, and the account of each group for the engine's audit.

    `written_units()` returns how often each group has a written token (or state) in the pools, in live and in cached
    pages; a page counts once. It reads the live tables: call it before the next step is scheduled.
    """

    written_units: Callable[[], list[int]]


class GroupAccount:
    """Reads the counters of all groups; nothing is changed."""

    def __init__(self, pages: PoolPages, caches: Sequence[PrefixCache]) -> None:
        self._pages, self._layout = pages, pages.layout
        self._tables = [cache.tables for cache in caches]
        groups, slot = pages.layout.groups, pages.layout.slot_bytes
        self._unit_slots = [group.unit_bytes // slot for group in groups]
        self._lost_slots = [(group.page_bytes - group.units * group.unit_bytes) // slot for group in groups]

    def _live(self) -> list[int]:
        """Pages of each group that are in use."""
        return [tables.counters.blocks for tables in self._tables]

    def usage(self, needs: Sequence[int] | None) -> GroupUsage:
        """Slots by state, in slots of `GroupLayout.slot_bytes`.

        Free pages of a pool are external where the request at the head of the queue, which `needs` so many pages of
        each group, finds another pool full.
        """
        whole, cached, free = self._pages.slots()
        token = sum(map(mul, [tables.counters.written for tables in self._tables], self._unit_slots))
        internal = sum(map(mul, [tables.counters.internal for tables in self._tables], self._unit_slots))
        internal += sum(map(mul, self._live(), self._lost_slots))
        external = 0 if needs is None else self._pages.stranded(needs)
        reserved = whole - cached - free - token - internal
        entries, live = sum(tables.counters.entries for tables in self._tables), self._pages.live_pages
        usage = GroupUsage(token, cached, reserved, internal, external, free - external, entries, live)
        usage.written_units = self._written_units
        return usage

    def _written_units(self) -> list[int]:
        written = [tables.counters.written for tables in self._tables]
        return list(map(add, self._pages.cached_units(), written))

    def held_bytes(self) -> tuple[int, ...]:
        """Bytes of the pages of each group that are in use."""
        return held_bytes(self._layout, self._live())

    def waste(self, usage: SlotUsage) -> GroupWaste:
        """Where the bytes of a step go that is scheduled and not committed yet; `usage` is that of its plan."""
        copies = self._pages.live_duplicates()
        behind = [
            0 if group.window is None else self._behind_tokens(index, copies[index])
            for index, group in enumerate(self._layout.groups)
        ]
        return waste_of(self._layout, usage, behind, [*map(len, copies)], self._live())

    def _behind_tokens(self, index: int, copies: Container[int]) -> int:
        """Tokens of a windowed group that no sequence sees any more: in blocks where windows begin, and in all that a
        sequence without a row in this step has not released yet.

        A page counts where all of its sequences have left tokens behind, as often as the last of them. `copies` are
        duplicates as a whole.
        """
        group, found = self._layout.groups[index], dict[int, list[int]]()
        size = group.block_size
        for part in self._tables[index].live:
            unseen, table = group.unseen(part.computed), part.table
            for place in range(part.held, min(len(table), -(-unseen // size))):
                found.setdefault(table[place], []).append(min(unseen - place * size, size))
        return sum(
            min(behind)
            for page, behind in found.items()
            if page not in copies and len(behind) == self._pages.pools[index].references(page)
        )
