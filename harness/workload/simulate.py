"""Replaying a workload: the free-running prediction, and the replay of a measured run's recording.

Most points can be replayed by compiled code (`harness.compiled`). All others run through the scheduler and cache of
`engine.core`. Outcomes that depend on token values come from `Workload.drawn`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.core.memory.eviction import EvictionPolicy
from engine.core.options import Decoding, Eviction, Retention, Scheduling
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from harness.compiled.grouping import Grouping
from harness.compiled.numba_edge import is_available, is_cached
from harness.compiled.replay import Branches, CompiledReplay, Drafts, Keeping, PlainPool, PlainRequests
from harness.compiled.replicas import run_replicas
from harness.compiled.state import BlockNames
from harness.config.capabilities import Way, obstacles
from harness.config.errors import ConfigError
from harness.config.schema import CacheConfig, Compiled, ReplayMode
from harness.console import install_hint, remark
from harness.cost.roofline import RooflineCost
from harness.metrics.log import IntArray, RunLog
from harness.replay.arrivals import TimedRequest
from harness.replay.beams import BeamGenealogy, RecordedGenealogy
from harness.replay.cost_model import CostModel
from harness.replay.executors import Executor, RecordedExecutor, SimulatedExecutor
from harness.replay.features import FeatureMeter
from harness.replay.folds import Fold, KeptLog, Prediction, RunFold, prediction_of
from harness.replay.loop import Observer, Progress, Replay, ReplayClock
from harness.replay.memory import TierUse, Wastes
from harness.replay.recorder import PlanRecording, Recorder
from harness.replay.replicas import Balancer, merged, run_in_lockstep, run_together
from harness.workload.beam_requests import BeamClient
from harness.workload.point import Point
from harness.workload.scheduler import eviction_policy, goes_singly, tiers_below
from traces.analysis.reuse import optimal_hits_of_run
from traces.trace import Requests

# CPU-seconds, all of one CPU (AMD EPYC, family 23; compiling: family 25): of loading compiled code, and of compiling it
LOADING_S, COMPILING_S = 0.8, 44.0
REQUEST_S, BRANCH_S, CHUNK_S = 1e-3, 3e-4, 6e-4
"""Of the policy core, for a request, each branch of it beyond the first, and each step that its prompt fills."""
STEP_S, DRAFTS_S, BEAM_S, GROUP_S = 2e-4, 5e-5, 4e-5, 1e-5
"""Where each step is a plan: for a step, and in it for a row with drafts, for each beam and each group of layers."""


def compiled_replays(point: Point, cost: CostModel) -> Sequence[CompiledReplay]:
    """The point's compiled replay of each replica; none where `engine.core` must replay it, or is quicker because
    requests are few.

    Raises:
        ConfigError: `replay.compiled=always`, but the point cannot be replayed by compiled code.
    """
    mode, rows = point.replay.compiled, point.trace.columns
    if mode is Compiled.never or (mode is Compiled.auto and _is_small(point)):
        return ()
    reason = obstacle(point, cost)
    if reason is None:
        requests = PlainRequests(
            rows.request_id,
            rows.arrival_us * 1000,
            rows.prompt_tokens,
            rows.output_tokens,
            _named_blocks(point),
            _branches(point, cost),
            point.workload.waiting,
            _column(rows.values("priority")),
            _drafts(point, cost),
            point.workload.traffic.client,
            point.front_times,
        )
        return [replay_of(point, requests, cost) for _ in range(point.replicas)]
    if mode is Compiled.always:
        raise _refusal(reason)
    _LEFT_TO_CORE.clear()  # those before it are likely of its kind
    return ()


def _is_small(point: Point) -> bool:
    """Whether `engine.core` replays the workload before the compiled code is loaded, or has been compiled once.

    The process loads or compiles it when the core has replayed for as long as that takes, so that a sweep of small
    points comes to it, too.
    """
    _LEFT_TO_CORE.append(len(point.trace.requests) * _seconds_in_core(point))
    return sum(_LEFT_TO_CORE) < (LOADING_S if is_cached() else COMPILING_S)


_LEFT_TO_CORE: list[float] = []  # CPU-seconds of each replay that could have been compiled


def _seconds_in_core(point: Point) -> float:
    """CPU-seconds that the policy core takes for a request, roughly.

    They depend on the plans and their rows. A plan of plain decoding takes all steps to the next arrival or end
    together, so tokens cost little. With drafts, beams or groups each step is a plan; all drafts are taken to be right
    and all requests of an open loop to run together, which is the least that it can be.
    """
    rows, traffic, decodings = point.trace.columns, point.workload.traffic, point.workload.decodings
    width = max(each.width for each in decodings)
    chunks = float(np.mean(rows.prompt_tokens)) / point.limits.max_batched_tokens
    seconds = REQUEST_S + BRANCH_S * (width - 1) + CHUNK_S * chunks
    drafts = max(each.speculation.tokens if each.speculation else 0 for each in decodings)
    beams = width * any(each.mode is Decoding.beam for each in decodings)
    groups = len(point.pool.groups.groups) if point.pool.groups else 0
    row_s = DRAFTS_S * (drafts > 0) + BEAM_S * beams + GROUP_S * groups
    in_flight = traffic.users if traffic.mode is ReplayMode.closed else traffic.client.max_in_flight
    together = min(in_flight or len(rows), len(rows), point.limits.max_running)
    step_s = STEP_S / together if row_s else 0.0
    return seconds + float(np.mean(rows.output_tokens)) / (1 + drafts) * (row_s + step_s)


_OFTEN = 20  # times


def often_replayed(point: Point, cost: CostModel, requests: int) -> Point:
    """The point, replayed by compiled code where that pays: `requests` or a part of them come some twenty times."""
    takes_s = LOADING_S if is_cached() else COMPILING_S
    asked = point.replay.compiled is not Compiled.auto
    if asked or _OFTEN * requests * _seconds_in_core(point) < takes_s or obstacle(point, cost) is not None:
        return point
    return replace(point, replay=replace(point.replay, compiled=Compiled.always))


def check_compiled(point: Point) -> None:
    """Check `replay.compiled=always` without a cost model.

    Raises:
        ConfigError: the workload cannot be replayed by compiled code, whatever the cost model.
    """
    reason = _obstacle(point) if point.replay.compiled is Compiled.always else None
    if reason is not None:
        raise _refusal(reason)


def _refusal(reason: str) -> ConfigError:
    return ConfigError("replay.compiled", f"always, but {reason}; use auto")


def obstacle(point: Point, cost: CostModel) -> str | None:
    """Why the point cannot be replayed by compiled code; None where it can."""
    from harness.compiled.pricing import prices_of

    if prices_of(cost) is None:
        return f"cost={cost.source.kind} has prices that the compiled code does not know (tables)"
    return _obstacle(point)


def _obstacle(point: Point) -> str | None:
    if not is_available():
        return f"numba is not installed, cannot be imported or is switched off ({install_hint('fast')})"
    if point.workload.resubmits:
        return "a client sends the beams as requests (decoding.sharing=prefix_cache)"
    waits = point.workload.waiting
    after = waits.after if waits and waits.after else ()
    if any(max(before, default=-1) >= index for index, before in enumerate(after)):  # it may never be sent
        return "turns wait for later ones"
    if point.deployment.cache.tier_tokens and point.deployment.copies_tiers:
        return "the engine copies what its tier has, which is a part of single steps"
    if (grouping := _grouping(point)) and (reason := grouping.obstacle()):
        return reason
    return next((reason for _, reason in obstacles(point.asked, Way.compiled)), None)


def _named_blocks(point: Point) -> BlockNames | None:
    """Names for the blocks that several requests may share; None where none may."""
    if not point.may_share:
        return None
    rows = point.trace.columns
    return BlockNames.of(rows.segments, rows.values("salt"), point.pool.block_size)


def _branches(point: Point, cost: CostModel) -> Branches | None:
    """Widths of the requests, and the model of their beams; None where each is a greedy request of one branch."""
    if all(each.width == 1 and each.mode is Decoding.greedy for each in point.workload.decodings):
        return None
    decodings = point.workload.trace_decoding.of_all(point.trace)
    genealogy = point.workload.genealogy(cost.source)
    assert isinstance(genealogy, BeamGenealogy)
    beam, drawn = (
        _column([int(each.mode is mode) for each in decodings]) for mode in (Decoding.beam, Decoding.sample)
    )
    return Branches(_column([each.width for each in decodings]), beam, drawn, genealogy)


def _column(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def replay_of(point: Point, requests: PlainRequests, cost: CostModel) -> CompiledReplay:
    """The compiled replay of `requests` on the workload's pool; `obstacle()` must be None."""
    from harness.compiled.pricing import prices_of

    pool, prices, cache = point.pool, prices_of(cost), point.deployment.cache
    assert prices is not None
    tiers = tiers_below(point.deployment, eviction_policy(point.deployment))
    memory = PlainPool(
        pool.num_blocks,
        pool.block_size,
        pool.prefix_caching and cache.retention is Retention.lru,
        cache.host_tokens // pool.block_size,
        _keeping(cache, point.trace.columns, pool.block_size),
        pool.window,
        _grouping(point),
        TierUse(tiers, pool.block_size, pool.kv_bytes_per_token) if tiers else None,
    )
    asynchronous = point.deployment.scheduler.async_scheduling
    return CompiledReplay(requests, point.limits, memory, prices, asynchronous=asynchronous)


