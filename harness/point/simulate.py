"""The predicted side of a point, and the playback of a measured one."""

from collections.abc import Mapping, Sequence

from harness.metrics.log import RunLog
from harness.point.workload import Workload
from harness.sim.cost import CostModel
from harness.sim.executors import Executor, RecordedExecutor, SimulatedExecutor
from harness.sim.genealogy import BeamGenealogy
from harness.sim.recorder import Recorder
from harness.sim.replay import Progress, Replay, TimedRequest


def play(
    workload: Workload,
    requests: Sequence[TimedRequest],
    executor: Executor,
    *,
    keep_plans: bool = False,
    progress: Progress | None = None,
) -> tuple[RunLog, Recorder]:
    """Replay `requests` through a fresh scheduler and pool."""
    scheduler = workload.scheduler()
    by_id = {timed.request.request_id: timed.request for timed in requests}
    recorder = Recorder(by_id, workload.pool.block_size, keep_plans=keep_plans)
    Replay(requests, scheduler, executor, recorder, progress).run()
    return recorder.log(scheduler.stats, workload.pool.tokens, workload.pool.kv_bytes_per_token), recorder


def simulate(
    workload: Workload, cost: CostModel, beam_churn: float | None, *, fast_forward: bool = True
) -> RunLog:
    """The free-running prediction. `beam_churn` None takes the calibrated one."""
    requests = workload.requests()
    by_id = {timed.request.request_id: timed.request for timed in requests}
    churn = cost.source.beam_churn if beam_churn is None else {workload.width: beam_churn}
    executor = SimulatedExecutor(
        cost, by_id, workload.pool.block_size, BeamGenealogy(churn), fast_forward=fast_forward
    )
    log, _ = play(workload, requests, executor)
    return log


def play_back(workload: Workload, recording: Recorder) -> Recorder:
    """Run the policy again on a measured run's durations and parents, with blocks named by keys instead of tokens.

    Every plan must come out the same, block ids included.
    """
    parents: Sequence[Mapping[int, Sequence[int]]] = recording.parents
    executor = RecordedExecutor(recording.step_ns, parents)
    _, recorder = play(workload, workload.requests(), executor, keep_plans=True)
    return recorder
