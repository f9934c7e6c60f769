"""The engine as an executor of the replay, and the yardstick that tells the pace of a CPU core between its steps.

Other work on a machine slows a core down by a tenth to a half, for some milliseconds or for minutes. It slows
arithmetic, Python code and reads of memory by different amounts, so the yardstick, a fixed piece of work, has one part
of each. A step's time divided by the pace beside it is the time that the step takes at the reference pace.

The engine itself slows the yardstick down, too: on a quiet machine it takes 1.2 to 2 times its time after a large
prefill, which leaves the caches cold, while steps take no longer. That is no pace. So readings after small steps and
right after large prefills have a reference each, and nothing is read while the caches get warm again.

`FixedDurations` gives repeated runs the same step plans.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median

import numpy as np

from engine.core.plan import StepPlan, StepResult
from engine.runtime.runner import Runner
from harness.metrics.log import RunLog
from harness.replay.arrivals import to_ns, to_s
from harness.replay.cost_model import Amount
from harness.replay.executors import AroundEngine, Executor, StepTiming
from harness.replay.features import LARGE_PREFILL, FeatureMeter, StepFeatures

WINDOW = 8
"""Readings over which the pace is a median; about a tenth of a second of a small model's steps."""

READ_EVERY_S = 2e-3
"""Between two readings there is at least so much engine time, so that short steps do not wait for the yardstick."""


Reading = tuple[float, ...]
"""Seconds of the parts of the yardstick, about 0.1 ms each: arithmetic, Python, memory; where there are six, the last
three are those right after a large prefill."""

_WARM = 0.3
"""Of `StepFeatures.after_prefill`: below it a step is hardly slower any more."""


def is_cold(features: StepFeatures[Amount]) -> bool | None:
    """Whether a step was a large prefill; None where the caches are still getting warm again."""
    large = features.prefill_tokens / LARGE_PREFILL
    return True if large >= 1 else None if max(large, features.after_prefill) > _WARM else False


class Yardstick:
    """Follows the pace beside the steps of one run; `read` does the fixed work (`yardstick.FixedWork`).

    Without a `reference` its own first readings after small steps are one. Readings without a reference do not count.

    Only readings after a step count: back to back the yardstick finds its memory in the nearest caches, and is faster.
    """

    def __init__(self, read: Callable[[], Sequence[float]], reference: Reading | None = None) -> None:
        self._read = read
        self._recent: deque[Reading] = deque(maxlen=WINDOW)  # over the reference
        reference = reference or ()
        self._references = [reference[:3], reference[3:]]
        self._since_s = READ_EVERY_S
        self._pace = 1.0
        self._readings: tuple[list[Reading], list[Reading]] = [], []

    def pace_after(self, step_s: float, cold: bool | None = False) -> float:
        """The pace beside a step that has just ended after `step_s` seconds; `cold` as `is_cold` has it."""
        self._since_s += step_s
        if cold is None or self._since_s < READ_EVERY_S:
            return self._pace
        self._since_s = 0.0
        found, same = tuple(self._read()), self._readings[cold]
        same.append(found)
        if not (cold or self._references[cold]) and len(same) == WINDOW:
            self._references[cold] = _medians(same)
        if reference := self._references[cold]:
            self._recent.append(tuple(now / then for now, then in zip(found, reference, strict=True)))
            self._pace = fmean(_medians(self._recent))
        return self._pace

    @property
    def reading(self) -> Reading | None:
        """The median of each part over all readings so far; None without one after a small step."""
        warm, cold = map(_medians, self._readings)
        return warm + cold if warm else None


def _medians(readings: Iterable[Reading]) -> Reading:
    return tuple(median(part) for part in zip(*readings, strict=True))


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
        features = self._meter.single(self._plan, self._result.accepted)
        if self._yardstick is not None:
            pace = self._yardstick.pace_after(seconds, is_cold(features))
            seconds, attention_s = seconds / pace, attention_s / pace
            phases = {name: value / pace for name, value in phases.items()} | {"pace": pace}
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
        seconds = to_s(np.array(self._own_ns, dtype=np.int64))
        return replace(log, steps={**log.steps, "seconds": seconds})
