"""Replaying a workload: the free-running prediction, and the replay of a measured run's recording.

Most points can be replayed by compiled code (`harness.workload.compiled`). All others run through the scheduler and
cache of `engine.core`. Outcomes that depend on token values come from `harness.workload.drawn`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import simpy

from engine.core.memory.grouped import GroupedManager
from engine.core.memory.paged import PagedManager
from engine.core.options import Scheduling
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from harness.compiled.replay import BranchesPreemptedError, CompiledReplay
from harness.metrics import compute_metrics
from harness.metrics.log import Outcome, RunLog, empty_log
from harness.metrics.totals import Totals, as_floats, step_totals
from harness.replay.arrivals import Arrivals, TimedRequest
from harness.replay.beams import RecordedGenealogy
from harness.replay.branches import BranchEnds
from harness.replay.cost_model import CostModel, CostSource
from harness.replay.executors import Executor, RecordedExecutor, SimulatedExecutor, StepTiming
from harness.replay.kv_events import KvEventRecorder, lookup_table, residency_table, waste_table
from harness.replay.loop import Progress, Replay
from harness.replay.recorder import Recorder
from harness.replay.replicas import Balancer, merged, run_together
from harness.replay.streaming import RunFold, StreamingRecorder, extrapolated
from harness.workload.beam_requests import BeamClient
from harness.workload.compiled import compiled_replay, refuse_preempted_branches
from harness.workload.workload import Workload
from traces.analysis.belady import optimal_hits_of_run


def replay_workload(
    workload: Workload,
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
    pool = workload.pool
    recorder = Recorder(by_id, pool.block_size, keep_plans=keep_plans, window=pool.window)
    scheduler = scheduler or workload.scheduler()
    arrivals = workload.arrivals(requests, client)
    manager = scheduler.manager
    cached = manager if isinstance(manager, PagedManager) else None
    events = KvEventRecorder(cached) if workload.kv_events and cached else None
    replay = Replay(
        arrivals,
        scheduler,
        executor,
        recorder,
        progress,
        live=live,
        until_ns=workload.traffic.until_ns,
        asynchronous=workload.batching.async_scheduling,
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
    log = recorder.log(scheduler.stats, workload.pool.tokens, workload.pool.slot_bytes)
    if grouped is not None:
        log = replace(log, waste=waste_table(grouped))
    if workload.lookups and cached:
        log = replace(log, lookups=lookup_table(cached))
    if residency is not None:
        log = replace(log, residency=residency_table(residency))
    return replace(log, kv_events=events.file()) if events else log, recorder


def simulate(
    workload: Workload, cost: CostModel, beam_churn: float | None, *, fast_forward: bool = True
) -> RunLog:
    """The free-running prediction as a run log. `beam_churn` None takes the calibrated one."""
    log = _simulated(workload, cost, beam_churn, fast_forward=fast_forward)
    return replace(log, optimal_hit_tokens=optimal_hit_tokens(workload, log)) if workload.optimum else log


def _simulated(
    workload: Workload, cost: CostModel, beam_churn: float | None, *, fast_forward: bool
) -> RunLog:
    compiled = compiled_replay(workload, cost, beam_churn)
    if compiled is not None:
        try:
            return compiled.log()
        except BranchesPreemptedError:
            refuse_preempted_branches(workload)
    if workload.replicas > 1:
        return _simulate_replicas(workload, cost, beam_churn, fast_forward)
    requests = workload.requests()
    client = workload.beam_client(workload.drawn.genealogy(cost.source, workload.width, beam_churn))
    live: dict[int, Request] | None = {} if client else None
    by_id = {timed.request.request_id: timed.request for timed in requests} if live is None else live
    single = workload.residency is not None  # a fast-forward would take all its blocks at one time
    executor = simulated_executor(workload, cost, by_id, beam_churn, fast_forward=fast_forward and not single)
    return replay_workload(workload, requests, executor, client=client, live=live)[0]


def optimal_hit_tokens(workload: Workload, log: RunLog) -> int:
    """The most fresh hit tokens that any order of eviction could find in this run (`optimal_hits_of_run`).

    Blocks are those of the run's own hashes, answers included where later prompts may find them.
    """
    size = workload.pool.block_size
    asked, held = [], []
    for timed in workload.stream():
        request = timed.request
        assert request.identity is not None
        hashes = request.identity.prompt_hashes(size)
        asked.append(hashes[: (request.prompt_tokens - 1) // size])
        held.append(request.identity.generated_hashes(0, size) or hashes)
    rows = {row.request_id: (index, row.priority) for index, row in enumerate(workload.trace.requests)}
    by_priority = workload.limits.policy is Scheduling.priority
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
    return optimal_hits_of_run(asked, held, order, workload.pool.num_blocks) * size


def _simulate_replicas(
    workload: Workload, cost: CostModel, beam_churn: float | None, fast_forward: bool
) -> RunLog:
    """The same for data-parallel replicas on one clock."""
    requests, pool = workload.requests(), workload.pool
    by_id = {timed.request.request_id: timed.request for timed in requests}
    schedulers = [workload.scheduler() for _ in range(workload.replicas)]
    balancer = Balancer(workload.arrivals(requests), schedulers)
    recorders = [Recorder(by_id, pool.block_size, window=pool.window) for _ in schedulers]
    env = simpy.Environment(initial_time=0)
    replays = [
        Replay(
            *(
                lane,
                scheduler,
                simulated_executor(workload, cost, by_id, beam_churn, fast_forward=fast_forward),
            ),
            recorder,
            until_ns=workload.traffic.until_ns,
            asynchronous=workload.batching.async_scheduling,
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


def simulate_metrics(
    workload: Workload, cost: CostModel, beam_churn: float | None = None, *, fast_forward: bool = True
) -> Prediction:
    """The free-running prediction in constant memory: only the trace and the requests under way are held."""
    compiled = compiled_replay(workload, cost, beam_churn)
    if compiled is not None:
        try:
            return predict_compiled(workload, compiled, cost.source)
        except BranchesPreemptedError:
            refuse_preempted_branches(workload)
    if workload.replicas > 1:
        log = _simulate_replicas(workload, cost, beam_churn, fast_forward)
        none = empty_log(log.block_size, log.capacity_slots, log.kv_bytes_per_token)
        return replace(prediction_of(log, cost.source), log=none)
    client = workload.beam_client(workload.drawn.genealogy(cost.source, workload.width, beam_churn))
    arrivals = workload.arrivals(workload.stream(), client)
    return predict(workload, arrivals, cost, beam_churn, fast_forward=fast_forward)


def predict(
    workload: Workload,
    arrivals: Arrivals,
    cost: CostModel,
    beam_churn: float | None = None,
    *,
    fast_forward: bool = True,
) -> Prediction:
    """The prediction for `arrivals` at the workload's pool, in constant memory."""
    live: dict[int, Request] = {}
    recorder = StreamingRecorder(live, workload.pool.block_size, cost.source.hull)
    scheduler = workload.scheduler()
    executor = simulated_executor(workload, cost, live, beam_churn, fast_forward=fast_forward)
    asynchronous, until_ns = workload.batching.async_scheduling, workload.traffic.until_ns
    Replay(
        *(arrivals, scheduler, executor, recorder),
        live=live,
        until_ns=until_ns,
        asynchronous=asynchronous,
    ).run()
    recorder.finish(scheduler.stats)
    return _folded(workload, recorder.fold, recorder.span_s)


