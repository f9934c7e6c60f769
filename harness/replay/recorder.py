"""The recorder: it collects the run log of a replay step by step.

`Recorder` makes the run log from a `StepTable` and from `RequestTimes`, and keeps the plans too where that is asked
for. `MeasuredRun` is the record of a run on the engine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.commit import CommitReport, RequestStats
from harness.metrics.log import FloatArray, RunLog
from harness.replay.beams import Choices
from harness.replay.cost_model import Amount
from harness.replay.executors import StepTiming
from harness.replay.features import FEATURES, FeatureMeter
from harness.replay.request_times import NEVER, RequestTimes
from harness.replay.step_table import StepTable


class Recorder:
    """Records one replay; `log()` gives its run log. `requests` by id may grow while the replay runs.

    With `keep_plans` it also keeps each step plan's digest, features and draft tokens by request, and the step result.
    They serve to compare two replays step by step, to price a measured run's plans, and to calibrate. `keep_plans` is
    only for replays without fast-forward. `window` is that of the model's windowed layers, in tokens.
    """

    def __init__(
        self,
        requests: Mapping[int, Request],
        block_size: int,
        *,
        keep_plans: bool = False,
        window: int | None = None,
    ) -> None:
        self._block_size = block_size
        self._meter = FeatureMeter(requests, block_size, window)
        self._steps = StepTable()
        self._times = RequestTimes()
        self._keep_plans = keep_plans
        self.digests: list[str] = []
        self.results: list[StepResult] = []
        self.drafted: list[Mapping[int, int]] = []
        self.step_ns: list[int] = []
        self._features: list[list[Amount]] = []
        self.chosen: Mapping[int, Choices] = {}  # parents of beams that a client chose, by request

    @property
    def parents(self) -> list[Mapping[int, Sequence[int]]]:
        """Beam parents by step and request, with `keep_plans` only; behind them those that a client chose."""
        by_client = [{rid: parents} for rid, choices in self.chosen.items() for parents in choices]
        return [*(result.parents for result in self.results), *by_client]

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
    ) -> int:
        """One plan, taken `result.num_steps` times, from `now_ns` on; returns how long all of it took, in ns."""
        features = timing.features or self._meter.first(plan, result.accepted)
        took_ns = sum(timing.ns)
        self._steps.add(now_ns, plan, timing, report.fast_forward, features, took_ns)
        if result.ended:
            self._times.ended_early(plan, result.ended)
        self._times.add(now_ns, plan, report, timing.ns, took_ns)
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


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run: its log, its recording, and the number of audits, which compare slots with counters.

    `yardstick_s` are the median seconds of the yardstick's parts (`harness.measure.yardstick`); None without one.
    """

    log: RunLog
    recorder: Recorder
    audits: int
    yardstick_s: tuple[float, ...] | None = None

    @property
    def clocked_s(self) -> FloatArray:
        """Seconds of the steps as the clock showed them, `[steps]`: not divided by the pace of the core."""
        seconds: FloatArray = self.log.steps["seconds"]
        return seconds * self.log.steps["pace"] if self.yardstick_s else seconds
