"""The engine as an executor of the replay. `FixedDurations` gives repeated runs the same step plans."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from engine.core.plan import StepPlan, StepResult
from engine.runtime.runner import Runner
from harness.measure.yardstick import Yardstick
from harness.metrics.log import RunLog
from harness.replay.executors import Executor, StepTiming
from harness.replay.virtual_time import to_ns, to_s


class MeasuredExecutor:
    """Runs each plan on the engine; the seconds of a step are the clock time from `begin` to `end`, without audits.

    With a `yardstick` all times are divided by the local pace of the core, which the phase `pace` holds.
    """

    max_steps = 1

    def __init__(
        self, runner: Runner, clock: Callable[[], float], yardstick: Yardstick | None = None
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._yardstick = yardstick
        self._start = self._planned = 0.0

    def begin(self) -> None:
        """Start the clock: the scheduler is called next."""
        self._start = self._clock()

    def execute(self, plan: StepPlan, horizon_ns: int | None) -> StepResult:
        """Forward pass and sampling."""
        self._planned = self._clock()
        result, self._times = self._runner.execute(plan)
        self._returned = self._clock()
        return result

    def end(self) -> StepTiming:
        """Stop the clock. The phase `policy_s` is `schedule()` and `commit()` together."""
        now, times = self._clock(), self._times
        seconds = now - self._start - times.audit_s
        phases = {
            "policy_s": self._planned - self._start + now - self._returned,
            "build_s": times.build_s,
            "forward_s": times.forward_s,
            "sample_s": times.sample_s,
        }
        attention_s = times.attention_s
        if self._yardstick is not None:
            pace = self._yardstick.pace_after(seconds)
            seconds, attention_s = seconds / pace, attention_s / pace
            phases = {name: value / pace for name, value in phases.items()} | {"pace": pace}
        return StepTiming([max(1, to_ns(seconds))], [attention_s], phases)


class FixedDurations:
    """Reports the given durations `step_ns` to the replay (those of an earlier run), and keeps the engine's own."""

    max_steps = 1

    def __init__(self, engine: Executor, step_ns: Sequence[int]) -> None:
        self._engine = engine
        self._step_ns = step_ns
        self._own_ns: list[int] = []

    def begin(self) -> None:
        """A step begins."""
        self._engine.begin()

    def execute(self, plan: StepPlan, horizon_ns: int | None) -> StepResult:
        """Run the plan."""
        return self._engine.execute(plan, horizon_ns)

    def end(self) -> StepTiming:
        """The engine's timing with the given duration, or with its own where `step_ns` has no more entries.

        That happens on a GPU: logits can differ in the last bit, so that fewer drafts are right and a run has more
        steps.
        """
        timing, step = self._engine.end(), len(self._own_ns)
        self._own_ns += timing.ns
        return timing._replace(ns=[self._step_ns[step]]) if step < len(self._step_ns) else timing

    def as_measured(self, log: RunLog) -> RunLog:
        """The log with the engine's own step durations; times of requests still follow the given durations."""
        seconds = to_s(np.array(self._own_ns, dtype=np.int64))
        return replace(log, steps={**log.steps, "seconds": seconds})
