"""Tiers below the pool: beside an LRU of several levels, on random walks, with bugs planted in both."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiers import cases
from tiers import tier as by_tier
from two_levels import TwoLevels

from engine.core import KeyIdentity, PagedManager, Request, Scheduler, SchedulerLimits, StepResult
from engine.core.errors import CoreError, InvariantError
from engine.core.memory.eviction import LruQueue, Released
from engine.core.memory.eviction_rules import new_policy
from engine.core.memory.tiers import HostBlocks, Tier, TierHit, Tiers, TierSpec
from engine.core.options import Eviction, Preemption, TierLoad, TierStore
from engine.core.plan import StepPlan
from traces.reading import read_trace

SIZE = 4
Asked = tuple[list[tuple[int | None, int]], int]  # segments, output tokens


def tiered(
    blocks: int, counts: Sequence[int], size: int = SIZE, rule: Eviction = Eviction.lru, **how: Any
) -> Scheduler:
    policy = new_policy(rule, ttl_s=5e-9, pinned=2)
    names = ("host", "disk")[: len(counts)]
    specs = [TierSpec(name, count, 1e-3, 2e-3, 1e-4) for name, count in zip(names, counts, strict=True)]
    below = Tiers([Tier(spec, new_policy(rule, ttl_s=5e-9, pinned=2)) for spec in specs], policy.facts, **how)
    manager = PagedManager(blocks, size, eviction=policy, tiers=below)
    return Scheduler(manager, SchedulerLimits(1 << 20, 8))


def below(scheduler: Scheduler) -> Tiers:
    assert isinstance(scheduler.manager, PagedManager)
    assert scheduler.manager.tiers is not None
    return scheduler.manager.tiers


def submit(scheduler: Scheduler, rid: int, asked: Asked) -> Request:
    segments, output = asked
    total = sum(tokens for _, tokens in segments)
    request = Request(rid, total, output, identity=KeyIdentity(rid, segments), session=str(segments[0][0]))
    scheduler.submit(request)
    return request


def run(scheduler: Scheduler) -> tuple[int, float]:
    """Blocks that were found, and seconds of loading, until all is done."""
    found, load_s = 0, 0.0
    while scheduler.has_work:
        plan = scheduler.schedule()
        found, load_s = found + plan.hit_tokens, load_s + plan.loads.seconds
        scheduler.commit(plan, StepResult())
    return found // scheduler.manager.block_size, load_s


def chats(draw: random.Random, count: int) -> list[Asked]:
    """Turns of a few conversations that begin alike; some have a tail of their own."""
    turns = [0] * 6
    asked: list[Asked] = []
    for _ in range(count):
        chat = draw.randrange(6)
        turns[chat] = 0 if turns[chat] > 7 or draw.random() < 0.1 else turns[chat] + 1
        segments: list[tuple[int | None, int]] = [(1, 2 * SIZE)]
        segments += [(10 * (chat + 1) + turn, draw.choice([SIZE, 6])) for turn in range(turns[chat])]
        if draw.random() < 0.5:
            segments.append((None, draw.randint(1, 9)))
        asked.append((segments, draw.randint(1, 9)))
    return asked


def compare(
    requests: Sequence[Asked], blocks: int, counts: Sequence[int], size: int, store: TierStore, every: int = 1
) -> list[int]:
    """Hits by level of all requests together, equal for each of them; counters are recounted after `every`."""
    scheduler = tiered(blocks, counts, size, store=store)
    model = TwoLevels(blocks, size, counts, written=store is TierStore.written)
    totals = [0] * (1 + len(counts))
    for rid, asked in enumerate(requests):
        before = list(below(scheduler).counts.hit_blocks)
        request = submit(scheduler, rid, asked)
        found, _ = run(scheduler)
        lower = [now - then for now, then in zip(below(scheduler).counts.hit_blocks, before, strict=True)]
        assert request.identity is not None
        keys = request.identity.prompt_hashes(size)
        expected = model.request(rid, keys, request.prompt_tokens, request.output_tokens)
        assert (found - sum(lower), *lower) == expected, rid
        totals = [one + more for one, more in zip(totals, expected, strict=True)]
        if rid % every == 0:
            scheduler.manager.check()
    assert [each.written for each in below(scheduler).tiers] == [level.written for level in model.levels]
    return totals


@cases("store", list(TierStore), day=4)
@pytest.mark.parametrize("counts", [(34,), (34, 60)])
@pytest.mark.parametrize("seed", range(by_tier(2, 30)))
def test_hits_by_tier_are_those_of_an_lru_of_several_levels(
    store: TierStore, counts: tuple[int, ...], seed: int
) -> None:
    totals = compare(chats(random.Random(seed), 120), 26, counts, SIZE, store)
    assert all(totals)


@pytest.mark.nightly
@pytest.mark.parametrize("store", list(TierStore))
@pytest.mark.parametrize("counts", [(8_000,), (4_000, 40_000)])
def test_recorded_conversations_hit_by_tier_as_in_an_lru_of_several_levels(
    store: TierStore, counts: tuple[int, ...]
) -> None:
    """3,000 of Mooncake's, one after the other, in its blocks of 512 tokens; a pool of a million tokens."""
    path = Path(__file__).parents[5] / "shared/traces/mooncake-fast25/conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"too large for this repository, looked for in {path}")
    rows = read_trace(path).requests[:3_000]
    asked = [(list(row.segments), row.output_tokens) for row in rows]
    totals = compare(asked, 2_000, counts, 512, store, every=100)
    assert all(totals)


