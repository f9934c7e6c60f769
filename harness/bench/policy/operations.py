"""The operations whose cost must not grow: each is timed in a pool, or a queue, of a given size."""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random

from engine.core.identity import BlockName, KeyIdentity
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.paged import PagedManager
from engine.core.options import SchedulerLimits
from engine.core.plan import StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from engine.core.sequence import Group, ScheduledRow

TABLE = 16  # blocks of a table
CONTROL = "a bare dictionary"
_PASSES = 15


@dataclass(frozen=True)
class Cost:
    """CPU time of one operation at one size: blocks of the pool, or queued requests."""

    operation: str
    of: str  # blocks or requests
    size: int
    ns: float


class Stopwatch:
    """CPU time by operation, in passes: the fastest counts, because others on the machine only make one slower."""

    def __init__(self) -> None:
        self._passes: dict[str, list[float]] = {}

    def time(self, operation: str, count: int, run: Callable[[], object]) -> None:
        """One pass: `run` does the operation `count` times, and no garbage collection of Python's falls into it."""
        gc.disable()
        start = time.process_time_ns()
        run()
        spent = time.process_time_ns() - start
        gc.enable()
        self._passes.setdefault(operation, []).append(spent / count)

    def costs(self, of: str, size: int) -> list[Cost]:
        """The fastest passes."""
        return [Cost(name, of, size, min(passes)) for name, passes in self._passes.items()]


class FullPool:
    """A pool of which half is in use and named, the rest cached but for a window of unnamed free blocks."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.window = max(1, min(64, blocks // (8 * TABLE)))  # tables
        self._fresh = 0
        self.named = [self._new_table() for _ in range(blocks // TABLE - self.window)]
        self.live = self.named[: len(self.named) // 2]
        for table, _ in self.named[len(self.live) :]:
            self.pool.release(table)

    def names(self) -> list[BlockName]:
        """Names of a table that no other has."""
        self._fresh += TABLE
        return [number.to_bytes(32, "little") for number in range(self._fresh, self._fresh + TABLE)]

    def _new_table(self) -> tuple[list[int], list[BlockName]]:
        table, names = self.pool.take(TABLE), self.names()
        self.pool.name(table, names)
        return table, names


def control_costs(size: int) -> list[Cost]:
    """Nanoseconds a look-up costs in a dictionary of `size` names: what caches and page tables alone make of size."""
    names = [number.to_bytes(32, "little") for number in range(size)]
    index, random, watch = dict.fromkeys(names, 0), Random(0), Stopwatch()
    count = max(1, min(64, size // (8 * TABLE)))
    for _ in range(_PASSES):
        starts = [random.randrange(size - TABLE) for _ in range(count)]
        asked = [name for start in starts for name in names[start : start + TABLE]]
        watch.time(CONTROL, len(asked), partial(_each, index.get, asked))
    return watch.costs("blocks", size)


def block_costs(blocks: int) -> list[Cost]:
    """Nanoseconds a block of every operation of the pool, in a pool of `blocks`."""
    full, watch, random = FullPool(blocks), Stopwatch(), Random(0)
    for _ in range(_PASSES):
        _one_pass(full, watch, random)
    return watch.costs("blocks", blocks) + append_costs(blocks) + control_costs(blocks)


def _one_pass(full: FullPool, watch: Stopwatch, random: Random) -> None:
    """Every operation on a window of tables; the pool is as full afterwards as it was before."""
    pool, window = full.pool, full.window
    count, tables = window * TABLE, list[list[int]]()
    watch.time("take", count, lambda: _take(pool, window, tables))
    watch.time("release", count, lambda: _each(pool.release, tables))
    _take(pool, window, tables)
    names = [full.names() for _ in tables]
    watch.time("name", count, lambda: _each(pool.name, tables, names))
    live = [random.choice(full.live) for _ in tables]
    shared, asked = [table for table, _ in live], [wanted for _, wanted in live]
    watch.time("find", count, lambda: _each(pool.find, asked))
    watch.time("share", count, lambda: _each(pool.share, shared))
    watch.time("unshare", count, lambda: _each(pool.release, shared))
    watch.time("release named", count, lambda: _each(pool.release, tables))
    watch.time("revive cached", count, lambda: _each(pool.share, tables))
    _each(pool.release, tables)
    watch.time("evict", count, lambda: _take(pool, window, tables))
    _each(pool.release, tables)
    pool.drain_voided()


def _take(pool: BlockPool, count: int, tables: list[list[int]]) -> None:
    tables[:] = [pool.take(TABLE) for _ in range(count)]


def _each(operation: Callable[..., object], *arguments: Iterable[object]) -> None:
    deque(map(operation, *arguments), maxlen=0)


def append_costs(blocks: int) -> list[Cost]:
    """Nanoseconds that one more block costs a decoding sequence, with the pool three quarters full."""
    manager, watch = PagedManager(blocks, TABLE), Stopwatch()
    group = Group(Request(0, TABLE, TABLE * blocks, identity=KeyIdentity(0, [(None, TABLE)])))
    manager.pool.take(blocks * 3 // 4)
    manager.admit(group, [])
    manager.extend(ScheduledRow(group.sequences[0], TABLE, True))
    count = max(1, min(256, blocks // (8 * _PASSES)))
    for _ in range(_PASSES):
        watch.time("append", count, partial(_each, manager.append, [group] * count))
    return watch.costs("blocks", blocks)


class Queue:
    """A scheduler with room for one request at a time and a long queue, whose order we know."""

    def __init__(self, queued: int) -> None:
        manager = PagedManager(64, TABLE, prefix_caching=False)
        self.scheduler = Scheduler(manager, SchedulerLimits(2048, 1))
        self.waiting: list[int] = []
        self._submitted = 0
        self.submit(queued)

    def submit(self, count: int) -> None:
        """`count` more requests wait."""
        for number in range(self._submitted, self._submitted + count):
            self.scheduler.submit(Request(number, 32, 1))
        self.waiting.extend(range(self._submitted, self._submitted + count))
        self._submitted += count

    def choose(self, count: int, random: Random) -> list[int]:
        """Requests out of the middle of the queue, which are about to be aborted."""
        return [self.waiting.pop(random.randrange(len(self.waiting))) for _ in range(count)]

    def abort(self, chosen: list[int]) -> None:
        """They wait no more."""
        for number in chosen:
            self.scheduler.abort(number)

    def serve(self, count: int) -> None:
        """Steps that each admit, compute and end one request."""
        for _ in range(count):
            self.scheduler.commit(self.scheduler.schedule(), StepResult())


def queue_costs(queued: int) -> list[Cost]:
    """Nanoseconds a request with `queued` others waiting: to submit it, to abort it, to serve it."""
    queue, watch, random = Queue(queued), Stopwatch(), Random(0)
    window = min(256, queued // 4)
    for _ in range(_PASSES):
        watch.time("submit", 2 * window, partial(queue.submit, 2 * window))
        watch.time("abort", window, partial(queue.abort, queue.choose(window, random)))
        watch.time("serve", window, partial(queue.serve, window))
        del queue.waiting[:window]
    return watch.costs("requests", queued)
