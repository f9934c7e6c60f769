"""The built-in rules of eviction, one class each; `LruQueue` and the seam are in `engine.core.memory.eviction`.

Least recently used is also the order of leaves of a radix tree: a table is released as a whole and from its end, so no
block is evicted before one that continues it. `LfuQueue` keeps to the leaves too.

Sources: SIEVE: Zhang et al., NSDI 2024. S3-FIFO: Yang et al., SOSP 2023. GDSF: Cherkasova, HP Laboratories, 1998.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import chain, repeat
from operator import itemgetter

from engine.core.identity import BlockHash
from engine.core.memory.eviction import EvictionPolicy, LruQueue, Released
from engine.core.options import Eviction

_Key = float | int
_Entry = tuple[_Key, int, int]  # a key, the number of its run, a block
_Run = tuple[
    Iterator[_Entry], Sequence[_Key], list[int]
]  # what is not in the heap, keys and blocks, lowest first


class Run(list[int]):
    """Blocks that one table has released at once, and the rank that they came to."""

    __slots__ = ("rank",)
    rank: int


class RankedQueue(EvictionPolicy):
    """Blocks in ranks: the lowest rank first, within a rank as `LruQueue`. A subclass says the ranks of a table."""

    def __init__(self) -> None:
        super().__init__()
        self._ranks = defaultdict[int, LruQueue](LruQueue)
        self._run_of: dict[int, Run] = {}

    def __len__(self) -> int:
        return len(self._run_of)

    def rank(self, table: Released) -> int:
        """The rank of all blocks of a table."""
        raise NotImplementedError

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """Add blocks of one table."""
        self._add(blocks, self.rank(table))

    def _add(self, blocks: Sequence[int], rank: int) -> Run:
        run = Run(blocks)
        run.rank = rank
        self._run_of.update(zip(run, repeat(run)))
        self._ranks[rank].push(run)
        return run

    def _fall(self, run: Run) -> None:
        """Those blocks of `run` that were not used since come to rank 0, as the last ones there."""
        if left := [block for block in run if self._run_of.get(block) is run]:
            self._ranks[run.rank].reuse(left, left)
            self._add(left, 0)

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """Remove the blocks from their ranks."""
        by_rank: dict[int, list[int]] = {}
        for block, run in zip(queued, map(self._run_of.pop, queued), strict=True):
            by_rank.setdefault(run.rank, []).append(block)
        for rank, some in by_rank.items():
            self._ranks[rank].reuse(some, some)

    def pop(self, count: int) -> list[int]:
        """Empty the ranks from the lowest on."""
        self.check_count(count)
        victims: list[int] = []
        for _, queue in sorted(self._ranks.items()):  # no two ranks are equal
            victims += queue.pop(min(len(queue), count - len(victims)))
        for block in victims:
            del self._run_of[block]
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
        self._due: deque[tuple[int, Run]] = deque()
        self._over = deque[Run]()  # their time is over

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """Note the time where the request is of a session."""
        kept = table.request is not None and table.request.session is not None
        run = self._add(blocks, int(kept))
        if kept and run:
            self._due.append((self.facts.clock() + self._ttl_ns, run))

    def pop(self, count: int) -> list[int]:
        """Let blocks whose time is over fall first."""
        self.check_count(count)
        self.changes_ns()
        while self._over:
            self._fall(self._over.popleft())
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
        self._last: dict[str, Run] = {}  # of a session

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """What the turn before left in the queue was not taken up by this one."""
        session = None if table.request is None else table.request.session
        if session in self._last:
            self._fall(self._last[session])
        run = self._add(blocks, 1)
        if session is not None:
            self._last[session] = run
        if len(self._last) > 64 + 2 * len(self):
            runs = set(map(id, self._run_of.values()))
            self._last = {each: run for each, run in self._last.items() if id(run) in runs}


class KeyedQueue(EvictionPolicy):
    """Blocks by a key, the lowest first; of equal keys those released first, and of one table the last.

    A subclass says the keys of a table's blocks when they are released. `last_key` is that of the last one evicted.

    Blocks that are released at once are a run, sorted once, and the heap has the first of each run. One that is used
    again leaves its run where it is the last one there, as a table's first block mostly is. Else it leaves a stale
    entry, which is skipped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[_Entry] = []
        self._runs: dict[int, _Run] = {}
        self._run_of: dict[int, int] = {}  # also of blocks that were evicted
        self._last_run = self._stale = self._size = 0
        self.last_key: _Key = 0.0

    def __len__(self) -> int:
        return self._size

    def keys(self, blocks: Sequence[int], table: Released) -> list[_Key]:
        """The key of each of `blocks`, which are some."""
        raise NotImplementedError

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """Add the blocks by their keys."""
        if blocks:
            self._size += len(blocks)
            keys, run = self.keys(blocks, table)[::-1], [*reversed(blocks)]
            if (ordered := sorted(keys)) != keys:
                run = [run[at] for at in sorted(range(len(run)), key=keys.__getitem__)]
            self._add(ordered, run)

    def _add(self, keys: Sequence[_Key], run: list[int]) -> None:
        self._last_run = number = self._last_run + 1
        run_of = self._run_of
        for block in run:
            run_of[block] = number
        entries = zip(keys, repeat(number), run)
        heappush(self._heap, next(entries))
        self._runs[number] = entries, keys, run

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """Remove the blocks that are in the queue."""
        for block in queued:
            run = self._runs[self._run_of.pop(block)][2]
            if len(run) > 1 and run[-1] == block:
                run.pop()
            else:
                self._stale += 1
        self._size -= len(queued)
        if self._stale + len(self._heap) > 64 + 3 * self._size:
            left, self._heap, self._runs, self._stale = self._entries(), [], {}, 0
            if left:
                self._add([key for key, _, _ in left], [block for _, _, block in left])

    def _entries(self) -> list[_Entry]:
        """Those that are not stale, in order."""
        entries = list[_Entry]()
        for _, number, block in self._heap:
            _, keys, run = self._runs[number]
            at = run.index(block) if block in run else len(run)
            entries += zip(keys[at:], repeat(number), run[at:])
        live = (entry for entry in entries if self._run_of.get(entry[2]) == entry[1])
        return sorted(live, key=itemgetter(0, 1))

    def pop(self, count: int) -> list[int]:
        """Remove the blocks with the lowest keys."""
        self.check_count(count)
        heap, runs, run_of, victims, key = self._heap, self._runs, self._run_of, list[int](), self.last_key
        while len(victims) < count:
            key, number, block = heap[0]
            after = next(runs[number][0], None)
            if after is None:
                heappop(heap)
                del runs[number]
            elif after[0] == key:  # no other can be before it
                heap[0] = after
            else:
                heapreplace(heap, after)
            if run_of.get(block) == number:
                victims.append(block)
        self.last_key = key
        self._size -= count
        self.forget(victims)
        return victims

    def blocks(self) -> list[int]:
        """By key."""
        return [block for _, _, block in self._entries()]


