"""The built-in rules of eviction, one class each; `LruQueue` and the seam are in `engine.core.memory.eviction`.

Least recently used is also the order of leaves of a radix tree: a table is released as a whole and from its end, so no
block is evicted before one that continues it. `LfuQueue` keeps to the leaves too.

Sources: SIEVE: Zhang et al., NSDI 2024. S3-FIFO: Yang et al., SOSP 2023. GDSF: Cherkasova, HP Laboratories, 1998.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import chain, count, repeat
from typing import Any

from engine.core.identity import BlockHash
from engine.core.memory.eviction import EvictionPolicy, LruQueue, Released
from engine.core.options import Eviction

_Key = float | int
# key, number of its run, place from the end, block, what follows it
_Entry = tuple[_Key, int, int, int, list[Any]]


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

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._ttl_ns = round(seconds * 1e9)
        self._due: deque[tuple[int, list[int]]] = deque()
        self._over: list[list[int]] = []  # their time is over
        self._run_of: dict[int, list[int]] = {}  # by block, with which others it was released last

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """Note the time where the request is of a session."""
        kept = table.request is not None and table.request.session is not None
        self._add(blocks, int(kept))
        if kept and blocks:
            run = list(blocks)
            self._due.append((self.facts.clock() + self._ttl_ns, run))
            self._run_of.update(zip(run, repeat(run)))

    def pop(self, count: int) -> list[int]:
        """Let blocks whose time is over fall first."""
        self.check_count(count)
        self.changes_ns()
        for run in self._over:
            over = [block for block in run if self._rank_of.get(block) and self._run_of[block] is run]
            self.reuse(over, over)
            self._add(over, 0)
        self._over.clear()
        return super().pop(count)

    def changes_ns(self) -> int | None:
        """When the next time is over."""
        now = self.facts.clock()
        while self._due and self._due[0][0] <= now:
            self._over.append(self._due.popleft()[1])
        return self._due[0][0] if self._due else None


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


class KeyedQueue(EvictionPolicy):
    """Blocks by a key, the lowest first; of equal keys those released first, and of one table the last.

    A subclass says the keys of a table's blocks when they are released. `last_key` is that of the last one evicted.

    Blocks that are released at once are a run, sorted once, and the heap has the first entry of each run. A block that
    is used again leaves a stale entry, which is skipped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[_Entry] = []
        self._run_of: dict[int, int] = {}
        self._runs = self._stale = 0
        self.last_key: _Key = 0.0

    def __len__(self) -> int:
        return len(self._run_of)

    def keys(self, blocks: Sequence[int], table: Released) -> Sequence[_Key]:
        """The key of each of `blocks`, which are some."""
        raise NotImplementedError

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """Add the blocks by their keys."""
        if blocks:
            self._runs += 1
            self._run_of.update(zip(blocks, repeat(self._runs)))
            run, keys = list[_Entry](), self.keys(blocks, table)
            run += zip(reversed(keys), repeat(self._runs), count(), reversed(blocks), repeat(run))
            run.sort(reverse=True)
            heappush(self._heap, run.pop())

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """Remove the blocks that are in the queue."""
        for block in queued:
            del self._run_of[block]
        self._stale += len(queued)
        if self._stale > 64 + 2 * len(self._run_of):
            self._heap, self._stale = self._entries(), 0
            for *_, run in self._heap:
                run.clear()

    def _entries(self) -> list[_Entry]:
        """Those that are not stale, in order."""
        every = chain(self._heap, *(run for *_, run in self._heap))
        return sorted(entry for entry in every if self._run_of.get(entry[3]) == entry[1])

    def pop(self, count: int) -> list[int]:
        """Remove the blocks with the lowest keys."""
        self.check_count(count)
        heap, run_of, victims, key = self._heap, self._run_of, list[int](), self.last_key
        while len(victims) < count:
            key, number, _, block, run = heap[0]
            if not run:
                heappop(heap)
            elif run[-1][0] == key:  # no other can be before it
                heap[0] = run.pop()
            else:
                heapreplace(heap, run.pop())
            if run_of.get(block) == number:
                del run_of[block]
                victims.append(block)
            else:
                self._stale -= 1
        self.last_key = key
        self.forget(victims)
        return victims

    def blocks(self) -> list[int]:
        """By key."""
        return [entry[3] for entry in self._entries()]


