"""The prefix cache of requests: which full blocks enter it, under which hash, and how a lookup finds them.

`PrefixCache` is that of one group of layers. With several a prefix is hit as far as every group has what the next token
needs (`GroupHits`): all blocks, those of the last window or chunk, or the state at the end. Facts of vLLM's
`HybridKVCacheCoordinator` and `SingleTypeKVCacheManager` (0.33) are named where they decide.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.core.identity import BlockHash, InnerHash
from engine.core.memory.block_pool import NULL_BLOCK, BlockOrigin
from engine.core.memory.block_tables import BlockTables, GroupTable
from engine.core.memory.group_layout import GroupLayout
from engine.core.options import Decoding, Retention, WindowHits
from engine.core.request import Request
from engine.core.sequence import Group, SequenceState


@dataclass(frozen=True, slots=True)
class LookupRecord:
    """One lookup: how many leading blocks were asked for, how many hit, and the first hash that missed."""

    request_id: int
    asked_blocks: int
    hit_blocks: int
    missed: BlockHash | None


class RecentHits:
    """The share of tokens that the last `requests` requests found in the prefix cache when they were admitted first.

    As in vLLM's metric, what a request finds again after a preemption does not count (`PrefixCacheStats.record`).
    """

    def __init__(self, requests: int = 1000) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=requests)
        self._asked = self._hit = 0

    def note(self, asked: int, hit: int) -> None:
        """A request of `asked` tokens found `hit` of them."""
        recent = self._recent
        if len(recent) == recent.maxlen:
            self._asked -= recent[0][0]
            self._hit -= recent[0][1]
        recent.append((asked, hit))
        self._asked += asked
        self._hit += hit

    @property
    def rate(self) -> float | None:
        """Hit tokens over tokens; None where nobody has asked, which is no rate of 0 (vLLM prints none then)."""
        return self._hit / self._asked if self._asked else None


class PrefixCache:
    """Enters full blocks of sequences into the cache of a pool, and finds them for other requests.

    `find` looks up a request's prefix. `cache_full` is called when blocks are scheduled to be filled, so a second
    request in the same step hits them already. `cache_computed` is called before a sequence releases its blocks. Only
    then are the generated blocks of a steady decoder cached whose outputs no other request can use.

    Blocks that only their own request can use are entered under private numbers. A request looks for those that its
    preemptions left. Blocks that beams generated do not enter the cache: beams are replaced too often for their blocks
    to be found again. `deduplicate`: if another block with the same hash is older, refer to it and free the new one.
    Of several groups of layers, `index` is the number of this one; only blocks of whole `unit` tokens are cached, of
    which `keeps` names those to keep: from a first to before a last one, with the checkpoints of a sequence.
    """

    def __init__(
        self,
        tables: BlockTables,
        enabled: bool,
        deduplicate: bool = False,
        *,
        index: int | None = None,
        unit: int = 0,
        keeps: Callable[[int, int, Sequence[int]], Sequence[int]] | None = None,
    ) -> None:
        self.tables = tables
        self._pool = tables.pool
        self._size = tables.block_size
        self.enabled = enabled
        self._deduplicate = deduplicate
        self._index = index
        self._unit = unit or self._size
        self._keeps = keeps
        # What was cached in this step: first index, hashes.
        self._fresh: dict[SequenceState, tuple[int, Sequence[BlockHash]]] = {}

    def serves(self, request: Request) -> bool:
        """Whether the request uses the prefix cache."""
        return self.enabled and request.identity is not None

    def _keys(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """What hashes are entered under: groups with equal blocks have equal hashes and different pages."""
        return hashes if self._index is None else [(self._index, each) for each in hashes]

    # -- lookup --------------------------------------------------------------------------------------------

    def hashes(self, group: Group) -> Sequence[BlockHash]:
        """Of the full blocks of the group's prompt that other requests may have; none where it is not served."""
        identity = group.request.identity
        if not self.enabled or identity is None:
            return ()
        found = group.block_hashes.get(self._index)
        if found is None:
            found = group.block_hashes[self._index] = self._keys(identity.prompt_hashes(self._size))
        return found

    def names(self, group: Group) -> Sequence[BlockHash]:
        """The hashes of the group's full blocks that other requests may have, generated ones included."""
        hashes, identity = group.block_hashes.get(self._index) or self.hashes(group), group.request.identity
        if self.enabled and identity is not None and group.generated and group.request.width == 1:
            hashes = identity.generated_hashes(0, self._size) or hashes
        return hashes

    def find(self, group: Group, asked: int) -> tuple[list[int], BlockHash | None]:
        """The longest cached prefix in the first `asked` blocks, and the first hash that missed. Changes nothing."""
        hashes = self.names(group)
        hits = self._pool.find(hashes[:asked]) if hashes else []
        if len(hits) < min(asked, len(hashes)):
            return hits, hashes[len(hits)]
        if group.private:
            while len(hits) < asked and (found := self._private_block(group, len(hits))) is not None:
                hits.append(found)
        return hits, None

    def block(self, group: Group, index: int) -> int | None:
        """The cached block number `index` of the group, or None."""
        hashes = self.hashes(group)
        if index < len(hashes):
            return self._pool.first_block(hashes[index])
        return self._private_block(group, index)

    def _inner_hash(self, group: Group, tokens: int, private: int) -> InnerHash:
        """What the first `tokens` tokens, whole units, are entered under; `private` is the first of the numbers."""
        found, identity = group.block_hashes.get(None), group.request.identity
        if found is None and identity is not None:
            found = group.block_hashes[None] = identity.prompt_hashes(self._unit)
        known, unit = found or (), tokens // self._unit - 1
        return InnerHash(self._index or 0, known[unit] if unit < len(known) else private, tokens)

    def ending(self, group: Group, tokens: int) -> int | None:
        """The cached block that ends after the first `tokens` tokens, or inside which they are named; or None."""
        if tokens % self._size == 0:
            return self.block(group, tokens // self._size - 1)
        bases = (*group.private, -1)  # the last one is no request's number
        names = (self._inner_hash(group, tokens, base) for base in bases)
        return next(filter(None, map(self._pool.first_block, names)), None)

    def _private_block(self, group: Group, index: int) -> int | None:
        found = (self._pool.find(self._keys([base + index])) for base in group.private)
        return next((blocks[0] for blocks in found if blocks), None)

    def adopt(self, group: Group, root: SequenceState, hits: int, private: int) -> None:
        """`root` starts with a cached prefix of `hits` blocks; `private` is the first of its numbers.

        The group need not have been looked up.
        """
        root.block_hashes, root.cached_blocks, root.private = self.hashes(group), hits, private
        last = (group.request.prompt_tokens - 1) // self._unit * self._unit
        if isinstance(root, GroupTable) and last % self._size:
            root.inner = self._inner_hash(group, last, private)

    # -- entering ------------------------------------------------------------------------------------------

    def cache_full(self, sequence: SequenceState, blocks: int) -> None:
        """Cache the first `blocks` blocks of `sequence`, which are full after the step that is being scheduled."""
        first, request = sequence.cached_blocks, sequence.request
        if blocks <= first or not self.enabled or request.identity is None:
            return
        if request.decoding is Decoding.beam or (request.width > 1 and self.tables.aligned):
            blocks = min(blocks, request.prompt_tokens // self._size)
        hashes = sequence.block_hashes
        if blocks > len(hashes):
            hashes = sequence.block_hashes = (
                request.identity.generated_hashes(sequence.branch, self._size) or hashes
            )
        if sequence.held > first:
            first = sequence.held
        if isinstance(sequence, GroupTable):
            self._enter_kept(sequence, first, blocks)
            sequence.cached_blocks = max(sequence.cached_blocks, blocks)
            return
        if request.width > 1 or request.speculation is not None:
            first = self._past_shared(sequence, first, blocks)
        table, public = sequence.table, min(blocks, len(hashes))
        if first < public:
            if self._pool.events is None:
                self._pool.cache_full_blocks(table[first:public], hashes[first:public])
            else:
                origin = self._origin(sequence, first, public)
                self._pool.cache_full_blocks(table[first:public], hashes[first:public], origin)
            if self._deduplicate:
                self._fresh[sequence] = first, hashes[first:public]
        private = max(first, public)
        if private < blocks:
            numbers: Sequence[int] = range(sequence.private + private, sequence.private + blocks)
            if request.width > 1:
                numbers = [self._number(sequence, block) for block in range(private, blocks)]
            self._pool.cache_full_blocks(table[private:blocks], numbers)
        sequence.cached_blocks = blocks

    def _enter_kept(self, sequence: GroupTable, first: int, end: int) -> None:
        """Cache those blocks of a group that its rule keeps; there is none where rows left gaps."""
        table, hashes, request = sequence.table, sequence.block_hashes, sequence.request
        kept = range(first, end) if self._keeps is None else self._keeps(first, end, sequence.checkpoints)
        entered = [block for block in kept if table[block]]
        if request.width > 1 or request.speculation is not None:  # another branch may have cached them
            entered = [block for block in entered if self._pool.hash_of(table[block]) is None]
        public = [block for block in entered if block < len(hashes)]
        private = [self._number(sequence, block) for block in entered[len(public) :]]
        keys = [*(hashes[block] for block in public), *self._keys(private)]
        self._pool.cache_full_blocks([table[block] for block in entered], keys)

    def _number(self, sequence: SequenceState, block: int) -> int:
        """The number of a private block: branches share what they have of the prompt alone."""
        request, number = sequence.request, sequence.private + block
        if request.width > 1 and block >= request.prompt_tokens // self._size:
            number += (1 + sequence.branch) * request.final_kv_tokens
        return number

    def _past_shared(self, sequence: SequenceState, first: int, blocks: int) -> int:
        """The first block from `first` on that no other branch, which shares it, has cached."""
        hash_of, table = self._pool.hash_of, sequence.table
        while first < blocks and hash_of(table[first]) is not None:
            first += 1
        return first

    def _origin(self, sequence: SequenceState, first: int, end: int) -> BlockOrigin:
        """Parent, tokens, adapter, tenant and items of blocks `first` to `end - 1`, for the event that reports them."""
        identity, size = sequence.request.identity, self._size
        assert identity is not None
        parent = sequence.block_hashes[first - 1] if first else None
        tokens = identity.token_ids(sequence.branch, first * size, end * size)
        keys = identity.item_keys(size)
        items = [keys.get(block, ()) for block in range(first, end)] if keys else ()
        return BlockOrigin(parent, tokens, identity.adapter, identity.salt, items)

    def cache_inside(self, part: GroupTable, end: int) -> None:
        """Name the block inside which the last match unit of the prompt ends; the step computes tokens up to `end`.

        A state is named where a row ends there. K and V grow behind it: the block that they fill is entered as a whole,
        and keeps its name, but then as its last holder. Without retention a name would not outlive its row. Source:
        `_cache_partial_tail_block` of `FullAttentionManager` and `MambaManager`.
        """
        inner, pool = part.inner, self._pool
        if inner is None or end < inner.tokens or not pool.names_inside or pool.retention is Retention.none:
            return
        place = inner.tokens // self._size
        if self.tables.aligned:
            if end == inner.tokens:
                pool.name(part.table[-1], inner)
        elif place >= part.hits:
            block, whole = part.table[place], place + 1
            if end >= whole * self._size:
                if pool.hash_of(block) == inner:
                    pool.uncache([block])
                self.cache_full(part, whole)
            pool.name(block, inner)

    def cache_upto(self, sequence: SequenceState, tokens: int) -> None:
        """Cache the blocks of the first `tokens` tokens that lie in whole units.

        No hit ends inside a unit, so blocks behind the last whole one are worth nothing (vLLM: `_align_cacheable`).
        """
        self.cache_full(sequence, tokens // self._unit * self._unit // self._size)

    def cache_computed(self, sequence: SequenceState, unseen: int = 0) -> None:
        """Cache all full blocks of `sequence` but the last `unseen` tokens. Call it before it releases its blocks."""
        if self._deduplicate:
            self.deduplicate(sequence)
        self.cache_full(sequence, (sequence.computed - unseen) // self._unit * self._unit // self._size)

    def recount(self, sequence: SequenceState) -> None:
        """Set `sequence.cached_blocks` for a new table: how many leading blocks are in the cache already."""
        table, hash_of = sequence.table, self._pool.hash_of
        missing = (index for index in range(sequence.held, len(table)) if hash_of(table[index]) is None)
        sequence.cached_blocks = next(missing, len(table))

    def deduplicate(self, sequence: SequenceState) -> None:
        """Replace blocks that `sequence` filled in its last step by older blocks with the same hash; free the new ones.

        Call it before the sequence's blocks become sources of copies. Shared blocks are not replaced.
        """
        if sequence not in self._fresh:
            return
        (first, hashes), table = self._fresh.pop(sequence), self.tables.get(sequence)
        # Fewer blocks may be left after truncation.
        for index, block_hash in zip(range(first, sequence.cached_blocks), hashes, strict=False):
            own, holder = table[index], self._pool.first_block(block_hash)
            if holder is not None and own != holder and self._pool.references(own) == 1:
                more = self._pool.share([holder]) - 1
                self.tables.counters.written += more * self._size
                self.tables.counters.blocks += more
                self._pool.uncache([own])
                self._pool.release([own])
                table[index] = holder

    def forget(self, sequence: SequenceState) -> None:
        """`sequence` releases its blocks: forget which of them are new."""
        self._fresh.pop(sequence, None)


class PrefixHit(Sequence[int]):
    """A hit of whole match units: `pages` has for each group the leading blocks that it needs, the others NULL_BLOCK.

    As a sequence it has one entry for each match unit, their numbers. `junction`: where a longer hit of the first
    groups ends, in tokens; 0: there is none. Where the hit ends inside a block, this page is the last of its group.
    """

    def __init__(self, units: int, pages: Sequence[list[int]], junction: int = 0) -> None:
        self.units, self.pages, self.junction = units, pages, junction

    def __len__(self) -> int:
        return self.units

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:  # type: ignore[override]
        return range(self.units)[index]


class GroupHits:
    """Looks up prefixes in all groups, whose caches are `caches`. `rule` says which blocks of a window a hit needs."""

    def __init__(self, layout: GroupLayout, caches: Sequence[PrefixCache], rule: WindowHits) -> None:
        self._groups, self._caches = layout.groups, caches
        self._unit = layout.match_unit
        self._needed = [group.hit_blocks(rule) for group in layout.groups]
        groups = range(len(layout.groups))
        like = [tuple(each for each in groups if layout.groups[each].keeps_as(one)) for one in layout.groups]
        whole = [index for index in groups if layout.groups[index].hits_whole(rule)]
        self._windows = [index for index in groups if index not in whole]
        self._whole = list(dict.fromkeys(like[index] for index in whole))  # those that keep the same together
        self._first = like[self._windows[0]] if self._windows else ()

    def nothing(self) -> PrefixHit:
        """A hit of no block."""
        return PrefixHit(0, [[] for _ in self._groups])

    def find(self, group: Group) -> PrefixHit:
        """The longest prefix of which every group has what it needs. At least one token is left to compute.

        Each group in turn shortens it, until none does; those that keep the same are looked up together. First are
        those that keep all, else windows: where more is hit by the first of them, a junction ends.
        """
        if not self._caches[0].serves(group.request):
            return self.nothing()
        ends: dict[int, int] = {}  # of the hit of each that keeps all
        tokens = longest = (group.root_target - 1) // self._unit * self._unit
        for alike in self._whole:
            tokens = self._leading(group, alike, tokens)
            ends |= dict.fromkeys(alike, tokens)
            longest = tokens if alike is self._whole[0] else longest
        if not self._whole:
            tokens = longest = self._settled(group, tokens, self._first)
        tokens = self._settled(group, tokens, self._windows)
        junction = longest if longest > tokens else 0
        return PrefixHit(tokens // self._unit, self._pages(group, tokens, ends), junction)

    def _settled(self, group: Group, tokens: int, windows: Sequence[int]) -> int:
        """The longest hit, at most `tokens`, for which each of `windows` has what it needs."""
        before = 0
        while tokens != before:
            before = tokens
            for index in windows:
                needed = self._needed[index]
                if needed is None:
                    tokens = self._of_chunk(group, index, tokens)
                else:
                    tokens = self._last_run(group, index, tokens, needed)
        return tokens

    def _leading(self, group: Group, alike: Sequence[int], tokens: int) -> int:
        """The longest hit, at most `tokens`, all blocks of which groups have that keep the same."""
        size, unit = self._groups[alike[0]].block_size, self._unit
        caches = [self._caches[each] for each in alike]
        blocks = min(len(cache.find(group, tokens // size)[0]) for cache in caches)
        end = max(blocks * size, min(tokens, (blocks + 1) * size - unit)) // unit * unit
        while end > blocks * size and any(cache.ending(group, end) is None for cache in caches):
            end -= unit
        return end

    def _last_run(self, group: Group, index: int, tokens: int, needed: int) -> int:
        """The longest hit, at most `tokens`, whose last `needed` blocks of a group (or all) are cached."""
        size, cache, unit = self._groups[index].block_size, self._caches[index], self._unit
        if unit < size:  # the last state, which may lie inside a block
            return next((end for end in range(tokens, 0, -unit) if cache.ending(group, end)), 0)
        end = tokens
        block = end // size - 1
        while block >= max(0, end // size - needed):
            if cache.block(group, block) is None:  # no hit ends behind this block and needs it
                end = block * size // unit * unit
                block = end // size
            block -= 1
        return end

    def _of_chunk(self, group: Group, index: int, tokens: int) -> int:
        """The longest hit, at most `tokens`, that begins with the chunk of attention in which `tokens` lies."""
        size, cache = self._groups[index].block_size, self._caches[index]
        block = self._groups[index].skipped(tokens)
        while (block + 1) * size <= tokens and cache.block(group, block) is not None:
            block += 1
        return block * size

    def _pages(self, group: Group, tokens: int, ends: Mapping[int, int]) -> list[list[int]]:
        """For each group the pages of the first `tokens` tokens that the next token needs.

        Where they end inside a block, it is a full one, or that with which the group's own hit ends (`ends`).
        """
        found = []
        for index, cache in enumerate(self._caches):
            size, skipped = self._groups[index].block_size, self._groups[index].skipped(tokens)
            needed = [cache.block(group, place) for place in range(skipped, tokens // size)]
            if tokens % size:
                end = min(ends.get(index, tokens), (tokens // size + 1) * size)
                needed.append(cache.ending(group, end))
            found.append([*([NULL_BLOCK] * skipped), *(page for page in needed if page is not None)])
        return found
