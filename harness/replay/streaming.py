"""A recorder that keeps no rows: steps, requests and gaps are added to running totals, in constant memory.

Chunks end at fixed numbers of steps and requests, so sums do not depend on the order in which a replay hands them over.
`ExtrapolatedSteps` counts the steps outside of the hull, the range that the cost model was measured on.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.commit import CommitReport, RequestStats
from harness.metrics.compute import RunningTotals, Totals, metrics_of_totals
from harness.metrics.log import BoolArray, Column, FloatArray, Outcome
from harness.replay.cost_model import Amount, CostSource
from harness.replay.executors import StepTiming
from harness.replay.recorder import Recorder

CHUNK = 4096  # steps, and requests, that are added to the totals at a time
COLUMNS = ("rows", "query_tokens", "prefill_tokens", "kv_read_tokens", "copies")
"""Columns of the step table whose measured ranges make the hull."""

Hull = Mapping[str, tuple[float, float]]
DECODE_GRID, PREFILL_GRID = "decode rows outside the timed grid", "chunks outside the timed grid"


def hull_of(steps: Mapping[str, Column]) -> dict[str, tuple[float, float]]:
    """The range of each column over measured steps."""
    return {name: (float(np.min(steps[name])), float(np.max(steps[name]))) for name in COLUMNS}


class TimedGrid(Protocol):
    """Attention seconds that were timed on a grid of two axes."""

    def at(self, across: Amount, along: Amount, /) -> Amount:
        """Seconds at each place; NaN outside of the grid."""
        ...


class GridHull(dict[str, tuple[float, float]]):
    """The ranges of a fitted model's steps, and the grids in which a table model looks attention up first.

    Steps of decode rows alone, or of prefill chunks alone, are checked against the grids; mixed steps only against the
    ranges.
    """

    decode: TimedGrid | None = None
    prefill: TimedGrid | None = None  # over (tokens of a chunk, its context with these tokens)

    def outside_grids(self, steps: Mapping[str, Column]) -> Iterator[tuple[str, BoolArray]]:
        """(name, which steps) for the steps whose attention lies outside of a grid."""
        rows, kv = (np.asarray(steps[name], dtype=np.float64) for name in ("decode_rows", "kv_read_tokens"))
        chunks = np.asarray(steps["rows"], dtype=np.float64) - rows
        if self.decode is not None:
            alone = (rows > 0) & (chunks == 0)
            yield DECODE_GRID, alone & np.isnan(self.decode.at(rows, kv / np.maximum(rows, 1)))
        if self.prefill is not None:
            alone = (rows == 0) & (chunks > 0)
            tokens = np.asarray(steps["prefill_tokens"], dtype=np.float64)
            some = np.maximum(chunks, 1)
            yield PREFILL_GRID, alone & np.isnan(self.prefill.at(tokens / some, kv / some))


class ExtrapolatedSteps:
    """Counts the steps of a prediction that lie outside of a hull; with an empty hull it counts none.

    Call `add` with the step columns, chunk after chunk, then `section`.
    """

    def __init__(self, hull: Hull) -> None:
        self._hull = hull
        self._steps = self._outside = 0
        self._seconds = self._outside_s = 0.0
        self._by = dict.fromkeys(hull, 0)

    def add(self, steps: Mapping[str, Column]) -> None:
        """Count more steps."""
        seconds = np.asarray(steps["seconds"], dtype=np.float64)
        outside = np.zeros(len(seconds), dtype=bool)
        for name, beyond in self._beyond(steps):
            self._by[name] = self._by.get(name, 0) + int(beyond.sum())
            outside |= beyond
        self._steps += len(seconds)
        self._outside += int(outside.sum())
        self._seconds += float(seconds.sum())
        self._outside_s += float(seconds[outside].sum())

    def _beyond(self, steps: Mapping[str, Column]) -> Iterator[tuple[str, BoolArray]]:
        for name, (low, high) in self._hull.items():
            yield name, (steps[name] < low) | (steps[name] > high)
        if isinstance(self._hull, GridHull):
            yield from self._hull.outside_grids(steps)

    def section(self) -> dict[str, Any] | None:
        """The record's section: shares of the steps and of their time, and steps by column; None without a hull."""
        if not self._hull:
            return None
        return {
            "steps": self._outside,
            "share_of_steps": self._outside / self._steps if self._steps else 0.0,
            "share_of_time": self._outside_s / self._seconds if self._seconds else 0.0,
            "by": {name: count for name, count in self._by.items() if count},
            "hull": {name: list(ends) for name, ends in self._hull.items()},
        }


