from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_cases import LinearCost, fingerprint, play, replay, request
from tiers import tier

from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.plan import StepPlan
from engine.core.request import Request
from engine.core.scheduling.commit import RequestStats
from engine.core.scheduling.scheduler import Scheduler
from harness.metrics.log import Outcome
from harness.replay.arrivals import NEVER, TimedRequest
from harness.replay.beams import BeamGenealogy
from harness.replay.executors import RecordedExecutor, RecordingEndedError, SimulatedExecutor
from harness.replay.features import FeatureMeter
from harness.replay.loop import Observer, Replay, StepRecord
from harness.replay.recorder import PlanRecording, digests_differ


def test_a_lone_request_takes_the_sum_of_its_steps() -> None:
    log, _ = replay([request(0, 0.5, prompt=100, output=5)])
    assert log.requests["first_token_s"][0] == pytest.approx(0.501)
    assert log.requests["finish_s"][0] == pytest.approx(0.505)


def test_idle_time_is_not_stepped_through() -> None:
    log, _ = replay([request(0, 0, 10, 2), request(1, 1000.0, 10, 2)])
    assert len(log.steps["step"]) == 4
    assert log.span_s == pytest.approx(1000.002)


def test_an_arrival_at_the_very_end_of_a_step_joins_the_next() -> None:
    log, _ = replay([request(0, 0, 10, 4), request(1, 0.002, 10, 1)])
    assert log.requests["first_scheduled_s"][1] == pytest.approx(0.002)


@pytest.mark.parametrize(("asynchronous", "scheduled_s"), [(False, 0.003), (True, 0.004)])
def test_a_step_that_is_scheduled_ahead_sees_a_request_one_step_later(
    asynchronous: bool, scheduled_s: float
) -> None:
    """Steps of 1 ms. The request arrives in the third; the fourth was scheduled when the third began."""
    requests = [request(0, 0, 10, 9), request(1, 0.0025, 10, 1)]
    log, _ = replay(requests, asynchronous=asynchronous)
    assert log.requests["first_scheduled_s"][1] == pytest.approx(scheduled_s)


def test_an_idle_engine_that_schedules_ahead_serves_a_request_at_once() -> None:
    log, _ = replay([request(0, 0, 10, 2), request(1, 0.0015, 10, 1)], asynchronous=True)
    assert log.requests["first_scheduled_s"].tolist() == pytest.approx([0, 0.002])


def test_simultaneous_arrivals_share_their_first_step() -> None:
    log, _ = replay([request(rid, 1.0, 10, 2) for rid in range(5)])
    assert log.steps["admitted"].tolist() == [5, 0]


def test_every_generated_token_has_one_gap_but_the_first() -> None:
    log, _ = replay([request(rid, rid * 0.003, 20, 10 + rid) for rid in range(6)])
    assert log.itl_weight.sum() == sum(9 + rid for rid in range(6))


@pytest.mark.nightly
def test_a_constant_step_and_one_place_make_a_single_server_queue() -> None:
    """M/D/1: mean wait in queue = rho s / (2 (1 - rho)), Pollaczek and Khinchine; s is the service time."""
    draw = np.random.default_rng(1)
    service, rho = 0.004, 0.7
    arrivals = np.cumsum(draw.exponential(service / rho, tier(2_000, 20_000)))
    requests = [request(rid, float(at), 8, 4) for rid, at in enumerate(arrivals)]
    log, _ = replay(requests, limits=SchedulerLimits(512, 1))
    waits = log.requests["first_scheduled_s"] - log.requests["arrival_s"]
    expected = rho * service / (2 * (1 - rho))
    assert waits.mean() == pytest.approx(expected, rel=0.08)


def test_offline_time_is_the_sum_of_step_costs() -> None:
    log, _ = replay([request(rid, 0, 50, 20) for rid in range(30)], cost=LinearCost(1e-3, 1e-5, 1e-7))
    assert log.span_s == pytest.approx(log.steps["seconds"].sum())


