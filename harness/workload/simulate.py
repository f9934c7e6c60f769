"""Replaying a workload: the free-running prediction, and the replay of a measured run's recording.

Most points can be replayed by compiled code (`harness.workload.simulate`). All others run through the scheduler and
cache of `engine.core`. Outcomes that depend on token values come from `harness.point.workload.drawn`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import simpy

from engine.core.memory.grouped import GroupedManager
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, Retention, Scheduling
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from harness.compiled.names import BlockNames
from harness.compiled.numba_edge import is_available
from harness.compiled.replay import Branches, BranchesPreemptedError, CompiledReplay, PlainPool, PlainRequests
from harness.config.capabilities import Way, obstacles
from harness.config.errors import ConfigError
from harness.config.schema import Compiled
from harness.console import install_hint
from harness.metrics.compute import Totals, as_floats, compute_metrics, step_totals
from harness.metrics.log import IntArray, Outcome, RunLog, empty_log
from harness.replay.arrivals import Arrivals, TimedRequest
from harness.replay.beams import BeamGenealogy, RecordedGenealogy
from harness.replay.branches import BranchEnds
from harness.replay.cost_model import CostModel, CostSource
from harness.replay.executors import Executor, RecordedExecutor, SimulatedExecutor, StepTiming
from harness.replay.kv_events import KvEventRecorder, lookup_table, residency_table, waste_table
from harness.replay.loop import Progress, Replay
from harness.replay.recorder import Recorder
from harness.replay.replicas import Balancer, merged, run_together
from harness.replay.streaming import RunFold, StreamingRecorder, extrapolated
from harness.workload.beam_requests import BeamClient
from harness.workload.decoding import RequestDecoding
from harness.workload.point import Point
from traces.analysis.reuse import optimal_hits_of_run
from traces.trace import TraceRequest

COMPILED_FROM = (
    5_000  # requests; loading the compiled code takes a second, and compiling it once takes some more
)
SHARING_FROM = 1_000  # the same where prompts may share blocks, which take the policy core longer


def compiled_replay(point: Point, cost: CostModel) -> CompiledReplay | None:
    """The point's compiled replay, or None where `engine.core` must replay it, or is quicker because requests are few.

    Raises:
        ConfigError: `replay.compiled=always`, but the point cannot be replayed by compiled code.
    """
    mode, rows = point.replay.compiled, point.trace.requests
    if mode is Compiled.never or (mode is Compiled.auto and _is_small(point)):
        return None
    reason = obstacle(point, cost)
    if reason is None:
        requests = plain_requests(rows, _named_blocks(point), _branches(point, cost))
        return replay_of(point, requests, cost)
    if mode is Compiled.always:
        raise _refusal(reason)
    return None


def _is_small(point: Point) -> bool:
    """Whether `engine.core` replays the workload before the compiled code is loaded."""
    count = len(point.trace.requests)
    return count < SHARING_FROM or (count < COMPILED_FROM and not _is_slow_in_the_core(point))


def _is_slow_in_the_core(point: Point) -> bool:
    return point.may_share or any(decoding.width > 1 for decoding in _decodings(point))


def _decodings(point: Point) -> set[RequestDecoding]:
    return {point.workload.trace_decoding.of(row) for row in point.trace.requests}


def check_compiled(point: Point) -> None:
    """Check `replay.compiled=always` without a cost model.

    Raises:
        ConfigError: the workload cannot be replayed by compiled code, whatever the cost model.
    """
    reason = _obstacle(point) if point.replay.compiled is Compiled.always else None
    if reason is not None:
        raise _refusal(reason)


def refuse_preempted_branches(point: Point) -> None:
    """A compiled replay met a preemption of several branches: only the policy core replays that.

    Raises:
        ConfigError: `replay.compiled=always`.
    """
    if point.replay.compiled is Compiled.always:
        raise _refusal("a request with several samples or beams is preempted")


def _refusal(reason: str) -> ConfigError:
    return ConfigError("replay.compiled", f"always, but {reason}; use auto")


def obstacle(point: Point, cost: CostModel) -> str | None:
    """Why the point cannot be replayed by compiled code; None where it can."""
    from harness.compiled.pricing import prices_of

    if prices_of(cost) is None:
        return f"cost={cost.source.kind} has prices that the compiled code does not know (experts, windows, tables)"
    return _obstacle(point)


def _obstacle(point: Point) -> str | None:
    if not is_available():
        return f"numba is not installed, or cannot be imported ({install_hint('fast')})"
    if point.workload.resubmits:
        return "a client sends the beams as requests (decoding.sharing=prefix_cache)"
    return next((reason for _, reason in obstacles(point.asked, Way.compiled)), None)


def _named_blocks(point: Point) -> BlockNames | None:
    """Names for the blocks that several requests may share; None where none may."""
    if not point.may_share:
        return None
    return BlockNames.of(((row.segments, row.salt) for row in point.trace.requests), point.pool.block_size)


def _branches(point: Point, cost: CostModel) -> Branches | None:
    """Widths of the requests, and the model of their beams; None where each is a greedy request of one branch."""
    decodings = [point.workload.trace_decoding.of(row) for row in point.trace.requests]
    if all(each.width == 1 and each.mode is Decoding.greedy for each in decodings):
        return None
    genealogy = point.workload.genealogy(cost.source)
    assert isinstance(genealogy, BeamGenealogy)
    beam, drawn = (
        _column([int(each.mode is mode) for each in decodings]) for mode in (Decoding.beam, Decoding.sample)
    )
    return Branches(_column([each.width for each in decodings]), beam, drawn, genealogy)


def plain_requests(
    rows: Sequence[TraceRequest], names: BlockNames | None = None, branches: Branches | None = None
) -> PlainRequests:
    """Ids, arrivals and lengths of `rows` as arrays, with the names of their shared blocks and their branches."""
    return PlainRequests(
        _column([row.request_id for row in rows]),
        _column([row.arrival_us for row in rows]) * 1000,
        _column([row.prompt_tokens for row in rows]),
        _column([row.output_tokens for row in rows]),
        names,
        branches,
    )


def _column(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def replay_of(point: Point, requests: PlainRequests, cost: CostModel) -> CompiledReplay:
    """The compiled replay of `requests` on the workload's pool; `obstacle()` must be None."""
    from harness.compiled.pricing import prices_of

    pool, prices = point.pool, prices_of(cost)
    assert prices is not None
    keeps = pool.prefix_caching and point.deployment.cache.retention is Retention.lru
    plain = PlainPool(pool.num_blocks, pool.block_size, pool.kv_bytes_per_token, keeps)
    return CompiledReplay(requests, point.limits, plain, prices)