class Line:
    """Blocks in the order in which they entered. Who goes along passes over those in use, which `busy` has.

    Blocks that enter at once are a run, the last one first. A block that was passed over or spared has a place, and
    those without one entered after it. One that was passed over is put back when it is idle again, so it costs nothing
    meanwhile. Blocks before `hand` wait until somebody begins with the first one again.
    """

    def __init__(self, busy: set[int]) -> None:
        self.size = self.hand = self._given = 0
        self._busy = busy
        self._runs = deque[list[int]]()  # of those that are ahead
        self._place = dict[int, int]()  # in order
        self._passed = set[int]()
        self._back: list[tuple[int, int]] = []  # a heap, by place: those put back that are ahead
        self._behind: list[int] = []

    def enter(self, blocks: Sequence[int]) -> None:
        """Add new blocks at the end, in this order."""
        if blocks:
            self._runs.append([*reversed(blocks)])
            self.size += len(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Those of `blocks` that are here can be evicted again."""
        for block in self._passed.intersection(blocks) if self._passed else ():
            self._passed.remove(block)
            if self._place[block] < self.hand:
                self._behind.append(block)
            else:
                heappush(self._back, (self._place[block], block))

    def go(self, most: int) -> list[int]:
        """Go along to the next blocks that can be evicted, at most `most`; none if there is none ahead."""
        runs, back, places, busy, found = self._runs, self._back, self._place, self._busy, list[int]()
        while len(found) < most and (runs or back):
            count = 1 if back else most - len(found)
            if back and not (runs and places.get(runs[0][-1], self._given) < back[0][0]):
                place, block = heappop(back)
                some = [block] if places.get(block) == place else []  # else it was forgotten
            else:
                some = runs[0][: -count - 1 : -1]
                del runs[0][-count:]
                if not runs[0]:
                    runs.popleft()
            if not busy.isdisjoint(some):
                self._give_places([*found, *some])
                self._passed.update(block for block in some if block in busy)
                some = [block for block in some if block not in busy]
            found += some
        return found

    def _give_places(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block not in self._place:
                self._place[block] = self._given
                self._given += 1

    def remove(self, blocks: Sequence[int]) -> None:
        """Blocks that `go` found are evicted, or move elsewhere."""
        self.size -= len(blocks)
        if self._place and not self._place.keys().isdisjoint(blocks):
            for block in blocks:
                self._place.pop(block, None)

    def put_back(self, blocks: Sequence[int]) -> None:
        """The last ones that `go` found stay where they were."""
        if blocks:
            self._runs.appendleft([*reversed(blocks)])

    def part(self, found: Sequence[int], spared: Sequence[int], gone: Sequence[int]) -> None:
        """Of those that `go` found some are spared and the others are evicted: all are behind the hand. It begins anew
        behind the last of all.
        """
        self._give_places(spared)
        self._behind += spared
        self.hand = self._place.get(found[-1], self._given - 1) + 1
        self.remove(gone)
        if not self._runs and self.hand > next(reversed(self._place.values()), -1):
            self.turn()

    def turn(self) -> None:
        """Begin with the first block again."""
        self.hand = 0
        self.put_back(sorted(self._behind, key=self._place.__getitem__))
        self._behind = []

    def forget(self, blocks: set[int]) -> None:
        """Remove those of `blocks`, which were in use, that are here. It is rare, so it may look at all."""
        here = blocks & {*self._place, *chain(*self._runs)}
        self.size -= len(here)
        for block in here:
            self._place.pop(block, None)
        self._passed -= here
        *runs, self._behind = ([one for one in run if one not in here] for run in (*self._runs, self._behind))
        self._runs = deque(filter(None, runs))

    def blocks(self) -> list[int]:
        """Those that can be evicted, as they entered."""
        new = (block for run in self._runs for block in reversed(run) if block not in self._place)
        return [block for block in (*self._place, *new) if block not in self._busy]


class PlacedQueue(EvictionPolicy):
    """Blocks in one or more lines. A block that is used again keeps its place. A subclass says which line new blocks
    enter, and which blocks leave.
    """

    def __init__(self) -> None:
        super().__init__()
        self._busy = set[int]()  # those in use that have a place
        self._size = 0
        self._lines: tuple[Line, ...] = (Line(self._busy),)

    def __len__(self) -> int:
        return self._size

    def enter(self, blocks: Sequence[int]) -> None:
        """New blocks, in order, enter a line."""
        self._lines[0].enter(blocks)

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """New blocks enter, the last of the table first. Others have their places."""
        new, busy = blocks[::-1], self._busy
        self._size += len(blocks)
        if not busy.isdisjoint(blocks):
            new = [block for block in new if block not in busy]
            busy.difference_update(blocks)
            for line in self._lines:
                line.release(blocks)
        self.enter(new)

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """The blocks keep their places."""
        self._size -= len(queued)
        self._busy.update(queued)

    def forget(self, blocks: Sequence[int]) -> None:
        """What comes under these numbers is new."""
        if known := self._busy.intersection(blocks):
            self._busy -= known
            for line in self._lines:
                line.forget(known)

    def pop(self, count: int) -> list[int]:
        """Remove the first ones."""
        self.check_count(count)
        self._size -= count
        return self._leave(count)

    def _leave(self, count: int) -> list[int]:
        """The next `count` blocks, which leave their lines."""
        line, victims = self._lines[0], list[int]()
        while len(victims) < count:
            found = line.go(count - len(victims))
            line.remove(found)
            victims += found
        return victims

    def blocks(self) -> list[int]:
        """Line by line, as they entered."""
        return [block for line in self._lines for block in line.blocks()]


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

    def _leave(self, count: int) -> list[int]:
        """Move the hand."""
        line, victims = self._lines[0], list[int]()
        while len(victims) < count:
            while not (found := line.go(count - len(victims))):
                line.turn()
            gone = [block for block in found if block not in self._used]
            spared = [block for block in found if block in self._used]
            self._used.difference_update(spared)
            victims += gone
            line.part(found, spared, gone)
        return victims


class CountingQueue(EvictionPolicy):
    """Counts the uses of each block since it was filled. Another base says what comes of them."""

    def __init__(self) -> None:
        super().__init__()
        self._uses = defaultdict[int, int](int)

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """Count the use of all."""
        super().reuse(blocks, queued)
        uses = self._uses
        for block in blocks:
            uses[block] += 1

    def forget(self, blocks: Sequence[int]) -> None:
        """What comes under these numbers is new."""
        super().forget(blocks)
        for block in self._uses.keys() & blocks:
            del self._uses[block]


class LfuQueue(CountingQueue, KeyedQueue):
    """What was used least often first. Who uses a block uses those before it, so leaves of the prefix tree go first."""

    def keys(self, blocks: Sequence[int], table: Released) -> list[_Key]:
        """Uses since the block was filled."""
        return [*map(self._uses.get, blocks, repeat(0))]


class GdsfQueue(LfuQueue):
    """Greedy-dual: what costs least to lose first, by the seconds that are computed again, times the uses so far.

    What is lost with a block is the computation of its table from this block on. As blocks are evicted, the value of
    the last one is added to all that come later, so what is used no more ages.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seconds_before: list[float] = []  # by place, to compute what is before it

    def keys(self, blocks: Sequence[int], table: Released) -> list[_Key]:
        """Age at release + (1 + uses) x seconds."""
        places, before, size = table.places(blocks), self._seconds_before, self.facts.block_size
        end, age, uses = places[-1] + 1, self.last_key, self._uses
        before += [self.facts.seconds(place * size) for place in range(len(before), end + 1)]
        starts, end_s = before[places[0] : end], before[end]
        if len(starts) > len(blocks):
            starts = [before[place] for place in places]
        keys = [age + (end_s - at) for at in starts]
        if not uses.keys().isdisjoint(blocks):
            for at in [at for at, block in enumerate(blocks) if block in uses]:
                keys[at] = age + (1 + uses[blocks[at]]) * (end_s - starts[at])
        return keys


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
        self._lines = self._small, self._main = Line(self._busy), Line(self._busy)
        self._ghosts: OrderedDict[BlockHash | None, bool] = OrderedDict()
        self._evicts = False  # whether any block was evicted

    def enter(self, blocks: Sequence[int]) -> None:
        """What the third queue knew enters the large one. It is cut then."""
        hashes, ghosts, main = [*map(self.facts.hash_of, blocks)], self._ghosts, self._main
        if not ghosts.keys().isdisjoint(hashes):
            known = {block for block, each in zip(blocks, hashes, strict=True) if ghosts.pop(each, False)}
            main.enter([block for block in blocks if block in known])
            blocks = [block for block in blocks if block not in known]
        share = max(1, self.facts.num_blocks // 10)
        room = len(blocks) if self._evicts else max(0, share - self._small.size)
        if room < len(blocks):
            main.enter(blocks[room:])
            blocks = blocks[:room]
        self._small.enter(blocks)
        for _ in range(len(ghosts) - self.facts.num_blocks * 9 // 10):
            ghosts.popitem(last=False)

    def _leave(self, count: int) -> list[int]:
        """Of the large queue where it has more than its share, else of the small one; what is used moves on."""
        self._evicts = self._evicts or count > 0
        small, main, victims = self._small, self._main, list[int]()
        most = self.facts.num_blocks - max(1, self.facts.num_blocks // 10)
        while (short := count - len(victims)) > 0:
            over = main.size - most
            if over > 0 and (found := main.go(min(over, short))):
                victims += self._of_main(found)
                continue
            gone: Sequence[int] = ()
            while not gone and (found := small.go(short if main.size <= most else 1)):
                gone = self._of_small(found)
            victims += gone or self._of_main(main.go(short))
        return victims

    def _of_small(self, found: Sequence[int]) -> Sequence[int]:
        """Victims of those found in the small queue, up to the first one used enough; none where that moves on."""
        uses, moves = self._uses, False
        if not uses.keys().isdisjoint(found):
            enough = [uses.get(block, 0) >= self._ENOUGH for block in found]
            moves = enough[0]
            if (not moves) in enough:
                end = enough.index(not moves)
                self._small.put_back(found[end:])
                found = found[:end]
            for block in found:
                uses.pop(block, None)
        self._small.remove(found)
        if moves:
            self._main.enter(found)
            return ()
        hashes, ghosts = [*map(self.facts.hash_of, found)], self._ghosts
        known = len(ghosts)
        for block_hash in hashes:
            ghosts[block_hash] = True
        if len(ghosts) < known + len(hashes):
            for block_hash in hashes:
                ghosts.move_to_end(block_hash)
        return found

    def _of_main(self, found: Sequence[int]) -> Sequence[int]:
        """Victims of those found in the large queue; what is used there moves to its end, with one use less."""
        uses = self._uses
        self._main.remove(found)
        if uses.keys().isdisjoint(found):
            return found
        moves = [block for block in found if block in uses]
        found = [block for block in found if block not in uses]
        for block in moves:
            if left := min(self._MOST_USES, uses.pop(block)) - 1:
                uses[block] = left
        self._main.enter(moves)
        return found


def new_policy(rule: Eviction, *, ttl_s: float = 60.0, pinned: int = 0) -> EvictionPolicy:
    """A built-in policy: `ttl_s` is the time to live of `ttl`, `pinned` the leading blocks of `pinned`."""
    made = {Eviction.ttl: TtlQueue(ttl_s), Eviction.pinned: PinnedQueue(pinned)}
    return made[rule] if rule in made else RULES[rule]()


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
