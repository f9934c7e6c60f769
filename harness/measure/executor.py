"""The engine as an executor of the replay, and the yardstick that tells the pace of a CPU core between its steps.

Other work on a machine slows a core down by a tenth to a half, for some milliseconds or for minutes. It slows
arithmetic, Python code and reads of memory by different amounts, so the yardstick, a fixed piece of work, has one part
of each. A step's time divided by the pace beside it is the time that the step takes at the reference pace.

`FixedDurations` gives repeated runs the same step plans.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from engine.core.plan import StepPlan, StepResult
from engine.runtime.runner import Runner
from harness.metrics.log import RunLog
from harness.replay.arrivals import to_ns, to_s
from harness.replay.executors import AroundEngine, Executor, StepTiming
from harness.replay.features import FeatureMeter

WINDOW = 8
"""Readings over which the pace is a median; about a tenth of a second of a small model's steps."""

READ_EVERY_S = 2e-3
"""Between two readings there is at least so much engine time, so that short steps do not wait for the yardstick."""


class Reading(NamedTuple):
    """Seconds of the three parts of the yardstick, about 0.1 ms each."""

    arithmetic_s: float
    python_s: float
    memory_s: float


def pace_of(reading: Reading, reference: Reading) -> float:
    """The mean of the parts' ratios; above 1 the core is slower than at the reference."""
    return fmean(now / then for now, then in zip(reading, reference, strict=True))


def middle(readings: Sequence[Reading]) -> Reading:
    """The median of each part."""
    return Reading(*(median(part) for part in zip(*readings, strict=True)))


class Yardstick:
    """Follows the pace beside the steps of one run; `read` does the fixed work (`yardstick.FixedWork`).

    Without a `reference` its own first readings are one.

    Only readings after a step count: back to back the yardstick finds its memory in the nearest caches, and is faster.
    """

    def __init__(self, read: Callable[[], Sequence[float]], reference: Reading | None = None) -> None:
        self._read = read
        self._recent: deque[Reading] = deque(maxlen=WINDOW)
        self._reference = reference
        self._since_s = READ_EVERY_S
        self._pace = 1.0
        self.readings: list[Reading] = []

    def pace_after(self, step_s: float) -> float:
        """The pace beside a step that has just ended after `step_s` seconds."""
        self._since_s += step_s
        if self._since_s >= READ_EVERY_S:
            self._since_s = 0.0
            found = Reading(*self._read())
            self.readings.append(found)
            self._recent.append(found)
            if self._reference is None and len(self.readings) == WINDOW:
                self._reference = middle(self.readings)
            if self._reference is not None:
                self._pace = pace_of(middle(self._recent), self._reference)
        return self._pace


class MeasuredExecutor(Executor):
    """Runs each plan on the engine; the seconds of a step are the clock time from `begin` to `end`, without audits.

    With a `yardstick` all times are divided by the local pace of the core, which the phase `pace` holds.
    """

    max_steps = 1

    def __init__(
        self,
        runner: Runner,
        clock: Callable[[], float],
        meter: FeatureMeter,
        yardstick: Yardstick | None = None,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._meter = meter
        self._yardstick = yardstick
        self._start = self._planned = 0.0

    def begin(self) -> None:
        """Start the clock: the scheduler is called next."""
        self._start = self._clock()

    def unclocked(self, look: Callable[[], None]) -> None:
        """Call `look`, and begin so much later."""
        began = self._clock()
        look()
        self._start += self._clock() - began

    def execute(self, plan: StepPlan, horizon_ns: int | None) -> StepResult:
        """Forward pass and sampling."""
        self._planned = self._clock()
        self._result, self._times = self._runner.execute(plan)
        self._returned = self._clock()
        self._plan = plan
        return self._result

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
        features = self._meter.single(self._plan, self._result.accepted)
        return StepTiming([max(1, to_ns(seconds))], [attention_s], features, phases)


class FixedDurations(AroundEngine):
    """Reports the given durations `step_ns` to the replay (those of an earlier run), and keeps the engine's own."""

    def __init__(self, engine: Executor, step_ns: Sequence[int]) -> None:
        super().__init__(engine)
        self._step_ns = step_ns
        self._own_ns: list[int] = []

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
        return replace(log, steps={**log.steps, "seconds": to_s(np.array(self._own_ns, dtype=np.int64))})
