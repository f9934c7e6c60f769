"""The predicted side of a point, and the playback of a measured one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.request import Request
from harness.metrics import compute_metrics
from harness.metrics.log import Outcome, RunLog, empty_log
from harness.metrics.totals import Totals, as_floats, step_totals
from harness.point.chance import simulated_executor
from harness.point.compiled import compiled_replay
from harness.point.workload import Workload
from harness.sim.arrivals import Arrivals, TimedRequest
from harness.sim.compiled.replay import CompiledReplay
from harness.sim.cost import CostModel, CostSource
from harness.sim.executors import Executor, RecordedExecutor
from harness.sim.folding import RunFold
from harness.sim.hull import extrapolated
from harness.sim.recorder import Recorder
from harness.sim.replay import Progress, Replay
from harness.sim.streaming import StreamingRecorder


def play(
    workload: Workload,
    requests: Sequence[TimedRequest],
    executor: Executor,
    *,
    keep_plans: bool = False,
    progress: Progress | None = None,
) -> tuple[RunLog, Recorder]:
    """Replay `requests` through a fresh scheduler and pool."""
    by_id = {timed.request.request_id: timed.request for timed in requests}
    recorder = Recorder(by_id, workload.pool.block_size, keep_plans=keep_plans)
    scheduler = workload.scheduler()
    arrivals = workload.release.arrivals(workload.trace.requests, requests)
    Replay(arrivals, scheduler, executor, recorder, progress, until_ns=workload.release.until_ns).run()
    return recorder.log(scheduler.stats, workload.pool.tokens, workload.pool.kv_bytes_per_token), recorder


def simulate(
    workload: Workload, cost: CostModel, beam_churn: float | None, *, fast_forward: bool = True
) -> RunLog:
    """The free-running prediction. `beam_churn` None takes the calibrated one."""
    compiled = compiled_replay(workload, cost)
    if compiled is not None:
        return compiled.log()
    requests = workload.requests()
    by_id = {timed.request.request_id: timed.request for timed in requests}
    executor = simulated_executor(workload, cost, by_id, beam_churn, fast_forward=fast_forward)
    return play(workload, requests, executor)[0]


@dataclass(frozen=True)
class Prediction:
    """What a simulation came to; `log` has its rows, and is empty where they were not kept."""

    metrics: dict[str, float]
    outcome: dict[str, int]
    extrapolated: dict[str, Any] | None
    totals: Totals
    log: RunLog


def prediction_of(log: RunLog, source: CostSource) -> Prediction:
    """The same from a log that was kept."""
    outcomes = log.requests["outcome"]
    counts = {outcome.name.lower(): int((outcomes == outcome).sum()) for outcome in Outcome}
    steps = as_floats(log.steps)
    return Prediction(compute_metrics(log), counts, extrapolated(source, log.steps), step_totals(steps), log)


def simulate_metrics(
    workload: Workload, cost: CostModel, beam_churn: float | None = None, *, fast_forward: bool = True
) -> Prediction:
    """The free-running prediction in constant memory: beside the trace, only requests under way are held."""
    compiled = compiled_replay(workload, cost)
    if compiled is not None:
        return predict_compiled(workload, compiled, cost.source)
    arrivals = workload.release.arrivals(workload.trace.requests, workload.stream())
    return predict(workload, arrivals, cost, beam_churn, fast_forward=fast_forward)


def predict(
    workload: Workload,
    arrivals: Arrivals,
    cost: CostModel,
    beam_churn: float | None = None,
    *,
    fast_forward: bool = True,
) -> Prediction:
    """The same of whatever arrives at the workload's pool."""
    live: dict[int, Request] = {}
    recorder = StreamingRecorder(live, workload.pool.block_size, cost.source.hull)
    scheduler = workload.scheduler()
    executor = simulated_executor(workload, cost, live, beam_churn, fast_forward=fast_forward)
    until_ns = workload.release.until_ns
    Replay(arrivals, scheduler, executor, recorder, live=live, until_ns=until_ns, forget=True).run()
    recorder.finish(scheduler.stats)
    return _folded(workload, recorder.fold, recorder.span_s)


def predict_compiled(workload: Workload, replay: CompiledReplay, source: CostSource) -> Prediction:
    """The same of a compiled replay."""
    fold = RunFold(source.hull)
    return _folded(workload, fold, replay.fold(fold))


def _folded(workload: Workload, fold: RunFold, span_s: float) -> Prediction:
    pool = workload.pool
    metrics = fold.metrics(span_s, pool.tokens, pool.kv_bytes_per_token)
    log = empty_log(pool.block_size, pool.tokens, pool.kv_bytes_per_token)
    return Prediction(metrics, fold.outcome, fold.extrapolated.section(), fold.totals, log)


def play_back(workload: Workload, recording: Recorder) -> Recorder:
    """Run the policy again on a measured run's durations and answers, with blocks named by keys instead of tokens.

    Every plan must come out the same, block ids included.
    """
    executor = RecordedExecutor(recording.step_ns, recording.results)
    _, recorder = play(workload, workload.requests(), executor, keep_plans=True)
    return recorder
