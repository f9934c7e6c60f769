"""The prefix cache of requests: which full blocks enter it, under which hash, and how a lookup finds them.

`PrefixCache` is that of one group of layers. With several a prefix is hit as far as every group has what the next token
needs (`GroupHits`): all blocks, those of the last window or chunk, or the state at the end. Facts of vLLM's
`HybridKVCacheCoordinator` and `SingleTypeKVCacheManager` (0.33) are named where they decide.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.core.identity import BlockHash
from engine.core.memory.block_pool import NULL_BLOCK, BlockOrigin
from engine.core.memory.block_tables import BlockTables, GroupTable
from engine.core.memory.group_layout import GroupLayout
from engine.core.options import Decoding, WindowHits
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
    """The share of tokens that the last `requests` admitted requests found in the prefix cache, like vLLM's metric."""

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
        identity = group.request.identity
        if not self.enabled or identity is None:
            return ()
        hashes = group.block_hashes.get(self._index) or self.hashes(group)
        if group.generated and group.request.width == 1:
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

    def _private_block(self, group: Group, index: int) -> int | None:
        found = (self._pool.find(self._keys([base + index])) for base in group.private)
        return next((blocks[0] for blocks in found if blocks), None)

    def adopt(self, group: Group, root: SequenceState, hits: int, private: int) -> None:
        """`root` starts with a cached prefix of `hits` blocks; `private` is the first of its numbers.

        The group need not have been looked up.
        """
        root.block_hashes, root.cached_blocks, root.private = self.hashes(group), hits, private

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
        private, number = max(first, public), sequence.private
        if private < blocks and request.width > 1:  # branches share what they have of the prompt alone
            own = max(private, min(blocks, request.prompt_tokens // self._size))
            self._enter_private(table, private, own, number)
            private, number = own, number + (1 + sequence.branch) * request.final_kv_tokens
        if private < blocks:
            self._enter_private(table, private, blocks, number)
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

    def _enter_private(self, table: Sequence[int], first: int, end: int, private: int) -> None:
        if first < end:
            keys = self._keys(range(private + first, private + end))
            self._pool.cache_full_blocks(table[first:end], keys)

    def _origin(self, sequence: SequenceState, first: int, end: int) -> BlockOrigin:
        """Parent, tokens, adapter, tenant and items of blocks `first` to `end - 1`, for the event that reports them."""
        identity, size = sequence.request.identity, self._size
        assert identity is not None
        parent = sequence.block_hashes[first - 1] if first else None
        tokens = identity.token_ids(sequence.branch, first * size, end * size)
        keys = identity.item_keys(size)
        items = [keys.get(block, ()) for block in range(first, end)] if keys else ()
        return BlockOrigin(parent, tokens, identity.adapter, identity.salt, items)

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
    groups ends, in tokens; 0: there is none.
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
        self._whole = [index for index, group in enumerate(layout.groups) if group.hits_whole(rule)]
        self._windows = [index for index in range(len(layout.groups)) if index not in self._whole]
        first = layout.groups[(self._whole or self._windows)[0]]
        self._first = [index for index, group in enumerate(layout.groups) if group.keeps_as(first)]

    def nothing(self) -> PrefixHit:
        """A hit of no block."""
        return PrefixHit(0, [[] for _ in self._groups])

    def find(self, group: Group) -> PrefixHit:
        """The longest prefix of which every group has what it needs. At least one token is left to compute."""
        if not self._caches[0].serves(group.request):
            return self.nothing()
        tokens, longest = self._tokens(group, (group.root_target - 1) // self._unit * self._unit)
        junction = longest if longest > tokens else 0
        return PrefixHit(tokens // self._unit, self._pages(group, tokens), junction)

    def _tokens(self, group: Group, asked: int) -> tuple[int, int]:
        """The longest hit of at most `asked` tokens, and the longest of the groups that are looked up first.

        Each group in turn shortens it, until none does. First are those that keep the same as the first of those that
        keep all, else of the windows.
        """
        tokens = longest = asked
        for index in self._whole:
            tokens = self._leading(group, index, tokens)
            if index in self._first:
                longest = tokens
        if not self._whole:
            tokens = longest = self._settled(group, tokens, self._first)
        return self._settled(group, tokens, self._windows), longest

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

    def _leading(self, group: Group, index: int, tokens: int) -> int:
        """The longest hit, at most `tokens`, all blocks of which a group has."""
        size = self._groups[index].block_size
        found, _ = self._caches[index].find(group, tokens // size)
        return len(found) * size // self._unit * self._unit

    def _last_run(self, group: Group, index: int, tokens: int, needed: int) -> int:
        """The longest hit, at most `tokens`, whose last `needed` blocks of a group (or all) are cached."""
        size, cache, unit = self._groups[index].block_size, self._caches[index], self._unit
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

    def _pages(self, group: Group, tokens: int) -> list[list[int]]:
        """For each group the pages of the first `tokens` tokens that the next token needs."""
        found = []
        for index, cache in enumerate(self._caches):
            blocks, skipped = tokens // self._groups[index].block_size, self._groups[index].skipped(tokens)
            needed = (cache.block(group, place) for place in range(skipped, blocks))
            found.append([*([NULL_BLOCK] * skipped), *(page for page in needed if page is not None)])
        return found