def test_every_token_is_computed_exactly_once_without_preemption() -> None:
    log, _ = replay([request(rid, 0, 50 + rid, 20) for rid in range(30)])
    assert log.steps["query_tokens"].sum() == sum(50 + rid + 19 for rid in range(30))


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 30),  # ms after the previous one
        st.integers(1, 60),
        st.integers(1, 40),
        st.integers(2, 4),
        st.sampled_from(Decoding),
        st.integers(0, 30),
    ),
    min_size=1,
    max_size=10,
)


def test_the_same_replay_gives_the_same_record() -> None:
    requests = [request(rid, 0.001 * rid, 30, 20, 4, Decoding.beam) for rid in range(6)]
    assert fingerprint(replay(requests)[0]) == fingerprint(replay(requests)[0])


def test_a_beam_search_returns_one_sequence_and_parallel_samples_return_all() -> None:
    requests = [request(0, 0, 30, 20, 4, Decoding.beam), request(1, 0, 30, 20, 3, Decoding.sample)]
    log, _ = replay(requests)
    assert log.requests["generated"].tolist() == [80, 60]
    assert log.requests["returned"].tolist() == [20, 60]


def test_slot_states_sum_to_the_capacity_at_every_step() -> None:
    requests = [request(rid, 0.002 * rid, 40, 30, shared=20) for rid in range(20)]
    log, _ = replay(requests, manager=PagedManager(30, 16))
    states = sum(log.steps[name] for name in ("token", "cached", "reserved", "internal", "external", "free"))
    assert set(states.tolist()) == {480}


def test_preemptions_are_counted_and_what_they_recompute() -> None:
    log, _ = replay([request(rid, 0, 40, 60) for rid in range(8)], manager=PagedManager(30, 16))
    assert log.requests["preemptions"].sum() == log.steps["preempted"].sum() > 0
    extra = log.steps["query_tokens"].sum() - sum(40 + 59 for _ in range(8))
    assert log.requests["recomputed_tokens"].sum() == extra


def test_playing_a_recording_back_gives_the_same_plans() -> None:
    requests = [request(rid, 0.003 * rid, 30, 20, 3, Decoding.beam, 16) for rid in range(8)]
    _, first = replay(requests, manager=PagedManager(40, 16), fast_forward=False)
    again, live = PlanRecording(), {}
    executor = RecordedExecutor(first.step_ns, first.results, FeatureMeter(live, 16))
    Replay(
        requests, Scheduler(PagedManager(40, 16), SchedulerLimits(512, 64)), executor, again, live=live
    ).run()
    assert digests_differ(first.digests, again.digests) is None


def test_playing_a_recording_back_on_another_pool_is_noticed() -> None:
    requests = [request(rid, 0, 60, 60) for rid in range(8)]
    _, first = replay(requests, manager=PagedManager(100, 16), fast_forward=False)
    again, live = PlanRecording(), {}
    executor = RecordedExecutor(first.step_ns, first.results, FeatureMeter(live, 16))
    with pytest.raises(RecordingEndedError, match="the recording has"):
        Replay(
            requests, Scheduler(PagedManager(20, 16), SchedulerLimits(512, 64)), executor, again, live=live
        ).run()
    assert digests_differ(first.digests, again.digests) is not None


class NaiveGaps(Observer):
    """Every gap of every request, from who got a token in which step: what the recorder must come to."""

    def __init__(self) -> None:
        self.gaps: list[int] = []
        self._last: dict[int, int] = {}

    def committed(self, step: StepRecord) -> None:
        end_ns = step.start_ns + step.took_ns
        for request_id in step.report.emitted:
            if request_id in self._last:
                self.gaps.append(end_ns - self._last[request_id])
            self._last[request_id] = end_ns


