"""Rules of eviction: each beside its definition by brute force, beside textbooks, and through the policy core."""

import random
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from tiers import cases, tier

from engine.core import KeyIdentity, PagedManager, Request, Scheduler, SchedulerLimits, StepResult
from engine.core.errors import OutOfBlocksError
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.eviction import EvictionPolicy, Released
from engine.core.memory.eviction_rules import new_policy
from engine.core.options import Eviction

SIZE = 4


def request(rid: int, priority: int = 0, blocks: int = 1, session: str | None = None) -> Request:
    identity = KeyIdentity(rid, [(rid + 1, blocks * SIZE)])
    return Request(rid, blocks * SIZE, 1, identity=identity, priority=priority, session=session)


def push(queue: EvictionPolicy, owner: Request | None, *blocks: int, first: int = 0) -> None:
    queue.push(blocks, Released(blocks, first, owner))


# -- by hand -------------------------------------------------------------------------------------------------------


def test_a_time_to_live_keeps_sessions_before_the_rest_until_it_is_over() -> None:
    queue, now = new_policy(Eviction.ttl, ttl_s=10), [0]
    queue.facts.clock = lambda: now[0]
    push(queue, request(0, session="a"), 1, 2)
    push(queue, request(9), 3)
    assert queue.blocks() == [3, 2, 1]
    now[0] = 10_000_000_000
    push(queue, request(8), 4)
    assert queue.pop(4) == [3, 4, 2, 1]  # what is over falls behind what is there


def test_pinned_blocks_are_those_at_the_start_of_prompts_not_of_what_is_released() -> None:
    queue = new_policy(Eviction.pinned, pinned=2)
    push(queue, request(0), 1, 2, 3, 4)
    push(queue, request(1), 5, 6, first=3)  # another request still has its first blocks
    assert queue.pop(6) == [4, 3, 6, 5, 2, 1]


def test_first_in_first_out_moves_nothing_that_is_used_or_released_again() -> None:
    queue = new_policy(Eviction.fifo)
    push(queue, request(0), 1, 2)
    push(queue, request(1), 3)
    queue.reuse([1, 2], [1, 2])
    push(queue, request(2), 1, 2, 4)
    assert queue.pop(4) == [2, 1, 3, 4]


def test_what_the_next_turn_does_not_take_up_is_evicted_first() -> None:
    queue = new_policy(Eviction.superseded)
    push(queue, request(2, session="b"), 9)
    push(queue, request(0, session="a"), 1, 2, 3)
    queue.reuse([1], [1])  # the next turn hits the first block alone
    push(queue, request(1, session="a"), 1, 4)
    assert queue.pop(5) == [3, 2, 9, 4, 1]


def test_what_is_dear_to_compute_again_outlives_what_is_cheap() -> None:
    queue = new_policy(Eviction.gdsf)
    queue.facts.block_size = SIZE
    push(queue, request(0), 1, 2, 3, 4)
    push(queue, request(1), 5)
    queue.reuse([5], [5])
    push(queue, request(1), 5)  # used once: twice its seconds, so as dear as the last two of the other table
    assert queue.pop(5) == [4, 3, 5, 2, 1]


def test_s3_fifo_remembers_a_hash_from_its_last_eviction_on() -> None:
    queue, names = new_policy(Eviction.s3fifo), dict[int, str]()
    queue.facts.num_blocks, queue.facts.hash_of = 4, names.__getitem__  # three hashes are remembered

    def enter_and_leave(*hashes: str) -> list[int]:
        first = len(names) + 1
        for block, name in enumerate(hashes, first):
            names[block] = name
            push(queue, request(block), block)
        return queue.pop(len(hashes))

    enter_and_leave("z")
    assert enter_and_leave("a", "b", "a") == [2, 3, 4]
    for name in "de":
        enter_and_leave(name)
    names |= {7: "f", 8: "a", 9: "g"}
    for block in (7, 8, 9):
        push(queue, request(block), block)
    assert queue.pop(2) == [7, 9]  # the last one of b, a, d and e that is forgotten is b


@pytest.mark.nightly
@cases("rule", [Eviction.lru, Eviction.lfu, Eviction.gdsf, Eviction.ttl], day=(Eviction.gdsf,))
def test_what_is_released_and_used_again_without_end_takes_no_more_memory(rule: Eviction) -> None:
    queue = new_policy(rule)

    def use(times: int) -> int:
        for turn in range(times):
            push(queue, request(0), 1, 2, 3)
            again = [1, 2, 3] if turn % 2 else [3, 1, 2]
            queue.reuse(again, again)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = use(1000)
        assert use(3000) - before < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rule", list(Eviction))
