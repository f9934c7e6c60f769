"""Users who wait, conversations, deadlines and refusals: what arrives when, and what becomes of the rest."""

from pathlib import Path

import numpy as np
import pytest
from sim_cases import LinearCost, replay, request

from engine.core.errors import CoreError
from engine.core.memory.paged import PagedManager
from engine.core.options import SchedulerLimits
from engine.core.request import Request
from harness.config.schema import ReplayMode, RunConfig
from harness.metrics.log import Outcome
from harness.metrics.record import PointRecord
from harness.metrics.verdict import judge
from harness.replay.arrivals import ClosedLoop, OpenLoop, Sessions, Turn, to_ns
from harness.report.study import Study
from harness.report.verdict_text import completeness
from harness.workload.point import resolve
from harness.workload.trace import pauses_ns, retimed


def plain(count: int, prompt: int = 20, output: int = 10) -> list[Request]:
    return [request(rid, 0, prompt, output).request for rid in range(count)]


def test_a_closed_loop_never_has_more_requests_under_way_than_users() -> None:
    users = ClosedLoop(plain(40), 40, users=3, pause_ns=[0] * 40)
    log, _ = replay([request(rid, 0, 20, 10) for rid in range(40)], users)
    assert (log.steps["running"] + log.steps["waiting"]).max() == 3
    assert (log.requests["outcome"] == Outcome.FINISHED).all()


def test_a_user_pauses_before_the_next_request() -> None:
    users = ClosedLoop(plain(3), 3, users=1, pause_ns=[0, to_ns(0.5), to_ns(2.0)])
    log, _ = replay([request(rid, 0, 20, 10) for rid in range(3)], users)
    gaps = log.requests["arrival_s"][1:] - log.requests["finish_s"][:-1]
    assert gaps.tolist() == pytest.approx([0.5, 2.0])


def test_a_closed_loop_without_pauses_keeps_the_engine_busy() -> None:
    users = ClosedLoop(plain(20), 20, users=2, pause_ns=[0] * 20)
    log, _ = replay([request(rid, 0, 20, 10) for rid in range(20)], users)
    assert log.steps["seconds"].sum() == pytest.approx(log.span_s)


def conversation() -> list[Turn]:
    return [
        Turn(request(0, 1.0, 20, 10)),
        Turn(request(1, 1.5, 40, 10), (0,), to_ns(3.0)),
        Turn(request(2, 9.0, 60, 10), (1,), to_ns(0.25)),
        Turn(request(3, 2.0, 10, 5)),
    ]


def test_a_turn_waits_for_its_parent_and_its_user() -> None:
    turns = conversation()
    log, _ = replay([turn.timed for turn in turns], Sessions(turns))
    rows = {int(rid): place for place, rid in enumerate(log.requests["request_id"])}
    arrival, finish = log.requests["arrival_s"], log.requests["finish_s"]
    assert arrival[rows[0]] == 1.0
    assert arrival[rows[1]] == pytest.approx(finish[rows[0]] + 3.0)
    assert arrival[rows[2]] == pytest.approx(finish[rows[1]] + 0.25)
    assert arrival[rows[3]] == 2.0


def test_a_turn_whose_parent_is_not_in_the_trace_arrives_at_its_recorded_time() -> None:
    turns = [turn for turn in conversation() if turn.timed.request.request_id != 0]
    log, _ = replay([turn.timed for turn in turns], Sessions(turns))
    assert log.requests["arrival_s"][0] == 1.5


def test_a_turn_waits_for_the_last_of_several() -> None:
    turns = [
        Turn(request(0, 0, 20, 2)),
        Turn(request(1, 0, 20, 50)),
        Turn(request(2, 0, 20, 2), (0, 1), to_ns(1)),
    ]
    log, _ = replay([turn.timed for turn in turns], Sessions(turns))
    assert log.requests["arrival_s"][2] == pytest.approx(log.requests["finish_s"][1] + 1)