def replay_point(
    point: Point,
    requests: Sequence[TimedRequest],
    executor: Executor,
    *,
    keep_plans: bool = False,
    progress: Progress | None = None,
    scheduler: Scheduler | None = None,
    client: BeamClient | None = None,
    live: dict[int, Request] | None = None,
) -> tuple[RunLog, Recorder]:
    """Replay `requests` through a new scheduler, or the given one, over an empty pool; returns log and recorder.

    With `client` the engine gets what it sends for `requests`. Then `live` holds the requests under way, and the
    executor was made with it.
    """
    by_id = {timed.request.request_id: timed.request for timed in requests} if live is None else live
    pool = point.pool
    recorder = Recorder(by_id, pool.block_size, keep_plans=keep_plans, window=pool.window)
    scheduler = scheduler or point.scheduler()
    arrivals = point.arrivals(requests, client)
    manager = scheduler.manager
    cached = manager if isinstance(manager, PagedManager) else None
    events = KvEventRecorder(cached) if point.replay.kv_events and cached else None
    replay = Replay(
        arrivals,
        scheduler,
        executor,
        recorder,
        progress,
        live=live,
        until_ns=point.workload.traffic.until_ns,
        asynchronous=point.deployment.scheduler.async_scheduling,
        after_step=events.note if events else None,
    )
    grouped = manager if isinstance(manager, GroupedManager) else None
    if grouped is not None:
        grouped.waste = []
    if cached and cached.keeping:
        cached.keeping.clock = replay.now_ns
    residency = cached.residency if cached else None
    if residency is not None:
        residency.clock = replay.now_ns
    replay.run()
    if client is not None:
        recorder.chosen = client.chosen
    log = recorder.log(scheduler.stats, point.pool.tokens, point.pool.slot_bytes)
    if grouped is not None:
        log = replace(log, waste=waste_table(grouped))
    if point.replay.lookups and cached:
        log = replace(log, lookups=lookup_table(cached))
    if residency is not None:
        log = replace(log, residency=residency_table(residency))
    return replace(log, kv_events=events.file()) if events else log, recorder


