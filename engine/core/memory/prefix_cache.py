"""The prefix cache of requests: which full blocks enter it, under which hash, and how a lookup finds them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.identity import BlockHash
from engine.core.memory.block_pool import BlockOrigin
from engine.core.memory.block_tables import BlockTables
from engine.core.options import Decoding
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
    def rate(self) -> float:
        """Hit tokens over tokens, 0 before the first request."""
        return self._hit / self._asked if self._asked else 0.0


class PrefixCache:
    """Enters full blocks of sequences into the block pool's cache, and finds them for other requests.

    `find` looks up a request's prefix. `cache_full` is called when blocks are scheduled to be filled, so a second
    request in the same step hits them already. `cache_computed` is called before a sequence releases its blocks. Only
    then are the generated blocks of a steady decoder cached whose outputs no other request can use.

    Blocks that only their own request can use get private hashes; a preempted request remembers them. Blocks that
    beams generated do not enter the cache: beams are replaced too often for their blocks to be found again.
    `deduplicate`: if another block with the same hash is older, refer to it and free the new one. `copying`: forks
    copy all blocks, so cached blocks may be in no table of their request.
    """

    def __init__(self, tables: BlockTables, enabled: bool, deduplicate: bool, copying: bool = False) -> None:
        self._copying = copying
        self._tables = tables
        self._pool = tables.pool
        self._size = tables.block_size
        self._enabled = enabled
        self._deduplicate = deduplicate
        # What was cached in this step: first index, hashes.
        self._fresh: dict[SequenceState, tuple[int, Sequence[BlockHash]]] = {}

    def serves(self, request: Request) -> bool:
        """Whether the request uses the prefix cache."""
        return self._enabled and request.identity is not None

    # -- lookup --------------------------------------------------------------------------------------------

    def find(self, group: Group, asked: int) -> tuple[list[int], BlockHash | None]:
        """The longest cached prefix in the first `asked` blocks, and the first hash that missed. Changes nothing."""
        identity = group.request.identity
        if not self._enabled or identity is None:
            return [], None
        if group.block_hashes is None:
            group.block_hashes = identity.prompt_hashes(self._size)
        hashes = group.block_hashes
        if group.generated and group.request.width == 1:
            hashes = identity.generated_hashes(0, self._size) or hashes
        hits = self._pool.find(hashes[:asked])
        if len(hits) < min(asked, len(hashes)):
            return hits, hashes[len(hits)]
        while len(hits) < asked and (found := self._private_blocks(group, len(hits))):
            hits.append(found[0])
        return hits, None

    def _private_blocks(self, group: Group, index: int) -> list[int]:
        """The blocks that still hold block `index` of a preempted group, the oldest first."""
        hash_of = self._pool.hash_of
        return [
            block for block, known in group.private_blocks.get(index, {}).items() if hash_of(block) == known
        ]

    def remember_private_blocks(self, group: Group) -> None:
        """The group is preempted: remember the private blocks in the table of its first sequence."""
        root, hash_of = group.sequences[0], self._pool.hash_of
        for index in range(len(root.block_hashes), root.cached_blocks):
            blocks = [*self._private_blocks(group, index), root.table[index]]
            known = ((block, hash_of(block)) for block in blocks)  # a copy of a cached block has no hash
            group.private_blocks[index] = {block: own for block, own in known if isinstance(own, int)}

    def adopt(self, group: Group, root: SequenceState, hits: int) -> None:
        """`root` starts with a cached prefix of `hits` blocks. The group need not have been looked up."""
        identity = group.request.identity
        if group.block_hashes is None and self._enabled and identity is not None:
            group.block_hashes = identity.prompt_hashes(self._size)
        root.block_hashes, root.cached_blocks = group.block_hashes or (), hits
        if self._copying:
            root.private_blocks = group.private_blocks

    # -- entering ------------------------------------------------------------------------------------------

    def cache_full(self, sequence: SequenceState, blocks: int) -> None:
        """Cache the first `blocks` blocks of `sequence`, which are full after the step that is being scheduled."""
        first, request = sequence.cached_blocks, sequence.request
        if blocks <= first or not self._enabled or request.identity is None:
            return
        if request.decoding is Decoding.beam:
            blocks = min(blocks, request.prompt_tokens // self._size)
        hashes = sequence.block_hashes
        if blocks > len(hashes):
            hashes = sequence.block_hashes = (
                request.identity.generated_hashes(sequence.branch, self._size) or hashes
            )
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
            own = self._pool.cache_private_blocks(table[private:blocks])
            if sequence.private_blocks is not None:
                self._note_originals(sequence, private, own)
        sequence.cached_blocks = max(first, blocks)

    def _origin(self, sequence: SequenceState, first: int, end: int) -> BlockOrigin:
        """Parent, tokens, adapter, tenant and items of blocks `first` to `end - 1`, for the event that reports them."""
        identity, size = sequence.request.identity, self._size
        assert identity is not None
        parent = sequence.block_hashes[first - 1] if first else None
        tokens = identity.token_ids(sequence.branch, first * size, end * size)
        keys = identity.item_keys(size)
        items = [keys.get(block, ()) for block in range(first, end)] if keys else ()
        return BlockOrigin(parent, tokens, identity.adapter, identity.salt, items)

    def _note_originals(self, root: SequenceState, first: int, hashes: range) -> None:
        """Note blocks of the prompt for the next preemption: by then each branch may have a copy, and none of them."""
        assert root.private_blocks is not None
        prompt_blocks = root.request.prompt_tokens // self._size
        for index, own in zip(range(first, prompt_blocks), hashes, strict=False):
            root.private_blocks.setdefault(index, {})[root.table[index]] = own

    def cache_computed(self, sequence: SequenceState) -> None:
        """Cache all full blocks of `sequence`. Call it before the sequence releases its blocks."""
        self.deduplicate(sequence)
        self.cache_full(sequence, sequence.computed // self._size)

    def recount(self, sequence: SequenceState) -> None:
        """Set `sequence.cached_blocks` for a new table: how many leading blocks are in the cache already."""
        cached = (self._pool.hash_of(block) is None for block in sequence.table)
        sequence.cached_blocks = next(
            (index for index, missing in enumerate(cached) if missing), len(sequence.table)
        )

    def deduplicate(self, sequence: SequenceState) -> None:
        """Replace blocks that `sequence` filled in its last step by older blocks with the same hash; free the new ones.

        Call it before the sequence's blocks become sources of copies. Shared blocks are not replaced.
        """
        if sequence not in self._fresh:
            return
        (first, hashes), table = self._fresh.pop(sequence), self._tables.get(sequence)
        # Fewer blocks may be left after truncation.
        for index, block_hash in zip(range(first, sequence.cached_blocks), hashes, strict=False):
            own, holder = table[index], self._pool.first_block(block_hash)
            if holder is not None and own != holder and self._pool.references(own) == 1:
                self._tables.counters.written += (self._pool.share([holder]) - 1) * self._size
                self._pool.uncache([own])
                self._pool.release([own])
                table[index] = holder

    def forget(self, sequence: SequenceState) -> None:
        """`sequence` releases its blocks: forget which of them are new."""
        self._fresh.pop(sequence, None)