def test_a_replay_that_stops_mid_session_names_what_did_not_finish_or_arrive() -> None:
    turns = conversation()
    log, _ = replay([turn.timed for turn in turns], Sessions(turns), until_s=1.005)
    assert len(log.requests["outcome"]) == 4
    assert (log.requests["outcome"] == Outcome.UNFINISHED).all()
    assert np.isnan(log.requests["arrival_s"]).sum() == 3
    assert log.steps["start_s"].max() < 1.005


@pytest.mark.parametrize("fast_forward", [True, False])
def test_no_step_begins_after_the_deadline(fast_forward: bool) -> None:
    log, _ = replay([request(0, 0, 20, 500)], until_s=0.0205, fast_forward=fast_forward)
    assert len(log.steps["step"]) == 21
    assert log.requests["outcome"].tolist() == [Outcome.UNFINISHED]


def test_a_pool_too_small_for_one_request_rejects_it_and_serves_the_others() -> None:
    requests = [request(0, 0, 20, 10), request(1, 0, 900, 10), request(2, 0, 20, 10)]
    log, _ = replay(requests, manager=PagedManager(10, 16))
    assert log.requests["outcome"].tolist() == [Outcome.FINISHED, Outcome.REJECTED, Outcome.FINISHED]
    assert np.isnan(log.requests["first_token_s"][1])


def test_a_rejected_request_does_not_stop_its_user() -> None:
    requests = [request(rid, 0, 900 if rid == 1 else 20, 5) for rid in range(4)]
    users = ClosedLoop((timed.request for timed in requests), 4, users=1, pause_ns=[0] * 4)
    log, _ = replay(requests, users, manager=PagedManager(10, 16))
    assert (log.requests["outcome"] == Outcome.FINISHED).sum() == 3


def test_the_turns_after_a_rejected_one_still_come() -> None:
    turns = [Turn(request(0, 0, 900, 5)), Turn(request(1, 0, 20, 5), (0,), to_ns(1))]
    log, _ = replay([turn.timed for turn in turns], Sessions(turns), manager=PagedManager(10, 16))
    assert log.requests["outcome"].tolist() == [Outcome.REJECTED, Outcome.FINISHED]


def test_a_request_without_output_is_refused_by_name() -> None:
    with pytest.raises(CoreError, match="request 3: output_tokens is 0"):
        request(3, 0, 10, 0)


