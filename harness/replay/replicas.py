"""Data-parallel replicas of one engine behind one queue, balanced as vLLM 0.32 and 0.33 balance them.

Source: `DPLBAsyncMPClient.get_core_engine_for_request` in vllm/v1/engine/core_client.py. A request goes to the replica
with the lowest score (`ReplicaLoad`); of equals to the first of a round, which begins one replica further for each
request. The counts are refreshed every 100 ms at most; between, one API server counts each request that it sent as
waiting. A replica keeps its own pool, and never gives a request away.

Replicas of a mixture of experts run in lockstep: their experts lie on the devices of all, so that each layer waits for
the slowest. A replica without a request runs along on a dummy batch (`DPEngineCoreProc` in vllm/v1/engine/core.py).

Not modelled: several API servers, requests that end between two refreshes, of which vLLM knows some at once, and
tokens by which it pads smaller batches to the largest in lockstep.
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import simpy

from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from harness.metrics.log import Column, RunLog
from harness.replay.arrivals import Arrivals, TimedRequest
from harness.replay.loop import Replay

REFRESH_NS = 100_000_000
"""How old the counts may be: vLLM's coordinator publishes them at most every 100 ms."""
_EASY, _PRESSURE = 0.5, 6.0


class ReplicaLoad(NamedTuple):
    """What the API server knows of a replica: its requests there, those of them that wait, and the use of KV blocks."""

    requests: int  # that have not ended, seen by the scheduler or not
    waiting: int
    usage: float  # 0 to 1

    @property
    def score(self) -> float:
        """The lowest gets the next request. Where more than half of the blocks are in use, a queue drains slowly."""
        return self.requests + self.waiting * _PRESSURE * max(0.0, self.usage - _EASY)


class ReplicaLoads:
    """The loads of all replicas in rank order, as they were read last (`of`), with what was sent since."""

    def __init__(self) -> None:
        self.of: list[ReplicaLoad] = []
        self._first = 0

    def choose(self) -> int:
        """The replica that gets the next request, which counts there as waiting from now on."""
        first, count = self._first, len(self.of)
        best = min(range(first - count, first), key=lambda each: self.of[each].score) % count
        requests, waiting, usage = self.of[best]
        self.of[best], self._first = ReplicaLoad(requests + 1, waiting + 1, usage), (first + 1) % count
        return best


class Balancer:
    """Takes requests from `arrivals`, which must be an open loop, and puts each into the lane of one replica."""

    def __init__(self, arrivals: Arrivals, schedulers: Sequence[Scheduler]) -> None:
        self.arrivals = arrivals
        self._schedulers, self._loads = schedulers, ReplicaLoads()
        self.lanes = [Lane(self) for _ in schedulers]
        self._refresh_ns = 0

    def route(self, now_ns: int) -> None:
        """Put the requests that have arrived by now into the lanes."""
        for timed in self.arrivals.take(now_ns):
            if timed.arrival_ns >= self._refresh_ns:
                self._loads.of = list(map(_load, self._schedulers, self.lanes))
                self._refresh_ns = timed.arrival_ns + REFRESH_NS
            self.lanes[self._loads.choose()].queue.append(timed)


def _load(scheduler: Scheduler, lane: "Lane") -> ReplicaLoad:
    use, waiting = scheduler.manager.usage(None), len(scheduler.waiting) + len(scheduler.swapped)
    requests = waiting + len(scheduler.running) + len(lane.queue)
    return ReplicaLoad(requests, waiting, 1 - (use.free + use.cached + use.external) / use.capacity)


class Lane:
    """The requests of one replica, as a source of arrivals."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self.queue: deque[TimedRequest] = deque()
        self.total = balancer.arrivals.total

    def next_ns(self) -> int | None:
        """When the next request may come: the first of the lane, or the next of all, whose lane is not known yet."""
        return self.queue[0].arrival_ns if self.queue else self._balancer.arrivals.next_ns()

    def take(self, now_ns: int) -> list[TimedRequest]:
        """The lane's requests that have arrived by now."""
        self._balancer.route(now_ns)
        due: list[TimedRequest] = []
        while self.queue and self.queue[0].arrival_ns <= now_ns:
            due.append(self.queue.popleft())
        return due

    def ended(self, request_id: int, now_ns: int) -> None:
        """A request of the lane ended."""
        self._balancer.arrivals.ended(request_id, now_ns)

    def left(self) -> list[Request]:
        """The requests that the replica did not take; the first lane that is asked has those without a lane too."""
        return [*(timed.request for timed in self.queue), *self._balancer.arrivals.left()]


def run_together(replays: Sequence[Replay], env: simpy.Environment) -> None:
    """Run replays that share `env` until all have ended."""
    for each in replays:
        each.start()
    env.run()
    for each in replays:
        each.close()


def run_in_lockstep(
    replays: Sequence[Replay], env: simpy.Environment, tell: Callable[[int | None], None]
) -> None:
    """Run replays of predictions that share `env` step by step, each step as long as that of the slowest.

    Their executors take one step at a time. `tell` is told the tokens of all before a step is priced, None at the end.
    """

    def together() -> Generator[Any, Any, None]:
        while not replays[0].is_over:
            busy = [each for each in replays if each.has_work()]
            if busy:
                yield env.timeout(_step_together(busy, tell))
                continue
            due = min((ns for each in replays if (ns := each.next_ns()) is not None), default=None)
            if due is None:
                return
            yield env.timeout(max(0, due - env.now))

    env.process(together())
    env.run()
    tell(None)
    for each in replays:
        each.close()


def _step_together(busy: Sequence[Replay], tell: Callable[[int | None], None]) -> int:
    """One step of all that have work; its duration in ns."""
    plans = [each.plan() for each in busy]
    tell(sum(plan.steady + sum(row.query_len for row in plan.other_rows) for plan in plans))
    results = [each.execute(plan) for each, plan in zip(busy, plans, strict=True)]
    timings = [each.priced() for each in busy]
    longest = max(timing.ns[0] for timing in timings)
    for each, plan, result, timing in zip(busy, plans, results, timings, strict=True):
        each.commit(plan, result, timing._replace(ns=[longest]))
    return longest


def merged(logs: Sequence[RunLog]) -> RunLog:
    """The logs of the replicas as one: steps in the order in which they began, requests in that of their arrival.

    `capacity_slots` stays that of one replica, as the slot states of each step are.
    """
    begin, arrive = [log.steps["start_s"] for log in logs], [log.requests["arrival_s"] for log in logs]
    steps = _sorted([log.steps for log in logs], begin)
    values, inverse = np.unique(np.concatenate([log.itl_s for log in logs]), return_inverse=True)
    weights = np.concatenate([log.itl_weight for log in logs])
    return replace(
        logs[0],
        steps={**steps, "step": np.arange(len(steps["step"]))},
        requests=_sorted([log.requests for log in logs], arrive),
        itl_s=values,
        itl_weight=np.bincount(inverse, weights=weights, minlength=len(values)).astype(np.float64),
        span_s=max(log.span_s for log in logs),
        replicas=len(logs),
        waste=_sorted([log.waste for log in logs if log.waste is not None], begin) or None,
        tiers={name: sum((log.tiers or {})[name] for log in logs) for name in logs[0].tiers or ()},
    )


def _sorted(tables: Sequence[Mapping[str, Column]], times: Sequence[Column]) -> dict[str, Column]:
    order, names = np.argsort(np.concatenate(times), kind="stable"), tables[0] if tables else ()
    return {name: np.concatenate([table[name] for table in tables])[order] for name in names}
