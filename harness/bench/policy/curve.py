"""`bench policy --curve`: the cost of each operation by the size of the pool or the queue, and peak memory.

An operation fails if its cost grows faster with the size than looking up a plain dictionary of the same size. Memory is
measured in a process of its own.
"""

import gc
import json
import math
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random

from engine.core.identity import BlockHash, KeyIdentity
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.paged import PagedManager
from engine.core.options import SchedulerLimits
from engine.core.plan import StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from engine.core.sequence import Group, ScheduledRow
from harness.console import remark, say

TABLE = 16  # blocks of a table
CONTROL = "a bare dictionary"
_PASSES = 15
QUEUED = 100_000
LIMIT_MB = 1_000
PROMPT_TOKENS = 2048  # of the sequences that hold the blocks
QUEUED_TOKENS = 512  # of every queued prompt, whose token ids are kept until it is served
_BLOCK_SIZE = 16
_MB = 1e6
MAX_EXPONENT = 0.25
"""The largest allowed exponent e in cost ~ size^e, beyond that of looking up a plain dictionary of the same size.

O(n) has exponent 1, O(sqrt n) has 0.5. A large pool exceeds the processor's caches and page tables, and so does the
dictionary. That part of the growth is not counted.
"""


@dataclass(frozen=True)
class Cost:
    """CPU time of one operation at one size: blocks of the pool, or queued requests."""

    operation: str
    of: str  # blocks or requests
    size: int
    ns: float


class Stopwatch:
    """CPU time by operation, in passes. The fastest pass counts, because other processes only make a pass slower."""

    def __init__(self) -> None:
        self._passes: dict[str, list[float]] = {}

    def time(self, operation: str, count: int, run: Callable[[], object]) -> None:
        """Time one pass, in which `run` does the operation `count` times, without Python's garbage collection."""
        gc.disable()
        start = time.process_time_ns()
        run()
        spent = time.process_time_ns() - start
        gc.enable()
        self._passes.setdefault(operation, []).append(spent / count)

    def costs(self, of: str, size: int) -> list[Cost]:
        """The cost of each operation, from its fastest pass."""
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

    def names(self) -> list[BlockHash]:
        """Names of a table that no other has."""
        self._fresh += TABLE
        return [number.to_bytes(32, "little") for number in range(self._fresh, self._fresh + TABLE)]

    def _new_table(self) -> tuple[list[int], list[BlockHash]]:
        table, names = self.pool.take(TABLE), self.names()
        self.pool.cache_full_blocks(table, names)
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
    """Time every operation on a window of tables. Afterwards the pool is as full as before."""
    pool, window = full.pool, full.window
    count, tables = window * TABLE, list[list[int]]()
    watch.time("take", count, lambda: _take(pool, window, tables))
    watch.time("release", count, lambda: _each(pool.release, tables))
    _take(pool, window, tables)
    names = [full.names() for _ in tables]
    watch.time("name", count, lambda: _each(pool.cache_full_blocks, tables, names))
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
    """Nanoseconds to append one block to a decoding sequence, with the pool three quarters full."""
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
    """A scheduler that runs one request at a time, with a long queue in a known order."""

    def __init__(self, queued: int) -> None:
        manager = PagedManager(64, TABLE, prefix_caching=False)
        self.scheduler = Scheduler(manager, SchedulerLimits(2048, 1))
        self.waiting: list[int] = []
        self._submitted = 0
        self.submit(queued)

    def submit(self, count: int) -> None:
        """Submit `count` more requests."""
        for number in range(self._submitted, self._submitted + count):
            self.scheduler.submit(Request(number, 32, 1))
        self.waiting.extend(range(self._submitted, self._submitted + count))
        self._submitted += count

    def choose(self, count: int, random: Random) -> list[int]:
        """Take `count` random requests of the queue, to be aborted."""
        return [self.waiting.pop(random.randrange(len(self.waiting))) for _ in range(count)]

    def abort(self, chosen: list[int]) -> None:
        """Abort the requests."""
        for number in chosen:
            self.scheduler.abort(number)

    def serve(self, count: int) -> None:
        """Run `count` steps. Each admits, computes and finishes one request."""
        for _ in range(count):
            self.scheduler.commit(self.scheduler.schedule(), StepResult())


