"""Branches that end early and drafts that are accepted: drawn as fitted, and priced for what they leave."""

import numpy as np
import pytest
from sim_cases import LinearCost, play, request

from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits, SpeculationMode
from engine.core.plan import Row
from engine.core.request import Request, Speculation
from engine.core.scheduling.commit import CommitReport
from engine.core.scheduling.scheduler import Scheduler
from harness.metrics.log import Outcome, RunLog
from harness.replay.arrivals import TimedRequest
from harness.replay.beams import BeamGenealogy
from harness.replay.branches import BranchSurvival, DraftAcceptance
from harness.replay.executors import SimulatedExecutor
from harness.replay.features import AT
from harness.replay.recorder import PlanRecording


def feature_rows(requests: list[TimedRequest]) -> tuple[np.ndarray, list[list[Row]]]:
    """Features of each step, and its rows."""
    recording, rows, live = PlanRecording(), [], {}
    executor = SimulatedExecutor(LinearCost(1e-3, 1e-5), live, 16, BeamGenealogy({}), fast_forward=False)
    scheduler = Scheduler(PagedManager(2000, 16), SchedulerLimits(512, 64))
    commit = scheduler.commit
    scheduler.commit = lambda plan, result: (rows.append(list(plan.rows)), commit(plan, result))[1]
    play(requests, scheduler, executor, recording, live=live)
    return recording.features, rows


def run(
    requests: list[TimedRequest],
    survival: BranchSurvival | None = None,
    acceptance: DraftAcceptance | None = None,
    reports: list[CommitReport] | None = None,
) -> tuple[RunLog, Scheduler]:
    live = {}
    executor = SimulatedExecutor(
        LinearCost(1e-3, 1e-5), live, 16, BeamGenealogy({}), survival=survival, acceptance=acceptance
    )
    scheduler = Scheduler(PagedManager(2000, 16), SchedulerLimits(512, 64))
    if reports is not None:
        commit = scheduler.commit
        scheduler.commit = lambda plan, result: (reports.append(commit(plan, result)), reports[-1])[1]
    log = play(requests, scheduler, executor, live=live)
    scheduler.manager.check()
    return log, scheduler


def test_branch_lengths_are_geometric_and_cut_at_the_limit() -> None:
    lengths = [BranchSurvival(0.05).length(rid, branch, 100) for rid in range(500) for branch in range(4)]
    assert np.mean([length == 1 for length in lengths]) == pytest.approx(0.05, abs=0.02)
    assert np.mean([length == 100 for length in lengths]) == pytest.approx(0.95**99, abs=0.01)


@pytest.mark.parametrize("hazard", [1e-17, 5e-324])
def test_a_hazard_too_small_to_tell_from_nothing_ends_nothing(hazard: float) -> None:
    assert BranchSurvival(hazard).length(1, 0, 500) == 500


@pytest.mark.parametrize("hazard", [0.0, 0.01, 0.2])
def test_the_fitted_hazard_is_the_one_that_drew_the_lengths(hazard: float) -> None:
    survival = BranchSurvival(hazard)
    lengths = [survival.length(rid, 0, 60) for rid in range(3000)]
    assert BranchSurvival.fitted(lengths, [60] * 3000).hazard == pytest.approx(hazard, rel=0.1, abs=1e-9)


def test_drawn_rows_are_the_sampled_rows_of_requests_that_sample() -> None:
    modes = [Decoding.sample, Decoding.greedy, Decoding.beam, Decoding.sample, Decoding.greedy]
    requests = [
        request(rid, 0.004 * rid, 40, 30, 3 if mode is not Decoding.greedy else 1, mode)
        for rid, mode in enumerate(modes)
    ]
    features, rows = feature_rows(requests)
    drawing = {rid for rid, mode in enumerate(modes) if mode is Decoding.sample}
    expected = [sum(row.samples and row.request_id in drawing for row in step) for step in rows]
    assert features[:, AT.drawn_rows].tolist() == expected
    assert 0 < sum(expected) < features[:, AT.sampled_rows].sum()


def test_beam_rows_count_to_sixteen_a_second_time() -> None:
    features, _ = feature_rows([request(rid, 0.0, 20, 12, 8, Decoding.beam) for rid in range(4)])
    rows, first = features[:, [AT.beam_rows, AT.beam_rows_to_16]].T
    assert rows.max() > 16
    assert first.tolist() == np.minimum(rows, 16).tolist()


def test_branches_that_end_leave_rows_and_blocks_to_the_others() -> None:
    requests = [request(rid, 0.001 * rid, 40, 80, 4, Decoding.sample) for rid in range(10)]
    whole, _ = run(requests)
    parted, _ = run(requests, BranchSurvival(0.03))
    assert (parted.requests["outcome"] == Outcome.FINISHED).all()
    expected = sum(
        BranchSurvival(0.03).length(rid, branch, 80) - 1 for rid in range(10) for branch in range(4)
    )
    assert parted.steps["query_tokens"].sum() - 10 * 40 == expected
    assert parted.steps["token"].max() < whole.steps["token"].max()


def test_a_hazard_of_nothing_changes_nothing() -> None:
    requests = [request(rid, 0.001 * rid, 40, 30, 3, Decoding.sample) for rid in range(5)]
    assert run(requests)[0].span_s == run(requests, BranchSurvival(0.0))[0].span_s


def drafting(rid: int, mode: SpeculationMode) -> TimedRequest:
    speculation = Speculation(4, mode)
    return TimedRequest(Request(rid, 40, 200, speculation=speculation), rid * 1_000_000)


@pytest.mark.parametrize("mode", SpeculationMode)
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_drafts_are_accepted_at_the_given_share(share: float, mode: SpeculationMode) -> None:
    requests = [drafting(rid, mode) for rid in range(12)]
    reports = list[CommitReport]()
    log, _ = run(requests, acceptance=DraftAcceptance(share), reports=reports)
    assert (log.requests["outcome"] == Outcome.FINISHED).all()
    steps = log.steps["sampled_rows"].sum() - 12
    expected = sum(share**tokens for tokens in range(5))  # of a step with four drafts
    assert 12 * 199 / steps == pytest.approx(expected, rel=0.1)
    accepted = sum(stats.accepted_tokens for report in reports for stats in report.stats.values())
    past = accepted - (12 * 199 - steps)  # those after the last token of a request, which vLLM counts too
    assert 0 <= past <= 12 * 4 if mode is SpeculationMode.whole else past == 0


def test_tokens_that_are_verified_together_have_no_gap_between_them() -> None:
    log, _ = run([drafting(0, SpeculationMode.lookahead)], acceptance=DraftAcceptance(1.0))
    assert log.itl_weight.sum() == 199
    assert log.itl_weight[log.itl_s == 0].sum() == pytest.approx(199 * 4 / 5, abs=4)


def test_acceptance_raises_throughput_by_the_tokens_of_a_step() -> None:
    slow, _ = run([drafting(0, SpeculationMode.lookahead)])
    fast, _ = run([drafting(0, SpeculationMode.lookahead)], acceptance=DraftAcceptance(1.0))
    assert slow.span_s / fast.span_s == pytest.approx(5, rel=0.1)


@pytest.mark.parametrize("share", [0.0, 0.35, 0.8, 1.0])
def test_the_fitted_acceptance_is_the_one_that_drew_the_drafts(share: float) -> None:
    model = DraftAcceptance(share)
    drafts = [1 + place % 5 for place in range(4000)]
    right = [model.accepted(7, place, most) for place, most in enumerate(drafts)]
    assert DraftAcceptance.fitted(drafts, right).share == pytest.approx(share, abs=0.02)