def test_overload_queues_and_loses_nothing() -> None:
    requests = [request(rid, 0.0001 * rid, 64, 20) for rid in range(400)]
    log, _ = replay(requests, limits=SchedulerLimits(128, 4), manager=PagedManager(40, 16))
    assert (log.requests["outcome"] == Outcome.FINISHED).all()
    waited = log.requests["first_scheduled_s"] - log.requests["arrival_s"]
    assert waited[-1] > 50 * waited[: len(waited) // 50].mean()


def test_a_burst_of_ten_thousand_token_prompts_is_computed_chunk_by_chunk() -> None:
    requests = [request(rid, 1.0, 10_000, 3) for rid in range(6)]
    log, _ = replay(requests, manager=PagedManager(4000, 16), limits=SchedulerLimits(2048, 64))
    assert log.steps["query_tokens"].max() <= 2048
    assert log.steps["query_tokens"].sum() == 6 * 10_002


def test_little_s_law_holds_on_an_overloaded_run() -> None:
    """Mean requests in the system = throughput x mean time in it, over any run that begins and ends empty."""
    draw = np.random.default_rng(4)
    at = np.cumsum(draw.exponential(0.01, 300))
    requests = [request(rid, float(t), 60, 30) for rid, t in enumerate(at)]
    log, _ = replay(requests, cost=LinearCost(1e-3, 1e-5, 1e-7), manager=PagedManager(60, 16))
    seconds, starts = log.steps["seconds"], log.steps["start_s"]
    present = (log.steps["running"] + log.steps["waiting"]) @ seconds
    arrival = log.requests["arrival_s"]
    step = np.searchsorted(starts, arrival, "left") - 1
    ends = np.where(step < 0, 0, starts[step] + seconds[step])
    unseen = np.clip(ends - arrival, 0, None)[ends > arrival].sum()  # within the step they arrived in
    in_system = (log.requests["finish_s"] - arrival).sum()
    assert present + unseen == pytest.approx(in_system, rel=1e-9)


def test_every_token_of_every_finished_request_is_priced_exactly_once() -> None:
    """Work conservation: with a price per token alone, busy time is all requests' tokens and the recomputed ones."""
    requests = [request(rid, 0.002 * rid, 40, 30) for rid in range(30)]
    log, _ = replay(requests, cost=LinearCost(0, 1e-4), manager=PagedManager(30, 16))
    tokens = 30 * (40 + 29) + log.requests["recomputed_tokens"].sum()
    assert log.requests["preemptions"].sum() > 0
    assert log.steps["seconds"].sum() == pytest.approx(tokens * 1e-4, rel=1e-6)


def workload_config(mode: ReplayMode, requests: int = 400) -> RunConfig:
    config = RunConfig(measure=False)
    config.replay.mode = mode
    config.workload.num_requests, config.workload.request_rate = requests, 20.0
    config.cache.pool_tokens, config.workload.length_scale = 32_768, 0.1
    return config


@pytest.mark.parametrize(("mode", "variation"), [(ReplayMode.poisson, 1.0), (ReplayMode.gamma, 2.0)])
def test_drawn_arrivals_have_the_rate_and_the_irregularity_asked_for(
    mode: ReplayMode, variation: float
) -> None:
    trace = resolve(workload_config(mode, 4000)).trace
    gaps = np.diff([row.arrival_us for row in trace.requests]) / 1e6
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.1)
    assert "arrivals drawn anew" in trace.header.changes[-1]


def test_another_rate_than_asked_for_is_said() -> None:
    """32 requests at 20 a second came at 28.4: `run` had 3.6 times the time to first token of `capacity` there."""
    config = workload_config(ReplayMode.poisson, 32)
    trace = resolve(config).trace
    assert trace.mean_rate == pytest.approx(1.42 * 20, rel=0.01)
    said = "requests come at 1.42 times the rate asked for (workload.request_rate), as few arrivals are drawn, or some"
    assert trace.header.changes[-1].startswith(said)
    record = PointRecord(trace={"changes": trace.header.changes})
    study = Study(Path(), "", "", (record,))
    assert any(f"Of the trace: {said}" in line for line in completeness(study, judge([record])))
    for mode, count in ((ReplayMode.poisson, 400), (ReplayMode.trace, 32), (ReplayMode.closed, 32)):
        assert "times the rate" not in " ".join(resolve(workload_config(mode, count)).trace.header.changes)


def test_an_offline_batch_is_there_at_the_start() -> None:
    trace = resolve(workload_config(ReplayMode.offline)).trace
    assert {row.arrival_us for row in trace.requests} == {0}


def test_another_seed_draws_other_arrivals_and_the_same_seed_the_same() -> None:
    one, other = workload_config(ReplayMode.poisson, 20), workload_config(ReplayMode.poisson, 20)
    trace = resolve(one).trace
    assert retimed(trace, one).requests == retimed(trace, other).requests
    other.workload.seed = 1
    assert retimed(trace, one).requests != retimed(trace, other).requests


def test_pauses_have_the_mean_asked_for_and_each_its_own_draw() -> None:
    pauses = pauses_ns(10_000, 2.0, seed=3)
    assert np.mean(pauses) == pytest.approx(2e9, rel=0.05)
    assert pauses[:50] == pauses_ns(50, 2.0, seed=3)


def test_an_open_loop_holds_one_request_ahead() -> None:
    drawn: list[int] = []

    def source() -> object:
        for rid in range(5):
            drawn.append(rid)
            yield request(rid, rid, 10, 2)

    arrivals = OpenLoop(source(), 5)  # type: ignore[arg-type]
    arrivals.take(to_ns(1.0))
    assert drawn == [0, 1, 2]