@given(REQUESTS, st.integers(12, 60), st.integers(2, 60))
def test_gaps_are_those_of_every_token_one_by_one(rows: list, blocks: int, budget: int) -> None:
    """Under preemption and budgets that leave requests out: gaps are kept without looking at steady requests."""
    at, requests = 0, []
    for rid, (gap, prompt, output, width, mode, shared) in enumerate(rows):
        at += gap
        width = 1 if mode is Decoding.greedy else min(width, budget)
        mode = Decoding.greedy if width == 1 else mode
        requests.append(request(rid, at / 1000, prompt, output, width, mode, min(shared, prompt - 1)))
    naive, limits = NaiveGaps(), SchedulerLimits(budget, 12)
    fitting = [
        t for t in requests if Scheduler(PagedManager(blocks, 4), limits).never_fits(t.request) is None
    ]
    live: dict[int, Request] = {}
    executor = SimulatedExecutor(LinearCost(1e-3, 1e-5), live, 4, BeamGenealogy({}), fast_forward=False)
    log = play(fitting, Scheduler(PagedManager(blocks, 4), limits), executor, naive, live=live)
    found = np.repeat(np.rint(log.itl_s * 1e9).astype(int), log.itl_weight.astype(int))
    assert found.tolist() == sorted(naive.gaps)


class Told(Observer):
    """Every event of a replay, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def arrived(self, request: Request, at_ns: int) -> None:
        self.events.append(("arrived", request.request_id, at_ns))

    def planned(self, now_ns: int, plan: StepPlan) -> None:
        self.events.append(("planned", now_ns, plan.running, plan.rows[0].context_len))

    def committed(self, step: StepRecord) -> None:
        self.events.append(("committed", step.start_ns, step.report.finished))

    def ended(self, request: Request, outcome: Outcome, at_ns: int, stats: RequestStats) -> None:
        self.events.append(("ended", request.request_id, outcome.name.lower(), at_ns, stats.hit_tokens))


def told(requests: list[TimedRequest], until_s: float | None = None) -> list[tuple[Any, ...]]:
    live, seen = {}, Told()
    executor = SimulatedExecutor(LinearCost(1e-3), live, 16, BeamGenealogy({}), fast_forward=False)
    scheduler = Scheduler(PagedManager(10, 16), SchedulerLimits(512, 64))
    play(requests, scheduler, executor, seen, Observer(), live=live, until_ns=until_s and int(until_s * 1e9))
    return seen.events


def test_observers_are_told_of_every_request_and_step_in_order() -> None:
    ms = 1_000_000
    requests = [request(0, 0, 20, 2), request(1, 0.001, 400, 2), request(2, 0.0055, 20, 1)]
    assert told(requests) == [
        ("arrived", 0, 0),
        ("planned", 0, 1, 0),
        ("committed", 0, []),
        ("arrived", 1, ms),
        ("ended", 1, "rejected", ms, 0),
        ("planned", ms, 1, 20),
        ("committed", ms, [0]),
        ("ended", 0, "finished", 2 * ms, 0),
        ("arrived", 2, 5.5 * ms),
        ("planned", 5.5 * ms, 1, 0),
        ("committed", 5.5 * ms, [2]),
        ("ended", 2, "finished", 6.5 * ms, 0),
    ]


def test_requests_that_a_replay_leaves_end_as_unfinished() -> None:
    events = told([request(0, 0, 20, 9), request(1, 5, 20, 1)], until_s=0.002)
    assert events[-3:] == [
        ("arrived", 1, NEVER),
        ("ended", 0, "unfinished", NEVER, 0),
        ("ended", 1, "unfinished", NEVER, 0),
    ]


def test_an_event_that_nobody_wants_calls_nobody() -> None:
    live: dict[int, Request] = {}
    executor = SimulatedExecutor(LinearCost(1e-3), live, 16, BeamGenealogy({}), fast_forward=False)
    executor.unclocked = lambda look: pytest.fail("nobody looks")  # type: ignore[method-assign]
    play(
        [request(0, 0, 20, 2)],
        Scheduler(PagedManager(10, 16), SchedulerLimits()),
        executor,
        Observer(),
        live=live,
    )
