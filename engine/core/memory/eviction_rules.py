"""The built-in rules of eviction, one class each; `LruQueue` and the seam are in `engine.core.memory.eviction`.

Least recently used is also the order of leaves of a radix tree: a table is released as a whole and from its end, so no
block is evicted before one that continues it. `LfuQueue` keeps to the leaves too.

Sources: SIEVE: Zhang et al., NSDI 2024. S3-FIFO: Yang et al., SOSP 2023. GDSF: Cherkasova, HP Laboratories, 1998.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from itertools import repeat
from operator import itemgetter

from engine.core.identity import BlockHash
from engine.core.memory.eviction import EvictionPolicy, LruQueue, Released
from engine.core.options import Eviction

_Key = float | int
_KEY, _BLOCK = itemgetter(0), itemgetter(1)


class RankedQueue(EvictionPolicy):
    """Blocks in ranks: the lowest rank first, within a rank as `LruQueue`. A subclass says the ranks of a table."""

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[int, LruQueue] = {}
        self._rank_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rank_of)

    def rank(self, table: Released) -> int:
        """The rank of all blocks of a table."""
        raise NotImplementedError

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """Add blocks of one table."""
        self._add(blocks, self.rank(table))

    def _add(self, blocks: Sequence[int], rank: int) -> None:
        self._rank_of.update(zip(blocks, repeat(rank)))
        self._ranks.setdefault(rank, LruQueue()).add(blocks)

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """Remove the blocks from their ranks."""
        by_rank: dict[int, list[int]] = {}
        for block in queued:
            by_rank.setdefault(self._rank_of.pop(block), []).append(block)
        for rank, some in by_rank.items():
            self._ranks[rank].discard(some)

    def pop(self, count: int) -> list[int]:
        """Empty the ranks from the lowest on."""
        self.check_count(count)
        victims: list[int] = []
        for rank in sorted(self._ranks):
            queue = self._ranks[rank]
            victims += queue.pop(min(len(queue), count - len(victims)))
        for block in victims:
            del self._rank_of[block]
        return victims

    def blocks(self) -> list[int]:
        """Rank by rank."""
        return [block for rank in sorted(self._ranks) for block in self._ranks[rank].blocks()]


class PriorityQueue(RankedQueue):
    """Blocks of requests with a higher `Request.priority` number, which matter less, first."""

    def rank(self, table: Released) -> int:
        """The priority, the least important lowest."""
        return 0 if table.request is None else -table.request.priority


class PinnedQueue(RankedQueue):
    """The first `pinned` blocks of every prompt last."""

    def __init__(self, pinned: int) -> None:
        super().__init__()
        self._pinned = pinned

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """Add those behind the pinned ones, then these."""
        near = sum(place < self._pinned for place in table.places(blocks))
        self._add(blocks[near:], 0)
        self._add(blocks[:near], 1)


class TtlQueue(RankedQueue):
    """Blocks that a session has released less than `seconds` ago last. When their time is over they fall behind the
    others that are evicted first.

    A time to live that is alike for all changes nothing: what was released first is over first.
    """

    reads_clock = True

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._ttl_ns = round(seconds * 1e9)
        self._due: deque[tuple[int, Sequence[int]]] = deque()
        self._since: dict[int, int] = {}

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """Note the time where the request is of a session."""
        kept = table.request is not None and table.request.session is not None
        self._add(blocks, int(kept))
        if kept and blocks:
            now = self.facts.clock()
            self._due.append((now, list(blocks)))
            self._since.update(zip(blocks, repeat(now)))

    def pop(self, count: int) -> list[int]:
        """Let blocks whose time is over fall first."""
        self.check_count(count)
        now = self.facts.clock()
        while self._due and now - self._due[0][0] >= self._ttl_ns:
            since, blocks = self._due.popleft()
            over = [block for block in blocks if self._rank_of.get(block) and self._since[block] == since]
            self.reuse(over, over)
            self._add(over, 0)
        return super().pop(count)


class SupersededQueue(RankedQueue):
    """What a later turn of a session has not taken up first, once that turn is released."""

    def __init__(self) -> None:
        super().__init__()
        self._session_of: dict[int, str] = {}  # block in the queue: the session that released it last
        self._of_session: dict[str, dict[int, None]] = {}

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """What earlier turns left in the queue was not taken up by this one."""
        session = None if table.request is None else table.request.session
        if session is not None:
            left = list(self._of_session.get(session, ()))
            self.reuse(left, left)
            self._add(left[::-1], 0)
            self._session_of.update(zip(blocks, repeat(session)))
            self._of_session[session] = dict.fromkeys(reversed(blocks))
        self._add(blocks, 1)

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """Remove the blocks from their sessions too."""
        super().reuse(blocks, queued)
        self._leave(queued)

    def _leave(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            session = self._session_of.pop(block, None)
            if session is not None:
                of_session = self._of_session[session]
                del of_session[block]
                if not of_session:
                    del self._of_session[session]

    def pop(self, count: int) -> list[int]:
        """Forget whose blocks they were."""
        victims = super().pop(count)
        self._leave(victims)
        return victims


class KeyHeap:
    """Blocks by key, the lowest first; of equal keys those added first, and of one call the last block.

    Blocks that are added at once are a run, sorted once, and the heap has an entry for each run. A block that is
    discarded stays in its run as a stale entry, which is skipped.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[_Key, int, list[tuple[_Key, int]]]] = []
        self._run_of: dict[int, int] = {}
        self._runs = self._entries = 0

    def __len__(self) -> int:
        return len(self._run_of)

    def __contains__(self, block: int) -> bool:
        return block in self._run_of

    def add(self, blocks: Sequence[int], keys: Sequence[_Key]) -> None:
        """Add `blocks`, in table order, under `keys`."""
        if not blocks:
            return
        run = list(zip(keys, blocks, strict=True))
        run.sort(
            key=_KEY, reverse=True
        )  # stable: of equal keys the last block ends the run, and leaves it first
        self._push(run)
        if self._entries > 64 + 3 * len(self._run_of):
            self._rewrite()

    def _push(self, run: list[tuple[_Key, int]]) -> None:
        self._runs += 1
        self._run_of.update(zip(map(_BLOCK, run), repeat(self._runs)))
        self._entries += len(run)
        heappush(self._heap, (run[-1][0], self._runs, run))

    def _rewrite(self) -> None:
        """Drop the stale entries."""
        runs, self._heap, self._entries = sorted(self._heap, key=itemgetter(1)), [], 0
        for _, number, run in runs:
            if left := [entry for entry in run if self._run_of.get(entry[1]) == number]:
                self._push(left)

    def discard(self, block: int) -> None:
        """Remove a block."""
        del self._run_of[block]

    def pop(self) -> tuple[int, _Key]:
        """Remove and return the first block, with its key. There must be one."""
        heap, run_of = self._heap, self._run_of
        while True:
            _, number, run = heap[0]
            key, block = run.pop()
            self._entries -= 1
            if not run:
                heappop(heap)
            elif run[-1][0] != key:
                heapreplace(heap, (run[-1][0], number, run))
            if run_of.get(block) == number:
                del run_of[block]
                return block, key

    def ordered(self) -> list[int]:
        """All blocks in order."""
        live = [
            (key, number, -place, block)
            for _, number, run in self._heap
            for place, (key, block) in enumerate(run)
            if self._run_of.get(block) == number
        ]
        return [entry[-1] for entry in sorted(live)]


