"""The policy core per CPU-second: blocks, prompts, decode steps, scheduler steps, beams, and what size does to them.

With `PAGETWIN_VLLM=PATH/bin/python`, an interpreter that has vLLM 0.33.0, vLLM's own classes do the same work beside
ours, in one group of the table. Each class has `fresh`, which prepares a round and is not timed, and `run`, which is.
`make compiled`, and then `PYTHONPATH=build/compiled/site .venv/bin/pytest -n 0 -o pythonpath=build/compiled/site
benchmarks/test_policy_core.py`, times the core in machine code.
The yardstick is plain Python: divide by it to compare runs on machines of different speed or load.
"""

import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.core.identity import TokenIdentity
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, HashAlgorithm, SchedulerLimits
from engine.core.plan import IntArray, StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from engine.core.sequence import DecodeCalendar, Group, ScheduledRow
from harness.config.errors import ConfigError
from harness.oracle.check import vllm_version
from harness.workers import Peer

pytestmark = pytest.mark.benchmark(timer=time.process_time, disable_gc=True)
Benchmark = Any  # pytest-benchmark's fixture
Sizes = dict[str, int]
Identities = dict[int, TokenIdentity]  # of requests, by number
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a round, as pytest-benchmark's `setup` returns them
ROUNDS = 7
BLOCK_SIZE = 16
_VOCABULARY = 32_000
_TOLD = [7]  # the token that a step gives
_SPREAD = 16  # prompt lengths, so that as many sequences fill a block in every step


def tokens_of(seed: int, count: int) -> IntArray:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, _VOCABULARY, count)


def prefill(manager: PagedManager, group: Group) -> None:
    """Compute the whole prompt in one step, without a lookup in the prefix cache."""
    hits: list[int] = []
    if not manager.can_admit(group, hits, 0):
        raise RuntimeError(f"{group.request.request_id} does not fit: the benchmark's pool is too small")
    manager.admit(group, hits)
    root = group.sequences[0]
    manager.extend(ScheduledRow(root, group.request.prompt_tokens, True))
    root.computed = group.request.prompt_tokens


