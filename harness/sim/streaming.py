"""A recorder that keeps no rows: steps and requests are folded into running totals, in constant memory."""

from collections.abc import Mapping

import numpy as np

from engine.core.outcome import CommitReport, RequestStats
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from harness.metrics.compute import figures
from harness.metrics.log import Column, Outcome
from harness.metrics.totals import RunningTotals, Totals
from harness.sim.executors import StepTiming
from harness.sim.hull import ExtrapolatedSteps, Hull
from harness.sim.recorder import Recorder

CHUNK = 4096  # steps, and requests, folded at a time


class StreamingRecorder(Recorder):
    """Folds a replay as it runs. Chunks end at fixed numbers of steps and requests: fast-forward changes no sum."""

    def __init__(self, requests: Mapping[int, Request], block_size: int, hull: Hull) -> None:
        super().__init__(requests, block_size)
        self._running = RunningTotals()
        self._left: dict[str, Column] = {}  # steps that do not fill a chunk yet
        self._outcome = dict.fromkeys(Outcome, 0)
        self._outside = ExtrapolatedSteps(hull)

    def record(
        self,
        now_ns: int,
        plan: StepPlan,
        result: StepResult,
        report: CommitReport,
        timing: StepTiming,
        stats: Mapping[int, RequestStats],
    ) -> int:
        """One plan; returns how long it took, in ns."""
        took_ns = super().record(now_ns, plan, result, report, timing, stats)
        if self._steps.pending >= CHUNK:
            self._fold_steps()
        while self._times.ended >= CHUNK:
            self._fold_requests(CHUNK)
        return took_ns

    def _fold_steps(self) -> None:
        fresh = self._steps.drain()
        steps = {name: np.concatenate([self._left.get(name, fresh[name][:0]), fresh[name]]) for name in fresh}
        whole = len(steps["step"]) // CHUNK * CHUNK
        for start in range(0, whole, CHUNK):
            self._fold({name: column[start : start + CHUNK] for name, column in steps.items()})
        self._left = {name: column[whole:] for name, column in steps.items()}
        self._running.add_gaps(*self._times.drain_gaps())

    def _fold(self, steps: Mapping[str, Column]) -> None:
        self._running.add_steps(steps)
        self._outside.add(steps)

    def _fold_requests(self, count: int | None) -> None:
        table = self._times.drain(count)
        self._running.add_requests(table)
        for outcome in Outcome:
            self._outcome[outcome] += int((table["outcome"] == outcome).sum())

    def finish(self, stats: Mapping[int, RequestStats]) -> None:
        """The replay is over: fold what is left."""
        self._times.close(stats)
        self._fold_steps()
        if self._left:
            self._fold(self._left)
        while self._times.ended:
            self._fold_requests(CHUNK)

    def metrics(self, capacity_slots: int, kv_bytes_per_token: int) -> dict[str, float]:
        """Metrics as `compute_metrics` gives them; quantiles within 0.1 %."""
        running = self._running
        span_s = self._steps.end_s
        return figures(running.totals, running.samples, span_s, capacity_slots, kv_bytes_per_token)

    @property
    def totals(self) -> Totals:
        """Sums over the run."""
        return self._running.totals

    @property
    def outcome(self) -> dict[str, int]:
        """Requests by outcome."""
        return {outcome.name.lower(): count for outcome, count in self._outcome.items()}

    @property
    def extrapolated(self) -> ExtrapolatedSteps:
        """Steps outside what the cost model was fitted on."""
        return self._outside
