"""An engine that runs by a given clock, so that repeats of a workload have equal plans."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.core.plan import StepPlan, StepResult
from harness.metrics.log import RunLog
from harness.sim.clock import to_s
from harness.sim.executors import Executor, StepTiming


class SameClock:
    """Shows the replay the durations `step_ns`, those of an earlier run for instance, and keeps the engine's own."""

    max_repeat = 1

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
        """The engine's timing, its duration replaced by the given one; its own where none is left.

        On a GPU drafts that were right may be wrong by the last bit the next time, and a run has more steps.
        """
        timing, step = self._engine.end(), len(self._own_ns)
        self._own_ns += timing.ns
        return timing._replace(ns=[self._step_ns[step]]) if step < len(self._step_ns) else timing

    def as_measured(self, log: RunLog) -> RunLog:
        """The log with the engine's own durations in its steps; times of requests stay by the given clock."""
        seconds = to_s(np.array(self._own_ns, dtype=np.int64))
        return replace(log, steps={**log.steps, "seconds": seconds})