def _drafts(point: Point, cost: CostModel) -> Drafts | None:
    """The drafts of every request; None where they have none."""
    found = next((each.speculation for each in point.workload.decodings if each.speculation), None)
    return Drafts(found.tokens, point.workload.drawn.accepted(cost.source)) if found else None


def _grouping(point: Point) -> Grouping | None:
    """The groups of layers; None for a plain model."""
    layout, cache = point.pool.groups, point.deployment.cache
    return None if layout is None else Grouping(layout, cache.window_hits, cache.retention_interval)


def _keeping(cache: CacheConfig, rows: Requests, block_size: int) -> Keeping | None:
    """The rule by which cached blocks are kept; None for the least recently released."""
    if cache.eviction == Eviction.lru:
        return None
    if cache.eviction == Eviction.priority:
        rank = np.unique([-priority for priority in rows.values("priority")], return_inverse=True)[1]
    else:
        rank = np.array([session is not None for session in rows.values("session")])
    pinned = cache.pinned_tokens // block_size
    return Keeping(Eviction(cache.eviction), rank.astype(np.int64), cache.ttl_s, pinned)


Observe = Callable[[Scheduler], Observer]
"""Makes an observer of a replay, which may look at the replay's scheduler and pool."""


def replay_point(
    point: Point,
    fold: Fold,
    requests: Iterable[TimedRequest],
    executor: Executor,
    *observers: Observer,
    observe: Observe | None = None,
    eviction: EvictionPolicy | None = None,
    progress: Progress | None = None,
    client: BeamClient | None = None,
    live: dict[int, Request],
) -> dict[str, Any]:
    """Replay `requests` through a new scheduler over an empty pool, into `fold`.

    Returns what was kept of the memory, by its field of the run log; sums alone where `fold` keeps no rows.
    `observers`, and what `observe` makes, look at the replay. `eviction` replaces the eviction order. With `client`
    the engine gets what it sends for `requests`. `live` holds the requests under way; the executor was made with it.
    """
    recorder, env = Recorder(fold), ReplayClock()
    arrivals = point.arrivals(requests, client)
    eviction = eviction_policy(point.deployment, env) if eviction is None else eviction
    scheduler, memory = point.observed_scheduler(env, eviction)
    kept = memory if fold.keeps_rows else [total for each in memory if (total := each.summed())]
    made = [observe(scheduler)] if observe else []
    watching: list[Observer] = [recorder, *kept, *observers, *made]
    Replay(
        arrivals,
        scheduler,
        executor,
        *watching,
        progress=progress,
        live=live,
        until_ns=point.workload.traffic.until_ns,
        asynchronous=point.deployment.scheduler.async_scheduling,
        env=env,
        changes_ns=eviction.changes_ns,
    ).run()
    recorder.close()
    return {each.field: each.value() for each in kept}


