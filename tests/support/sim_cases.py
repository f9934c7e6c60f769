"""Small replays for the tests of the simulated side: a workload, a constant or linear price, one call to run them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.core.identity import KeyIdentity
from engine.core.memory.contiguous import ContiguousManager
from engine.core.memory.manager import KVCacheManager
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from harness.metrics.log import RunLog
from harness.replay.arrivals import Arrivals, OpenLoop, TimedRequest, to_ns
from harness.replay.beams import BeamGenealogy
from harness.replay.cost_model import Amount, CostModel, CostSource, Price
from harness.replay.executors import Executor, SimulatedExecutor
from harness.replay.features import AT, Sight
from harness.replay.folds import Hull, KeptLog, RunFold
from harness.replay.loop import Observer, Replay
from harness.replay.recorder import PlanRecording, Recorder

DECODE_KV, TOKENS, COPIED, VOIDED = [AT.decode_kv, AT.tokens, AT.copied_slots, AT.freed_slots]


@dataclass
class LinearCost:
    """`floor_s` a step, plus seconds per query token, per KV slot read, and per slot copied or voided."""

    floor_s: float = 1e-3
    token_s: float = 0.0
    kv_s: float = 0.0
    moved_s: float = 0.0
    source: CostSource = CostSource("test", "linear", "test")  # noqa: RUF009

    def price(self, features: Sequence[Amount]) -> Price:
        attention = self.kv_s * features[DECODE_KV]
        moved = self.moved_s * (features[COPIED] + features[VOIDED])
        return Price(self.floor_s + self.token_s * features[TOKENS] + attention + moved, attention)


def request(
    rid: int,
    at_s: float,
    prompt: int,
    output: int,
    width: int = 1,
    mode: Decoding = Decoding.greedy,
    shared: int = 0,
) -> TimedRequest:
    segments = [(7, shared), (None, prompt - shared)] if shared else [(None, prompt)]
    identity = KeyIdentity(rid, segments)
    return TimedRequest(Request(rid, prompt, output, width, mode, identity), to_ns(at_s))


def replay(
    requests: list[TimedRequest],
    arrivals: Arrivals | None = None,
    *,
    until_s: float | None = None,
    cost: CostModel | None = None,
    manager: KVCacheManager | None = None,
    limits: SchedulerLimits | None = None,
    fast_forward: bool = True,
    asynchronous: bool = False,
    window: Sight | None = None,
) -> tuple[RunLog, PlanRecording]:
    manager = manager or PagedManager(1000, 16)
    scheduler = Scheduler(manager, limits or SchedulerLimits(512, 64))
    live: dict[int, Request] = {}
    executor = SimulatedExecutor(
        cost or LinearCost(),
        live,
        manager.block_size,
        BeamGenealogy({4: 0.3}),
        fast_forward=fast_forward,
        window=window,
    )
    until_ns = None if until_s is None else to_ns(until_s)
    recording = PlanRecording()
    ahead = {"until_ns": until_ns, "asynchronous": asynchronous}
    return play(arrivals or requests, scheduler, executor, recording, live=live, **ahead), recording


def play(
    arrivals: Arrivals | list[TimedRequest],
    scheduler: Scheduler,
    executor: Executor,
    *observers: Observer,
    live: dict[int, Request],
    **options: Any,
) -> RunLog:
    """The log of a replay; the executor was made with `live`."""
    manager = scheduler.manager
    fold = KeptLog(manager.block_size, manager.num_blocks * manager.block_size, 1)
    recorder = Recorder(fold)
    Replay(arrivals, scheduler, executor, recorder, *observers, live=live, **options).run()
    recorder.close()
    return fold.log()


def stream(
    requests: list[TimedRequest],
    *,
    cost: LinearCost | None = None,
    manager: KVCacheManager | None = None,
    fast_forward: bool = True,
    hull: Hull | None = None,
) -> RunFold:
    """The same without records."""
    manager = manager or PagedManager(1000, 16)
    scheduler = Scheduler(manager, SchedulerLimits(512, 64))
    live: dict[int, Request] = {}
    fold = RunFold(hull or {})
    recorder, genealogy = Recorder(fold), BeamGenealogy({4: 0.3})
    executor = SimulatedExecutor(
        cost or LinearCost(), live, manager.block_size, genealogy, fast_forward=fast_forward
    )
    arrivals = OpenLoop(iter(requests), len(requests))
    Replay(arrivals, scheduler, executor, recorder, live=live).run()
    recorder.close()
    return fold


def fingerprint(log: RunLog) -> str:
    """A name for every byte of a log."""
    book = hashlib.sha256()
    for columns in (log.steps, log.requests):
        for name in columns:
            book.update(np.ascontiguousarray(columns[name]).tobytes())
    book.update(log.itl_s.tobytes() + log.itl_weight.tobytes())
    return book.hexdigest()


def contiguous(slots: int, longest: int) -> KVCacheManager:
    return ContiguousManager(slots, longest)
