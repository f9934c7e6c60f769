"""How beams coalesce: the model draws what was fitted, and recorded parents come back exactly."""

import numpy as np
import pytest
from sim_cases import LinearCost, replay, request
from tiers import cases

from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.scheduling.scheduler import Scheduler
from harness.replay.beams import (
    EVEN,
    BeamGenealogy,
    Choices,
    Genealogy,
    RecordedGenealogy,
    choices_of_run,
    churn_of_run,
    evenness_of_run,
)
from harness.replay.executors import SimulatedExecutor
from harness.replay.loop import Replay
from harness.replay.recorder import PlanRecording


def lineages(choices: Choices, width: int) -> list[int]:
    """Of the `width` beams before the first of `choices`, how many have descendants after 0, 1, 2 … selections."""
    origin, alive = list(range(width)), [width]
    for parents in choices:
        origin = [origin[parent] for parent in parents]
        alive.append(len(set(origin)))
    return alive


def drawn_choices(genealogy: Genealogy, request_id: int, width: int, steps: int) -> list[list[int]]:
    """Selections drawn from a model, in the format of recorded ones."""
    return [genealogy.parents(request_id, generated, width) for generated in range(1, steps + 1)]


@cases("evenness", [0.05, 0.5, 4.0], day=2)
@pytest.mark.parametrize("width", [4, 8])
def test_the_fit_recovers_the_process_that_drew_the_parents(width: int, evenness: float) -> None:
    model = BeamGenealogy({width: 0.5}, evenness={width: evenness})
    choices = [parents for rid in range(60) for parents in drawn_choices(model, rid, width, 100)]
    assert churn_of_run(width, [len(set(parents)) for parents in choices]) == pytest.approx(0.5, abs=0.01)
    assert np.log(evenness_of_run(choices)) == pytest.approx(np.log(evenness), abs=0.5)


def test_places_shared_out_evenly_are_recognised() -> None:
    model = BeamGenealogy({8: 0.5})
    choices = [parents for rid in range(60) for parents in drawn_choices(model, rid, 8, 100)]
    assert evenness_of_run(choices) > 10


def test_a_fitted_process_loses_lineages_as_the_recorded_one_does() -> None:
    """The survival curve is not what was fitted: it tests the model's form."""
    truth = BeamGenealogy({6: 0.45}, seed=1, evenness={6: 0.3})
    recorded = [drawn_choices(truth, rid, 6, 12) for rid in range(400)]
    flat = [parents for choices in recorded for parents in choices]
    churn = churn_of_run(6, [len(set(parents)) for parents in flat])
    fitted = BeamGenealogy({6: churn}, seed=2, evenness={6: evenness_of_run(flat)})
    drawn = [drawn_choices(fitted, rid, 6, 12) for rid in range(400)]
    curves = [np.mean([lineages(choices, 6) for choices in side], axis=0) for side in (recorded, drawn)]
    assert curves[0][0] == 6
    assert curves[0][-1] < 1.6
    assert curves[1] == pytest.approx(curves[0], abs=0.15)


def test_uneven_shares_make_lineages_die_sooner() -> None:
    def left(evenness: float) -> float:
        model = BeamGenealogy({8: 0.4}, evenness={8: evenness})
        return float(np.mean([lineages(drawn_choices(model, rid, 8, 4), 8)[-1] for rid in range(300)]))

    assert left(0.05) < left(EVEN) - 0.3


def test_copies_follow_from_the_churn() -> None:
    requests = [request(rid, 0.001 * rid, 33, 200, 4, Decoding.beam) for rid in range(8)]
    log, recorder = replay(requests, manager=PagedManager(2000, 16), fast_forward=False)
    choices = [parents for choices in choices_of_run(recorder.parents) for parents in choices]
    churn = churn_of_run(4, [len(set(parents)) for parents in choices])
    per_token = log.steps["copies"].sum() / (8 * 200 * 4)
    # of n children of a parent n - 1 copy its last block, unless that has just been filled
    assert per_token == pytest.approx(churn * (16 - 1) / 16, rel=0.05)


def test_recorded_parents_are_replayed_exactly() -> None:
    requests = [request(rid, 0.003 * rid, 30, 20, 3, Decoding.beam, 16) for rid in range(8)]
    _, first = replay(requests, manager=PagedManager(60, 16), fast_forward=False)
    again, live = PlanRecording(), {}
    genealogy = RecordedGenealogy(first.parents)
    executor = SimulatedExecutor(LinearCost(), live, 16, genealogy, fast_forward=False)
    scheduler = Scheduler(PagedManager(60, 16), SchedulerLimits(512, 64))
    Replay(requests, scheduler, executor, again, live=live).run()
    assert again.parents == first.parents
    assert again.digests == first.digests
