"""Belady's optimum: equal to brute force on small traces, and beaten by no eviction order of the policy core."""

import random
from itertools import combinations

import pytest
from tiers import cases

from engine.core import KeyIdentity, PagedManager, Request, Scheduler, SchedulerLimits, StepResult
from engine.core.memory.eviction import LruQueue
from traces.analysis.reuse import optimal_hit_tokens, optimal_hits, optimal_hits_of_run, reuse_profile
from traces.trace import Segment, Trace, TraceHeader, TraceRequest


def make_trace(prompts: list[list[tuple[int | None, int]]]) -> Trace:
    rows = [
        TraceRequest(
            number, number, sum(tokens for _, tokens in parts), 2, [Segment(*part) for part in parts]
        )
        for number, parts in enumerate(prompts)
    ]
    return Trace(
        TraceHeader("made", "made", "test", "content", None, 1, "00", len(rows), len(rows)), tuple(rows)
    )


def random_trace(draw: random.Random, count: int) -> Trace:
    """Prompts that begin with one of a few texts, continue with one of a few others, and end on their own."""
    prompts = []
    for _ in range(count):
        parts: list[tuple[int | None, int]] = [(draw.randint(1, 3), 12)]
        if draw.random() < 0.6:
            parts.append((draw.randint(4, 6), 8))
        if draw.random() < 0.5:
            parts.append((None, draw.randint(1, 6)))
        prompts.append(parts)
    return make_trace(prompts)


class Random(LruQueue):
    """Evicts any block."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._draw = draw

    def pop(self, count: int) -> list[int]:
        known = self.blocks()
        chosen = self._draw.sample(known, count)
        self.reuse(chosen, chosen)
        return chosen


class MostRecent(LruQueue):
    """Evicts what was released last."""

    def pop(self, count: int) -> list[int]:
        chosen = self.blocks()[::-1][:count]
        self.reuse(chosen, chosen)
        return chosen


def engine_hits(trace: Trace, blocks: int, size: int, eviction: LruQueue, running: int) -> int:
    """Hits of the policy core, whose requests come one after the other and overlap."""
    scheduler = Scheduler(PagedManager(blocks, size, eviction=eviction), SchedulerLimits(64, running))
    hits, left = 0, list(trace.requests)
    while left or scheduler.has_work:
        if left:
            row = left.pop(0)
            identity = KeyIdentity(row.request_id, row.segments)
            request = Request(row.request_id, row.prompt_tokens, row.output_tokens, identity=identity)
            if scheduler.never_fits(request) is None:
                scheduler.submit(request)
        if scheduler.has_work:
            report = scheduler.commit(scheduler.schedule(), StepResult())
            hits += sum(stats.hit_tokens for stats in report.stats.values())
    return hits


def brute_force(prompts: list[list[tuple[int, int]]], lookups: list[int], capacity: int) -> int:
    """The most intervals between a block and its next lookup of which no more than `capacity` overlap."""
    spans = []
    for later, (blocks, looked_up) in enumerate(zip(prompts, lookups, strict=True)):
        for block in blocks[:looked_up]:
            earlier = [index for index in range(later) if block in prompts[index]]
            if earlier:
                spans.append((earlier[-1], later))
    for count in range(len(spans), 0, -1):
        for chosen in combinations(spans, count):
            if all(
                sum(first <= step < last for first, last in chosen) <= capacity
                for step in range(len(prompts))
            ):
                return count
    return 0


@pytest.mark.parametrize("seed", range(30))
def test_it_equals_brute_force_on_small_traces(seed: int) -> None:
    draw = random.Random(seed)
    prompts, lookups = [], []
    for _ in range(draw.randint(3, 6)):
        text = draw.randint(1, 3)
        blocks = [(text, number) for number in range(draw.randint(1, 3))]
        prompts.append(blocks)
        lookups.append(len(blocks) - draw.randint(0, 1))
    for capacity in range(1, 6):
        assert optimal_hits(prompts, lookups, capacity) == brute_force(prompts, lookups, capacity)


@cases("seed", range(12), day=2)
def test_no_eviction_order_beats_it(seed: int) -> None:
    draw = random.Random(seed)
    trace = random_trace(draw, 60)
    for blocks in (10, 14, 20):
        best = optimal_hit_tokens(trace, 4, blocks)
        for eviction in (LruQueue(), MostRecent(), Random(draw)):
            assert engine_hits(trace, blocks, 4, eviction, draw.choice((1, 3))) <= best


@pytest.mark.nightly
def test_a_bound_that_is_too_low_would_be_beaten() -> None:
    """One block less than the engine has: least recently used finds more on some trace, so the bound is tight."""
    beaten = 0
    for seed in range(40):
        trace = random_trace(random.Random(seed), 60)
        beaten += engine_hits(trace, 40, 4, LruQueue(), 1) > optimal_hit_tokens(trace, 4, 5)
    assert beaten


def test_an_unlimited_cache_finds_what_the_profile_finds() -> None:
    trace = random_trace(random.Random(5), 80)
    profile = reuse_profile(trace, 4, spare_last_token=True)
    assert optimal_hit_tokens(trace, 4, 10**6) == profile.hit_tokens(float("inf"))


def test_it_is_never_below_least_recently_used() -> None:
    trace = random_trace(random.Random(6), 80)
    profile = reuse_profile(trace, 4, spare_last_token=True)
    sizes = (1, 2, 4, 8, 12, 16, 24)
    assert all(optimal_hit_tokens(trace, 4, size) >= profile.hit_tokens(size) for size in sizes)
    assert any(optimal_hit_tokens(trace, 4, size) > profile.hit_tokens(size) for size in sizes)


def test_a_larger_cache_never_finds_less() -> None:
    trace = random_trace(random.Random(7), 80)
    found = [optimal_hit_tokens(trace, 4, size) for size in range(30)]
    assert found == sorted(found)
    assert found[0] == 0


def brute_force_of_run(
    asked: list[list[int]], held: list[list[int]], events: list[tuple[bool, int]], capacity: int
) -> int:
    """The best over every choice of what to keep whenever a request ends."""

    def best(place: int, kept: frozenset[int], running: tuple[int, ...]) -> int:
        if place == len(events):
            return 0
        enters, index = events[place]
        in_use = {block for each in running for block in held[each]}
        if enters:
            hits = sum(block in kept or block in in_use for block in asked[index])
            return hits + best(place + 1, kept - set(held[index]), (*running, index))
        left = tuple(each for each in running if each != index)
        freed = kept | (set(held[index]) - {block for each in left for block in held[each]})
        return max(
            best(place + 1, frozenset(some), left)
            for count in range(min(capacity, len(freed)) + 1)
            for some in combinations(sorted(freed), count)
        )

    return best(0, frozenset(), ())


@pytest.mark.parametrize("seed", range(25))
def test_the_optimum_of_a_run_equals_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    held = [draw.sample(range(5), draw.randint(1, 3)) for _ in range(6)]
    asked = [blocks[: draw.randint(0, len(blocks))] for blocks in held]
    events, running, waiting = [], [], list(range(6))
    while waiting or running:
        enters = bool(waiting) and (not running or draw.random() < 0.5)
        index = waiting.pop(0) if enters else running.pop(draw.randrange(len(running)))
        if enters:
            running.append(index)
        events.append((enters, index))
    capacity = draw.randint(0, 3)
    assert optimal_hits_of_run(asked, held, events, capacity) == brute_force_of_run(
        asked, held, events, capacity
    )