def test_more_than_there_is_cannot_be_evicted(rule: Eviction) -> None:
    queue = new_policy(rule)
    queue.facts.num_blocks = 4
    push(queue, request(0), 1)
    with pytest.raises(OutOfBlocksError, match="2 blocks to evict were asked for, 1 are in the queue"):
        queue.pop(2)
    assert queue.blocks() == [1]


# -- by brute force ------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """What is known of a block since it was filled."""

    release: tuple[int, int] = (0, 0)  # when, and how far from the end of its table
    entered: tuple[int, int] = (0, 0)
    place: int = 0
    owner: Request | None = None
    since: int = 0
    uses: int = 0
    fresh: int = 0  # uses that SIEVE or S3-FIFO has not taken away
    key: float = 0.0
    is_main: bool = False
    rank: int = 0


@dataclass
class ByDefinition(EvictionPolicy):
    """Keeps every block in one dictionary and looks at all of them to evict one."""

    rule: Eviction
    facts: object = None
    known: dict[int, Entry] = field(default_factory=dict)
    queue: set[int] = field(default_factory=set)
    ghosts: list[Hashable] = field(default_factory=list)
    now: int = 0
    age: float = 0.0
    evicts: bool = False
    hand: tuple[int, int] = (0, 0)

    def push(self, blocks: Sequence[int], table: Released) -> None:
        self.now += 1
        owner, session = table.request, table.request and table.request.session
        if self.rule is Eviction.superseded and session:
            left = [b for b in self.queue if self.known[b].owner and self.known[b].owner.session == session]
            for number, block in enumerate(sorted(left, key=lambda b: self.known[b].release)):
                entry = self.known[block]
                if entry.rank:
                    entry.rank, entry.release = 0, (self.now, number)
        self.now += 1
        end = (table.places(blocks)[-1] + 1) * SIZE if blocks else 0
        for back, (block, place) in enumerate(
            zip(blocks[::-1], list(table.places(blocks))[::-1], strict=True)
        ):
            at = (self.now, back)
            entry = self.known.setdefault(block, Entry())
            if entry.entered == (0, 0):
                ghost, small = self.facts.hash_of(block), max(1, self.facts.num_blocks // 10)
                smalls = sum(each.entered > (0, 0) and not each.is_main for each in self.known.values())
                entry.is_main = ghost in self.ghosts or (not self.evicts and smalls >= small)
                entry.entered = at
                if ghost in self.ghosts:
                    self.ghosts.remove(ghost)
            entry.release, entry.place, entry.owner, entry.since = at, place, owner, self.facts.clock()
            lost = self.facts.seconds(end) - self.facts.seconds(place * SIZE)
            entry.key = self.age + (1 + entry.uses) * lost
            entry.rank = 1 if self.rule is Eviction.superseded else int(bool(session))
            self.queue.add(block)
        self.ghosts = self.ghosts[-(self.facts.num_blocks * 9 // 10) :]

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        for block in blocks:
            entry = self.known.setdefault(block, Entry())
            entry.uses += 1
            entry.fresh = min(3, entry.fresh + 1)
        self.queue -= set(queued)

    def forget(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.known.pop(block, None)

    def order(self, block: int) -> tuple[object, ...]:
        entry = self.known[block]
        first: dict[Eviction, object] = {
            Eviction.fifo: entry.entered,
            Eviction.lfu: entry.uses,
            Eviction.priority: -entry.owner.priority if entry.owner else 0,
            Eviction.pinned: entry.place < 2,
            Eviction.gdsf: entry.key,
            Eviction.ttl: entry.rank,
            Eviction.superseded: entry.rank,
        }
        return first.get(self.rule, 0), entry.release

    def victim(self) -> int:
        known = self.known
        if self.rule is Eviction.sieve:
            while True:
                ahead = [b for b in self.queue if known[b].entered > self.hand]
                if not ahead or max(e.entered for e in known.values()) <= self.hand:
                    self.hand = (0, -1)
                    ahead = list(self.queue)
                block = min(ahead, key=lambda b: known[b].entered)
                self.hand = known[block].entered
                if not known[block].fresh:
                    return block
                known[block].fresh = 0
        if self.rule is Eviction.s3fifo:
            most, moved = self.facts.num_blocks - max(1, self.facts.num_blocks // 10), False
            while True:
                mains = [b for b in self.queue if known[b].is_main]
                smalls = [b for b in self.queue if not known[b].is_main]
                over = sum(entry.is_main for entry in known.values()) > most
                from_main = not smalls or (over and bool(mains) and not moved)
                block = min(mains if from_main else smalls, key=lambda b: known[b].entered)
                entry, self.now = known[block], self.now + 1
                if from_main and not entry.fresh:
                    return block
                if not from_main and entry.fresh < 2:
                    ghost = self.facts.hash_of(block)
                    self.ghosts = [*(one for one in self.ghosts if one != ghost), ghost]
                    return block
                entry.fresh = entry.fresh - 1 if from_main else 0
                entry.is_main, entry.entered, moved = True, (self.now, 0), not from_main
        if self.rule is Eviction.ttl:
            over = [b for b in self.queue if known[b].rank and self.facts.clock() - known[b].since >= 5]
            self.now += 1
            for number, block in enumerate(sorted(over, key=lambda b: known[b].release)):
                known[block].rank, known[block].release = 0, (self.now, number)
        return min(self.queue, key=self.order)

    def pop(self, count: int) -> list[int]:
        victims = []
        self.evicts = self.evicts or count > 0
        for _ in range(count):
            block = self.victim()
            self.age = self.known[block].key
            self.queue.remove(block)
            victims.append(block)
            if self.rule is Eviction.sieve:  # the hand is at its end where nothing newer is known
                newest = max((e.entered for b, e in self.known.items() if b != block), default=(0, 0))
                self.hand = (0, -1) if newest < self.hand else self.hand
            self.forget([block])
        return victims


class Both(EvictionPolicy):
    """A rule and its definition, which must evict the same."""

    def __init__(self, rule: EvictionPolicy, definition: ByDefinition) -> None:
        super().__init__()
        rule.facts = definition.facts = self.facts
        self.rule, self.definition = rule, definition

    def __len__(self) -> int:
        return len(self.rule)

    def push(self, blocks: Sequence[int], table: Released) -> None:
        self.rule.push(blocks, table)
        self.definition.push(blocks, table)

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        self.rule.reuse(blocks, queued)
        self.definition.reuse(blocks, queued)

    def forget(self, blocks: Sequence[int]) -> None:
        self.rule.forget(blocks)
        self.definition.forget(blocks)

    def pop(self, count: int) -> list[int]:
        victims = self.rule.pop(count)
        assert victims == self.definition.pop(count)
        return victims

    def blocks(self) -> list[int]:
        assert sorted(self.rule.blocks()) == sorted(self.definition.queue)
        return self.rule.blocks()


@cases("rule", list(Eviction), day=6)
@pytest.mark.parametrize("seed", tier([3, 16], range(60)))
def test_a_rule_evicts_as_it_is_defined(rule: Eviction, seed: int) -> None:
    """Tables of a few texts that are taken, shared, rewritten in part and released in any order."""
    draw, now = random.Random(seed), [0]
    policy = Both(new_policy(rule, ttl_s=5e-9, pinned=2), ByDefinition(rule))
    policy.facts.clock, policy.facts.block_size = lambda: now[0], SIZE
    policy.facts.pair_s = 0.01
    blocks, texts, longest, steps = (20, 5, 6, 150) if seed % 4 else (100, 9, 30, 400)
    pool = BlockPool(blocks, eviction=policy)
    tables: list[tuple[list[int], Request]] = []
    for step in range(steps):
        now[0] += draw.randint(0, 2)
        if tables and (draw.random() < 0.5 or pool.free_blocks < longest):
            table, owner = tables.pop(draw.randrange(len(tables)))
            if draw.random() < 0.1 and pool.references(table[-1]) == 1:
                pool.uncache(table[-1:])
            pool.release(table, 0, owner)
        else:
            text, length = draw.randint(0, texts), draw.randint(1, longest)
            hashes = [f"{text}.{place}" for place in range(length)]
            hits = pool.find(hashes)
            pool.share(hits)
            fresh = pool.take(length - len(hits))
            pool.cache_full_blocks(fresh, hashes[len(hits) :])
            session = draw.choice(["a", "b", None])
            tables.append(([*hits, *fresh], request(step, draw.randint(0, 2), length, session)))
        references: dict[int, int] = {}
        for table, _ in tables:
            for block in table:
                references[block] = references.get(block, 0) + 1
        pool.check(references)


# -- beside textbooks ----------------------------------------------------------------------------------------------


def lru(keys: Sequence[int], size: int) -> int:
    cache, hits = OrderedDict[int, None](), 0
    for key in keys:
        if key in cache:
            hits += 1
            cache.move_to_end(key)
            continue
        if len(cache) == size:
            cache.popitem(last=False)
        cache[key] = None
    return hits


def fifo(keys: Sequence[int], size: int) -> int:
    cache, hits = OrderedDict[int, None](), 0
    for key in keys:
        hits += key in cache
        if key not in cache:
            if len(cache) == size:
                cache.popitem(last=False)
            cache[key] = None
    return hits


def sieve(keys: Sequence[int], size: int) -> int:
    """Figure 5 of the paper: a list from tail (oldest) to head, a hand, a bit for each object."""
    queue: list[int] = []
    visited: dict[int, bool] = {}
    hand: int | None = None  # an object
    hits = 0
    for key in keys:
        if key in visited:
            hits, visited[key] = hits + 1, True
            continue
        if len(queue) == size:
            place = 0 if hand is None else queue.index(hand)
            while visited[queue[place]]:
                visited[queue[place]] = False
                place = (place + 1) % len(queue)
            hand = queue[place + 1] if place + 1 < len(queue) else None
            del visited[queue.pop(place)]
        queue.append(key)
        visited[key] = False
    return hits


def s3fifo(keys: Sequence[int], size: int, paper: str = "") -> int:
    """Algorithm 1 of the paper as its library has it, where `paper` does not name a step that it has otherwise.

    `fill`: the library fills M where S has its share, until the first key is evicted; the paper fills S.
    `order`: the library asks G before it makes room, the paper after. `room`: where keys of S move to a full M, the
    library looks for a key to evict in S alone, the paper evicts one of M for each. `ghosts`: the library rounds nine
    tenths of the size down, the paper has as many as M.
    """
    small_most = max(1, size // 10)
    most, evicts = size - small_most, False
    ghosts = most if paper == "ghosts" else size * 9 // 10
    small, main, ghost, uses, hits = list[int](), list[int](), list[int](), dict[int, int](), 0

    def evict_main() -> None:
        while uses[main[0]]:
            uses[main[0]] -= 1
            main.append(main.pop(0))
        del uses[main.pop(0)]

    for key in keys:
        if key in uses:
            hits, uses[key] = hits + 1, min(3, uses[key] + 1)
            continue
        known = key in ghost
        if known and paper != "order":
            ghost.remove(key)
        while len(small) + len(main) >= size:
            evicts, left = True, len(main) > most or not small
            if left:
                evict_main()
            while small and not left:
                first = small.pop(0)
                left = uses[first] < 2
                if left:
                    del uses[first]
                    ghost = [*ghost, first][-ghosts:]
                else:
                    uses[first] = 0
                    main.append(first)
                    if paper == "room" and len(main) > most:
                        evict_main()
        if paper == "order":
            known = key in ghost
            ghost = [each for each in ghost if each != key]
        if known or (not evicts and len(small) >= small_most and paper != "fill"):
            main.append(key)
        else:
            small.append(key)
        uses[key] = 0
    return hits


def gdsf(keys: Sequence[int], size: int, *, ages_first: bool = True) -> int:
    """Keys of one size and cost. The age of a new key is that after room was made for it, or that before."""
    known: dict[int, tuple[float, int, int]] = {}  # value, time, uses
    age, hits = 0.0, 0
    for now, key in enumerate(keys):
        hits, before = hits + (key in known), age
        if key not in known and len(known) == size:
            victim = min(known, key=known.__getitem__)
            age = known.pop(victim)[0]
        uses = known[key][2] + 1 if key in known else 1
        known[key] = ((age if ages_first else before) + uses, now, uses)
    return hits


def pool_hits(rule: Eviction, keys: Sequence[int], size: int) -> int:
    """Hits of a block pool with requests of one block, one after the other."""
    pool, hits = BlockPool(size, eviction=new_policy(rule)), 0
    for key in keys:
        found = pool.find([key])
        hits += len(found)
        if found:
            pool.share(found)
        else:
            found = pool.take(1)
            pool.cache_full_blocks(found, [key])
        pool.release(found)
    return hits


def popular(seed: int, count: int) -> list[int]:
    """Keys of which some are asked for often, and a scan now and then."""
    draw = np.random.default_rng(seed)
    keys = (draw.zipf(1.2, count) % 3000).tolist()
    return [100_000 + place if place % 500 < 60 else key for place, key in enumerate(keys)]


TEXTBOOKS: dict[Eviction, Callable[[Sequence[int], int], int]] = {
    Eviction.lru: lru,
    Eviction.fifo: fifo,
    Eviction.sieve: sieve,
    Eviction.s3fifo: s3fifo,
    Eviction.gdsf: gdsf,
}
# Where the library's S3-FIFO is not the paper's: the steps of `s3fifo`, a size, and a trace whose last key shows it.
DEPARTURES = {
    "fill": (20, [*range(23), 2]),
    "room": (20, [*range(20), 0, 0, 20, 2]),
    "ghosts": (25, [*range(48), 0, 99, 98, 0]),
    "order": (25, [*range(47), 0, 99, 98, 0]),
}


@cases("rule", TEXTBOOKS, day=6)
@cases("size", [7, 100, 400], day=2)
def test_single_blocks_are_evicted_as_textbooks_have_it(rule: Eviction, size: int) -> None:
    keys = popular(size, 6000)
    assert pool_hits(rule, keys, size) == TEXTBOOKS[rule](keys, size)


@pytest.mark.parametrize("step", DEPARTURES)
def test_s3_fifo_follows_its_library_where_that_departs_from_the_paper(step: str) -> None:
    size, keys = DEPARTURES[step]
    assert pool_hits(Eviction.s3fifo, keys, size) == s3fifo(keys, size) != s3fifo(keys, size, step)
    assert s3fifo(keys[:-1], size) == s3fifo(keys[:-1], size, step)


def library_hits(rule: Eviction, keys: Sequence[int], size: int) -> int:
    library = pytest.importorskip("libcachesim", reason="libCacheSim is not installed")
    names = {"lru": "LRU", "fifo": "FIFO", "sieve": "Sieve", "s3fifo": "S3FIFO", "lfu": "LFU", "gdsf": "GDSF"}
    cache, hits = getattr(library, names[rule])(size, hashpower=12), 0
    for key in keys:
        asked = library.Request()
        asked.obj_id, asked.obj_size = key, 1
        hits += cache.get(asked)
    return hits


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("rule", [*TEXTBOOKS, Eviction.lfu])
def test_single_blocks_hit_as_often_as_in_libcachesim(rule: Eviction, seed: int) -> None:
    """Sizes from 20 on: of fewer than 20 the library's small queue admits nothing."""
    draw = np.random.default_rng(seed)
    size, universe = int(draw.integers(20, 400)), int(draw.integers(100, 3000))
    keys = (draw.zipf(draw.uniform(1.05, 1.5), 5000) % universe).tolist()
    found = library_hits(rule, keys, size)
    if rule is Eviction.gdsf:  # there a new key has the age of before room was made for it
        assert gdsf(keys, size, ages_first=False) == found
    else:
        assert pool_hits(rule, keys, size) == found


@pytest.mark.nightly
@pytest.mark.parametrize("step", DEPARTURES)
def test_the_library_departs_from_the_paper_as_we_read_it(step: str) -> None:
    size, keys = DEPARTURES[step]
    assert library_hits(Eviction.s3fifo, keys, size) == s3fifo(keys, size) != s3fifo(keys, size, step)


# -- through the policy core ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(Eviction))
@pytest.mark.parametrize("seed", range(tier(1, 10)))
def test_random_sessions_leave_every_counter_right(rule: Eviction, seed: int) -> None:
    draw, steps = random.Random(seed), [0]
    queue = new_policy(rule, ttl_s=5e-9, pinned=2)
    queue.facts.clock = lambda: steps[0]
    manager = PagedManager(24, SIZE, eviction=queue)
    scheduler = Scheduler(manager, SchedulerLimits(32, 4))
    hits = 0
    for rid in range(60):
        session = draw.randint(0, 4) if draw.random() < 0.8 else None
        segments = [(9 if session is None else 1 + session, draw.randint(1, 40)), (None, draw.randint(1, 9))]
        total, identity = sum(tokens for _, tokens in segments), KeyIdentity(rid, segments)
        asked = Request(rid, total, draw.randint(1, 12), identity=identity, priority=draw.randint(0, 2))
        scheduler.submit(replace(asked, session=None if session is None else str(session)))
        for _ in range(draw.randint(0, 6)):
            if scheduler.has_work:
                plan = scheduler.schedule()
                hits += plan.hit_tokens
                scheduler.commit(plan, StepResult())
                manager.check()
                steps[0] += 1
    while scheduler.has_work:
        scheduler.commit(scheduler.schedule(), StepResult())
        manager.check()
    assert hits > 0
    assert manager.pool.live_blocks == 0
