"""The built-in rules of eviction, one class each; `LruQueue` and the seam are in `engine.core.memory.eviction`.

Least recently used is also the order of leaves of a radix tree: a table is released as a whole and from its end, so no
block is evicted before one that continues it. `LfuQueue` keeps to the leaves too.

Sources: SIEVE: Zhang et al., NSDI 2024. S3-FIFO: Yang et al., SOSP 2023. GDSF: Cherkasova, HP Laboratories, 1998.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import repeat
from math import inf
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
        self._due: deque[tuple[int, list[int]]] = deque()
        self._run_of: dict[int, list[int]] = {}  # by block, with which others it was released last

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """Note the time where the request is of a session."""
        kept = table.request is not None and table.request.session is not None
        self._add(blocks, int(kept))
        if kept and blocks:
            run = list(blocks)
            self._due.append((self.facts.clock(), run))
            self._run_of.update(zip(run, repeat(run)))

    def pop(self, count: int) -> list[int]:
        """Let blocks whose time is over fall first."""
        self.check_count(count)
        now = self.facts.clock()
        while self._due and now - self._due[0][0] >= self._ttl_ns:
            _, run = self._due.popleft()
            over = [block for block in run if self._rank_of.get(block) and self._run_of[block] is run]
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

    def add(self, blocks: Sequence[int], keys: Sequence[_Key]) -> None:
        """Add `blocks`, in table order, under `keys`."""
        if not blocks:
            return
        # stable: of equal keys the last block ends the run, and leaves it first
        run = sorted(zip(keys, blocks, strict=True), key=_KEY, reverse=True)
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

    def discard(self, blocks: Sequence[int]) -> None:
        """Remove those of `blocks` that are here."""
        for block in self._run_of.keys() & blocks:
            del self._run_of[block]

    def pop(self, count: int) -> tuple[list[int], _Key]:
        """Remove and return the first `count` blocks, and the key of the last one. There must be as many."""
        heap, run_of = self._heap, self._run_of
        victims, last = list[int](), 0.0
        while len(victims) < count:
            _, number, run = heappop(heap)
            next_key, next_number = heap[0][:2] if heap else (inf, 0)
            while run and len(victims) < count:
                key, block = run[-1]
                if key > next_key or (key == next_key and number > next_number):
                    break
                del run[-1]
                self._entries -= 1
                if run_of.get(block) == number:
                    del run_of[block]
                    victims.append(block)
                    last = key
            if run:
                heappush(heap, (run[-1][0], number, run))
        return victims, last

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

    A subclass says the keys of a table's blocks when they are released. `last_key` is that of the last one evicted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue = KeyHeap()
        self.last_key: _Key = 0.0

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
        self._queue.discard(queued)

    def pop(self, count: int) -> list[int]:
        """Remove the blocks with the lowest keys."""
        self.check_count(count)
        victims, self.last_key = self._queue.pop(count)
        self.forget(victims)
        return victims

    def blocks(self) -> list[int]:
        """By key."""
        return self._queue.ordered()


class Line:
    """Blocks in the order in which they entered. One in use keeps its place, and `pop` passes over it."""

    def __init__(self) -> None:
        self.idle = set[int]()  # those that can be evicted
        self.number = dict[int, int]()  # the places of all, those in use included
        self._entered = 0
        self._order = OrderedDict[int, None]()  # those not passed over; a dict finds its first key slowly
        self._passed = set[int]()
        self._back: list[tuple[int, int]] = []  # a heap of those passed over that are idle again

    def enter(self, block: int) -> None:
        """Add a new block at the end."""
        self._entered += 1
        self.number[block] = self._entered
        self._order[block] = None

    def release(self, blocks: Iterable[int]) -> None:
        """Those of `blocks` that are here can be evicted."""
        here = self.number.keys() & blocks
        self.idle |= here
        for block in self._passed & here if self._passed else ():
            self._passed.remove(block)
            heappush(self._back, (self.number[block], block))

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove those of `blocks`, which are in use, that are here."""
        for block in self.number.keys() & blocks:
            del self.number[block]
            self._order.pop(block, None)
            self._passed.discard(block)

    def pop(self) -> int:
        """Remove and return the first block that can be evicted. There must be one."""
        order, back, number = self._order, self._back, self.number
        while True:
            if back and (not order or back[0][0] < number[next(iter(order))]):
                place, block = heappop(back)
                if number.get(block) != place:  # it was forgotten
                    continue
            else:
                block, _ = order.popitem(last=False)
            if block in self.idle:
                self.idle.remove(block)
                del number[block]
                return block
            self._passed.add(block)


