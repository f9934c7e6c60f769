"""The block pool: reference counts, the free queue, and the index of block hashes (the prefix cache).

It follows the block pool of vLLM's v1 core. A block whose reference count falls to 0 keeps its hash and can be found
until it is allocated again (lazy eviction). Free blocks without a hash are allocated first, last in first out. Cached
blocks follow, in the order of the eviction queue. Block 0 is the null block: it is never given out and never counted.
`BlockPool.check` recounts everything and verifies the invariants.
`ResidencySampler` follows a share of the blocks: how long one lives, how long it lies idle, and how soon it is used
again. The figures and the rules are those of vLLM's `KVCacheMetricsCollector` (vllm/v1/core/kv_cache_metrics.py): a
block is sampled when it is allocated, each further reference to it (a hit, a fork) is a use, and its residency ends
when the pool gives the block out again.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from random import Random
from typing import NamedTuple, TypeVar

from engine.core.errors import CoreError, InvariantError, OutOfBlocksError
from engine.core.identity import BlockHash
from engine.core.memory.eviction import EvictionPolicy, LruQueue, Released
from engine.core.options import Retention
from engine.core.request import Request


class BlockOrigin(NamedTuple):
    """Where cached blocks come from: the block before them, their tokens (empty where unknown), adapter and tenant.

    `items` has, for each block, its multimodal items with the place where each begins; it is empty where none has one.
    """

    parent: BlockHash | None = None
    token_ids: Sequence[int] = ()
    adapter: str | None = None
    salt: str = ""
    items: Sequence[Sequence[tuple[str, int]]] = ()


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks entered the prefix cache under `hashes`, in prefix order. Private blocks are not reported."""

    hashes: tuple[BlockHash, ...]
    blocks: tuple[int, ...]
    origin: BlockOrigin = BlockOrigin()  # noqa: RUF009  # a tuple


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks left the prefix cache: they were evicted, or their hashes were removed."""

    hashes: tuple[BlockHash, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The whole prefix cache was emptied."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared
UNKNOWN_ORIGIN = BlockOrigin()


class HashIndex:
    """A map from block hash to blocks. Several blocks may have the same hash; a lookup finds the oldest entry."""

    def __init__(self) -> None:
        self._first: dict[BlockHash, int] = {}
        self._others: dict[BlockHash, list[int]] = {}

    def add(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> None:
        """Add `blocks` under `hashes`, which must differ from each other."""
        enter = self._first.setdefault  # one block, of a decoder, is quicker without a map
        found = [enter(hashes[0], blocks[0])] if len(blocks) == 1 else list(map(enter, hashes, blocks))
        if found == blocks:
            return
        for block_hash, block, oldest in zip(hashes, blocks, found, strict=True):
            if oldest != block:
                self._others.setdefault(block_hash, []).append(block)

    def drop(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> None:
        """Remove `blocks`. A hash is removed with its last block."""
        first = self._first
        if not self._others:
            for block_hash in hashes:
                del first[block_hash]
            return
        for block_hash, block in zip(hashes, blocks, strict=True):
            others = self._others.get(block_hash)
            if others is None:
                del first[block_hash]
                continue
            if first[block_hash] == block:
                first[block_hash] = others.pop(0)
            else:
                others.remove(block)
            if not others:
                del self._others[block_hash]

    def first(self, block_hash: BlockHash) -> int | None:
        """The block that was added first under `block_hash`, or None."""
        return self._first.get(block_hash)

    def find(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest prefix of `hashes` that is in the index. Changes nothing."""
        blocks: list[int] = []
        for block in map(self._first.get, hashes):
            if block is None:
                break
            blocks.append(block)
        return blocks

    def copies(self) -> Iterator[tuple[BlockHash, list[int]]]:
        """The hashes that several blocks have, each with its blocks, the oldest first."""
        return ((block_hash, [self._first[block_hash], *more]) for block_hash, more in self._others.items())

    def clear(self) -> None:
        """Remove every hash."""
        self._first.clear()
        self._others.clear()

    def pairs(self) -> list[tuple[int, BlockHash]]:
        """Every (block, hash) pair, sorted by block."""
        more = [(block, block_hash) for block_hash, blocks in self._others.items() for block in blocks]
        return sorted(
            [*((block, block_hash) for block_hash, block in self._first.items()), *more],
            key=lambda pair: pair[0],
        )


