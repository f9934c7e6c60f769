"""Over every policy and every way of arriving: fast-forward changes no record, and a recording plays back."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_cases import LinearCost, fingerprint, play, request

from engine.core.memory.contiguous import ContiguousManager
from engine.core.memory.manager import KVCacheManager
from engine.core.memory.paged import PagedManager
from engine.core.options import (
    Decoding,
    Placement,
    Preemption,
    Reservation,
    Retention,
    SchedulerLimits,
    Scheduling,
)
from engine.core.scheduling.scheduler import Scheduler
from harness.metrics.log import RunLog
from harness.replay.arrivals import Arrivals, ClosedLoop, OpenLoop, Sessions, TimedRequest, Turn
from harness.replay.beams import BeamGenealogy
from harness.replay.executors import RecordedExecutor, SimulatedExecutor
from harness.replay.features import FastForwardFeatures, FeatureMeter
from harness.replay.loop import Replay
from harness.replay.recorder import PlanRecording, digests_differ

COST = LinearCost(1e-3, 1e-5, 1e-6, 1e-7)
LONGEST = 100

MANAGERS: dict[str, Callable[[], KVCacheManager]] = {
    "paged": lambda: PagedManager(40, 8),
    "paged, single slots": lambda: PagedManager(320, 1),
    "paged, no retention": lambda: PagedManager(40, 8, retention=Retention.none),
    "paged, deduplicated": lambda: PagedManager(40, 8, deduplicate=True),
    "paged, copy at fork": lambda: PagedManager(60, 8, copy_at_fork=True),
    "paged, host": lambda: PagedManager(40, 8, host_blocks=60),
    "paged, no cache": lambda: PagedManager(80, 4, prefix_caching=False),
    "contiguous, max": lambda: ContiguousManager(640, LONGEST),
    "contiguous, pow2": lambda: ContiguousManager(640, LONGEST, Reservation.pow2, Placement.buddy),
    "contiguous, oracle": lambda: ContiguousManager(640, LONGEST, Reservation.oracle, Placement.buddy),
}
LIMITS = st.builds(
    SchedulerLimits,
    max_batched_tokens=st.sampled_from([64, 128, 512]),
    max_running=st.sampled_from([4, 8, 32]),
    max_model_len=st.just(LONGEST),
    watermark=st.sampled_from([0.0, 0.1]),
    policy=st.sampled_from(Scheduling),
    preemption=st.sampled_from(Preemption),
    long_prefill_tokens=st.sampled_from([None, 16]),
    admit_whole_prompt=st.booleans(),
    static_batch=st.booleans(),
    mixed_steps=st.booleans(),
)
ROWS = st.lists(
    st.tuples(
        st.integers(0, 30),  # ms after the previous one
        st.integers(1, 60),
        st.integers(1, 40),
        st.integers(2, 4),
        st.sampled_from(Decoding),
        st.integers(0, 30),
    ),
    min_size=1,
    max_size=8,
)


@dataclass(frozen=True)
class Case:
    requests: list[TimedRequest]
    manager: str
    limits: SchedulerLimits
    arriving: str

    def arrivals(self) -> Arrivals:
        requests, count = self.requests, len(self.requests)
        if self.arriving == "users":
            plain = (timed.request for timed in requests)
            return ClosedLoop(plain, count, 2, [3_000_000 * place for place in range(count)])
        if self.arriving == "sessions":
            places = enumerate(requests)
            return Sessions([Turn(t, (place - 2,) if place > 1 else (), 2_000_000) for place, t in places])
        return OpenLoop(requests, count)

    def play(self, *, fast_forward: bool) -> tuple[RunLog, PlanRecording]:
        manager, recording, live = MANAGERS[self.manager](), PlanRecording(), {}
        executor = SimulatedExecutor(
            COST, live, manager.block_size, BeamGenealogy({4: 0.3}), fast_forward=fast_forward
        )
        scheduler = Scheduler(manager, self.limits)
        ahead = self.arriving == "ahead"
        arrivals = self.arrivals()
        return play(arrivals, scheduler, executor, recording, live=live, asynchronous=ahead), recording


def case(rows: list, manager: str, limits: SchedulerLimits, arriving: str) -> Case:
    at, requests = 0, []
    for rid, (gap, prompt, output, width, mode, shared) in enumerate(rows):
        at += gap
        width = 1 if mode is Decoding.greedy else width
        requests.append(request(rid, at / 1000, prompt, output, width, mode, min(shared, prompt - 1)))
    return Case(requests, manager, limits, arriving)


CASES = st.builds(
    case,
    ROWS,
    st.sampled_from(sorted(MANAGERS)),
    LIMITS,
    st.sampled_from(["open", "ahead", "users", "sessions"]),
)


@given(CASES)
def test_fast_forward_changes_no_record_under_any_policy(chosen: Case) -> None:
    together, single = (chosen.play(fast_forward=together)[0] for together in (True, False))
    assert fingerprint(together) == fingerprint(single)


@pytest.mark.nightly
@given(CASES)
def test_a_recording_plays_back_to_the_same_plans_under_any_policy(chosen: Case) -> None:
    _, first = chosen.play(fast_forward=False)
    again, live, manager = PlanRecording(), {}, MANAGERS[chosen.manager]()
    executor = RecordedExecutor(first.step_ns, first.results, FeatureMeter(live, manager.block_size))
    scheduler = Scheduler(manager, chosen.limits)
    ahead = chosen.arriving == "ahead"
    Replay(chosen.arrivals(), scheduler, executor, again, live=live, asynchronous=ahead).run()
    assert digests_differ(first.digests, again.digests) is None


def test_a_planted_difference_between_fast_forward_and_single_steps_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [(5, 30, 40, 2, Decoding.greedy, 0)] * 3
    chosen = case(rows, "paged", SchedulerLimits(512, 32, max_model_len=LONGEST), "open")
    right = fingerprint(chosen.play(fast_forward=True)[0])
    assert right == fingerprint(chosen.play(fast_forward=False)[0])
    begin = FastForwardFeatures.__init__

    def one_row_too_many(self: FastForwardFeatures, *given: Any) -> None:
        begin(self, *given)
        self._rows += 1

    monkeypatch.setattr(FastForwardFeatures, "__init__", one_row_too_many)
    assert fingerprint(chosen.play(fast_forward=True)[0]) != right


SCRIPT = """
import json, sys
sys.path[:0] = [{tests!r}]
from test_fast_forward import SchedulerLimits, Decoding, case, fingerprint
rows = [(4, 20 + 3 * n, 5 + 4 * n, 3, list(Decoding)[n % 3], 8) for n in range(9)]
limits = SchedulerLimits(128, 8, max_model_len=100)
print(json.dumps([fingerprint(case(rows, name, limits, "open").play(fast_forward=True)[0])
                  for name in ("paged", "contiguous, pow2")]))
"""


@pytest.mark.nightly
def test_the_same_seed_gives_the_same_bytes_in_every_process_and_hash_seed() -> None:
    here = Path(__file__).resolve()
    script = SCRIPT.format(tests=str(here.parent)) + "\n"
    found = set()
    for seed in ("0", "12345"):
        path = os.pathsep.join([str(here.parents[2] / "support"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        found.add(tuple(json.loads(done.stdout)))
    assert len(found) == 1
