"""The loop: requests arrive and steps run, in one simpy model for all executors.

What looks at a replay is an `Observer` that the loop tells of four events. It knows no observer by name.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import simpy

from engine.core.errors import NeverFitsError
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.commit import CommitReport, RequestStats
from engine.core.scheduling.scheduler import Scheduler
from harness.metrics.log import Outcome
from harness.replay.arrivals import LATEST_NS, NEVER, Arrivals, OpenLoop, TimedRequest, TimeSpanError
from harness.replay.executors import Executor, StepTiming

Progress = Callable[[int, int], None]
_NO_STATS = RequestStats()


class StepRecord(NamedTuple):
    """A plan that ran from `start_ns` on and took `took_ns`, for one step or for as many as `timing` has entries.

    Every log of a replay is a fold over these, and over the ends of requests.
    """

    start_ns: int
    took_ns: int
    plan: StepPlan
    result: StepResult
    report: CommitReport
    timing: StepTiming


class Observer:
    """What looks at a replay and changes nothing in it. A subclass overrides the events that it wants.

    * `arrived`: a request comes at `at_ns`, before the scheduler sees it; NEVER if the replay stopped before.
    * `planned`: the step that begins at `now_ns` is scheduled, and has not run. Its block tables are live.
    * `committed`: a step is over.
    * `ended`: a request ends at `at_ns` (NEVER if unfinished), after the step that ends it. `stats` are its counters.

    No event counts in the duration of a step.
    """

    def arrived(self, request: Request, at_ns: int) -> None:
        """A request comes."""

    def planned(self, now_ns: int, plan: StepPlan) -> None:
        """A step is scheduled."""

    def committed(self, step: StepRecord) -> None:
        """A step is over."""

    def ended(self, request: Request, outcome: Outcome, at_ns: int, stats: RequestStats) -> None:
        """A request ends."""


class ReplayClock(simpy.Environment):  # type: ignore[misc]  # it has no types
    """The clock of a replay, in ns. While a fast-forward is committed, it gives the time of its last step."""

    ahead_ns = 0

    def __call__(self) -> int:
        """The time at which the step began."""
        return int(self.now) + self.ahead_ns


def _listeners(observers: Sequence[Observer], event: str) -> list[Callable[..., None]]:
    """The methods of those that override `event`: who does not want it costs nothing."""
    unheard = getattr(Observer, event)
    return [getattr(each, event) for each in observers if getattr(type(each), event) is not unheard]


class Replay:
    """One run of a workload; call `run()` once. `arrivals` is a source, or a sequence of requests in order of arrival.

    The next step sees a request that arrives at the very end of a step. A request that can never be served is rejected
    on arrival. `live` holds the requests that have arrived and not ended. At `until_ns` the replay stops: no step
    begins then or later, and requests that have not finished end as unfinished. `progress(ended, total)` is called
    after steps that end a request.

    With `asynchronous`, a step is scheduled while the step before it runs, as vLLM's async scheduling does: the
    scheduler (`SchedulerLimits.ahead`) sees a request one step later, unless no step is running. Replays that share
    `env` run on one clock (`start`, `close`). No fast-forward goes beyond the time that `changes_ns` gives: there the
    memory changes by itself.
    """

    def __init__(
        self,
        arrivals: Arrivals | Sequence[TimedRequest],
        scheduler: Scheduler,
        executor: Executor,
        *observers: Observer,
        progress: Progress | None = None,
        live: dict[int, Request] | None = None,
        until_ns: int | None = None,
        asynchronous: bool = False,
        env: ReplayClock | None = None,
        changes_ns: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._arrivals = OpenLoop(arrivals, len(arrivals)) if isinstance(arrivals, Sequence) else arrivals
        self._scheduler = scheduler
        self._executor = executor
        self._arrived = _listeners(observers, "arrived")
        self._planned = _listeners(observers, "planned")
        self._committed = _listeners(observers, "committed")
        self._finally = _listeners(observers, "ended")
        self._progress = progress
        self._live = {} if live is None else live
        self._until_ns = until_ns
        self._asynchronous = asynchronous
        # when the last step began; None if none has since the engine was idle
        self._began_ns: int | None = None
        self._ended, self._answers = 0, list[tuple[int, int]]()  # answers that the client does not have yet
        self._env, self._changes_ns = env or ReplayClock(), changes_ns

    def run(self) -> None:
        """Replay the whole trace; returns when every request has ended, or at `until_ns`."""
        self.start()
        self._env.run()
        self.close()

    def start(self) -> None:
        """Begin, without running the clock: for replays that share `env`."""
        self._env.process(self._engine())

    def close(self) -> None:
        """The clock has stopped: requests that are under way, and those that never arrived, end as unfinished."""
        self._answer()
        never = self._arrivals.left()
        for request in never:
            for tell in self._arrived:
                tell(request, NEVER)
        for request in [*self._live.values(), *never]:
            stats = self._scheduler.stats.get(request.request_id, _NO_STATS)
            for tell in self._finally:
                tell(request, Outcome.UNFINISHED, NEVER, stats)

    def _engine(self) -> Generator[Any, Any, None]:
        env = self._env
        while not self.is_over:
            if self.has_work():
                yield env.timeout(self._step(env.now))
                continue
            due = self.next_ns()
            if due is None:
                return
            yield env.timeout(max(0, due - env.now))

    @property
    def is_over(self) -> bool:
        """Whether the time at which the replay stops has come."""
        return self._until_ns is not None and self._env.now >= self._until_ns

    def has_work(self) -> bool:
        """Submit what has arrived; whether there is something to schedule now."""
        self._answer()
        began = self._began_ns if self._asynchronous else None
        self._submit(int(self._env.now) if began is None else began)
        if not self._scheduler.has_work:
            self._scheduler.rest()
            self._began_ns = None
        return self._scheduler.has_work

    def next_ns(self) -> int | None:
        """When the next request may come; None where none does."""
        return self._arrivals.next_ns()

    def _waited(self) -> None:
        """The step under way has ended before another one could be scheduled: that one knows of all that came."""
        self._submit(int(self._env.now))

    def _submit(self, seen_ns: int) -> None:
        due = self._arrivals.next_ns()
        for timed in self._arrivals.take(seen_ns) if due is not None and due <= seen_ns else ():
            request, arrival_ns = timed.request, timed.arrival_ns
            for tell in self._arrived:
                tell(request, arrival_ns)
            try:
                self._scheduler.submit(request)
            except NeverFitsError:
                self._end(request, Outcome.REJECTED, self._env.now, _NO_STATS)
                self._answer()
            else:
                self._live[request.request_id] = request

    def _end(self, request: Request, outcome: Outcome, now_ns: int, stats: RequestStats) -> None:
        for tell in self._finally:
            tell(request, outcome, now_ns, stats)
        self._ended += 1
        self._answers.append((request.request_id, now_ns))

    def _answer(self) -> None:
        """Give the client its answers, when the step that ended them has: replicas share a front end."""
        for request_id, at_ns in self._answers:
            self._arrivals.ended(request_id, at_ns)
        self._answers.clear()

    def _step(self, now: int) -> int:
        """Run one plan and return its duration in ns."""
        plan = self.plan()
        result = self.execute(plan)
        if result.num_steps > 1:
            self._env.ahead_ns = sum(self.priced().ns[:-1])
        report = self._scheduler.commit(plan, result)
        self._env.ahead_ns = 0
        return self._record(now, plan, result, report, self._executor.end())

    def plan(self) -> StepPlan:
        """Schedule the step that begins now."""
        self._executor.begin()
        plan = self._scheduler.schedule(self._executor.max_steps, self._waited)
        for look in self._planned:
            self._executor.unclocked(partial(look, self._env.now, plan))
        return plan

    def execute(self, plan: StepPlan) -> StepResult:
        """Run or price the plan that was scheduled."""
        return self._executor.execute(plan, self._horizon(self._env.now) if plan.num_steps > 1 else None)

    def priced(self) -> StepTiming:
        """What the executor says of the plan that it has executed, before its commit: of a prediction alone."""
        return self._executor.end()

    def commit(self, plan: StepPlan, result: StepResult, timing: StepTiming) -> int:
        """Commit a plan whose duration others decide too; returns it in ns."""
        return self._record(self._env.now, plan, result, self._scheduler.commit(plan, result), timing)

    def _record(
        self, now: int, plan: StepPlan, result: StepResult, report: CommitReport, timing: StepTiming
    ) -> int:
        took = sum(timing.ns)
        if now + took > LATEST_NS:
            raise TimeSpanError
        step = StepRecord(now, took, plan, result, report, timing)
        for tell in self._committed:
            tell(step)
        self._began_ns = now + took - timing.ns[-1]
        if report.finished:
            for request_id in report.finished:
                self._end(self._live.pop(request_id), Outcome.FINISHED, now + took, report.stats[request_id])
            if self._progress:
                self._progress(self._ended, self._arrivals.total)
        return took

    def _horizon(self, now: int) -> int | None:
        """Nanoseconds from now to the next arrival, change of the memory, or end of the replay; None where none is
        known.
        """
        times = (self._arrivals.next_ns(), self._until_ns, self._changes_ns())
        return min((each - now for each in times if each is not None), default=None)