def predict_compiled(workload: Workload, replay: CompiledReplay, source: CostSource) -> Prediction:
    """The prediction of a compiled replay, in constant memory."""
    fold = RunFold(source.hull)
    return _folded(workload, fold, replay.fold(fold))


def _folded(workload: Workload, fold: RunFold, span_s: float) -> Prediction:
    pool = workload.pool
    metrics = fold.metrics(span_s, pool.tokens, pool.slot_bytes)
    log = empty_log(pool.block_size, pool.tokens, pool.slot_bytes)
    return Prediction(metrics, fold.outcome, fold.extrapolated.section(), fold.totals, log)


def replay_recording(workload: Workload, recording: Recorder) -> tuple[RunLog, Recorder]:
    """Replay a measured run with its own step durations and results, and with prefix keys instead of token hashes.

    Every plan must equal the measured run's, block ids included; with groups, also where the bytes of their pools go.
    """
    executor = RecordedExecutor(recording.step_ns, recording.results)
    client = workload.beam_client(RecordedGenealogy(recording.parents))
    live: dict[int, Request] | None = {} if client else None
    return replay_workload(workload, workload.requests(), executor, keep_plans=True, client=client, live=live)


def simulated_executor(
    workload: Workload,
    cost: CostModel,
    requests: Mapping[int, Request],
    beam_churn: float | None,
    *,
    fast_forward: bool,
) -> SimulatedExecutor:
    """The executor of a prediction: seconds from `cost`, outcomes from `workload.drawn`; `requests` may grow."""
    drawn = workload.drawn
    return SimulatedExecutor(
        cost,
        requests,
        workload.pool.block_size,
        drawn.genealogy(cost.source, workload.width, beam_churn),
        fast_forward=fast_forward,
        survival=drawn.survival,
        acceptance=drawn.accepted(cost.source),
        window=workload.pool.window,
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


def with_ends(workload: Workload, engine: Executor, requests: Mapping[int, Request]) -> Executor:
    """The engine, with sampled branches that end as drawn where the workload draws their ends."""
    survival = workload.drawn.survival
    return PinnedEnds(engine, BranchEnds(survival, requests)) if survival else engine
