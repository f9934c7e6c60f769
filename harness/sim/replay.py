"""The replay: requests arrive, steps run. One simpy model, whatever the executor.

Every arrival and every engine step (or fast-forwarded stretch of steps) is one event; what a step decides is the policy
core's, how long it takes the executor's. Idle time between arrivals costs nothing: the clock is virtual on both sides.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from engine.core.request import Request
from engine.core.scheduler import Scheduler
from harness.sim.executors import Executor
from harness.sim.recorder import Recorder

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request and its arrival in ns from the start of the replay."""

    request: Request
    arrival_ns: int


class Replay:
    """One run of a trace. Requests must be in order of arrival; equal times keep their order.

    An arrival at the very end of a step is seen by the next step. `progress(finished, total)` is called after steps
    that finish a request.
    """

    def __init__(
        self,
        requests: Sequence[TimedRequest],
        scheduler: Scheduler,
        executor: Executor,
        recorder: Recorder,
        progress: Progress | None = None,
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._executor = executor
        self._recorder = recorder
        self._progress = progress
        self._next = 0  # index of the next request to arrive
        self._finished = 0
        self._env = simpy.Environment(initial_time=0)
        self._wake = self._env.event()

    def run(self) -> None:
        """Play the whole trace; returns when every request has finished."""
        self._env.process(self._arrivals())
        self._env.process(self._engine())
        self._env.run()

    def _arrivals(self) -> Generator[Any, Any, None]:
        while self._next < len(self._requests):
            at = self._requests[self._next].arrival_ns
            if at > self._env.now:
                yield self._env.timeout(at - self._env.now)
            while self._next < len(self._requests) and self._requests[self._next].arrival_ns == at:
                self._scheduler.submit(self._requests[self._next].request)
                self._next += 1
            self._wake.succeed()
            self._wake = self._env.event()

    def _engine(self) -> Generator[Any, Any, None]:
        while True:
            if self._arrives_now():
                yield self._env.timeout(0)  # let the arrivals of this very instant in first
            if self._scheduler.has_work:
                yield self._env.timeout(self._step())
            elif self._next < len(self._requests):
                yield self._wake
            else:
                return

    def _arrives_now(self) -> bool:
        return self._next < len(self._requests) and self._requests[self._next].arrival_ns <= self._env.now

    def _step(self) -> int:
        """Run one plan and return its duration in ns."""
        now = int(self._env.now)
        self._executor.begin()
        plan = self._scheduler.schedule(self._executor.max_repeat)
        result = self._executor.execute(plan, self._horizon(now))
        report = self._scheduler.commit(plan, result)
        timing = self._executor.end()
        self._recorder.record(now, plan, result, report, timing)
        self._finished += len(report.finished)
        if report.finished and self._progress:
            self._progress(self._finished, len(self._requests))
        return sum(timing.ns)

    def _horizon(self, now: int) -> int | None:
        return self._requests[self._next].arrival_ns - now if self._next < len(self._requests) else None