def new_log(point: Point) -> KeptLog:
    """The fold of a replay of the point that keeps every row."""
    pool = point.pool
    return KeptLog(pool.block_size, pool.tokens, pool.slot_bytes)


def predict(point: Point, cost: CostModel, *, rows: bool, fast_forward: bool = True) -> Prediction:
    """The free-running prediction: with its rows, or in constant memory, where only the trace and the requests under
    way are held. Replicas keep their rows until they are merged.
    """
    if not rows and point.replicas == 1:
        fold, pool = RunFold(cost.source.hull), point.pool
        kept = _run_compiled(point, cost, [fold]) or [_simulated(point, cost, fold, fast_forward)]
        found = fold.prediction(pool.block_size, pool.tokens, pool.slot_bytes, **kept[0])
    else:
        found = prediction_of(simulate(point, cost, fast_forward=fast_forward), cost.source, rows=rows)
    if not point.pool.prefix_caching:  # what is not asked for is not 0 %
        found.metrics.pop("hit_ratio", None)
    return found


def simulate(point: Point, cost: CostModel, *, fast_forward: bool = True) -> RunLog:
    """The free-running prediction as a run log."""
    folds = [new_log(point) for _ in range(point.replicas)]
    if beside := _run_compiled(point, cost, folds):
        logs = [fold.log(**kept) for fold, kept in zip(folds, beside, strict=True)]
        log = logs[0] if len(logs) == 1 else merged(logs)
    elif point.replicas > 1:
        log = _simulate_replicas(point, cost, fast_forward)
    else:
        log = folds[0].log(**_simulated(point, cost, folds[0], fast_forward))
    return replace(log, optimal_hit_tokens=optimal_hit_tokens(point, log)) if point.replay.optimum else log


