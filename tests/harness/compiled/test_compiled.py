"""The compiled replay says to the bit what the policy core says."""

from dataclasses import replace

import numpy as np
import pytest
from compiled_cases import (
    COSTS,
    DEVICE,
    GENEALOGY,
    LIMITS,
    POOLS,
    SHAPE,
    Sharing,
    assert_same,
    branching,
    compiled_replay,
    core_log,
    core_parts,
    core_requests,
    crowded,
    entering,
    log_of,
    new_fold,
    sharing,
    tight,
    waiting,
    workloads,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sim_cases import play
from tiers import cases, tier

from engine.core.identity import KeyIdentity
from engine.core.memory.eviction_rules import new_policy
from engine.core.options import (
    Eviction,
    Preemption,
    SchedulerLimits,
    Scheduling,
)
from engine.core.request import Request
from harness.compiled.pricing import prices_of
from harness.compiled.replay import (
    Branches,
    CompiledReplay,
    Drafts,
    Keeping,
    PlainPool,
    PlainRequests,
    advance,
)
from harness.compiled.replicas import run_replicas
from harness.compiled.state import Heap
from harness.cost.roofline import RooflineCost
from harness.replay.arrivals import (
    OpenLoop,
    TimeSpanError,
)
from harness.replay.beams import BeamGenealogy
from harness.replay.branches import DraftAcceptance
from harness.replay.executors import SimulatedExecutor
from harness.replay.folds import RunFold
from harness.replay.loop import Replay, ReplayClock
from harness.replay.recorder import Recorder
from harness.replay.replicas import Balancer, run_together


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
    requests = data.draw(entering(requests))
    found = compiled_replay(requests, limits, pool, COSTS["expected"], asynchronous=asynchronous)
    expected = core_log(requests, limits, pool, COSTS["expected"], shared, asynchronous=asynchronous)
    assert_same(log_of(found, pool), expected)


@settings(max_examples=tier(20, 2000))
@example(55)  # preempted again after one step, of a token that it had before: its block stays cached
@example(731)  # the same after it came back from the host
@example(298)  # a decoder is preempted for prompts alone, of whose budget it has taken nothing
@example(2)  # one that comes back from the host has a share of the budget
@given(st.integers(0, 10**6))
def test_what_comes_back_into_a_tight_pool_is_replayed_as_the_core_does(seed: int) -> None:
    shared, limits, pool = tight(seed)
    requests = shared.named(pool.block_size)
    expected = core_log(requests, limits, pool, COSTS["expected"], shared)
    assert_same(log_of(compiled_replay(requests, limits, pool, COSTS["expected"]), pool), expected)


@settings(max_examples=tier(20, 400))
@given(
    st.data(), sharing(), LIMITS, POOLS, st.sampled_from([Eviction.ttl, Eviction.pinned, Eviction.priority])
)
def test_cached_blocks_are_kept_by_the_rules_of_the_core(
    data: st.DataObject, shared: Sharing, limits: SchedulerLimits, pool: PlainPool, rule: Eviction
) -> None:
    count = len(shared.salts)
    priority = np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    limits = replace(limits, policy=data.draw(st.sampled_from(Scheduling)))
    seconds, pinned = data.draw(st.sampled_from([0.0, 0.002, 0.1])), data.draw(st.integers(0, 6))
    requests = replace(shared.named(pool.block_size), priority=priority)
    ids, env, live = requests.request_id.tolist(), ReplayClock(), dict[int, Request]()
    queue = new_policy(rule, ttl_s=seconds, pinned=pinned)
    queue.facts.clock = env
    sessions = {request_id: "s" for request_id, level in zip(ids, priority, strict=True) if level > 1}
    rank = np.unique(-priority, return_inverse=True)[1] if rule is Eviction.priority else priority > 1
    keeping = Keeping(rule, rank.astype(np.int64), seconds, pinned)
    fast = data.draw(st.booleans())
    executor = SimulatedExecutor(COSTS["expected"], live, pool.block_size, GENEALOGY, fast_forward=fast)
    scheduler = core_parts(limits, pool, queue)
    timed = [
        replace(each, request=replace(each.request, session=sessions.get(each.request.request_id)))
        for each in core_requests(requests, shared)
    ]
    expected = play(timed, scheduler, executor, live=live, env=env, changes_ns=queue.changes_ns)
    found = compiled_replay(requests, limits, replace(pool, keeping=keeping), COSTS["expected"])
    assert_same(log_of(found, pool), expected)


ACCEPTANCE = st.none() | st.builds(DraftAcceptance, st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.integers(0, 99))


@settings(max_examples=tier(30, 400))
@given(
    st.data(),
    sharing() | st.integers(0, 10**6).map(crowded),
    LIMITS,
    POOLS,
    st.integers(1, 5),
    ACCEPTANCE,
    st.booleans(),
)
def test_drafts_are_drawn_scheduled_and_priced_as_the_core_does(
    data: st.DataObject,
    shared: Sharing,
    limits: SchedulerLimits,
    pool: PlainPool,
    tokens: int,
    acceptance: DraftAcceptance | None,
    asynchronous: bool,
) -> None:
    count = len(shared.salts)
    priority = np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    limits = replace(limits, policy=data.draw(st.sampled_from(Scheduling)))
    requests = replace(shared.named(pool.block_size), waiting=data.draw(waiting(count)), priority=priority)
    requests = replace(requests, drafts=Drafts(tokens, acceptance))
    cost = COSTS[data.draw(st.sampled_from(["drafts", "fitted"]))]
    found = compiled_replay(requests, limits, pool, cost, asynchronous=asynchronous)
    expected = core_log(requests, limits, pool, cost, shared, asynchronous=asynchronous)
    assert_same(log_of(found, pool), expected)


@settings(max_examples=tier(20, 400))
@given(sharing(), LIMITS, POOLS, st.booleans(), st.integers(2, 4), st.sampled_from([1, 20, 400]))
def test_replicas_get_the_requests_that_they_get_of_the_core(
    shared: Sharing, limits: SchedulerLimits, pool: PlainPool, asynchronous: bool, replicas: int, apart: int
) -> None:
    named = shared.named(pool.block_size)
    requests = replace(named, arrival_ns=named.arrival_ns * apart)
    cost, env = COSTS["expected"], ReplayClock()
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


@pytest.mark.parametrize("beam", [0, 1])
def test_a_last_token_of_a_prompt_that_is_computed_again_decodes_nothing(beam: int) -> None:
    """Where prompts go alone, it goes among them: of 17 tokens in steps of eight one is left."""
    count = 6
    columns = (np.full(count, value, dtype=np.int64) for value in (17, 12))
    branches = Branches(*(np.full(count, value, dtype=np.int64) for value in (3, beam, 1 - beam)), GENEALOGY)
    requests = PlainRequests(np.arange(count), 1000 * np.arange(count), *columns, branches=branches)
    shared = Sharing(requests, [[(None, 17)]] * count, [""] * count)
    limits, pool = SchedulerLimits(8, 6, mixed_steps=False), PlainPool(24, 3, keeps=False)
    requests = shared.named(pool.block_size)
    expected = core_log(requests, limits, pool, COSTS["expected"], shared)
    assert expected.requests["preemptions"].sum() > 4
    assert_same(log_of(compiled_replay(requests, limits, pool, COSTS["expected"]), pool), expected)


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


@cases("keeps", [False, True], day=1)
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


@pytest.mark.nightly
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
    from harness.compiled import committing, scheduling

    def forgets_one(run: object, row: int, unseen: int) -> None:
        scheduling.release_ended(run, row, unseen)  # type: ignore[arg-type]
        run.at[6] -= 1  # type: ignore[attr-defined]  # EMPTY

    monkeypatch.setattr(committing, "release_ended", forgets_one)
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


def _part(value: int) -> int:
    return value + 1


def _inlined(value: int) -> int:
    return _part(value)


def _called(value: int) -> int:
    return _part(np.int32(value)) + _part(3)


def _outermost(value: int) -> int:
    return 10 * _inlined(value) + _called(value)


def test_a_part_is_compiled_once_whoever_calls_it_with_whatever_integer() -> None:
    numba, reference = pytest.importorskip("numba"), pytest.importorskip("harness.compiled.reference")
    for part in (_part, _inlined, _called):
        reference.compile_where_called(part, part is _inlined)
    assert numba.njit(_nrt=False)(_outermost)(4) == _outermost(4) == 59
    known = reference.cpu_target.typing_context.resolve_value_type(_part)._known
    assert list(known) == [(numba.int64,)]


def test_an_array_with_gaps_is_not_referred_to() -> None:
    reference = pytest.importorskip("harness.compiled.reference")
    with pytest.raises(TypeError, match="without gaps"):
        reference.reference_to(Heap(*(np.zeros(8, np.int64)[::2] for _ in range(3))))
