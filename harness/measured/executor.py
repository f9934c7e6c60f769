"""The real engine as a source of time."""

from collections.abc import Callable

from engine.core.plan import StepPlan, StepResult
from engine.runtime.runner import Runner
from harness.sim.clock import to_ns
from harness.sim.executors import StepTiming


class MeasuredExecutor:
    """Runs each plan on the engine; a step's time is what the clock shows from `begin` to `end`, audits left out."""

    max_repeat = 1

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
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
        """Stop the clock. Policy is `schedule()` and `commit()` together."""
        now, times = self._clock(), self._times
        seconds = now - self._start - times.audit_s
        phases = {
            "policy_s": self._planned - self._start + now - self._returned,
            "build_s": times.build_s,
            "forward_s": times.forward_s,
            "sample_s": times.sample_s,
        }
        return StepTiming([max(1, to_ns(seconds))], [times.attention_s], phases)
