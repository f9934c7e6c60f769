"""What a replay leaves behind, gathered step by step: the run log, and, on request, what a second look needs.

Nothing here is timed: the replay records between the steps, and columns are laid out when it is over.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.commit import CommitReport, RequestStats
from harness.metrics.log import RunLog
from harness.sim.cost import Amount, FloatArray
from harness.sim.executors import StepTiming
from harness.sim.features import FEATURES, FeatureMeter
from harness.sim.request_times import NEVER, RequestTimes
from harness.sim.step_table import StepTable


class Recorder:
    """Collects one replay; `requests` by id may grow while it runs.

    With `keep_plans` it also keeps each plan's digest, features and draft tokens by request, and the executor's answer:
    to compare two replays step by step, to price a measured run's plans, and to calibrate. Only for replays without
    fast-forward.
    """

    def __init__(self, requests: Mapping[int, Request], block_size: int, *, keep_plans: bool = False) -> None:
        self._block_size = block_size
        self._meter = FeatureMeter(requests, block_size)
        self._steps = StepTable()
        self._times = RequestTimes()
        self._keep_plans = keep_plans
        self.digests: list[str] = []
        self.results: list[StepResult] = []
        self.drafted: list[Mapping[int, int]] = []
        self.step_ns: list[int] = []
        self._features: list[list[Amount]] = []

    @property
    def parents(self) -> list[Mapping[int, Sequence[int]]]:
        """Whom each beam continued, by step and request; with `keep_plans` only."""
        return [result.parents for result in self.results]

    @property
    def features(self) -> FloatArray:
        """Features of every step, `[steps, len(FEATURES)]`; with `keep_plans` only."""
        return np.array(self._features, dtype=np.float64).reshape(-1, len(FEATURES))

    def arrived(self, request: Request, arrival_ns: int) -> None:
        """A request arrived."""
        self._times.arrived(request, arrival_ns)

    def never_arrived(self, request: Request) -> None:
        """The replay stopped before the request arrived."""
        self._times.arrived(request, NEVER)

    def rejected(self, request_id: int) -> None:
        """An arrived request can never be served."""
        self._times.rejected(request_id)

    def record(
        self,
        now_ns: int,
        plan: StepPlan,
        result: StepResult,
        report: CommitReport,
        timing: StepTiming,
        stats: Mapping[int, RequestStats],
    ) -> int:
        """One plan, taken `result.repeat` times, from `now_ns` on; returns how long all of it took, in ns."""
        features = timing.features or self._meter.first(plan, result.accepted)
        took_ns = sum(timing.ns)
        self._steps.add(now_ns, plan, timing, report.leap, features, took_ns)
        if result.ended:
            self._times.ended_early(plan, result.ended)
        self._times.add(now_ns, plan, report, timing.ns, took_ns, stats)
        if timing.features is None:
            self._meter.took(features, len(timing.ns))
        if self._keep_plans:
            self.digests.append(plan.digest())
            self.results.append(result)
            self.drafted.append({row.request_id: row.drafts for row in plan.other_rows if row.drafts})
            self.step_ns.append(timing.ns[0])
            self._features.append(features)
        return took_ns

    def log(self, stats: Mapping[int, RequestStats], capacity_slots: int, kv_bytes_per_token: int) -> RunLog:
        """The finished run's log."""
        self._times.close(stats)
        itl_s, itl_weight = self._times.drain_gaps()
        return RunLog(
            steps=self._steps.drain(),
            requests=self._times.drain(),
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
