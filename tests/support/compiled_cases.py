"""Workloads for the compiled replay and for the policy core, and what both make of them."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from sim_cases import play

from engine.core.identity import KeyIdentity
from engine.core.memory.eviction import EvictionPolicy
from engine.core.memory.group_chunks import pages_of
from engine.core.memory.paged import PagedManager, layer_groups
from engine.core.memory.tiers import Tiers
from engine.core.options import (
    Decoding,
    Preemption,
    Retention,
    SchedulerLimits,
    Scheduling,
)
from engine.core.request import Request, Speculation
from engine.core.scheduling.scheduler import Scheduler
from harness.compiled.pricing import prices_of
from harness.compiled.replay import (
    Branches,
    CompiledReplay,
    PlainPool,
    PlainRequests,
    Waiting,
)
from harness.compiled.state import BlockNames
from harness.cost.fitted import FittedCost
from harness.cost.model_shape import Experts, LatentKV, ModelShape
from harness.cost.roofline import DeviceShape, RooflineCost
from harness.metrics.log import RunLog
from harness.replay.arrivals import (
    Arrivals,
    Capped,
    ClosedLoop,
    FrontEnd,
    FrontTimes,
    OpenLoop,
    Sessions,
    TimedRequest,
    Turn,
)
from harness.replay.beams import BeamGenealogy
from harness.replay.cost_model import CostModel, CostSource, PacedCost
from harness.replay.executors import SimulatedExecutor
from harness.replay.features import ATTENTION_FEATURES, FEATURES, Sight
from harness.replay.folds import KeptLog
from harness.replay.memory import Wastes
from traces.trace import Client, ClientKind, SegmentColumns

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
    "windows": RooflineCost(replace(SHAPE, window=16, windowed_layers=3), DEVICE),
    "drafts": RooflineCost(SHAPE, DEVICE, replace(SHAPE, layers=1)),
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
        names = BlockNames.of(SegmentColumns.of(self.segments), self.salts, block_size)
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


def crowded(seed: int) -> Sharing:
    """Prompts of a few texts and of their beginnings, which come faster than they are served."""
    draw, count = np.random.default_rng(seed), 60
    texts: list[list[tuple[int | None, int]]] = []
    for _ in range(count):
        whole = draw.random(3) < 0.7
        keys = range(draw.integers(0, 4))
        keyed = [(key, 24 if whole[key] else int(draw.integers(1, 24))) for key in keys]
        texts.append([*keyed, (None, int(draw.integers(1, 40)))])
    requests = PlainRequests(
        np.arange(count) * 3 + 7,
        np.cumsum(draw.integers(0, 3_000_000, count)),
        np.array([sum(tokens for _, tokens in prompt) for prompt in texts], dtype=np.int64),
        draw.integers(1, 90, count),
        priority=draw.integers(0, 3, count),
    )
    return Sharing(requests, texts, [""] * count)


def tight(seed: int) -> tuple[Sharing, SchedulerLimits, PlainPool]:
    """A few prompts in small chunks, scheduled ahead in a pool that all but a few of them fill: they come and go."""
    draw = np.random.default_rng(seed)
    count = int(draw.integers(4, 12))
    prompt, output = draw.integers(1, 12, count), draw.integers(1, 9, count)
    arrival_ns, priority = np.cumsum(draw.integers(0, 10**6, count)), draw.integers(0, 3, count)
    requests = PlainRequests(np.arange(count), arrival_ns, prompt, output, priority=priority)
    adaptive, whole, mixed, swaps = (draw.random(4) < 0.5).tolist()
    limits = SchedulerLimits(
        max_batched_tokens=int(draw.integers(4, 16)),
        max_running=int(draw.integers(2, 7)),
        long_prefill_tokens=int(draw.integers(1, 5)),
        long_prefill_adaptive=adaptive,
        admit_whole_prompt=whole,
        mixed_steps=mixed,
        ahead=True,
        policy=Scheduling.priority,
        preemption=Preemption.swap if swaps else Preemption.recompute,
    )
    pool = PlainPool(int(draw.integers(19, 28)), 1, keeps=True, host_blocks=int(draw.integers(4, 16)))
    return Sharing(requests, [[(None, each)] for each in prompt.tolist()], [""] * count), limits, pool


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


@st.composite
def entering(draw: st.DrawFn, requests: PlainRequests) -> PlainRequests:
    """The same, which a client may hold back, and a server's front end may have before the scheduler."""
    cap = st.builds(Client, st.just(ClientKind.capped), st.integers(1, 8), st.sampled_from([0, 1, 300, 8000]))
    ns = st.sampled_from([0, 1, 40_000, 3_000_000])
    front = st.builds(FrontTimes, ns, st.sampled_from([0.0, 0.37, 90_000.0]), ns | st.just(10**8 + 1))
    return replace(requests, client=draw(st.just(Client()) | cap), front=draw(st.none() | front))