class Allocation:
    """Prompts whose blocks were named beforehand; `evicting` pools hold exactly one round."""

    def __init__(self, sequences: int, tokens: int, *, evicting: bool) -> None:
        self.blocks = sequences * (tokens // BLOCK_SIZE)
        self._manager = PagedManager(self.blocks * (1 if evicting else 2), BLOCK_SIZE)
        self._evicting = evicting
        self._sequences, self._tokens = sequences, tokens
        self._round = 0
        for _ in range(1 if evicting else 2):
            self.run(*self.fresh()[0])
        self._clear()

    def _clear(self) -> None:
        if not self._evicting:
            self._manager.reset_prefix_cache()
        self._manager.drain_frees()

    def fresh(self) -> Arguments:
        """Groups with names that no round had before."""
        self._clear()
        groups = []
        for number in range(self._sequences):
            identity = TokenIdentity(number, tokens_of(number, self._tokens), salt=f"round {self._round}")
            group = Group(Request(number, self._tokens, 1, identity=identity))
            group.block_hashes = {None: identity.prompt_hashes(BLOCK_SIZE)}
            groups.append(group)
        self._round += 1
        return (groups,), {}

    def run(self, groups: list[Group]) -> int:
        """Allocate the blocks of all groups, then free them; returns the blocks that got a name."""
        manager = self._manager
        for group in groups:
            prefill(manager, group)
        named = sum(group.sequences[0].cached_blocks for group in groups)
        for group in groups:
            manager.release(group.sequences[0])
        return named


class Prompts:
    """Prompts served one after the other; the first half of each is a common system prompt."""

    def __init__(
        self,
        count: int,
        tokens: int,
        *,
        evicting: bool,
        lists: bool,
        algorithm: HashAlgorithm = HashAlgorithm.sha256,
    ) -> None:
        self.count, self._lists, self._algorithm = count, lists, algorithm
        self._tokens = tokens
        blocks = tokens // BLOCK_SIZE
        self._manager = PagedManager(blocks * (200 if evicting else count + 2), BLOCK_SIZE)
        self._evicting = evicting
        self._shared = tokens_of(0, tokens // 2)
        self._round = 0
        for _ in range(1 + 400 // count if evicting else 1):  # until the pool is full
            self.run(*self.fresh()[0])

    def fresh(self) -> Arguments:
        """Prompts whose second halves are new in each round, as lists or as arrays."""
        if not self._evicting:
            self._manager.reset_prefix_cache()
            self._serve(np.concatenate([self._shared, tokens_of(1, self._tokens // 2)]))
        self._manager.drain_frees()
        self._round += 1
        own = [
            tokens_of(self._round * self.count + number, self._tokens // 2) for number in range(self.count)
        ]
        prompts = [np.concatenate([self._shared, half]) for half in own]
        return ([prompt.tolist() for prompt in prompts] if self._lists else prompts,), {}

    def run(self, prompts: Sequence[IntArray | list[int]]) -> int:
        """Serve each prompt, from its tokens to the release of its blocks; returns the blocks that were hit."""
        return sum(map(self._serve, prompts))

    def _serve(self, prompt: IntArray | list[int]) -> int:
        manager = self._manager
        identity = TokenIdentity(0, prompt, algorithm=self._algorithm)
        group = Group(Request(0, self._tokens, 1, identity=identity))
        hits = manager.lookup(group)
        if not manager.can_admit(group, hits, 0):
            raise RuntimeError("a prompt does not fit: the benchmark's pool is too small")
        manager.admit(group, hits)
        root = group.sequences[0]
        manager.extend(ScheduledRow(root, self._tokens - BLOCK_SIZE * len(hits), True))
        root.computed = self._tokens
        manager.release(root)
        return len(hits)


@dataclass
class _Running:
    manager: PagedManager
    calendar: DecodeCalendar
    identities: list[TokenIdentity]


class Decoders:
    """Steady decoders on the calendar over the block manager. With `hashed` each is told its token in every step."""

    def __init__(self, running: int, steps: int, *, hashed: bool) -> None:
        self.steps = steps
        self._running, self._hashed = running, hashed

    def fresh(self) -> Arguments:
        """Compute every prompt, so that all sequences decode."""
        blocks = self._running * (2 + (100 + _SPREAD + self.steps) // BLOCK_SIZE)
        decoders = _Running(PagedManager(blocks, BLOCK_SIZE), DecodeCalendar(BLOCK_SIZE), [])
        for number in range(self._running):
            prompt = 100 + number % _SPREAD
            identity = TokenIdentity(number, tokens_of(number, prompt), share_outputs=self._hashed)
            group = Group(Request(number, prompt, self.steps + 2, identity=identity))
            prefill(decoders.manager, group)
            group.generated = 1
            identity.extend(0, _TOLD)
            decoders.identities.append(identity)
            decoders.calendar.join(group)
        return (decoders,), {}

    def run(self, decoders: _Running) -> int:
        """Decode all sequences for `steps` steps; returns the blocks in use."""
        manager, calendar = decoders.manager, decoders.calendar
        identities = decoders.identities if self._hashed else []
        for _ in range(self.steps):
            for group in calendar.due():
                if not manager.can_append(group):
                    raise RuntimeError("no block is free: the benchmark's pool is too small")
                manager.append(group)
            manager.advance(calendar)
            calendar.tick(1)
            for identity in identities:
                identity.extend(0, _TOLD)
        return manager.pool.live_blocks


class Scheduling:
    """A full batch of decoding requests under the scheduler.

    With `hashed`, outputs are shared: each token is told when its step is committed, and full blocks are hashed.
    """

    def __init__(self, running: int, steps: int, *, rows: bool, hashed: bool = False) -> None:
        self.steps = steps
        self._running, self._rows, self._hashed = running, rows, hashed

    def fresh(self) -> Arguments:
        """Admit every request and compute its prompt."""
        blocks = self._running * (2 + (100 + _SPREAD + self.steps) // BLOCK_SIZE)
        scheduler = Scheduler(PagedManager(blocks, BLOCK_SIZE), SchedulerLimits(8192, self._running))
        identities = Identities()
        for number in range(self._running):
            prompt = 100 + number % _SPREAD
            tokens = tokens_of(number, prompt).tolist()
            identities[number] = TokenIdentity(number, tokens, share_outputs=self._hashed)
            scheduler.submit(Request(number, prompt, self.steps + 64, identity=identities[number]))
        while self._step(scheduler, identities).steady < self._running:
            pass
        return (scheduler, identities), {}

    def _step(self, scheduler: Scheduler, identities: Identities) -> StepPlan:
        plan = scheduler.schedule()
        report = scheduler.commit(plan, StepResult())
        for request_id in report.emitted if self._hashed else ():
            identities[request_id].extend(0, _TOLD)
        return plan

    def run(self, scheduler: Scheduler, identities: Identities) -> int:
        """Schedule and commit `steps` steps; returns the rows that were laid out."""
        rows = 0
        for _ in range(self.steps):
            plan = self._step(scheduler, identities)
            if self._rows:
                rows += len(list(plan.rows))
        return rows


class BeamChurn:
    """One beam group whose hypotheses get random parents at every step."""

    def __init__(self, width: int, prompt: int, steps: int) -> None:
        self.width, self.steps = width, steps
        self._prompt = prompt
        draw = random.Random(0)
        self._parents = [[draw.randrange(width) for _ in range(width)] for _ in range(steps)]

    def fresh(self) -> Arguments:
        """Compute the prompt and fork it into the beams."""
        blocks = self.width * (2 + (self._prompt + self.steps) // BLOCK_SIZE)
        manager = PagedManager(blocks, BLOCK_SIZE)
        identity = TokenIdentity(0, tokens_of(0, self._prompt))
        group = Group(Request(0, self._prompt, self.steps + 2, self.width, Decoding.beam, identity=identity))
        prefill(manager, group)
        manager.fork(group.sequences[0], group.fork())
        return (manager, group), {}

    def run(self, manager: PagedManager, group: Group) -> None:
        """In every step, extend all beams and re-parent them."""
        for parents in self._parents:
            rows = [ScheduledRow(beam, 1, True) for beam in group.sequences]
            if not manager.can_extend(rows):
                raise RuntimeError("beams do not fit: the benchmark's pool is too small")
            for row in rows:
                manager.extend(row)
            for beam in group.sequences:
                beam.computed += 1
            manager.drain_copies()
            manager.drain_frees()
            manager.reparent(group.sequences, parents)


def yardstick() -> int:
    """Plain Python with a list and a dictionary. No change of our code makes it faster."""
    kept: list[int] = []
    index: dict[int, int] = {}
    total = 0
    for number in range(200_000):
        kept.append(number)
        index[number & 1023] = number
        total += number
    return total + len(kept) + len(index)


def timed(
    benchmark: Benchmark,
    unit: str,
    count: int,
    run: Callable[..., Any],
    fresh: Callable[[], Any] | None = None,
) -> Any:
    """Time rounds of `run` on what `fresh` prepares; `count` units of work are done in one. Returns what it returns."""
    done = benchmark.pedantic(run, setup=fresh, rounds=ROUNDS, warmup_rounds=1)
    if benchmark.enabled:
        benchmark.extra_info[f"{unit} per CPU-second"] = count / benchmark.stats.stats.median
    return done


@pytest.fixture
def sizes(small: bool) -> Sizes:
    """The amount of work in one round."""
    if small:
        return {"sequences": 2, "tokens": 256, "prompts": 3, "running": 20, "steps": 20, "beam_steps": 8}
    return {
        "sequences": 256,
        "tokens": 2048,
        "prompts": 256,
        "running": 256,
        "steps": 400,
        "beam_steps": 256,
    }


def test_yardstick(benchmark: Benchmark) -> None:
    """Turns of a plain Python loop."""
    timed(benchmark, "turns", 200_000, yardstick)


def allocate(sizes: Sizes) -> tuple[str, int, Allocation]:
    """Blocks whose names (SHA-256) were computed beforehand: fit, admit, take, name; then all are released."""
    work = Allocation(sizes["sequences"], sizes["tokens"], evicting=False)
    return "blocks", work.blocks, work


def prompt_list(sizes: Sizes) -> tuple[str, int, Prompts]:
    """From a prompt as a list of ints, half of it shared, to its release: check, SHA-256, lookup, take, name."""
    return "prompts", sizes["prompts"], Prompts(sizes["prompts"], sizes["tokens"], evicting=False, lists=True)


def prompt_list_cbor(sizes: Sizes) -> tuple[str, int, Prompts]:
    """The same with `sha256_cbor`, the one algorithm by which both name blocks alike."""
    count, tokens, cbor = sizes["prompts"], sizes["tokens"], HashAlgorithm.sha256_cbor
    return "prompts", count, Prompts(count, tokens, evicting=False, lists=True, algorithm=cbor)


def decode_hashed(sizes: Sizes) -> tuple[str, int, Decoders]:
    """Calendar and block manager: who needs a block, does it fit, take it. Outputs are told, hashed and cached."""
    return "steps", sizes["steps"], Decoders(sizes["running"], sizes["steps"], hashed=True)


def schedule_hashed(sizes: Sizes) -> tuple[str, int, Scheduling]:
    """Schedule and commit, every request decoding, outputs hashed, all rows of the plan made into objects."""
    return "steps", sizes["steps"], Scheduling(sizes["running"], sizes["steps"], rows=True, hashed=True)


BOTH = {
    one.__name__: one for one in (allocate, prompt_list, prompt_list_cbor, decode_hashed, schedule_hashed)
}
"""What vLLM's own classes do too, with the same result."""


@pytest.mark.parametrize("line", BOTH)
def test_ours(benchmark: Benchmark, sizes: Sizes, line: str) -> None:
    """Our classes, in one group with those of vLLM."""
    benchmark.group = f"policy core: {line}"
    unit, count, work = BOTH[line](sizes)
    assert timed(benchmark, unit, count, work.run, work.fresh) > 0


OTHER: dict[str, Callable[[Sizes], tuple[str, int, Any]]] = {
    "allocate, every block evicts one": lambda sizes: (
        "blocks",
        sizes["sequences"] * (sizes["tokens"] // BLOCK_SIZE),
        Allocation(sizes["sequences"], sizes["tokens"], evicting=True),
    ),
    "prompt as array": lambda sizes: (
        "prompts",
        sizes["prompts"],
        Prompts(sizes["prompts"], sizes["tokens"], evicting=False, lists=False),
    ),
    "prompt as array, full pool": lambda sizes: (
        "prompts",
        sizes["prompts"],
        Prompts(sizes["prompts"], sizes["tokens"], evicting=True, lists=False),
    ),
    "decode, outputs private": lambda sizes: (
        "steps",
        sizes["steps"],
        Decoders(sizes["running"], sizes["steps"], hashed=False),
    ),
    "schedule, outputs private, no rows": lambda sizes: (
        "steps",
        sizes["steps"],
        Scheduling(sizes["running"], sizes["steps"], rows=False),
    ),
    "schedule, outputs private, with rows": lambda sizes: (
        "steps",
        sizes["steps"],
        Scheduling(sizes["running"], sizes["steps"], rows=True),
    ),
    "beams, k = 4, prompt 512": lambda sizes: (
        "beam-tokens",
        4 * sizes["beam_steps"],
        BeamChurn(4, 512, sizes["beam_steps"]),
    ),
}


@pytest.mark.parametrize("line", OTHER)
def test_other_work(benchmark: Benchmark, sizes: Sizes, line: str) -> None:
    """Work that vLLM 0.33 does in no class of its own: it forks no beams, and always hashes outputs."""
    benchmark.group = f"policy core: {line}"
    unit, count, work = OTHER[line](sizes)
    timed(benchmark, unit, count, work.run, work.fresh)


@cache
def started(python: str) -> Peer:
    """`vllm_core.py` in the interpreter that has vLLM."""
    return Peer(python, Path(__file__).with_name("vllm_core.py"))


def vllm_python() -> str:
    """The interpreter that has vLLM."""
    return os.environ.get("PAGETWIN_VLLM") or sys.executable


def vllm_seconds() -> float:
    """CPU-seconds of vLLM's process."""
    return float(started(vllm_python()).ask({"do": "seconds"}))


@pytest.fixture(scope="module")
def vllm() -> Iterator[Peer]:
    """vLLM's classes; skips where `PAGETWIN_VLLM` names no interpreter that has them."""
    try:
        vllm_version(vllm_python())
    except ConfigError:
        pytest.skip("vLLM is not installed; PAGETWIN_VLLM=PATH/bin/python names an environment that has it")
    with started(vllm_python()) as peer:
        yield peer
    started.cache_clear()


@pytest.mark.benchmark(timer=vllm_seconds)
@pytest.mark.parametrize("line", BOTH)
def test_vllm(vllm: Peer, benchmark: Benchmark, sizes: Sizes, line: str) -> None:
    """vLLM's classes; fails where they did other work than ours."""
    benchmark.group = f"policy core: {line}"
    unit, count, work = BOTH[line](sizes)
    arguments, _ = work.fresh()
    theirs = timed(
        benchmark,
        unit,
        count,
        lambda: vllm.ask({"do": "run"}),
        lambda: vllm.ask({"do": "fresh", "line": line, "sizes": sizes}),
    )
    assert theirs == work.run(*arguments)


class FullPool:
    """A pool of `blocks`, half in use and named, the rest cached but for a few tables."""

    TABLE = 16  # blocks

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.tables = max(1, min(64, blocks // (8 * self.TABLE)))  # of one round
        self._fresh = 0
        named = [
            (self.pool.take(self.TABLE), self.names()) for _ in range(blocks // self.TABLE - self.tables)
        ]
        for table, names in named:
            self.pool.cache_full_blocks(table, names)
        self.live = named[: len(named) // 2]
        for table, _ in named[len(self.live) :]:
            self.pool.release(table)

    def names(self) -> list[bytes]:
        """Names of a table that no other has."""
        self._fresh += self.TABLE
        return [number.to_bytes(32, "little") for number in range(self._fresh, self._fresh + self.TABLE)]

    def fresh(self) -> Arguments:
        """Tables to find and share, and names for new ones."""
        chosen = random.Random(self._fresh).choices(self.live, k=self.tables)
        return (chosen, [self.names() for _ in chosen]), {}

    def run(self, chosen: Sequence[tuple[list[int], list[bytes]]], names: Sequence[list[bytes]]) -> None:
        """Find, share and drop tables in use; take and name as many, each evicting one; release them."""
        pool = self.pool
        for table, wanted in chosen:
            if pool.find(wanted) != table:
                raise RuntimeError("a block in use was not found")
            pool.share(table)
            pool.release(table)
        tables = [pool.take(self.TABLE) for _ in names]
        deque(map(pool.cache_full_blocks, tables, names), maxlen=0)
        deque(map(pool.release, tables), maxlen=0)
        pool.drain_voided()


@pytest.mark.parametrize("blocks", [1_000, 10_000, 100_000, 1_000_000])
def test_pool_size(benchmark: Benchmark, small: bool, blocks: int) -> None:
    """A block costs the same in a pool a thousand times larger, but for what the processor's caches make of it."""
    benchmark.group = "policy core: find, share, take, name, evict by pool size"
    full = FullPool(min(blocks, 2_000) if small else blocks)
    timed(benchmark, "blocks", full.tables * full.TABLE, full.run, full.fresh)


@pytest.mark.parametrize("queued", [1_000, 10_000, 100_000])
def test_queue_length(benchmark: Benchmark, small: bool, queued: int) -> None:
    """Submitting, aborting and serving a request costs the same however many wait."""
    benchmark.group = "policy core: submit, abort, serve by queue length"
    scheduler = Scheduler(PagedManager(64, 16, prefix_caching=False), SchedulerLimits(2048, 1))
    waiting: list[int] = []
    window, random_ = 200, random.Random(0)

    def submit(count: int) -> None:
        begin = waiting[-1] + 1 if waiting else 0
        for number in range(begin, begin + count):
            scheduler.submit(Request(number, 32, 1))
        waiting.extend(range(begin, begin + count))

    def choose() -> Arguments:
        return ([waiting.pop(random_.randrange(window, len(waiting) - 1)) for _ in range(window)],), {}

    def run(aborted: list[int]) -> None:
        for number in aborted:
            scheduler.abort(number)
        for _ in range(window):
            scheduler.commit(scheduler.schedule(), StepResult())
        del waiting[:window]
        submit(2 * window)

    submit(min(queued, 1_000) if small else queued)
    timed(benchmark, "requests", window, run, choose)
