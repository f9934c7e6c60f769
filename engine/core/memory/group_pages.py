"""The pages of groups: which pool a group takes them from, and the order in which cached ones are evicted.

`PoolPages` keeps one `BlockPool` for all groups or one for each. Page numbers of all pools differ from each other.
Beside them stand the block tables of a sequence in every group, the keys of its blocks, what a lookup found, and
the counters, which say where every byte of the pools goes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple, overload

from engine.core.errors import CoreError, InvariantError
from engine.core.identity import BlockHash, BlockIdentity
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.eviction import LruQueue
from engine.core.memory.group_layout import GroupLayout, KVGroup
from engine.core.options import GroupKind, GroupPages, Retention
from engine.core.plan import SlotUsage
from engine.core.sequence import SequenceState

# The key of a cached page: its group, and the hash of the tokens up to the block's end.
GroupKey = tuple[int, BlockHash]


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
        shares = [self.shares[index] for index in self._share_of]
        return [
            [block + share.offset for block in share.pool.take(need)] if need else []
            for share, need in zip(shares, needs, strict=True)
        ]

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


# In a block table: a block that is not held, because its window has left it or a hit did not need it.
NO_PAGE = 0


class GroupTables(Sequence[int]):
    """The block tables of one sequence, one for each group; as a sequence of integers, one after the other.

    Entry i of a group's table is the page of tokens i x block_size and following, or NO_PAGE. `held` is the first
    entry of each table that may be a page, `hits` and `cached` say how many leading blocks came from the prefix cache
    and of how many it is settled whether they are in it. Below `due` computed tokens the next token needs no page and
    leaves none behind. `checkpoints` are positions in tokens where a later prompt may resume.
    """

    __slots__ = ("cached", "checkpoints", "due", "groups", "held", "hits", "keys")

    def __init__(
        self,
        groups: list[list[int]],
        hits: list[int],
        keys: "GroupKeys | None",
        checkpoints: Sequence[int] = (),
    ) -> None:
        self.groups = groups
        self.checkpoints = checkpoints
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
        return [page for page in self.groups[group][self.held[group] :] if page]


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

    As a sequence it has one entry for each match unit, their numbers. `junction`: where a longer hit of the first
    groups ends, in tokens; 0: there is none.
    """

    def __init__(self, units: int, pages: Sequence[list[int]], junction: int = 0) -> None:
        self.units, self.pages, self.junction = units, pages, junction

    def __len__(self) -> int:
        return self.units

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:  # type: ignore[override]
        return range(self.units)[index]


def check_table(sequence: SequenceState, tables: GroupTables, index: int, group: KVGroup) -> None:
    """Raise InvariantError unless the table has the blocks of its tokens, and those that the next token needs."""
    table, held, computed = tables.groups[index], tables.held[index], sequence.computed
    if len(table) != group.blocks(computed):
        raise InvariantError(f"{sequence}, group {index}: {len(table)} blocks for {computed} tokens")
    gaps = table[held:].count(NO_PAGE) if not group.aligned else int(bool(table) and not table[-1])
    if any(table[:held]) or gaps:
        raise InvariantError(f"{sequence}, group {index}: the pages do not begin at block {held}: {table}")
    if held > group.skipped(computed):
        raise InvariantError(
            f"{sequence}, group {index}: block {held - 1} was released, and token {computed} sees it"
        )


class GroupWaste(NamedTuple):
    """The bytes of all pools by what they are, while a step runs; they sum to the pools.

    Of pages that sequences refer to: `token` is needed by a next token (a state, too), `behind_window` is written and
    no longer seen, in a block that is not behind its window as a whole, `duplicate` holds what another such page holds,
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


class GroupUsage(SlotUsage):
    """The slot states of a cache with groups, and the account of each group for the engine's audit.

    `written_units()` returns how often each group has a written token (or state) in the pools, in live and in cached
    pages; a page counts once. It reads the live tables: call it before the next step is scheduled.
    """

    written_units: Callable[[], list[int]]


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
        written = sum(map(mul, self.written, self._unit_slots))
        lost = sum(map(mul, self.unfillable, self._unit_slots))
        return written, lost + sum(map(mul, self.pages, self._lost_slots))

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