LIMITS = st.builds(
    SchedulerLimits,
    max_batched_tokens=st.integers(4, 64),
    max_running=st.integers(1, 12),
    max_model_len=st.one_of(st.none(), st.integers(20, 100)),
    chunked_prefill=st.just(True),
    watermark=st.sampled_from([0.0, 0.1]),
    long_prefill_tokens=st.one_of(st.none(), st.integers(1, 20)),
    long_prefill_adaptive=st.booleans(),
    admit_whole_prompt=st.booleans(),
    mixed_steps=st.booleans(),
    ahead=st.booleans(),
) | st.builds(
    SchedulerLimits,
    max_batched_tokens=st.integers(20, 150),
    max_running=st.integers(1, 12),
    chunked_prefill=st.just(False),
    mixed_steps=st.booleans(),
    ahead=st.booleans(),
)
POOLS = st.builds(
    PlainPool,
    num_blocks=st.integers(5, 200),
    block_size=st.sampled_from([1, 3, 8, 16]),
    keeps=st.booleans(),
    window=st.sampled_from([None, Sight(7), Sight(40), Sight(24, chunked=True)]),
)


def core_requests(requests: PlainRequests, shared: Sharing | None = None) -> list[TimedRequest]:
    columns = [requests.request_id, requests.arrival_ns, requests.prompt_tokens, requests.output_tokens]
    columns.append(0 * requests.request_id if requests.priority is None else requests.priority)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    segments = [[(None, row[2])] for row in rows] if shared is None else shared.segments
    salts = [""] * len(rows) if shared is None else shared.salts
    drafts = Speculation(requests.drafts.tokens) if requests.drafts else None
    return [
        TimedRequest(Request(i, p, o, *decoding, KeyIdentity(i, s, salt), priority, drafts), at)
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
    source, client = own_arrivals(requests, timed), requests.client
    if client.max_in_flight is not None:
        source = Capped(source, client.max_in_flight, 1000 * client.pause_us)
    return source if requests.front is None else FrontEnd(source, *requests.front)


def own_arrivals(requests: PlainRequests, timed: list[TimedRequest]) -> Arrivals:
    waits, count = requests.waiting, len(timed)
    if waits is None:
        return OpenLoop(timed, count)
    pauses = waits.pause_ns.tolist()
    if waits.after is None:
        return ClosedLoop((each.request for each in timed), count, waits.users, pauses)
    ids = requests.request_id.tolist()
    parents = [tuple(ids[place] for place in places) for places in waits.after]
    return Sessions([Turn(*turn) for turn in zip(timed, parents, pauses, strict=True)])


def core_parts(
    limits: SchedulerLimits,
    pool: PlainPool,
    eviction: EvictionPolicy | None = None,
    tiers: Tiers | None = None,
) -> Scheduler:
    retention, grouping = Retention.lru if pool.keeps else Retention.none, pool.grouping
    if grouping is not None:
        manager = PagedManager.of(
            pages_of(grouping.layout, [pool.num_blocks], retention=retention),
            most_chunk=limits.max_batched_tokens,
            window_hits=grouping.rule,
            retention_interval=grouping.interval,
        )
        return Scheduler(manager, limits)
    manager = PagedManager(
        *(pool.num_blocks, pool.block_size),
        retention=retention,
        host_blocks=pool.host_blocks,
        eviction=eviction,
        tiers=tiers,
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
    tiers: Tiers | None = None,
    fast_forward: bool = True,
) -> RunLog:
    live: dict[int, Request] = {}
    accepted = requests.drafts.acceptance if requests.drafts else None
    executor = SimulatedExecutor(
        *(cost, live, pool.block_size, GENEALOGY),
        window=pool.window,
        acceptance=accepted,
        fast_forward=fast_forward,
    )
    arrivals = arrivals_of(requests, core_requests(requests, shared))
    scheduler = core_parts(limits, pool, tiers=tiers)
    groups = layer_groups(scheduler.manager)
    wastes = [Wastes(groups.account)] if groups else []
    log = play(arrivals, scheduler, executor, *wastes, live=live, asynchronous=asynchronous)
    return replace(log, waste=wastes[0].value()) if groups else log


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