class KeyedQueue(EvictionPolicy):
    """Blocks by a key, the lowest first; of equal keys those released first, and of one table the last.

    A subclass says the keys of a table's blocks when they are released.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue = KeyHeap()

    def __len__(self) -> int:
        return len(self._queue)

    def keys(self, blocks: Sequence[int], table: Released) -> Sequence[_Key]:
        """The key of each of `blocks`."""
        raise NotImplementedError

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """Add the blocks by their keys."""
        self._queue.add(blocks, self.keys(blocks, table))

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """Remove the blocks that are in the queue."""
        for block in queued:
            self._queue.discard(block)

    def evicted(self, block: int, key: _Key) -> None:
        """The block is evicted, which had this key."""
        self.forget((block,))

    def pop(self, count: int) -> list[int]:
        """Remove the blocks with the lowest keys."""
        self.check_count(count)
        victims = []
        for _ in range(count):
            block, key = self._queue.pop()
            self.evicted(block, key)
            victims.append(block)
        return victims

    def blocks(self) -> list[int]:
        """By key."""
        return self._queue.ordered()


class FifoQueue(KeyedQueue):
    """What was cached first, whatever was used since: the release that brought a block is its place."""

    def __init__(self) -> None:
        super().__init__()
        self._entered: dict[int, int] = {}
        self._releases = 0

    def keys(self, blocks: Sequence[int], table: Released) -> Sequence[_Key]:
        """The release after which each was cached first."""
        self._releases += 1
        return [self._entered.setdefault(block, self._releases) for block in blocks]

    def forget(self, blocks: Sequence[int]) -> None:
        """What comes under these numbers is new."""
        for block in blocks:
            self._entered.pop(block, None)


class LfuQueue(KeyedQueue):
    """What was used least often first. Who uses a block uses those before it, so leaves of the prefix tree go first."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, int] = {}

    def keys(self, blocks: Sequence[int], table: Released) -> Sequence[_Key]:
        """Uses since the block was filled."""
        uses = self._uses
        return [uses.get(block, 0) for block in blocks] if uses else [0] * len(blocks)

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """Count the use of all."""
        super().reuse(blocks, queued)
        uses = self._uses
        for block in blocks:
            uses[block] = uses.get(block, 0) + 1

    def forget(self, blocks: Sequence[int]) -> None:
        """What comes under these numbers is new."""
        for block in blocks:
            self._uses.pop(block, None)