def simulate(point: Point, cost: CostModel, *, fast_forward: bool = True) -> RunLog:
    """The free-running prediction as a run log."""
    log = _simulated(point, cost, fast_forward=fast_forward)
    return replace(log, optimal_hit_tokens=optimal_hit_tokens(point, log)) if point.replay.optimum else log


def _simulated(point: Point, cost: CostModel, *, fast_forward: bool) -> RunLog:
    compiled = compiled_replay(point, cost)
    if compiled is not None:
        try:
            return compiled.log()
        except BranchesPreemptedError:
            refuse_preempted_branches(point)
    if point.replicas > 1:
        return _simulate_replicas(point, cost, fast_forward)
    requests = point.requests()
    client = point.beam_client(point.workload.genealogy(cost.source))
    live: dict[int, Request] | None = {} if client else None
    by_id = {timed.request.request_id: timed.request for timed in requests} if live is None else live
    single = point.replay.residency is not None  # a fast-forward would take all its blocks at one time
    executor = simulated_executor(point, cost, by_id, fast_forward=fast_forward and not single)
    return replay_point(point, requests, executor, client=client, live=live)[0]


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
    events: list[
        tuple[float, int, int, int, bool]
    ] = []  # at one time: admissions first, in the order of the queue
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
    requests, pool = point.requests(), point.pool
    by_id = {timed.request.request_id: timed.request for timed in requests}
    schedulers = [point.scheduler() for _ in range(point.replicas)]
    balancer = Balancer(point.arrivals(requests), schedulers)
    recorders = [Recorder(by_id, pool.block_size, window=pool.window) for _ in schedulers]
    env = simpy.Environment(initial_time=0)
    replays = [
        Replay(
            *(
                lane,
                scheduler,
                simulated_executor(point, cost, by_id, fast_forward=fast_forward),
            ),
            recorder,
            until_ns=point.workload.traffic.until_ns,
            asynchronous=point.deployment.scheduler.async_scheduling,
            env=env,
        )
        for lane, scheduler, recorder in zip(balancer.lanes, schedulers, recorders, strict=True)
    ]
    run_together(replays, env)
    return merged(
        [
            recorder.log(scheduler.stats, pool.tokens, pool.slot_bytes)
            for recorder, scheduler in zip(recorders, schedulers, strict=True)
        ]
    )


@dataclass(frozen=True)
class Prediction:
    """The result of a simulation; `log` is empty where rows were not kept.

    `outcome` counts the requests by outcome. `extrapolated` says how much lies outside of the measured range.
    """

    metrics: dict[str, float]
    outcome: dict[str, int]
    extrapolated: dict[str, Any] | None
    totals: Totals
    log: RunLog


def prediction_of(log: RunLog, source: CostSource) -> Prediction:
    """The prediction that a kept run log stands for."""
    outcomes = log.requests["outcome"]
    counts = {outcome.name.lower(): int((outcomes == outcome).sum()) for outcome in Outcome}
    steps = as_floats(log.steps)
    return Prediction(compute_metrics(log), counts, extrapolated(source, log.steps), step_totals(steps), log)