def walk(seed: int, store: TierStore, rule: Eviction = Eviction.lru, chunk: int = 1) -> Scheduler:
    """Requests that overlap and preempt one another; every counter is compared with a recount after each step."""
    draw = random.Random(seed)
    scheduler = tiered(22, (8 // chunk + 3, 30 // chunk), rule=rule, store=store, chunk=chunk)
    found = [0, 0]
    for rid, asked in enumerate(chats(draw, 60)):
        submit(scheduler, rid, asked)
        for _ in range(draw.randint(0, 9)):
            if scheduler.has_work:
                plan = scheduler.schedule()
                found[0] += plan.hit_tokens // SIZE
                found[1] += plan.loads.blocks
                assert (plan.loads.seconds > 0) == (plan.loads.blocks > 0)
                scheduler.commit(plan, StepResult())
                scheduler.manager.check()
    more, _ = run(scheduler)
    scheduler.manager.check()
    tiers = below(scheduler)
    read_s = sum(each.read * (1e-4 + chunk * 1e-3) for each in tiers.tiers)
    write_s = sum(each.written * (1e-4 + chunk * 2e-3) for each in tiers.tiers)
    assert tiers.counts.load_s == pytest.approx(read_s)
    assert tiers.counts.write_s == pytest.approx(write_s)
    assert 0 < sum(tiers.counts.hit_blocks) <= found[0] + more
    return scheduler


class Memory:
    """Device and host blocks as lists of tokens, which a plan moves as an engine does, and every row is checked."""

    def __init__(self) -> None:
        self.blocks = dict[tuple[str, int], list[Any]]()
        self.saved = self.brought = 0

    def run(self, plan: StepPlan, texts: Sequence[Asked]) -> None:
        """Copy, then read the context of each row, and write its tokens."""
        self.saved, self.brought = self.saved + len(plan.swap_out), self.brought + len(plan.swap_in)
        self._move(plan.swap_out, "device", "host")
        for block in plan.frees:
            self.blocks.pop(("device", block), None)
        self._move(plan.swap_in, "host", "device")
        for rid, _, held, query, _, table, _ in plan.rows:
            text = [(key, place) for key, tokens in texts[rid][0] for place in range(tokens)]
            text = [(rid, where) if key is None else (key, place) for where, (key, place) in enumerate(text)]
            text += [(rid, where) for where in range(len(text), held + query)]
            for where in range(held + query):
                slots = self.blocks.setdefault(("device", table[where // SIZE]), [None] * SIZE)
                if where < held:
                    assert slots[where % SIZE] == text[where], (plan.step, rid, where)
                slots[where % SIZE] = text[where]

    def _move(self, pairs: Sequence[tuple[int, int]], here: str, there: str) -> None:
        found = {to: list(self.blocks[here, block]) for block, to in pairs}
        assert len(found) == len(pairs), "two blocks are copied to one place"
        self.blocks |= {(there, to): tokens for to, tokens in found.items()}


@cases("store", list(TierStore), day=4)
@cases(("rule", "chunk"), [(Eviction.lru, 1), (Eviction.fifo, 1), (Eviction.lru, 3)], day=2)
@pytest.mark.parametrize("seed", range(by_tier(2, 60)))
def test_copies_bring_every_block_back_with_its_own_tokens(
    store: TierStore, rule: Eviction, chunk: int, seed: int
) -> None:
    copy_and_check(store, rule, 1 if store is TierStore.evicted else chunk, seed)


def copy_and_check(store: TierStore, rule: Eviction, chunk: int, seed: int) -> None:
    draw = random.Random(seed)
    units = (30, 40, 6)[seed % 3]
    texts = chats(draw, 80)
    scheduler = tiered(
        22, (units,), rule=rule, store=store, chunk=chunk, copies=HostBlocks(7, min(22, units))
    )
    memory, tiers = Memory(), below(scheduler)
    for rid, asked in enumerate(texts):
        submit(scheduler, rid, asked)
        for _ in range(draw.randint(0, 9) if rid + 1 < len(texts) else 10_000):
            if scheduler.has_work:
                plan = scheduler.schedule()
                memory.run(plan, texts)
                scheduler.commit(plan, StepResult())
                scheduler.manager.check()
    assert memory.brought == sum(tiers.counts.hit_blocks)
    assert memory.brought or units == 6
    host = [number for kind, number in memory.blocks if kind == "host"]
    assert 7 <= min(host) <= max(host) < 7 + tiers.host_blocks
    assert memory.saved <= tiers.tiers[0].written * chunk


@cases("store", list(TierStore), day=8)
@pytest.mark.parametrize("rule", list(Eviction))
@pytest.mark.parametrize("seed", range(by_tier(1, 20)))
def test_random_walks_leave_every_counter_right(store: TierStore, rule: Eviction, seed: int) -> None:
    walk(seed, store, rule)


def test_chunks_are_found_and_read_as_a_whole() -> None:
    scheduler = tiered(8, (10,), chunk=3)
    submit(scheduler, 0, ([(1, 7 * SIZE)], 1))  # two chunks of three blocks, and one block more
    run(scheduler)
    submit(scheduler, 1, ([(None, 8 * SIZE)], 1))  # takes the whole pool
    run(scheduler)
    submit(scheduler, 2, ([(1, 6 * SIZE)], 1))  # its last block is computed
    found, load_s = run(scheduler)
    assert (found, below(scheduler).tiers[0].read) == (5, 2)
    assert load_s == pytest.approx(2 * (1e-4 + 3e-3))
    walk(3, TierStore.written, chunk=2)


@pytest.mark.parametrize("store", list(TierStore))
def test_a_prompt_that_was_swapped_is_written_to_a_tier_once_also_without_a_key(store: TierStore) -> None:
    written = []
    for key in (7, None):
        policy = new_policy(Eviction.lru)
        host = Tiers([Tier(TierSpec("host", 100), LruQueue())], policy.facts, store=store)
        manager = PagedManager(9, SIZE, eviction=policy, tiers=host, host_blocks=20)
        scheduler = Scheduler(manager, SchedulerLimits(8, 8, preemption=Preemption.swap))
        for rid in range(4):
            submit(scheduler, rid, ([(key and key + rid, 12)], 16))
        swapped = 0
        while scheduler.has_work:
            plan = scheduler.schedule()
            swapped += len(plan.preempted)
            scheduler.commit(plan, StepResult())
        assert swapped
        written.append(host.tiers[0].written)
    assert written[0] == written[1]


@pytest.mark.parametrize(("token_s", "loaded"), [(1e-3, 6), (1e-5, 0)])
def test_blocks_that_are_quicker_computed_are_not_loaded(token_s: float, loaded: int) -> None:
    scheduler = tiered(7, (20,), load=TierLoad.cheaper)
    below(scheduler).facts.token_s = token_s
    for rid, key in enumerate((1, 2, 1)):
        submit(scheduler, rid, ([(key, 7 * SIZE)], 1))
        found, _ = run(scheduler)
    assert found == below(scheduler).counts.hit_blocks[0] == loaded


def test_chunks_beside_evicted_blocks_are_refused() -> None:
    with pytest.raises(CoreError, match="chunks of 2 blocks"):
        tiered(8, (4,), chunk=2, store=TierStore.evicted)


class Told(LruQueue):
    """Notes whose blocks it is told to keep, and where they stood."""

    def __init__(self) -> None:
        super().__init__()
        self.told = list[tuple[Any, int, Request | None]]()

    def push(self, blocks: Sequence[int], table: Released) -> None:
        keys = map(self.facts.hash_of, blocks)
        self.told += zip(keys, table.places(blocks), [table.request] * len(blocks), strict=True)
        super().push(blocks, table)


@pytest.mark.parametrize(
    ("store", "chunk"), [(TierStore.written, 1), (TierStore.written, 2), (TierStore.evicted, 1)]
)
def test_a_rule_of_a_tier_is_told_whose_a_unit_was_and_where_it_stood(store: TierStore, chunk: int) -> None:
    """When blocks are evicted, and when they come down from the tier above, too."""
    draw, texts, rules = random.Random(5), dict[Any, tuple[int, set[int]]](), [Told(), Told()]
    specs = [TierSpec("host", 9), TierSpec("disk", 30)]
    policy = LruQueue()
    tiers = Tiers([*map(Tier, specs, rules)], policy.facts, store=store, chunk=chunk)
    scheduler = Scheduler(PagedManager(26, SIZE, eviction=policy, tiers=tiers), SchedulerLimits(1 << 20, 8))
    for rid, asked in enumerate(chats(draw, 80)):
        request = submit(scheduler, rid, asked)
        assert request.identity is not None
        for block, key in enumerate(request.identity.prompt_hashes(SIZE)):
            texts.setdefault(key, (block // chunk, set()))[1].add(rid)
        run(scheduler)
    for rule in rules:
        known = [(key, place, owner) for key, place, owner in rule.told if key in texts]
        assert len(known) > 100
        assert all(place == texts[key][0] for key, place, _ in known)
        assert all(owner is not None and owner.request_id in texts[key][1] for key, _, owner in known)


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (Tier, "hold", lambda tier, slots: None),
        (HostBlocks, "save", lambda copies, slot, blocks: None),
        (HostBlocks, "bring", lambda copies, hosts, blocks: None),
    ],
)
def test_a_copy_that_is_left_out_or_overwritten_is_noticed(
    owner: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, KeyError)):
        copy_and_check(TierStore.evicted, Eviction.fifo, 1, 2)


# -- planted bugs --------------------------------------------------------------------------------------------------


def lose_what_is_written(real: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return lambda tier, units: real(tier, units[:-1])


def keep_what_is_evicted(real: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def evict(tier: Tier, count: int) -> list[Any]:
        before = dict(tier.slots)
        lost = real(tier, count)
        tier.slots.update({unit.key: before[unit.key] for unit in lost[:1]})
        return lost

    return evict


def never_evict(real: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return lambda tier, count: []


def uncounted(real: Callable[..., int]) -> Callable[..., int]:
    def enter(tier: Tier, unit: Any) -> int:
        slot = real(tier, unit)
        tier.written -= 1
        return slot

    return enter


def nothing_touched(tier: Tier, units: Any) -> None:
    """What is read is not of use again."""


def head_first(
    queue: LruQueue, blocks: Sequence[int], table: Released | None = None, push: Any = LruQueue.push
) -> None:
    push(queue, blocks[::-1], table)


def found_one_more(real: Callable[..., TierHit]) -> Callable[..., TierHit]:
    def find(tiers: Tiers, hashes: Any, hits: list[int], asked: int) -> TierHit:
        hit = real(tiers, hashes, hits, asked)
        if hit.parts and len(hit) < min(asked, len(hashes)):
            last = hit.parts[-1]
            return TierHit(hits, [*hit.parts[:-1], last._replace(blocks=last.blocks + 1)], hit.keys)
        return hit

    return find


def disk_first(real: Callable[..., TierHit]) -> Callable[..., TierHit]:
    def find(tiers: Tiers, hashes: Any, hits: list[int], asked: int) -> TierHit:
        hit = real(tiers, hashes, hits, asked)
        last = len(tiers.tiers) - 1
        return TierHit(hits, [part._replace(tier=last) for part in hit.parts], hit.keys)

    return find


def read_for_nothing(real: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def load(tiers: Tiers, hit: TierHit, request: Request, take: Callable[[], list[int]]) -> list[int]:
        blocks = real(tiers, hit, request, take)
        for part in hit.parts:
            tiers.tiers[part.tier].read -= len(part.keys)
        return blocks

    return load


def time_forgotten(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tiers: real(tiers)._replace(seconds=0.0)


def spill_nothing(tiers: Tiers, units: Any, blocks: Any) -> None:
    """What the pool evicts is lost."""


def disk_gets_nothing(tiers: Tiers, units: Any, blocks: Any) -> None:
    tiers.tiers[0].store(units)


def not_found_again(real: Callable[..., None]) -> Callable[..., None]:
    def opened(manager: PagedManager, group: Any, root: Any, hit: TierHit) -> None:
        real(manager, group, root, hit)
        manager.pool.uncache(root.table[len(hit.pool) :])

    return opened


def unwritten(real: Callable[..., None]) -> Callable[..., None]:
    def opened(manager: PagedManager, group: Any, root: Any, hit: TierHit) -> None:
        real(manager, group, root, hit)
        manager.tables.counters.written -= hit.loaded * manager.block_size

    return opened


def one_key_for_a_tier(real: Callable[..., None]) -> Callable[..., None]:
    def write(tiers: Tiers, units: Sequence[Any], blocks: Any) -> None:
        real(tiers, [units[0]._replace(place=each.place) for each in units], blocks)

    return write


BUGS: dict[str, tuple[Any, str, Any]] = {
    "the last block of a table is not stored": (Tier, "store", lose_what_is_written(Tier.store)),
    "an evicted unit is still found": (Tier, "_evict", keep_what_is_evicted(Tier._evict)),
    "a tier holds more than its size": (Tier, "_evict", never_evict(Tier._evict)),
    "a written unit is not counted": (Tier, "_enter", uncounted(Tier._enter)),
    "what is read is evicted as if it were not": (Tier, "touch", nothing_touched),
    "the head of a table is evicted first": (LruQueue, "push", head_first),
    "a hit goes one block too far": (Tiers, "find", found_one_more(Tiers.find)),
    "the slowest tier is read": (Tiers, "find", disk_first(Tiers.find)),
    "a hit reads no bytes": (Tiers, "load", read_for_nothing(Tiers.load)),
    "reading takes no time": (Tiers, "drain_loads", time_forgotten(Tiers.drain_loads)),
    "what the pool evicts is lost": (Tiers, "spilled", spill_nothing),
    "the disk gets nothing": (Tiers, "_write", disk_gets_nothing),
    "what is loaded leaves the cache": (
        PagedManager,
        "_open_loaded",
        not_found_again(PagedManager._open_loaded),
    ),
    "loaded slots are not counted": (PagedManager, "_open_loaded", unwritten(PagedManager._open_loaded)),
    "units are stored under another's key": (Tiers, "_write", one_key_for_a_tier(Tiers._write)),
}


def look_everywhere() -> None:
    for store in TierStore:
        compare(chats(random.Random(1), 60), 26, (20, 60), SIZE, store)
        walk(1, store)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = BUGS[bug]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, InvariantError, CoreError, KeyError, IndexError)):
        look_everywhere()