def _simulated(point: Point, cost: CostModel, fold: Fold, fast_forward: bool) -> dict[str, Any]:
    client, live = point.beam_client(point.workload.genealogy(cost.source)), dict[int, Request]()
    # A fast-forward would take and release all its blocks at one time.
    single = point.replay.residency is not None or goes_singly(point.deployment)
    executor = simulated_executor(point, cost, live, fast_forward=fast_forward and not single)
    return replay_point(point, fold, point.stream(), executor, client=client, live=live)


def _run_compiled(point: Point, cost: CostModel, folds: Sequence[Fold]) -> list[dict[str, Any]]:
    """Replay the point by compiled code, each replica into its fold. Returns what each kept of the memory, as
    `replay_point`; nothing, and no rows in the folds, where `engine.core` must replay the point.
    """
    replays = compiled_replays(point, cost)
    if replays and not is_cached():
        takes = "about half a minute, a minute on a slow CPU"
        remark(f"compiling the replay, once on this machine and version: {takes}")
    return run_replicas(replays, folds) if len(replays) > 1 else [each.run(folds[0]) for each in replays]


def optimal_hit_tokens(point: Point, log: RunLog) -> int:
    """The most fresh hit tokens that any order of eviction could find in this run (`optimal_hits_of_run`).

    Blocks are those of the run's own hashes, answers included where later prompts may find them.
    """
    size = point.pool.block_size
    asked, held = [], []
    for timed in point.stream():
        request = timed.request
        assert request.identity is not None
        hashes = request.identity.prompt_hashes(size)
        asked.append(hashes[: (request.prompt_tokens - 1) // size])
        held.append(request.identity.generated_hashes(0, size) or hashes)
    rows = {row.request_id: (index, row.priority) for index, row in enumerate(point.trace.requests)}
    by_priority = point.limits.policy is Scheduling.priority
    # at one time: admissions first, in the order of the queue
    events: list[tuple[float, int, int, int, bool]] = []
    columns = [log.requests[name] for name in ("request_id", "first_scheduled_s", "finish_s")]
    for request_id, first_s, finish_s in zip(*columns, strict=True):
        index, priority = rows[int(request_id)]
        if first_s == first_s:  # not nan
            events.append((float(first_s), 0, priority * by_priority, index, True))
        if finish_s == finish_s:
            events.append((float(finish_s), 1, 0, index, False))
    order = [(enters, index) for *_, index, enters in sorted(events)]
    return optimal_hits_of_run(asked, held, order, point.pool.num_blocks) * size


def _simulate_replicas(point: Point, cost: CostModel, fast_forward: bool) -> RunLog:
    """The same for data-parallel replicas on one clock."""
    env = ReplayClock()
    rules = [eviction_policy(point.deployment, env) for _ in range(point.replicas)]
    made = [point.observed_scheduler(env, rule) for rule in rules]
    lockstep = point.deployment.shape.experts is not None
    fast_forward = fast_forward and not lockstep and not goes_singly(point.deployment)
    schedulers, lives = [scheduler for scheduler, _ in made], [dict[int, Request]() for _ in made]
    executors = [simulated_executor(point, cost, live, fast_forward=fast_forward) for live in lives]
    arrivals, folds = point.arrivals(point.requests()), [new_log(point) for _ in made]
    recorders = [Recorder(fold) for fold in folds]
    kept = [[each for each in memory if isinstance(each, TierUse | Wastes)] for _, memory in made]
    lanes = Balancer(arrivals, schedulers).lanes
    replays = [
        Replay(
            *(lane, scheduler, executor, recorder, *memory),
            live=live,
            until_ns=point.workload.traffic.until_ns,
            asynchronous=point.deployment.scheduler.async_scheduling,
            env=env,
            changes_ns=rule.changes_ns,
        )
        for lane, scheduler, executor, recorder, memory, live, rule in zip(
            lanes, schedulers, executors, recorders, kept, lives, rules, strict=True
        )
    ]
    if lockstep:
        assert isinstance(cost, RooflineCost)  # `check_cost` refuses others
        run_in_lockstep(replays, env, cost.of_group)
    else:
        run_together(replays, env)
    for recorder in recorders:
        recorder.close()
    values = ({each.field: each.value() for each in memory} for memory in kept)
    return merged([fold.log(**each) for fold, each in zip(folds, values, strict=True)])


def replay_recording(point: Point, recording: PlanRecording) -> tuple[RunLog, PlanRecording]:
    """Replay a measured run with its own step durations and results, and with prefix keys instead of token hashes.

    Every plan must equal the measured run's, block ids included; with groups, also where the bytes of their pools go.
    """
    client, live = point.beam_client(RecordedGenealogy(recording.parents)), dict[int, Request]()
    meter = FeatureMeter(live, point.pool.block_size, point.pool.window, point.pool.page_slots)
    executor = RecordedExecutor(recording.step_ns, recording.results, meter)
    again, log = PlanRecording(client.chosen if client else None), new_log(point)
    beside = replay_point(point, log, point.requests(), executor, again, client=client, live=live)
    return log.log(**beside), again


def simulated_executor(
    point: Point, cost: CostModel, requests: Mapping[int, Request], *, fast_forward: bool
) -> SimulatedExecutor:
    """The executor of a prediction: seconds from `cost`, outcomes from `point.workload.drawn`; `requests` may grow."""
    drawn = point.workload.drawn
    return SimulatedExecutor(
        cost,
        requests,
        point.pool.block_size,
        point.workload.genealogy(cost.source),
        fast_forward=fast_forward,
        survival=drawn.survival,
        acceptance=drawn.accepted(cost.source),
        window=point.pool.window,
        page_slots=point.pool.page_slots,
    )