def simulate_metrics(point: Point, cost: CostModel, *, fast_forward: bool = True) -> Prediction:
    """The free-running prediction in constant memory: only the trace and the requests under way are held."""
    compiled = compiled_replay(point, cost)
    if compiled is not None:
        try:
            return predict_compiled(point, compiled, cost.source)
        except BranchesPreemptedError:
            refuse_preempted_branches(point)
    if point.replicas > 1:
        log = _simulate_replicas(point, cost, fast_forward)
        none = empty_log(log.block_size, log.capacity_slots, log.kv_bytes_per_token)
        return replace(prediction_of(log, cost.source), log=none)
    client = point.beam_client(point.workload.genealogy(cost.source))
    arrivals = point.arrivals(point.stream(), client)
    return predict(point, arrivals, cost, fast_forward=fast_forward)


def predict(
    point: Point,
    arrivals: Arrivals,
    cost: CostModel,
    *,
    fast_forward: bool = True,
) -> Prediction:
    """The prediction for `arrivals` at the workload's pool, in constant memory."""
    live: dict[int, Request] = {}
    recorder = StreamingRecorder(live, point.pool.block_size, cost.source.hull)
    scheduler = point.scheduler()
    executor = simulated_executor(point, cost, live, fast_forward=fast_forward)
    asynchronous, until_ns = point.deployment.scheduler.async_scheduling, point.workload.traffic.until_ns
    Replay(
        *(arrivals, scheduler, executor, recorder),
        live=live,
        until_ns=until_ns,
        asynchronous=asynchronous,
    ).run()
    recorder.finish(scheduler.stats)
    return _folded(point, recorder.fold, recorder.span_s)


def predict_compiled(point: Point, replay: CompiledReplay, source: CostSource) -> Prediction:
    """The prediction of a compiled replay, in constant memory."""
    fold = RunFold(source.hull)
    return _folded(point, fold, replay.fold(fold))


def _folded(point: Point, fold: RunFold, span_s: float) -> Prediction:
    pool = point.pool
    metrics = fold.metrics(span_s, pool.tokens, pool.slot_bytes)
    log = empty_log(pool.block_size, pool.tokens, pool.slot_bytes)
    return Prediction(metrics, fold.outcome, fold.extrapolated.section(), fold.totals, log)


def replay_recording(point: Point, recording: Recorder) -> tuple[RunLog, Recorder]:
    """Replay a measured run with its own step durations and results, and with prefix keys instead of token hashes.

    Every plan must equal the measured run's, block ids included; with groups, also where the bytes of their pools go.
    """
    executor = RecordedExecutor(recording.step_ns, recording.results)
    client = point.beam_client(RecordedGenealogy(recording.parents))
    live: dict[int, Request] | None = {} if client else None
    return replay_point(point, point.requests(), executor, keep_plans=True, client=client, live=live)


def simulated_executor(
    point: Point,
    cost: CostModel,
    requests: Mapping[int, Request],
    *,
    fast_forward: bool,
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
    )


class PinnedEnds:
    """An executor around `engine` that ends sampled branches where the draws say, whatever tokens they choose."""

    max_steps = 1

    def __init__(self, engine: Executor, ends: BranchEnds) -> None:
        self._engine = engine
        self._ends = ends

    def begin(self) -> None:
        """A step begins."""
        self._engine.begin()

    def execute(self, plan: StepPlan, horizon_ns: int | None) -> StepResult:
        """Run the plan, and end branches with it."""
        return replace(self._engine.execute(plan, horizon_ns), ended=self._ends.of(plan))

    def end(self) -> StepTiming:
        """The engine's time."""
        return self._engine.end()


def with_ends(point: Point, engine: Executor, requests: Mapping[int, Request]) -> Executor:
    """The engine, with sampled branches that end as drawn where the workload draws their ends."""
    survival = point.workload.drawn.survival
    return PinnedEnds(engine, BranchEnds(survival, requests)) if survival else engine