# The block that is never given out; padding in a block table points to it.
NULL_BLOCK = 0

_CHUNK = 65_536  # blocks that enter the stack at once

# the list of void blocks is cut to one entry a block when so many times as long as the pool
_VOIDED_TIMES = 4

_Value = TypeVar("_Value")


def _each(values: Sequence[_Value], blocks: Sequence[int]) -> Sequence[_Value]:
    """The values of `blocks`; of many, in one call."""
    if len(blocks) > 1:
        found: tuple[_Value, ...] = itemgetter(*blocks)(values)
        return found
    return [values[block] for block in blocks]


class BlockPool:
    """Blocks 1 … `num_blocks`, their reference counts, and the index of block hashes (the prefix cache).

    In vLLM this is `BlockPool`: `take` is `get_new_blocks`, `share` is `touch`, `release` is `free_blocks`, `find` is
    `get_cached_block`, and `cache_full_blocks` has the same name there. Typical use:

    >>> pool, hashes = BlockPool(4), [b"one", b"two"]
    >>> blocks = pool.take(2)  # reference count 1
    >>> pool.cache_full_blocks(blocks, hashes)  # the blocks can be found from now on
    >>> pool.release(blocks)  # they stay in the cache until they are evicted
    [1, 2]
    >>> hits = pool.find(hashes)  # changes nothing
    >>> pool.share(hits)  # reference count 1 again; two blocks had none
    2

    The free queue has two parts: a stack of blocks without a hash, and an eviction queue of blocks with one. Every
    operation works on whole tables and costs O(1) per block; no cost depends on the size of the pool. Blocks enter the
    stack in chunks, when all earlier ones are given out or cached: a pool of a million blocks, of which a replay uses a
    thousand, takes the memory of one chunk.
    `keep_events` collects a `CacheEvent` for each change of the cache; `drain_events` returns and forgets them.
    Of several pools each numbers its blocks from `offset` + 1 on.
    """

    names_inside = True  # a hit may end inside a block

    def __init__(
        self,
        num_blocks: int,
        *,
        retention: Retention = Retention.lru,
        eviction: EvictionPolicy | None = None,
        keep_events: bool = False,
        offset: int = 0,
    ) -> None:
        if num_blocks < 1:
            raise CoreError(f"a pool needs at least 1 block, found {num_blocks}")
        self.num_blocks = num_blocks
        self.free_blocks = num_blocks  # with reference count 0, cached blocks included; do not set it
        self.retention = retention
        self.events: list[CacheEvent] | None = [] if keep_events else None
        self.offset, self._last = offset, offset + num_blocks
        self._refs = [0] * (offset + 1)  # by block, as far as blocks entered the stack
        self._uncached: list[int] = []
        self._evictable = LruQueue() if eviction is None else eviction
        self._hash_of: list[BlockHash | None] = [None] * (offset + 1)
        facts = self._evictable.facts
        facts.num_blocks, facts.hash_of = num_blocks, self._hash_of.__getitem__
        self._extend(0)
        self._index = HashIndex()
        self._names: dict[int, BlockHash] = {}  # by block: the second hash that a block may have
        self.filled: dict[int, int] = {}  # slots written, of blocks that were cached before they were full
        self._voided: list[int] = []
        self._most_voided = _VOIDED_TIMES * num_blocks

    # -- counts --------------------------------------------------------------------------------------------

    @property
    def cached_blocks(self) -> int:
        """The number of blocks with reference count 0 that are in the prefix cache."""
        return len(self._evictable)

    def cached_without_reference(self) -> list[int]:
        """The blocks that `cached_blocks` counts, in order of eviction."""
        return self._evictable.blocks()

    @property
    def live_blocks(self) -> int:
        """The number of blocks that at least one table refers to."""
        return self.num_blocks - self.free_blocks

    def references(self, block: int) -> int:
        """The reference count of `block`: how many tables refer to it."""
        return self._refs[block] if block < len(self._refs) else 0

    def unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` have reference count 0. A hit on such a block takes it out of the free queue."""
        return _each(self._refs, blocks).count(0)

    # -- reference counts ----------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """Allocate `count` blocks, with reference count 1 and no hash.

        Cached blocks are evicted only when no other free blocks are left. Raises OutOfBlocksError, and changes
        nothing, when fewer than `count` blocks are free.
        """
        if count < 0:
            raise CoreError(f"{count} blocks asked for, must be at least 0")
        if count > self.free_blocks:
            raise OutOfBlocksError(
                f"{count} blocks asked for, {self.free_blocks} of {self.num_blocks} are free"
            )
        stack = self._uncached
        if count > len(stack) and len(self._refs) <= self._last:
            self._extend(count - len(stack))
        fresh = min(count, len(stack))
        blocks = stack[: -fresh - 1 : -1]
        del stack[len(stack) - fresh :]
        if fresh < count:
            blocks += self._evict(count - fresh)
        self.free_blocks -= count
        refs = self._refs
        for block in blocks:
            refs[block] = 1
        return blocks

    def take_one(self) -> int:
        """The same as `take(1)[0]`, but faster. A decoding sequence calls it when its last block is full."""
        if not self._uncached:
            return self.take(1)[0]
        block = self._uncached.pop()
        self.free_blocks -= 1
        self._refs[block] = 1
        return block

    def _extend(self, count: int) -> None:
        """Put the next blocks under the stack: `count`, or a chunk where that is more, as far as there are any."""
        first = len(self._refs)
        last = min(self._last, first - 1 + max(count, _CHUNK))
        self._uncached[:0] = range(last, first - 1, -1)
        self._refs += [0] * (last - first + 1)
        self._hash_of += [None] * (last - first + 1)

    def _evict(self, count: int) -> list[int]:
        victims = self._evictable.pop(count)
        inside = not victims or (min(victims) >= 0 and max(victims) < len(self._refs))
        if not inside or not count == len(victims) == len(set(victims)) == self.unreferenced(victims):
            raise CoreError(
                f"cache.eviction: {count} blocks to evict were asked for, its rule gave {victims[:9]}, "
                "which are not as many different ones without a reference"
            )
        self._remove_hashes(victims)
        self._void(victims)
        return victims

    def share(self, blocks: Sequence[int]) -> int:
        """Add one reference to each of `blocks` (a cache hit or a fork); returns how many had reference count 0.

        Raises CoreError, and changes nothing, if a free block is given twice, or is not in the cache: then it holds
        nothing.
        """
        refs = self._refs
        revived = [block for block in blocks if not refs[block]]
        if revived and len(set(revived)) < len(revived):
            raise _twice("shared", blocks)
        known = _each(self._hash_of, revived)
        if not all(known) and None in known:
            block = next(block for block in revived if self._hash_of[block] is None)
            raise CoreError(f"block {block} is free and holds nothing: it cannot be shared")
        self._evictable.reuse(blocks, revived)
        self.free_blocks -= len(revived)
        for block in blocks:
            refs[block] += 1
        return len(revived)

    def leave(self, block: int) -> None:
        """Drop one of several references to `block`: the same as `release([block])`, but faster.

        Raises CoreError, and changes nothing, if the block has no other reference.
        """
        if self._refs[block] < 2:
            raise CoreError(
                f"block {block} has {self._refs[block]} references: it cannot be left to another table"
            )
        self._refs[block] -= 1

    def release(self, blocks: Sequence[int], first: int = 0, request: Request | None = None) -> list[int]:
        """Drop one reference to each of a table's `blocks`, given in table order; returns those that are now free.

        The blocks are those from entry `first` on of a table of `request`, as the policy of eviction is told. A free
        block with a hash stays in the prefix cache. Raises CoreError, and changes nothing, if a block has fewer
        references than are dropped, or loses the last one in two entries: a table has each block once.
        """
        refs = self._refs
        for place, block in enumerate(blocks):
            if refs[block] != 1:
                for before in blocks[:place]:
                    refs[before] = 1
                gone = self._release_shared(blocks)
                break
            refs[block] = 0
        else:
            gone = list(blocks)
        self._free(gone, Released(blocks, first, request))
        return gone

    def _release_shared(self, blocks: Sequence[int]) -> list[int]:
        refs = self._refs
        counts = _each(refs, blocks)
        if 0 in counts:
            block = blocks[counts.index(0)]
            raise CoreError(
                f"block {block} is released, but its reference count is 0 (pool of {self.num_blocks} blocks)"
            )
        for block in blocks:
            refs[block] -= 1
        gone = [block for block in blocks if refs[block] < 1]
        if len(gone) != counts.count(1) or len(set(gone)) < len(gone):
            for block in blocks:
                refs[block] += 1
            raise _twice("released", blocks)
        return gone

    def _free(self, gone: list[int], table: Released) -> None:
        hash_of = self._hash_of
        self.free_blocks += len(gone)
        hashes = _each(hash_of, gone)
        if all(hashes) and self.retention is Retention.lru:  # quicker than to look for None; number 0 goes on
            self._evictable.push(gone, table)
            return
        cached = [block for block, block_hash in zip(gone, hashes, strict=True) if block_hash is not None]
        if self.retention is Retention.none:
            self._remove_hashes(cached)
            cached = []
        self._evictable.push(cached, table)
        uncached = [block for block in gone if hash_of[block] is None]
        self._uncached += uncached
        self._void(uncached)

    def _void(self, blocks: Sequence[int]) -> None:
        """Note that the content of `blocks` is void. A caller that never drains the list does not make it grow."""
        self._voided += blocks
        if len(self._voided) > self._most_voided:
            self._voided = list(dict.fromkeys(self._voided))

    def drain_voided(self) -> list[int]:
        """The blocks whose content became void since the last call, in order; their slots may be set to NaN."""
        voided, self._voided = self._voided, []
        return voided

    def drain_events(self) -> list[CacheEvent]:
        """The changes of the prefix cache since the last call, in order; empty unless they are kept."""
        if not self.events:
            return []
        events, self.events = self.events, []
        return events

    # -- the prefix cache ----------------------------------------------------------------------------------

    def cache_full_blocks(
        self, blocks: Sequence[int], hashes: Sequence[BlockHash], origin: BlockOrigin = UNKNOWN_ORIGIN
    ) -> None:
        """Enter full blocks with references into the prefix cache. Several blocks may have the same hash.

        `origin` is for the event alone.

        Hashes that are numbers are private: only their own request knows them, and no event tells of them.

        Raises CoreError, and changes nothing, if a block has a hash already or no reference.
        """
        refs, hash_of = self._refs, self._hash_of
        if len(hashes) != len(blocks):
            raise CoreError(f"{len(blocks)} blocks were given with {len(hashes)} hashes")
        for place, block in enumerate(blocks):
            if not refs[block] or hash_of[block] is not None:
                known = hash_of[block] is not None
                for before in blocks[:place]:
                    hash_of[before] = None
                raise CoreError(
                    f"block {block} cannot be cached: {refs[block]} references, in the cache already: {known}"
                )
            hash_of[block] = hashes[place]
        self._index.add(hashes, blocks)
        if self.events is not None and hashes and type(hashes[0]) is not int:
            self.events.append(BlocksStored(tuple(hashes), tuple(blocks), origin))

    def name(self, block: int, block_hash: BlockHash) -> None:
        """Enter a block with a reference under a hash of its first tokens, beside that of the whole block.

        A block without a hash has this one alone; where it has it already, nothing changes.
        """
        if self._hash_of[block] is None:
            self.cache_full_blocks([block], [block_hash])
        elif block_hash not in (self._hash_of[block], self._names.get(block)):
            self._names[block] = block_hash
            self._index.add([block_hash], [block])

    def uncache(self, blocks: Sequence[int]) -> None:
        """Remove the hashes of blocks that are about to be rewritten. Blocks without a hash are left as they are.

        Raises CoreError, and changes nothing, if a block has no reference.
        """
        if self.unreferenced(blocks):
            raise CoreError("only a block with a reference can be rewritten")
        known = [block for block in blocks if self._hash_of[block] is not None]
        self._evictable.forget(known)
        self._remove_hashes(known)

    def _remove_hashes(self, blocks: Sequence[int]) -> None:
        hash_of = self._hash_of
        hashes = [hash_of[block] for block in blocks]
        for block in blocks:
            hash_of[block] = None
        self._index.drop(hashes, blocks)
        for block in filter(self._names.__contains__, blocks if self._names else ()):
            self._index.drop([self._names.pop(block)], [block])
        if self.events is not None:
            public = [
                (known, block) for known, block in zip(hashes, blocks, strict=True) if type(known) is not int
            ]
            if public:
                self.events.append(BlocksRemoved(*zip(*public, strict=True)))

    def hash_of(self, block: int) -> BlockHash | None:
        """The hash of `block`, None if it is not in the prefix cache."""
        return self._hash_of[block] if block < len(self._hash_of) else None

    def find(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest prefix of `hashes` that is in the cache. Changes nothing."""
        return self._index.find(hashes)

    def first_block(self, block_hash: BlockHash) -> int | None:
        """The oldest block in the cache with `block_hash`, or None."""
        return self._index.first(block_hash)

    def copies(self) -> Iterator[tuple[BlockHash, list[int]]]:
        """The hashes that several blocks have, each with its blocks, the oldest first."""
        return self._index.copies()

    def reset(self) -> None:
        """Empty the prefix cache. Raises CoreError, and changes nothing, while a block is in use."""
        if self.live_blocks:
            raise CoreError(f"the prefix cache cannot be emptied while {self.live_blocks} blocks are in use")
        cached = self._evictable.pop(len(self._evictable))
        for block in cached:
            self._hash_of[block] = None
        self._index.clear()
        self._names.clear()
        self._uncached += reversed(cached)  # so that the order of eviction stays
        self._void(cached)
        if self.events is not None:
            self.events.append(CacheCleared())

    def note_cleared(self) -> None:
        """Report that no later lookup finds a block, where the caller has made it so and cannot `reset` the pool."""
        if self.events is not None:
            self.events.append(CacheCleared())

    def check(self, references: dict[int, int]) -> None:
        """Raise InvariantError unless all of this holds; `references` has the table entries of each block.

        Reference counts equal the table entries. The free queue holds exactly the blocks with count 0. Free blocks with
        a hash are in the eviction queue. The hashes of the blocks and the index agree.
        """
        refs, uncached, hash_of = self._refs, self._uncached, self._hash_of
        everyone = range(self.offset + 1, len(refs))
        wrong = next((block for block in everyone if refs[block] != references.get(block, 0)), None)
        if wrong is not None:
            raise InvariantError(
                f"block {wrong}: reference count {refs[wrong]}, table entries {references.get(wrong, 0)}"
            )
        in_queue = self._evictable.blocks()
        queued = sorted([*uncached, *in_queue])
        if queued != [block for block in everyone if not refs[block]] or len(in_queue) != len(
            self._evictable
        ):
            raise InvariantError(
                f"the free queue has {len(queued)} entries, which are not exactly the blocks with reference count 0"
            )
        cached = {block for block in everyone if hash_of[block] is not None}
        if not cached >= set(in_queue) or not cached.isdisjoint(uncached):
            raise InvariantError("a free block is in the wrong part of the free queue")
        known = [*((block, hash_of[block]) for block in cached), *self._names.items()]
        if Counter(self._index.pairs()) != Counter(known):
            raise InvariantError(f"{len(cached)} blocks have a hash, the index has other entries")
        free = self._last + 1 - len(self._refs) + len(self._uncached) + len(self._evictable)
        if self.free_blocks != free:
            raise InvariantError(f"{free} blocks have reference count 0, {self.free_blocks} were counted")


def _twice(verb: str, blocks: Sequence[int]) -> CoreError:
    block = next(block for index, block in enumerate(blocks) if block in blocks[:index])
    return CoreError(f"block {block} is {verb} twice in one call: a table has each block once")


_USES = 4  # of a block that are kept, the last ones; so there are at most three gaps
_NS = 1e9


class Residency(NamedTuple):
    """One sampled block, from its allocation until the pool gave it out again.

    `idle_s` is the time since its last use, or since its allocation where it was not used again. `reuse_gaps_s` are the
    times between its last four uses.
    """

    lifetime_s: float
    idle_s: float
    reuse_gaps_s: tuple[float, ...]


class _Sampled(NamedTuple):
    born_ns: int
    uses_ns: deque[int]


class ResidencySampler:
    """Follows a share `rate` of the blocks that a pool gives out; `drain` returns those whose residency has ended.

    The core reads no clock: `clock` gives the time in ns, and whoever runs the scheduler sets it. Which blocks are
    sampled depends on `seed` and on the order of allocations alone, so both sides of a point sample the same blocks.

    >>> now = [0]
    >>> sampler = ResidencySampler(rate=1.0, clock=lambda: now[0])
    >>> pool = SampledPool(1)
    >>> pool.sampler = sampler
    >>> block = pool.take_one()
    >>> now[0] = 3_000_000_000
    >>> pool.release([block])
    [1]
    >>> pool.take(1), sampler.drain()
    ([1], [Residency(lifetime_s=3.0, idle_s=3.0, reuse_gaps_s=())])
    """

    def __init__(self, rate: float = 0.01, *, clock: Callable[[], int] | None = None, seed: int = 0) -> None:
        if not 0 < rate <= 1:
            raise CoreError(f"the share of sampled blocks is {rate}, must be above 0 and at most 1")
        self.rate = rate
        self.clock = clock
        self._random = Random(seed)
        self._sampled: dict[int, _Sampled] = {}
        self._ended: list[Residency] = []

    def _now_ns(self) -> int:
        if self.clock is None:
            raise CoreError("residency is sampled without a clock: set ResidencySampler.clock, of ns")
        return self.clock()

    def allocated(self, blocks: Sequence[int]) -> None:
        """The pool gives out `blocks`: their last residency ends, and a new one begins."""
        now, rate, draw, sampled = self._now_ns(), self.rate, self._random.random, self._sampled
        for block in blocks:
            if block in sampled:
                self._end(sampled.pop(block), now)
            if draw() < rate:
                sampled[block] = _Sampled(now, deque(maxlen=_USES))

    def used(self, blocks: Sequence[int]) -> None:
        """Each of `blocks` got one more reference."""
        now, sampled = self._now_ns(), self._sampled
        for block in blocks:
            if block in sampled:
                sampled[block].uses_ns.append(now)

    def _end(self, found: _Sampled, now: int) -> None:
        uses = found.uses_ns
        last = uses[-1] if uses else found.born_ns
        gaps = tuple((later - earlier) / _NS for earlier, later in pairwise(uses))
        self._ended.append(Residency((now - found.born_ns) / _NS, (now - last) / _NS, gaps))

    def forget(self) -> None:
        """The pool was emptied: no residency goes on, and those that ended are dropped."""
        self._sampled.clear()
        self._ended.clear()

    def drain(self) -> list[Residency]:
        """The residencies that have ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended


class SampledPool(BlockPool):
    """A block pool whose blocks are sampled. A class of its own, so that other pools pay nothing."""

    sampler: ResidencySampler  # its owner sets it

    def take(self, count: int) -> list[int]:
        """As `BlockPool.take`."""
        blocks = super().take(count)
        self.sampler.allocated(blocks)
        return blocks

    def take_one(self) -> int:
        """As `BlockPool.take_one`."""
        return self.take(1)[0]

    def share(self, blocks: Sequence[int]) -> int:
        """As `BlockPool.share`."""
        revived = super().share(blocks)
        self.sampler.used(blocks)
        return revived

    def reset(self) -> None:
        """As `BlockPool.reset`."""
        super().reset()
        self.sampler.forget()
