"""Random workloads against the brute-force slot model: every read finds its token, every invariant holds each step."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from slot_model import SlotModel

from engine.core.errors import NeverFitsError
from engine.core.identity import TokenIdentity
from engine.core.memory.contiguous import ContiguousManager
from engine.core.memory.manager import KVCacheManager
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class Arrival:
    shared: int  # leading tokens that every request has in common
    unique: int
    output: int
    width: int
    mode: Decoding
    delay: int  # steps before it arrives


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        shared=st.integers(0, 24),
        unique=st.integers(1, 20),
        output=st.integers(1, 24),
        width=st.integers(2, 4),
        mode=st.sampled_from(Decoding),
        delay=st.integers(0, 6),
    ),
    min_size=1,
    max_size=8,
)


def drive(
    manager: KVCacheManager, arrivals: list[Arrival], *, budget: int, chunked: bool = True
) -> SlotModel:
    model = SlotModel(Scheduler(manager, SchedulerLimits(budget, 8, chunked_prefill=chunked)))
    accepted = 0
    for rid, arrival in enumerate(arrivals):
        for _ in range(arrival.delay):
            if model.scheduler.has_work:
                model.step()
        width = 1 if arrival.mode is Decoding.greedy else arrival.width
        prompt = [*range(arrival.shared), *range(1000 * (rid + 1), 1000 * (rid + 1) + arrival.unique)]
        identity = TokenIdentity(rid, np.array(prompt))
        try:
            model.submit(Request(rid, len(prompt), arrival.output, width, arrival.mode, identity), prompt)
            accepted += 1
        except NeverFitsError:
            continue
    model.run()
    assert len(model.finished) == accepted
    return model


@given(
    ARRIVALS,
    st.sampled_from([1, 4, 8]),
    st.integers(10, 40),
    st.integers(5, 40),
    st.booleans(),
    st.booleans(),
)
def test_paged_runs_read_what_they_wrote_and_leave_nothing(
    arrivals: list[Arrival], size: int, blocks: int, budget: int, caching: bool, chunked: bool
) -> None:
    model = drive(
        PagedManager(blocks, size, prefix_caching=caching), arrivals, budget=budget, chunked=chunked
    )
    usage = model.scheduler.manager.usage(None)
    assert (usage.token, usage.reserved, usage.internal) == (0, 0, 0)
    assert usage.cached + usage.free == blocks * size


@given(ARRIVALS, st.integers(80, 300), st.integers(5, 40))
def test_contiguous_runs_read_what_they_wrote_and_leave_nothing(
    arrivals: list[Arrival], slots: int, budget: int
) -> None:
    model = drive(ContiguousManager(slots, 70), arrivals, budget=budget)
    assert model.scheduler.manager.usage(None).free == slots
    assert not any(plan.preempted for plan in model.plans)


def busy_workload() -> list[Arrival]:
    """Sharing, preemption, eviction, forks and beams in one short run."""
    modes = [Decoding.greedy, Decoding.beam, Decoding.greedy, Decoding.sample]
    return [Arrival(10, 3 + i, 18, 3, modes[i % 4], i % 3) for i in range(12)]


def run_busy() -> None:
    drive(PagedManager(26, 4), busy_workload(), budget=24)


def test_the_busy_workload_passes_without_a_planted_bug() -> None:
    run_busy()
