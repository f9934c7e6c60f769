"""What a replay leaves behind, gathered step by step: the run log, and, on request, what a second look needs.

Nothing here is timed: the replay records between the steps, and columns are laid out when it is over.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from engine.core.outcome import CommitReport, RequestStats
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from harness.metrics.log import RunLog
from harness.sim.cost import Amount, FloatArray
from harness.sim.executors import StepTiming
from harness.sim.features import FEATURES, FeatureMeter
from harness.sim.request_times import RequestTimes
from harness.sim.step_table import StepTable


class Recorder:
    """Collects one replay.

    With `keep_plans` it also keeps each plan's digest, its features and its beams' parents: to compare two replays step
    by step, to price a measured run's plans, and to calibrate. Only for replays without fast-forward.
    """

    def __init__(
        self, requests: Sequence[Request], arrival_ns: Sequence[int], block_size: int, *, keep_plans: bool
    ):
        self._block_size = block_size
        self._meter = FeatureMeter({request.request_id: request for request in requests}, block_size)
        self._steps = StepTable()
        self._times = RequestTimes(requests, arrival_ns)
        self._keep_plans = keep_plans
        self.digests: list[str] = []
        self.parents: list[Mapping[int, Sequence[int]]] = []
        self.step_ns: list[int] = []
        self._features: list[list[Amount]] = []

    @property
    def features(self) -> FloatArray:
        """Features of every step, `[steps, len(FEATURES)]`; with `keep_plans` only."""
        return np.array(self._features, dtype=np.float64).reshape(-1, len(FEATURES))

    def record(
        self, now_ns: int, plan: StepPlan, result: StepResult, report: CommitReport, timing: StepTiming
    ) -> None:
        """One plan, taken `result.repeat` times, from `now_ns` on."""
        self._steps.add(now_ns, plan, timing, report.leap)
        self._times.add(now_ns, plan, report, timing.ns)
        if self._keep_plans:
            self.digests.append(plan.digest())
            self.parents.append(result.parents)
            self.step_ns.append(timing.ns[0])
            self._features.append(self._meter.features(plan))
            self._meter.took(plan)

    def log(self, stats: Mapping[int, RequestStats], capacity_slots: int, kv_bytes_per_token: int) -> RunLog:
        """The finished run's log."""
        itl_s, itl_weight = self._times.gaps()
        return RunLog(
            steps=self._steps.columns(),
            requests=self._times.columns(stats),
            itl_s=itl_s,
            itl_weight=itl_weight,
            block_size=self._block_size,
            capacity_slots=capacity_slots,
            kv_bytes_per_token=kv_bytes_per_token,
            span_s=self._steps.end_s,
        )


def digests_differ(one: Sequence[str], other: Sequence[str]) -> int | None:
    """The first step at which two replays decided differently, or None."""
    pairs: Iterable[tuple[str, str]] = zip(one, other, strict=False)
    first = next((step for step, (a, b) in enumerate(pairs) if a != b), None)
    if first is None and len(one) != len(other):
        return min(len(one), len(other))
    return first
