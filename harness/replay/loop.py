"""The loop: requests arrive and steps run, in one simpy model for all executors."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import simpy

from engine.core.errors import NeverFitsError
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from harness.replay.arrivals import LATEST_NS, Arrivals, OpenLoop, TimedRequest, TimeSpanError
from harness.replay.executors import Executor
from harness.replay.recorder import Recorder

Progress = Callable[[int, int], None]


class Replay:
    """One run of a workload; call `run()` once. `arrivals` is a source, or a sequence of requests in order of arrival.

    The next step sees a request that arrives at the very end of a step. A request that can never be served is rejected
    on arrival, and recorded as rejected. `live` holds the requests that have arrived and not ended. At `until_ns` the
    replay stops: no step begins then or later, and requests that have not finished are recorded as unfinished.
    `progress(ended, total)` is called after steps that end a request.

    With `asynchronous`, a step is scheduled while the step before it runs, as vLLM's async scheduling does: the
    scheduler sees a request one step later, unless no step is running. `after_step(now)` is called with the start of
    each step after its commit, outside of the clock. Replays that share `env` run on one clock (`start`, `close`).
    """

    def __init__(
        self,
        arrivals: Arrivals | Sequence[TimedRequest],
        scheduler: Scheduler,
        executor: Executor,
        recorder: Recorder,
        progress: Progress | None = None,
        *,
        live: dict[int, Request] | None = None,
        until_ns: int | None = None,
        asynchronous: bool = False,
        after_step: Callable[[int], None] | None = None,
        env: simpy.Environment | None = None,
    ) -> None:
        self._arrivals = OpenLoop(arrivals, len(arrivals)) if isinstance(arrivals, Sequence) else arrivals
        self._scheduler = scheduler
        self._executor = executor
        self._recorder = recorder
        self._progress = progress
        self._live = {} if live is None else live
        self._until_ns = until_ns
        self._asynchronous = asynchronous
        self._began_ns: int | None = (
            None  # when the last step began; None if none has since the engine was idle
        )
        self._after_step = after_step
        self._ended = 0
        self._env = env or simpy.Environment(initial_time=0)

    def run(self) -> None:
        """Replay the whole trace; returns when every request has ended, or at `until_ns`."""
        self.start()
        self._env.run()
        self.close()

    def now_ns(self) -> int:
        """The virtual time: while a step runs, its beginning."""
        return int(self._env.now)

    def start(self) -> None:
        """Begin, without running the clock: for replays that share `env`."""
        self._env.process(self._engine())

    def close(self) -> None:
        """Record the requests that never arrived; the clock has stopped."""
        for request in self._arrivals.left():
            self._recorder.never_arrived(request)

    def _engine(self) -> Generator[Any, Any, None]:
        env, scheduler, arrivals = self._env, self._scheduler, self._arrivals
        while self._until_ns is None or env.now < self._until_ns:
            due, seen = arrivals.next_ns(), self._seen_ns()
            if due is not None and due <= seen:
                self._submit(arrivals.take(seen))
            if scheduler.has_work:
                yield env.timeout(self._step(env.now))
                continue
            self._began_ns = None
            due = arrivals.next_ns()
            if due is None:
                return
            yield env.timeout(max(0, due - env.now))

    def _seen_ns(self) -> int:
        """The time up to which the next step knows of arrivals."""
        if self._asynchronous and self._began_ns is not None:
            return self._began_ns
        return int(self._env.now)

    def _submit(self, arrived: Sequence[TimedRequest]) -> None:
        for timed in arrived:
            request = timed.request
            self._recorder.arrived(request, timed.arrival_ns)
            try:
                self._scheduler.submit(request)
            except NeverFitsError:
                self._recorder.rejected(request.request_id)
                self._end(request.request_id, self._env.now)
            else:
                self._live[request.request_id] = request

    def _end(self, request_id: int, now_ns: int) -> None:
        self._ended += 1
        self._arrivals.ended(request_id, now_ns)

    def _step(self, now: int) -> int:
        """Run one plan and return its duration in ns."""
        executor, scheduler = self._executor, self._scheduler
        executor.begin()
        plan = scheduler.schedule(executor.max_steps)
        result = executor.execute(plan, self._horizon(now))
        report = scheduler.commit(plan, result)
        timing = executor.end()
        if now + sum(timing.ns) > LATEST_NS:
            raise TimeSpanError
        took = self._recorder.record(now, plan, result, report, timing)
        self._began_ns = now + sum(timing.ns[:-1])
        if self._after_step:
            self._after_step(now)
        if report.finished:
            for request_id in report.finished:
                del self._live[request_id]
                self._end(request_id, now + took)
            if self._progress:
                self._progress(self._ended, self._arrivals.total)
        return took

    def _horizon(self, now: int) -> int | None:
        """Nanoseconds from now to the next arrival or to the end of the replay; None where neither is known."""
        due, until = self._arrivals.next_ns(), self._until_ns
        if due is None:
            return None if until is None else until - now
        return (due if until is None else min(due, until)) - now
