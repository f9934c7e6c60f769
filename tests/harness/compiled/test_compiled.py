"""The compiled replay says to the bit what the policy core says."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_cases import play
from tiers import tier

from engine.core.identity import KeyIdentity
from engine.core.memory.eviction import EvictionQueue, KeepQueue, TurnOf
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, Keep, Preemption, Retention, SchedulerLimits, Scheduling
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from harness.compiled import pool as compiled_pool
from harness.compiled.names import BlockNames
from harness.compiled.pricing import prices_of
from harness.compiled.replay import (
    Branches,
    CompiledReplay,
    Keeping,
    PlainPool,
    PlainRequests,
    Waiting,
    advance,
)
from harness.compiled.replicas import run_replicas
from harness.cost.fitted import FittedCost
from harness.cost.model_shape import Experts, LatentKV, ModelShape
from harness.cost.roofline import DeviceShape, RooflineCost
from harness.metrics.log import RunLog
from harness.replay.arrivals import (
    Arrivals,
    ClosedLoop,
    OpenLoop,
    Sessions,
    TimedRequest,
    TimeSpanError,
    Turn,
)
from harness.replay.beams import BeamGenealogy
from harness.replay.cost_model import CostModel, CostSource, PacedCost
from harness.replay.executors import SimulatedExecutor
from harness.replay.features import ATTENTION_FEATURES, FEATURES
from harness.replay.folds import KeptLog, RunFold
from harness.replay.loop import Replay
from harness.replay.recorder import Recorder
from harness.replay.replicas import Balancer, run_together

SHAPE = ModelShape(
    layers=4, hidden=256, heads=8, kv_heads=2, head_dim=32, intermediate=688, vocab=2048, bytes_per_element=2
)
DEVICE = DeviceShape("d", bandwidth=2e11, flops=4e12, step_overhead_s=3e-4, layer_overhead_s=2e-5)


def fitted() -> FittedCost:
    draw = np.random.default_rng(5)
    attention = draw.uniform(0, 1e-6, len(ATTENTION_FEATURES))
    rest = draw.uniform(0, 1e-6, len(FEATURES) - len(ATTENTION_FEATURES))
    rest[::3] = 0
    return FittedCost(attention, rest, CostSource("fitted", "d", "f"))


COSTS: dict[str, CostModel] = {
    "roofline": RooflineCost(SHAPE, DEVICE),
    "parallel": RooflineCost(SHAPE, replace(DEVICE, parallel=4)),
    "expected": RooflineCost(
        SHAPE,
        replace(
            DEVICE,
            attention_overhead_s=1e-5,
            row_overhead_s=2e-7,
            bandwidth_efficiency=0.85,
            kv_efficiency=0.95,
            compute_efficiency=0.65,
            attention_efficiency=0.5,
            overlaps=True,
        ),
    ),
    "experts": RooflineCost(replace(SHAPE, experts=Experts(16, 2, 96, shared=32, dense_layers=1)), DEVICE),
    "block size": RooflineCost(SHAPE, replace(DEVICE, block_size_factor=1.07)),
    "latent": RooflineCost(replace(SHAPE, latent=LatentKV(64, 16, 32)), DEVICE),
    "fitted": fitted(),
    "paced": PacedCost(fitted(), 1.37),
}


@st.composite
def workloads(draw: st.DrawFn) -> PlainRequests:
    lengths = st.tuples(st.integers(0, 30_000_000), st.integers(1, 90), st.integers(1, 40))
    rows = draw(st.lists(lengths, min_size=1, max_size=25))
    gaps, prompt, output = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return PlainRequests(np.arange(len(rows)) * 3 + 7, np.cumsum(gaps), prompt, output)


@dataclass(frozen=True)
class Sharing:
    """Requests with the segments of their prompts and their tenants."""

    requests: PlainRequests
    segments: list[list[tuple[int | None, int]]]
    salts: list[str]

    def named(self, block_size: int) -> PlainRequests:
        names = BlockNames.of(zip(self.segments, self.salts, strict=True), block_size)
        return replace(self.requests, names=names)


@st.composite
def sharing(draw: st.DrawFn) -> Sharing:
    """Prompts of keyed segments, of which a few texts are shared, and unique ends."""
    keyed = st.tuples(st.sampled_from([1, 2, 3]), st.integers(1, 45))
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 30_000_000),
                st.lists(keyed, max_size=3),
                st.integers(0, 30),
                st.integers(1, 40),
                st.sampled_from(["", "", "t"]),
            ),
            min_size=1,
            max_size=25,
        )
    )
    segments: list[list[tuple[int | None, int]]] = [
        [*texts, (None, own)] if own or not texts else [*texts] for _, texts, own, _, _ in rows
    ]
    segments = [[(key, max(1, tokens)) for key, tokens in prompt] for prompt in segments]
    prompt = np.array([sum(tokens for _, tokens in prompt) for prompt in segments], dtype=np.int64)
    gaps, output = (np.array([row[place] for row in rows], dtype=np.int64) for place in (0, 3))
    requests = PlainRequests(np.arange(len(rows)) * 3 + 7, np.cumsum(gaps), prompt, output)
    return Sharing(requests, segments, [row[4] for row in rows])


GENEALOGY = BeamGenealogy({2: 0.3, 4: 0.45}, evenness={2: 1.5, 3: 0.2})


@st.composite
def branching(draw: st.DrawFn) -> Sharing:
    """The requests of `sharing`, some of them with several samples or beams."""
    shared = draw(sharing())
    count = len(shared.salts)
    beams, samples = [(width, 1, 0) for width in (1, 2, 3, 5)], [(width, 0, 1) for width in (1, 2, 3, 4)]
    kinds = st.sampled_from([(1, 0, 0), (1, 0, 0), *beams, *samples])
    width, beam, drawn = (
        np.array(column, dtype=np.int64)
        for column in zip(*draw(st.lists(kinds, min_size=count, max_size=count)), strict=True)
    )
    requests = replace(shared.requests, branches=Branches(width, beam, drawn, GENEALOGY))
    return replace(shared, requests=requests)


@st.composite
def waiting(draw: st.DrawFn, count: int) -> Waiting | None:
    """Given times, users who wait, or turns of conversations."""
    kind = draw(st.sampled_from(["given", "users", "turns"]))
    pauses = st.lists(st.sampled_from([0, 0, 1, 200_000, 5_000_000]), min_size=count, max_size=count)
    if kind == "given":
        return None
    pause_ns = np.array(draw(pauses), dtype=np.int64)
    if kind == "users":
        return Waiting(pause_ns, users=draw(st.integers(1, 8)))
    after = [draw(st.sets(st.integers(0, turn - 1), max_size=2)) if turn else set() for turn in range(count)]
    return Waiting(pause_ns, after=after)


LIMITS = st.builds(
    SchedulerLimits,
    max_batched_tokens=st.integers(4, 64),
    max_running=st.integers(1, 12),
    max_model_len=st.one_of(st.none(), st.integers(20, 100)),
    chunked_prefill=st.just(True),
    watermark=st.sampled_from([0.0, 0.1]),
    long_prefill_tokens=st.one_of(st.none(), st.integers(1, 20)),
    admit_whole_prompt=st.booleans(),
) | st.builds(
    SchedulerLimits,
    max_batched_tokens=st.integers(20, 150),
    max_running=st.integers(1, 12),
    chunked_prefill=st.just(False),
)
POOLS = st.builds(
    PlainPool,
    num_blocks=st.integers(5, 200),
    block_size=st.sampled_from([1, 3, 8, 16]),
    keeps=st.booleans(),
)


def core_requests(requests: PlainRequests, shared: Sharing | None = None) -> list[TimedRequest]:
    columns = [requests.request_id, requests.arrival_ns, requests.prompt_tokens, requests.output_tokens]
    columns.append(0 * requests.request_id if requests.priority is None else requests.priority)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    segments = [[(None, row[2])] for row in rows] if shared is None else shared.segments
    salts = [""] * len(rows) if shared is None else shared.salts
    return [
        TimedRequest(Request(i, p, o, *decoding, identity=KeyIdentity(i, s, salt), priority=priority), at)
        for (i, at, p, o, priority), s, salt, decoding in zip(
            rows, segments, salts, decodings_of(requests), strict=True
        )
    ]


def decodings_of(requests: PlainRequests) -> list[tuple[int, Decoding]]:
    branches = requests.branches
    if branches is None:
        return [(1, Decoding.greedy)] * len(requests.request_id)
    kinds = zip(branches.width.tolist(), branches.beam.tolist(), branches.drawn.tolist(), strict=True)
    return [
        (width, Decoding.beam if beam else Decoding.sample if drawn else Decoding.greedy)
        for width, beam, drawn in kinds
    ]


def arrivals_of(requests: PlainRequests, timed: list[TimedRequest]) -> Arrivals:
    waits, count = requests.waiting, len(timed)
    if waits is None:
        return OpenLoop(timed, count)
    pauses = waits.pause_ns.tolist()
    if waits.after is None:
        return ClosedLoop((each.request for each in timed), count, waits.users, pauses)
    ids = requests.request_id.tolist()
    parents = [tuple(ids[place] for place in places) for places in waits.after]
    return Sessions([Turn(*turn) for turn in zip(timed, parents, pauses, strict=True)])


def core_parts(limits: SchedulerLimits, pool: PlainPool, eviction: EvictionQueue | None = None) -> Scheduler:
    retention = Retention.lru if pool.keeps else Retention.none
    manager = PagedManager(
        pool.num_blocks, pool.block_size, retention=retention, host_blocks=pool.host_blocks, eviction=eviction
    )
    return Scheduler(manager, limits)


def core_log(
    requests: PlainRequests,
    limits: SchedulerLimits,
    pool: PlainPool,
    cost: CostModel,
    shared: Sharing | None = None,
    *,
    asynchronous: bool = False,
) -> RunLog:
    live: dict[int, Request] = {}
    executor = SimulatedExecutor(cost, live, pool.block_size, GENEALOGY)
    arrivals = arrivals_of(requests, core_requests(requests, shared))
    return play(arrivals, core_parts(limits, pool), executor, live=live, asynchronous=asynchronous)


def new_fold(pool: PlainPool) -> KeptLog:
    return KeptLog(pool.block_size, pool.num_blocks * pool.block_size, 1)


def log_of(replay: CompiledReplay, pool: PlainPool) -> RunLog:
    fold = new_fold(pool)
    replay.run(fold)
    return fold.log()


def compiled_replay(
    requests: PlainRequests,
    limits: SchedulerLimits,
    pool: PlainPool,
    cost: CostModel,
    log_steps: int = 64,
    **options: Any,
) -> CompiledReplay:
    prices = prices_of(cost)
    assert prices is not None
    return CompiledReplay(requests, limits, pool, prices, log_steps=log_steps, **options)


def assert_same(one: RunLog, other: RunLog) -> None:
    assert list(one.steps) == list(other.steps)
    assert list(one.requests) == list(other.requests)
    for name, column in one.steps.items():
        np.testing.assert_array_equal(column, other.steps[name], err_msg=name)
        assert column.dtype == other.steps[name].dtype, name
    for name, column in one.requests.items():
        np.testing.assert_array_equal(column, other.requests[name], err_msg=name)
    np.testing.assert_array_equal(one.itl_s, other.itl_s)
    np.testing.assert_array_equal(one.itl_weight, other.itl_weight)
    assert one.span_s == other.span_s


@settings(max_examples=tier(20, 400))
@given(workloads(), LIMITS, POOLS, st.sampled_from(sorted(COSTS)))
def test_every_step_request_and_gap_is_the_core_s(
    requests: PlainRequests, limits: SchedulerLimits, pool: PlainPool, cost: str
) -> None:
    assert_same(
        log_of(compiled_replay(requests, limits, pool, COSTS[cost]), pool),
        core_log(requests, limits, pool, COSTS[cost]),
    )


@settings(max_examples=tier(20, 400))
@given(sharing(), LIMITS, POOLS, st.sampled_from(["expected", "fitted"]))
def test_shared_prefixes_are_replayed_as_the_core_does(
    shared: Sharing, limits: SchedulerLimits, pool: PlainPool, cost: str
) -> None:
    requests = shared.named(pool.block_size)
    assert_same(
        log_of(compiled_replay(requests, limits, pool, COSTS[cost]), pool),
        core_log(requests, limits, pool, COSTS[cost], shared),
    )


@settings(max_examples=tier(20, 400))
@given(st.data(), sharing(), LIMITS, POOLS, st.booleans())
def test_waiting_priorities_swapping_and_steps_scheduled_ahead_are_replayed_as_the_core_does(
    data: st.DataObject, shared: Sharing, limits: SchedulerLimits, pool: PlainPool, asynchronous: bool
) -> None:
    count = len(shared.salts)
    priority = np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    pool = replace(pool, host_blocks=data.draw(st.sampled_from([0, 3, 12, 100])))
    preemption = data.draw(st.sampled_from(Preemption))
    limits = replace(limits, policy=data.draw(st.sampled_from(Scheduling)), preemption=preemption)
    requests = replace(shared.named(pool.block_size), waiting=data.draw(waiting(count)), priority=priority)
    found = compiled_replay(requests, limits, pool, COSTS["expected"], asynchronous=asynchronous)
    expected = core_log(requests, limits, pool, COSTS["expected"], shared, asynchronous=asynchronous)
    assert_same(log_of(found, pool), expected)


@settings(max_examples=tier(20, 400))
@given(st.data(), sharing(), LIMITS, POOLS, st.sampled_from([Keep.ttl, Keep.pin, Keep.priority]))
def test_cached_blocks_are_kept_by_the_rules_of_the_core(
    data: st.DataObject, shared: Sharing, limits: SchedulerLimits, pool: PlainPool, rule: Keep
) -> None:
    count = len(shared.salts)
    priority = np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    limits = replace(limits, policy=data.draw(st.sampled_from(Scheduling)))
    seconds, pinned = data.draw(st.sampled_from([0.0, 0.002, 0.1])), data.draw(st.integers(0, 6))
    requests = replace(shared.named(pool.block_size), priority=priority)
    ids, env, live = requests.request_id.tolist(), simpy.Environment(initial_time=0), dict[int, Request]()
    turns = {request_id: TurnOf("s", 1) for request_id, level in zip(ids, priority, strict=True) if level > 1}
    queue = KeepQueue(rule, turns, seconds=seconds, pinned=pinned, clock=lambda: int(env.now))
    rank = np.unique(-priority, return_inverse=True)[1] if rule is Keep.priority else priority > 1
    keeping = Keeping(rule, rank.astype(np.int64), seconds, pinned)
    fast = rule is not Keep.ttl
    executor = SimulatedExecutor(COSTS["expected"], live, pool.block_size, GENEALOGY, fast_forward=fast)
    scheduler, timed = core_parts(limits, pool, queue), core_requests(requests, shared)
    expected = play(timed, scheduler, executor, live=live, env=env)
    found = compiled_replay(requests, limits, replace(pool, keeping=keeping), COSTS["expected"])
    assert_same(log_of(found, pool), expected)


@settings(max_examples=tier(20, 400))
@given(sharing(), LIMITS, POOLS, st.booleans(), st.integers(2, 4), st.sampled_from([1, 20, 400]))
def test_replicas_get_the_requests_that_they_get_of_the_core(
    shared: Sharing, limits: SchedulerLimits, pool: PlainPool, asynchronous: bool, replicas: int, apart: int
) -> None:
    named = shared.named(pool.block_size)
    requests = replace(named, arrival_ns=named.arrival_ns * apart)
    cost, env = COSTS["expected"], simpy.Environment(initial_time=0)
    schedulers, timed = [core_parts(limits, pool) for _ in range(replicas)], core_requests(requests, shared)
    core, recorders, replays = [new_fold(pool) for _ in schedulers], [], []
    lanes = Balancer(OpenLoop(timed, len(timed)), schedulers).lanes
    for lane, scheduler, fold in zip(lanes, schedulers, core, strict=True):
        live: dict[int, Request] = {}
        recorders.append(Recorder(fold))
        executor = SimulatedExecutor(cost, live, pool.block_size, GENEALOGY)
        options = {"live": live, "asynchronous": asynchronous, "env": env}
        replays.append(Replay(lane, scheduler, executor, recorders[-1], **options))
    run_together(replays, env)
    compiled = [new_fold(pool) for _ in schedulers]
    made = [compiled_replay(requests, limits, pool, cost, asynchronous=asynchronous) for _ in schedulers]
    run_replicas(made, compiled)
    for recorder, fold, expected in zip(recorders, compiled, core, strict=True):
        recorder.close()
        assert_same(fold.log(), expected.log())


@settings(max_examples=tier(30, 600))
@given(
    branching(), LIMITS, POOLS, st.sampled_from(["expected", "fitted", "roofline"]), st.sampled_from([1, 4])
)
def test_samples_and_beams_are_replayed_and_preempted_as_the_core_does(
    shared: Sharing, limits: SchedulerLimits, pool: PlainPool, cost: str, room: int
) -> None:
    pool, requests = replace(pool, num_blocks=pool.num_blocks * room), shared.named(pool.block_size)
    assert_same(
        log_of(compiled_replay(requests, limits, pool, COSTS[cost]), pool),
        core_log(requests, limits, pool, COSTS[cost], shared),
    )


@given(sharing(), st.sampled_from([1, 3, 8, 16]))
def test_names_are_equal_exactly_where_the_hashes_are(shared: Sharing, block_size: int) -> None:
    names = shared.named(block_size).names
    assert names is not None
    hashes = [
        block_hash
        for segments, salt in zip(shared.segments, shared.salts, strict=True)
        for block_hash in KeyIdentity(0, segments, salt).prompt_hashes(block_size)
    ]
    pairs = set(zip(hashes, names.names.tolist(), strict=True))
    assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs})


@pytest.mark.parametrize("keeps", [False, True])
def test_preempted_requests_come_back_as_the_core_says(keeps: bool) -> None:
    requests, limits = many(400), SchedulerLimits(256, 32)
    pool = PlainPool(60, 8, keeps=keeps)
    expected = core_log(requests, limits, pool, COSTS["roofline"])
    assert expected.requests["preemptions"].sum() > 30
    assert (expected.requests["resumed_hit_tokens"].sum() > 100) == keeps
    assert_same(log_of(compiled_replay(requests, limits, pool, COSTS["roofline"]), pool), expected)


def many(count: int) -> PlainRequests:
    draw = np.random.default_rng(3)
    return PlainRequests(
        np.arange(count),
        np.cumsum(draw.integers(0, 3_000_000, count)),
        draw.integers(1, 200, count),
        draw.integers(1, 30, count),
    )


def test_folded_totals_metrics_and_outcomes_are_those_of_the_streamed_core() -> None:
    requests, limits, pool = many(5_000), SchedulerLimits(256, 32), PlainPool(2_000, 16, keeps=True)
    live: dict[int, Request] = {}
    core = RunFold({"rows": (2.0, 9.0)})
    recorder = Recorder(core)
    scheduler, timed = core_parts(limits, pool), core_requests(requests)
    executor = SimulatedExecutor(COSTS["roofline"], live, pool.block_size, BeamGenealogy({}))
    Replay(timed, scheduler, executor, recorder, live=live).run()
    recorder.close()
    fold = RunFold({"rows": (2.0, 9.0)})
    compiled_replay(requests, limits, pool, COSTS["roofline"], log_steps=1000).run(fold)
    one, other = (each.prediction(16, 1, 1) for each in (fold, core))
    assert one.metrics == other.metrics
    assert one.totals == other.totals
    assert one.outcome == other.outcome
    assert one.extrapolated == other.extrapolated


def test_the_log_s_size_changes_nothing() -> None:
    requests, limits, pool = many(300), SchedulerLimits(256, 32), PlainPool(2_000, 16, keeps=True)
    logs = [
        log_of(compiled_replay(requests, limits, pool, COSTS["fitted"], steps), pool)
        for steps in (7, 64, 4096)
    ]
    assert_same(logs[0], logs[1])
    assert_same(logs[0], logs[2])


def test_what_is_compiled_is_what_python_says() -> None:
    requests, limits, pool = many(60), SchedulerLimits(128, 16), PlainPool(500, 16, keeps=True)
    prices = prices_of(COSTS["fitted"])
    assert prices is not None
    plain = log_of(CompiledReplay(requests, limits, pool, prices, advance_with=advance), pool)
    assert_same(plain, log_of(CompiledReplay(requests, limits, pool, prices), pool))


def test_a_miscounted_block_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.compiled import committing

    def forgets_one(run: object, row: int, kept: int, is_found: bool) -> None:
        compiled_pool.release(run, row, kept, is_found)  # type: ignore[arg-type]
        run.at[6] -= 1  # type: ignore[attr-defined]  # EMPTY

    monkeypatch.setattr(committing, "release", forgets_one)
    requests, limits, pool = many(60), SchedulerLimits(128, 16), PlainPool(900, 16, keeps=True)
    prices = prices_of(COSTS["roofline"])
    assert prices is not None
    wrong = log_of(CompiledReplay(requests, limits, pool, prices, advance_with=advance), pool)
    with pytest.raises(AssertionError, match=r"reserved|free"):
        assert_same(wrong, core_log(requests, limits, pool, COSTS["roofline"]))


@pytest.mark.parametrize("flops", [1e-30, 1e-6])  # one step, and some hundred, outlast what 64 bits count
def test_a_replay_of_centuries_is_refused_by_both(flops: float) -> None:
    requests, limits, pool = many(300), SchedulerLimits(256, 32), PlainPool(2_000, 16, keeps=True)
    cost = RooflineCost(SHAPE, replace(DEVICE, flops=flops))
    with pytest.raises(TimeSpanError, match="longer than 146 years"):
        log_of(compiled_replay(requests, limits, pool, cost), pool)
    with pytest.raises(TimeSpanError, match="longer than 146 years"):
        core_log(requests, limits, pool, cost)


def test_limits_that_nothing_reaches_cost_no_memory_and_change_nothing() -> None:
    requests, pool = many(60), PlainPool(10**12, 16, keeps=True)
    wide, narrow = (
        log_of(compiled_replay(requests, SchedulerLimits(128, rows), pool, COSTS["fitted"]), pool)
        for rows in (10**12, 60)
    )
    assert_same(wide, narrow)