class Line:
    """Blocks in the order in which they entered, each with a place. Who goes along passes over one in use.

    Blocks that enter at once are a run, the last one first. A block that was passed over is put back when it is idle
    again, so it costs nothing meanwhile. Blocks before `hand` wait until somebody begins with the first one again.
    """

    def __init__(self) -> None:
        self.idle = set[int]()  # those that can be evicted
        self.place = dict[int, int]()  # of all, those in use included, in this order
        self.hand = self._entered = 0
        self._runs = deque[list[int]]()  # of those that are ahead
        self._passed = set[int]()
        self._back: list[tuple[int, int]] = []  # a heap, by place: those put back that are ahead
        self._behind: list[int] = []

    def enter(self, blocks: Sequence[int]) -> None:
        """Add new blocks at the end, in this order."""
        if blocks:
            self._runs.append([*reversed(blocks)])
            self.place.update(zip(blocks, range(self._entered, self._entered + len(blocks)), strict=True))
            self._entered += len(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """Those of `blocks` that are here can be evicted."""
        here = self.place.keys() & blocks
        self.idle |= here
        for block in self._passed & here if self._passed else ():
            self._passed.remove(block)
            if self.place[block] < self.hand:
                self._behind.append(block)
            else:
                heappush(self._back, (self.place[block], block))

    def go(self, most: int) -> list[int]:
        """Go along to the next blocks that can be evicted, at most `most`; none if there is none ahead."""
        runs, back, idle = self._runs, self._back, self.idle
        while runs or back:
            if back and not (runs and self.place[runs[0][-1]] < back[0][0]):
                place, block = heappop(back)
                found = [block] if self.place.get(block) == place else []  # else it was forgotten
            else:
                count = 1 if back else most
                found = runs[0][: -count - 1 : -1]
                del runs[0][-count:]
                if not runs[0]:
                    runs.popleft()
            if not idle.issuperset(found):
                self._passed.update(block for block in found if block not in idle)
                found = [block for block in found if block in idle]
            if found:
                return found
        return []

    def remove(self, blocks: Sequence[int]) -> None:
        """Blocks that `go` found are evicted, or move elsewhere."""
        self.idle.difference_update(blocks)
        for block in blocks:
            del self.place[block]

    def put_back(self, blocks: Sequence[int]) -> None:
        """The last ones that `go` found stay where they were."""
        if blocks:
            self._runs.appendleft([*reversed(blocks)])

    def spare(self, blocks: Iterable[int], hand: int) -> None:
        """Those that `go` found before `hand`, and spared, are behind it. It begins anew behind the last of all."""
        self._behind += blocks
        self.hand = hand
        if not self._runs and hand > next(reversed(self.place.values()), 0):
            self.turn()

    def turn(self) -> None:
        """Begin with the first block again."""
        self.hand = 0
        self.put_back(sorted(self._behind, key=self.place.__getitem__))
        self._behind = []

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove those of `blocks`, which are in use, that are here. It is rare, so it may look at all."""
        if here := self.place.keys() & blocks:
            for block in here:
                del self.place[block]
            self._passed -= here
            left = ([block for block in run if block in self.place] for run in (*self._runs, self._behind))
            *runs, self._behind = left
            self._runs = deque(filter(None, runs))


class PlacedQueue(EvictionPolicy):
    """Blocks in one or more lines. A block that is used again keeps its place. A subclass says which line new blocks
    enter, and which blocks leave.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: tuple[Line, ...] = (Line(),)

    def __len__(self) -> int:
        return sum(len(line.idle) for line in self._lines)

    def enter(self, blocks: Sequence[int]) -> None:
        """New blocks, in order, enter a line."""
        self._lines[0].enter(blocks)

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """New blocks enter, the last of the table first. Others have their places."""
        new = blocks[::-1]
        for line in self._lines:
            new = [block for block in new if block not in line.place]
        self.enter(new)
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
        """Remove the first ones."""
        self.check_count(count)
        line, victims = self._lines[0], list[int]()
        while len(victims) < count:
            found = line.go(count - len(victims))
            line.remove(found)
            victims += found
        return victims

    def blocks(self) -> list[int]:
        """Line by line, as they entered."""
        return [block for line in self._lines for block in sorted(line.idle, key=line.place.__getitem__)]


class FifoQueue(PlacedQueue):
    """What was released first; of one table the last block. A hit and a later release move nothing."""


class SieveQueue(PlacedQueue):
    """Blocks in the order in which they were cached; a hand goes from the oldest to the newest and round again.

    It evicts the first block that was not used since it passed there last, and spares the others once. Blocks in use
    keep their place; the hand passes over them. `blocks` are in the order of the line, wherever the hand is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._used = set[int]()

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """Mark the blocks as used."""
        super().reuse(blocks, queued)
        self._used.update(blocks)

    def forget(self, blocks: Sequence[int]) -> None:
        """What comes under these numbers is new."""
        super().forget(blocks)
        self._used.difference_update(blocks)

    def pop(self, count: int) -> list[int]:
        """Move the hand."""
        self.check_count(count)
        line, used, victims = self._lines[0], self._used, list[int]()
        while len(victims) < count:
            if found := line.go(count - len(victims)):
                hand = line.place[found[-1]] + 1
                gone = found if used.isdisjoint(found) else [block for block in found if block not in used]
                victims += gone
                line.remove(gone)
                line.spare([block for block in found if block in used], hand)
                used.difference_update(found)
            else:
                line.turn()
        return victims


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
        for block in self._uses.keys() & blocks:
            del self._uses[block]


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
        unknown = range(len(before), places[-1] + 2)
        before += [self.facts.seconds(place * self.facts.block_size) for place in unknown]
        whole, uses, age = before[places[-1] + 1], self._uses, self.last_key
        lost = [whole - before[place] for place in places]
        return [age + (1 + uses.get(block, 0)) * each for block, each in zip(blocks, lost, strict=True)]


class S3FifoQueue(CountingQueue, PlacedQueue):
    """Three queues: new blocks pass a small one of a tenth of the pool, those used twice there a large one.

    A third remembers the hashes of what left the small one without it; such a block enters the large one at once. Where
    the authors' libCacheSim differs from the paper, it is followed: what does not fit into the small one enters the
    large one until the first block is evicted; to evict one, blocks move to the large queue however many it holds; and
    the third has nine tenths of the pool, rounded down, to which it is cut when blocks enter, not when others make room
    for them. Blocks in use keep their place.
    """

    _MOST_USES, _ENOUGH = 3, 2

    def __init__(self) -> None:
        super().__init__()
        self._lines = self._small, self._main = Line(), Line()
        self._ghosts: OrderedDict[BlockHash | None, bool] = OrderedDict()
        self._evicts = False  # whether any block was evicted

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """Cut the third queue."""
        super().push(blocks, table)
        for _ in range(len(self._ghosts) - self.facts.num_blocks * 9 // 10):
            self._ghosts.popitem(last=False)

    def enter(self, blocks: Sequence[int]) -> None:
        """What the third queue knew enters the large one."""
        hashes, ghosts, main = [*map(self.facts.hash_of, blocks)], self._ghosts, self._main
        if not ghosts.keys().isdisjoint(hashes):
            main.enter([block for block, each in zip(blocks, hashes, strict=True) if ghosts.pop(each, False)])
            blocks = [block for block in blocks if block not in main.place]
        room = len(blocks) if self._evicts else max(0, self._share() - len(self._small.place))
        main.enter(blocks[room:])
        self._small.enter(blocks[:room])

    def _share(self) -> int:
        """Of the small queue, in blocks."""
        return max(1, self.facts.num_blocks // 10)

    def pop(self, count: int) -> list[int]:
        """Of the large queue where it has more than its share, else of the small one; what is used moves on."""
        self.check_count(count)
        self._evicts = self._evicts or count > 0
        small, main, victims = self._small, self._main, list[int]()
        while len(victims) < count:
            before, over = len(victims), len(main.place) - self.facts.num_blocks + self._share()
            while len(victims) == before and small.idle and not (over > 0 and main.idle):
                victims += self._of_small(count - before)
            if len(victims) == before:
                victims += self._of_main(min(over, count - before) if small.idle else count - before)
        return victims

    def _of_small(self, most: int) -> list[int]:
        """Victims of the small queue, at most `most`; none where its first block moves on."""
        found, uses = self._small.go(most), self._uses
        end = len(found)
        if not uses.keys().isdisjoint(found):
            end = next((place for place, each in enumerate(found) if uses.get(each, 0) >= self._ENOUGH), end)
            for block in found[: max(1, end)]:
                uses.pop(block, None)
        self._small.put_back(found[max(1, end) :])
        self._small.remove(found[: max(1, end)])
        if not end:
            self._move(found[:1])
        for block_hash in map(self.facts.hash_of, found[:end]):
            self._ghosts[block_hash] = True
            self._ghosts.move_to_end(block_hash)
        return found[:end]

    def _of_main(self, most: int) -> list[int]:
        """Victims of the large queue, at most `most`; what is used there moves to its end, with one use less."""
        found, uses = self._main.go(most), self._uses
        self._main.remove(found)
        moves = [block for block in found if block in uses]
        for block in moves:
            if left := min(self._MOST_USES, uses.pop(block)) - 1:
                uses[block] = left
        self._move(moves)
        return [block for block in found if block not in self._main.place]

    def _move(self, blocks: Sequence[int]) -> None:
        """To the end of the large queue."""
        self._main.enter(blocks)
        self._main.idle.update(blocks)


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
}