class PlacedQueue(EvictionPolicy):
    """Blocks in one or more lines. A subclass says which one a new block enters, and which block leaves."""

    _LINES = 1

    def __init__(self) -> None:
        super().__init__()
        self._lines = [Line() for _ in range(self._LINES)]

    def __len__(self) -> int:
        return sum(len(line.idle) for line in self._lines)

    def entrance(self, block: int) -> Line:
        """The line that a new block enters."""
        return self._lines[0]

    def victim(self) -> int:
        """Remove and return the next block to evict. There is one."""
        return self._lines[0].pop()

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """New blocks enter, the last of the table first. Others have their places."""
        if new := set(blocks).difference(*(line.number for line in self._lines)):
            for block in reversed(blocks):
                if block in new:
                    self.entrance(block).enter(block)
        for line in self._lines:
            line.release(blocks)

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """The blocks keep their places."""
        for line in self._lines:
            line.idle.difference_update(queued)

    def forget(self, blocks: Sequence[int]) -> None:
        """What comes under these numbers is new."""
        for line in self._lines:
            line.forget(blocks)

    def pop(self, count: int) -> list[int]:
        """Remove one after the other."""
        self.check_count(count)
        return [self.victim() for _ in range(count)]

    def blocks(self) -> list[int]:
        """Line by line, as they entered."""
        return [block for line in self._lines for block in sorted(line.idle, key=line.number.__getitem__)]


class FifoQueue(PlacedQueue):
    """What was cached first, whatever was used since; of one table the last block."""


class CountingQueue(EvictionPolicy):
    """Counts the uses of each block since it was filled. Another base says what comes of them."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, int] = {}

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """Count the use of all."""
        super().reuse(blocks, queued)
        uses = self._uses
        for block in blocks:
            uses[block] = uses.get(block, 0) + 1

    def forget(self, blocks: Sequence[int]) -> None:
        """What comes under these numbers is new."""
        super().forget(blocks)
        for block in blocks:
            self._uses.pop(block, None)


class LfuQueue(CountingQueue, KeyedQueue):
    """What was used least often first. Who uses a block uses those before it, so leaves of the prefix tree go first."""

    def keys(self, blocks: Sequence[int], table: Released) -> Sequence[_Key]:
        """Uses since the block was filled."""
        return [self._uses.get(block, 0) for block in blocks]


class GdsfQueue(LfuQueue):
    """Greedy-dual: what costs least to lose first, by the seconds that are computed again, times the uses so far.

    What is lost with a block is the computation of its table from this block on. As blocks are evicted, the value of
    the last one is added to all that come later, so what is used no more ages.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seconds_before: list[float] = []  # by place, to compute what is before it

    def keys(self, blocks: Sequence[int], table: Released) -> Sequence[_Key]:
        """Age at release + (1 + uses) x seconds."""
        places, before = table.places(blocks), self._seconds_before
        unknown = range(len(before), places[-1] + 2 if blocks else 0)
        before += [self.facts.seconds(place * self.facts.block_size) for place in unknown]
        whole, uses, age = before[places[-1] + 1] if blocks else 0.0, self._uses, self.last_key
        return [
            age + (1 + uses.get(block, 0)) * (whole - before[place])
            for block, place in zip(blocks, places, strict=True)
        ]


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
        number, hand = self._number, self._hand
        for block in reversed(blocks):
            if block not in number:
                self._last += 1
                number[block] = self._last
        for queue, is_ahead in ((self._ahead, True), (self._behind, False)):
            some = [block for block in blocks if (number[block] >= hand) is is_ahead]
            queue.add(some, [number[block] for block in some])

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """Mark the blocks as used."""
        self._used.update(blocks)
        self._ahead.discard(queued)
        self._behind.discard(queued)

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
            (block,), number = self._ahead.pop(1)
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


class S3FifoQueue(CountingQueue, PlacedQueue):
    """Three queues: new blocks pass a small one of a tenth of the pool, those used twice there a large one.

    A third remembers the hashes of what left the small one without it; such a block enters the large one at once. Where
    the authors' libCacheSim differs from the paper, it is followed: what does not fit into the small one enters the
    large one until the first block is evicted; to evict one, blocks move to the large queue however many it holds; and
    the third has nine tenths of the pool, rounded down, to which it is cut when blocks enter, not when others make room
    for them. Blocks in use keep their place.
    """

    _LINES, _MOST_USES, _ENOUGH = 2, 3, 2

    def __init__(self) -> None:
        super().__init__()
        self._small, self._main = self._lines
        self._ghosts: OrderedDict[BlockHash | None, None] = OrderedDict()
        self._evicts = False  # whether any block was evicted

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """Cut the third queue."""
        super().push(blocks, table)
        while len(self._ghosts) > self.facts.num_blocks * 9 // 10:
            self._ghosts.popitem(last=False)

    def entrance(self, block: int) -> Line:
        """The large queue, if the third one knew the block."""
        block_hash = self.facts.hash_of(block)
        if block_hash in self._ghosts:
            del self._ghosts[block_hash]
            return self._main
        full = not self._evicts and len(self._small.number) >= max(1, self.facts.num_blocks // 10)
        return self._main if full else self._small

    def victim(self) -> int:
        """Of the large queue where it has more than its share, else of the small one; what is used moves on."""
        self._evicts = True
        small, main, uses = self._small, self._main, self._uses
        over = len(main.number) > self.facts.num_blocks - max(1, self.facts.num_blocks // 10)
        while small.idle and not (over and main.idle):
            block = small.pop()
            if uses.pop(block, 0) < self._ENOUGH:
                block_hash = self.facts.hash_of(block)
                self._ghosts[block_hash] = None
                self._ghosts.move_to_end(block_hash)
                return block
            main.enter(block)
            main.idle.add(block)
        while used := min(self._MOST_USES, uses.pop(block := main.pop(), 0)):
            uses[block] = used - 1
            main.enter(block)
            main.idle.add(block)
        return block


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