class GdsfQueue(LfuQueue):
    """Greedy-dual: what costs least to lose first, by the seconds that are computed again, times the uses so far.

    What is lost with a block is the computation of its table from this block on. As blocks are evicted, the value of
    the last one is added to all that come later, so what is used no more ages.
    """

    def __init__(self) -> None:
        super().__init__()
        self._age = 0.0

    def keys(self, blocks: Sequence[int], table: Released) -> Sequence[_Key]:
        """Age at release + (1 + uses) x seconds."""
        places, size, seconds = table.places(blocks), self.facts.block_size, self.facts.seconds
        whole = seconds((places[-1] + 1) * size) if blocks else 0.0
        uses, age = self._uses, self._age
        return [
            age + (1 + uses.get(block, 0)) * (whole - seconds(place * size))
            for block, place in zip(blocks, places, strict=True)
        ]

    def evicted(self, block: int, key: _Key) -> None:
        """Age."""
        super().evicted(block, key)
        self._age = key


class SieveQueue(EvictionPolicy):
    """Blocks in the order in which they were cached; a hand goes from the oldest to the newest and round again.

    It evicts the first block that was not used since it passed there last, and spares the others once. Blocks in use
    keep their place; the hand passes over them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._number: dict[int, int] = {}  # block: its place, for all that are cached, in this order
        self._last = self._hand = 0
        self._used: set[int] = set()
        self._ahead, self._behind = KeyHeap(), KeyHeap()  # of the hand

    def __len__(self) -> int:
        return len(self._ahead) + len(self._behind)

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """Add new blocks at the newest end, the last of the table as the oldest."""
        number = self._number
        for block in reversed(blocks):
            if block not in number:
                self._last += 1
                number[block] = self._last
        self._put(blocks)

    def _put(self, blocks: Sequence[int]) -> None:
        number, hand = self._number, self._hand
        keys = [number[block] for block in blocks]
        if not keys or min(keys) >= hand:
            self._ahead.add(blocks, keys)
            return
        for queue, is_ahead in ((self._ahead, True), (self._behind, False)):
            some = [block for block in blocks if (number[block] >= hand) is is_ahead]
            queue.add(some, [number[block] for block in some])

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """Mark the blocks as used."""
        self._used.update(blocks)
        for block in queued:
            (self._ahead if block in self._ahead else self._behind).discard(block)

    def forget(self, blocks: Sequence[int]) -> None:
        """What comes under these numbers is new."""
        for block in blocks:
            self._number.pop(block, None)
            self._used.discard(block)

    def pop(self, count: int) -> list[int]:
        """Move the hand."""
        self.check_count(count)
        victims: list[int] = []
        while len(victims) < count:
            if not self._ahead:
                self._wrap()
            block, number = self._ahead.pop()
            self._hand = int(number) + 1
            if block in self._used:
                self._used.remove(block)
                self._behind.add((block,), (number,))
            else:
                victims.append(block)
                del self._number[block]
            if number >= next(reversed(self._number.values()), 0):  # it was the newest
                self._wrap()
        return victims

    def _wrap(self) -> None:
        """The hand, with nothing ahead, begins with the oldest again."""
        self._hand = 0
        self._ahead, self._behind = self._behind, self._ahead

    def blocks(self) -> list[int]:
        """As the hand would take them if none had been used."""
        return self._ahead.ordered() + self._behind.ordered()


class S3FifoQueue(EvictionPolicy):
    """Three queues: new blocks pass a small one of a tenth of the pool, those used twice there a large one.

    A third remembers the hashes of what left the small one without it; such a block enters the large one at once. As in
    the authors' libCacheSim, what does not fit into the small one enters the large one until the first is evicted, and
    the third is cut to its size when blocks enter, not when others make room for them. Blocks in use keep their place.
    """

    _MOST_USES, _ENOUGH = 3, 2

    def __init__(self) -> None:
        super().__init__()
        self._small, self._main = KeyHeap(), KeyHeap()  # what can be evicted
        self._small_number: dict[int, int] = {}  # block: its place, those in use included
        self._main_number: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()  # a dict finds its first key slowly
        self._last = 0
        self._evicts = False  # whether any block was evicted

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    @property
    def _main_blocks(self) -> int:
        return self.facts.num_blocks - max(1, self.facts.num_blocks // 10)

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """Add new blocks to the small queue, or to the large one if it knew them; the last of the table first."""
        for block in reversed(blocks):
            if block not in self._small_number and block not in self._main_number:
                self._enter(block)
        while len(self._ghosts) > self._main_blocks:
            self._ghosts.popitem(last=False)
        for numbers, queue in ((self._small_number, self._small), (self._main_number, self._main)):
            some = [block for block in blocks if block in numbers]
            queue.add(some, [numbers[block] for block in some])

    def _enter(self, block: int) -> None:
        block_hash = self.facts.hash_of(block)
        self._last += 1
        if block_hash in self._ghosts:
            del self._ghosts[block_hash]
            self._main_number[block] = self._last
        elif not self._evicts and len(self._small_number) >= self.facts.num_blocks - self._main_blocks:
            self._main_number[block] = self._last
        else:
            self._small_number[block] = self._last

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """Count the use of all."""
        uses = self._uses
        for block in blocks:
            uses[block] = min(self._MOST_USES, uses.get(block, 0) + 1)
        for block in queued:
            (self._small if block in self._small else self._main).discard(block)

    def forget(self, blocks: Sequence[int]) -> None:
        """What comes under these numbers is new."""
        for block in blocks:
            self._small_number.pop(block, None)
            self._main_number.pop(block, None)
            self._uses.pop(block, None)

    def pop(self, count: int) -> list[int]:
        """Evict from the large queue where it has more than its share, else from the small one."""
        self.check_count(count)
        self._evicts = self._evicts or count > 0
        victims: list[int] = []
        while len(victims) < count:
            over = len(self._main_number) > self._main_blocks
            if self._small and not (over and self._main):
                self._pop_small(victims)
            else:
                self._pop_main(victims)
        return victims

    def _pop_small(self, victims: list[int]) -> None:
        block, _ = self._small.pop()
        del self._small_number[block]
        if self._uses.pop(block, 0) >= self._ENOUGH:
            self._to_main(block)
            return
        victims.append(block)
        block_hash = self.facts.hash_of(block)
        assert block_hash is not None, "a block that can be evicted is cached"
        self._ghosts.pop(block_hash, None)
        self._ghosts[block_hash] = None

    def _pop_main(self, victims: list[int]) -> None:
        block, _ = self._main.pop()
        uses = self._uses.pop(block, 0)
        if uses:
            if uses > 1:
                self._uses[block] = uses - 1
            self._to_main(block)
        else:
            del self._main_number[block]
            victims.append(block)

    def _to_main(self, block: int) -> None:
        self._last += 1
        self._main_number[block] = self._last
        self._main.add((block,), (self._last,))

    def blocks(self) -> list[int]:
        """The small queue and then the large one, as if none had been used."""
        return self._small.ordered() + self._main.ordered()


def new_policy(rule: Eviction, *, ttl_s: float = 60.0, pinned: int = 0) -> EvictionPolicy:
    """A built-in policy: `ttl_s` is the time to live of `ttl`, `pinned` the leading blocks of `pinned`."""
    if rule is Eviction.ttl:
        return TtlQueue(ttl_s)
    if rule is Eviction.pinned:
        return PinnedQueue(pinned)
    return RULES[rule]()


RULES: dict[Eviction, type[EvictionPolicy]] = {
    Eviction.lru: LruQueue,
    Eviction.fifo: FifoQueue,
    Eviction.lfu: LfuQueue,
    Eviction.sieve: SieveQueue,
    Eviction.s3fifo: S3FifoQueue,
    Eviction.priority: PriorityQueue,
    Eviction.superseded: SupersededQueue,
    Eviction.gdsf: GdsfQueue,
    Eviction.ttl: TtlQueue,
    Eviction.pinned: PinnedQueue,
}