def extrapolated(source: CostSource, steps: Mapping[str, Column]) -> dict[str, Any] | None:
    """The extrapolation of a finished prediction, as `section()` gives it; None where the model was not measured."""
    found = ExtrapolatedSteps(source.hull)
    found.add(steps)
    return found.section()


class RunFold:
    """Adds one run to running totals: steps, gaps and requests as they come, then `close()`, then the results.

    `hull` is the range that its cost model was measured on.
    """

    def __init__(self, hull: Hull) -> None:
        self._running = RunningTotals()
        self._left: dict[str, Column] = {}  # steps that do not fill a chunk yet
        self._outcome = dict.fromkeys(Outcome, 0)
        self.extrapolated = ExtrapolatedSteps(hull)

    def add_steps(self, fresh: Mapping[str, Column]) -> None:
        """The next steps, columns as in `RunLog.steps`; they are added in whole chunks."""
        steps = {name: np.concatenate([self._left.get(name, fresh[name][:0]), fresh[name]]) for name in fresh}
        whole = len(steps["step"]) // CHUNK * CHUNK
        for start in range(0, whole, CHUNK):
            self._fold({name: column[start : start + CHUNK] for name, column in steps.items()})
        self._left = {name: column[whole:] for name, column in steps.items()}

    def add_gaps(self, seconds: FloatArray, weights: FloatArray) -> None:
        """Gaps between tokens; each stands for its weight of equal gaps."""
        self._running.add_gaps(seconds, weights)

    def add_requests(self, table: Mapping[str, Column]) -> None:
        """The next CHUNK requests that ended, or the last ones; columns as in `RunLog.requests`."""
        self._running.add_requests(table)
        for outcome in Outcome:
            self._outcome[outcome] += int((table["outcome"] == outcome).sum())

    def close(self) -> None:
        """Add the last steps, which fill no chunk; no step follows."""
        if self._left:
            self._fold(self._left)

    def _fold(self, steps: Mapping[str, Column]) -> None:
        self._running.add_steps(steps)
        self.extrapolated.add(steps)

    def metrics(self, span_s: float, capacity_slots: int, kv_bytes_per_token: int) -> dict[str, float]:
        """Metrics as `compute_metrics` gives them for a log; quantiles are right within 0.1 %."""
        running = self._running
        return metrics_of_totals(running.totals, running.samples, span_s, capacity_slots, kv_bytes_per_token)

    @property
    def totals(self) -> Totals:
        """Sums over the run."""
        return self._running.totals

    @property
    def outcome(self) -> dict[str, int]:
        """Requests by outcome."""
        return {outcome.name.lower(): count for outcome, count in self._outcome.items()}


class StreamingRecorder(Recorder):
    """A recorder that hands steps, gaps and requests to `fold` a chunk at a time, and keeps none.

    Call `finish` after the replay; the results are in `fold`.
    """

    def __init__(self, requests: Mapping[int, Request], block_size: int, hull: Hull) -> None:
        super().__init__(requests, block_size)
        self.fold = RunFold(hull)

    def record(
        self,
        now_ns: int,
        plan: StepPlan,
        result: StepResult,
        report: CommitReport,
        timing: StepTiming,
    ) -> int:
        """One plan; returns how long it took, in ns."""
        took_ns = super().record(now_ns, plan, result, report, timing)
        if self._steps.pending >= CHUNK:
            self._hand_over()
        while self._times.ended >= CHUNK:
            self.fold.add_requests(self._times.drain(CHUNK))
        return took_ns

    def _hand_over(self) -> None:
        self.fold.add_steps(self._steps.drain())
        self.fold.add_gaps(*self._times.drain_gaps())

    def finish(self, stats: Mapping[int, RequestStats]) -> None:
        """The replay is over: hand over what is left."""
        self._times.close(stats)
        self._hand_over()
        self.fold.close()
        while self._times.ended:
            self.fold.add_requests(self._times.drain(CHUNK))

    @property
    def span_s(self) -> float:
        """When the last step ended, in seconds."""
        return self._steps.end_s