def queue_costs(queued: int) -> list[Cost]:
    """Nanoseconds to submit, abort and serve one request, with `queued` others waiting."""
    queue, watch, random = Queue(queued), Stopwatch(), Random(0)
    window = min(256, queued // 4)
    for _ in range(_PASSES):
        watch.time("submit", 2 * window, partial(queue.submit, 2 * window))
        watch.time("abort", window, partial(queue.abort, queue.choose(window, random)))
        watch.time("serve", window, partial(queue.serve, window))
        del queue.waiting[:window]
    return watch.costs("requests", queued)


@dataclass(frozen=True)
class Footprint:
    """Peak resident memory of the process, and the bytes that a live block and a queued request add."""

    blocks: int
    queued: int
    imports_mb: float
    peak_mb: float
    block_bytes: float
    request_bytes: float


def footprint(blocks: int, queued: int) -> Footprint:
    """Fill a pool of `blocks` with named blocks in use and queue `queued` requests, in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_measure, blocks, queued).result()


def _measure(blocks: int, queued: int) -> Footprint:
    from engine.core.memory.paged import PagedManager
    from engine.core.options import SchedulerLimits
    from engine.core.plan import StepResult
    from engine.core.scheduling.scheduler import Scheduler
    from harness.bench.policy.work import token_request

    imports = _resident_bytes()
    manager = PagedManager(blocks, _BLOCK_SIZE)
    sequences = blocks // (PROMPT_TOKENS // _BLOCK_SIZE)
    scheduler = Scheduler(manager, SchedulerLimits(PROMPT_TOKENS * (sequences + 1), max(1, sequences)))
    for number in range(sequences):
        scheduler.submit(token_request(number, PROMPT_TOKENS - 8))
    scheduler.commit(scheduler.schedule(), StepResult())
    live = manager.pool.live_blocks
    full = _resident_bytes()
    for number in range(queued):
        scheduler.submit(token_request(sequences + number, QUEUED_TOKENS))
    scheduler.commit(scheduler.schedule(), StepResult())
    if len(scheduler.waiting) < queued or manager.pool.live_blocks < live:
        raise RuntimeError(f"{len(scheduler.waiting)} requests wait and {live} blocks are in use")
    end = _resident_bytes()
    return Footprint(
        blocks=live,
        queued=len(scheduler.waiting),
        imports_mb=imports / _MB,
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MB,
        block_bytes=(full - imports) / max(1, live),
        request_bytes=(end - full) / max(1, queued),
    )


def _resident_bytes() -> int:
    """Resident memory now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def bench_curve(blocks: Sequence[int], queued: Sequence[int], out: Path) -> int:
    """Measure, print, draw; returns 1 if an operation's cost grows with the size, or memory exceeds the limit."""
    costs = [cost for size in sorted(set(blocks)) for cost in block_costs(size)]
    costs += [cost for size in sorted(set(queued)) for cost in queue_costs(size)]
    for line in curve_lines(costs):
        say(line)
    memory = footprint(max(blocks), QUEUED)
    say(memory_line(memory))
    content = {"costs": [asdict(cost) for cost in costs], "memory": asdict(memory)}
    (out / "curve.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _draw(costs, out / "curve.svg")
    growing = growing_operations(costs)
    for name in growing:
        remark(f"error: the cost of '{name}' grows with the size")
    if memory.peak_mb > LIMIT_MB:
        remark(f"error: {memory.peak_mb:,.0f} MB are needed, {LIMIT_MB:,} MB are allowed")
    return 1 if growing or memory.peak_mb > LIMIT_MB else 0


def by_operation(costs: Sequence[Cost]) -> Mapping[str, list[Cost]]:
    """Costs of each operation by ascending size."""
    found: dict[str, list[Cost]] = {}
    for cost in sorted(costs, key=lambda cost: cost.size):
        found.setdefault(cost.operation, []).append(cost)
    return found


def exponents(costs: Sequence[Cost]) -> dict[str, float]:
    """e in cost ~ size^e between the smallest and the largest size; 0 where there is one size."""
    found = {}
    for name, curve in by_operation(costs).items():
        first, last = curve[0], curve[-1]
        sizes = last.size / first.size
        found[name] = math.log(last.ns / first.ns) / math.log(sizes) if sizes > 1 else 0.0
    return found


def growing_operations(costs: Sequence[Cost]) -> list[str]:
    """Operations whose cost grows faster with the size than that of a plain dictionary."""
    exponent = exponents(costs)
    allowed = MAX_EXPONENT + max(0.0, exponent.get(CONTROL, 0.0))
    return [name for name, found in exponent.items() if name != CONTROL and found > allowed]


def curve_lines(costs: Sequence[Cost]) -> list[str]:
    """The costs as text: one line per operation, one column per size, and the ratio of the last to the first."""
    lines, header = [], ""
    exponent = exponents(costs)
    for name, curve in sorted(by_operation(costs).items(), key=lambda pair: (pair[1][0].of, pair[0])):
        wanted = f"{'ns each, by ' + curve[0].of:<22}" + "".join(f"{cost.size:>11,}" for cost in curve)
        if wanted != header:
            lines.append(f"{wanted}{'last/first':>12} {'exponent':>9}")
            header = wanted
        figures = "".join(f"{cost.ns:>11,.0f}" for cost in curve)
        lines.append(f"{name:<22}{figures}{curve[-1].ns / curve[0].ns:>12.2f} {exponent[name]:>9.2f}")
    return lines


def memory_line(memory: Footprint) -> str:
    """The footprint as text."""
    return (
        f"{memory.blocks:,} live, named blocks and {memory.queued:,} queued requests: "
        f"{memory.peak_mb:,.0f} MB at the peak of a fresh process ({memory.imports_mb:,.0f} MB of imports, "
        f"{memory.block_bytes:,.0f} bytes a block, {memory.request_bytes:,.0f} a queued request)"
    )


def _draw(costs: Sequence[Cost], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    from harness.report.style import PAGE_IN, PALETTE, RC

    with plt.rc_context(RC):
        figure, axes = plt.subplots(1, 2, figsize=(PAGE_IN, 3.0), layout="constrained")
        for axis, of in zip(axes, ("blocks", "requests"), strict=True):
            curves = by_operation([cost for cost in costs if cost.of == of])
            for number, (name, curve) in enumerate(curves.items()):
                axis.plot(
                    [cost.size for cost in curve],
                    [cost.ns for cost in curve],
                    color=PALETTE[number % len(PALETTE)],
                    linestyle="-" if number < len(PALETTE) else "--",
                    marker="o",
                    label=name,
                )
            axis.set(xscale="log", yscale="log", ylabel="CPU time, ns each")
            axis.set_xlabel("blocks in the pool" if of == "blocks" else "requests in the queue")
            axis.set_ylim(bottom=10)
            axis.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), columnspacing=0.8)
        figure.savefig(file)
        plt.close(figure)
