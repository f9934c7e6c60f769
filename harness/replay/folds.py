"""Folds of a run log: `KeptLog` keeps every row, `RunFold` adds rows to running totals, in constant memory.

The policy core and the compiled replay hand rows to the same folds. Chunks end at fixed numbers of steps and requests,
so sums do not depend on the order in which a replay hands them over. `ExtrapolatedSteps` counts the steps outside of
the hull, the range that the cost model was measured on.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from harness.metrics import compute
from harness.metrics.log import BoolArray, Column, FloatArray, Outcome, RunLog, empty_log
from harness.replay.cost_model import Amount, CostSource

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


@dataclass(frozen=True)
class Prediction:
    """The result of a simulation; `log` is empty where rows were not kept.

    `outcome` counts the requests by outcome. `extrapolated` says how much lies outside of the measured range.
    """

    metrics: dict[str, float]
    outcome: dict[str, int]
    extrapolated: dict[str, Any] | None
    totals: compute.Totals
    log: RunLog


def prediction_of(log: RunLog, source: CostSource, *, rows: bool) -> Prediction:
    """The prediction that a kept run log stands for, with its `rows` or without."""
    beyond, totals = extrapolated(source, log.steps), compute.step_totals(compute.as_floats(log.steps))
    kept = log if rows else empty_log(log.block_size, log.capacity_slots, log.kv_bytes_per_token)
    return Prediction(compute.compute_metrics(log, totals), log.outcomes, beyond, totals, kept)


class Fold(Protocol):
    """What a run log is folded into: steps, gaps and requests as they come, then `close()`, then its results.

    It gets `chunk` steps and ended requests at a time, and fewer at the end. Nobody who hands them on keeps them.
    """

    chunk: int
    keeps_rows: bool

    def add_steps(self, steps: Mapping[str, Column]) -> None:
        """The next steps, columns as in `RunLog.steps`."""

    def add_gaps(self, seconds: FloatArray, weights: FloatArray) -> None:
        """Gaps between tokens; each stands for its weight of equal gaps."""

    def add_requests(self, table: Mapping[str, Column]) -> None:
        """The next requests that ended, in order of arrival; columns as in `RunLog.requests`."""

    def close(self, span_s: float) -> None:
        """The run is over; the last step ended at `span_s`."""


class KeptLog:
    """The fold that keeps every row: `log()` is the run log."""

    chunk, keeps_rows = sys.maxsize, True

    def __init__(self, block_size: int, capacity_slots: int, kv_bytes_per_token: int) -> None:
        self._sizes = block_size, capacity_slots, kv_bytes_per_token
        self._steps: list[Mapping[str, Column]] = []
        self._gaps: list[tuple[FloatArray, FloatArray]] = []
        self._requests: Mapping[str, Column] = {}
        self._span_s = 0.0

    def add_steps(self, steps: Mapping[str, Column]) -> None:
        """The next steps."""
        self._steps.append(steps)

    def add_gaps(self, seconds: FloatArray, weights: FloatArray) -> None:
        """The next gaps."""
        self._gaps.append((seconds, weights))

    def add_requests(self, table: Mapping[str, Column]) -> None:
        """All requests."""
        self._requests = table

    def close(self, span_s: float) -> None:
        """The run is over."""
        self._span_s = span_s

    def log(self, **beside: Any) -> RunLog:
        """The whole run; `beside` are further fields of its log."""
        values, inverse = np.unique(np.concatenate([part for part, _ in self._gaps]), return_inverse=True)
        weights = np.concatenate([part for _, part in self._gaps])
        return RunLog(
            {name: np.concatenate([part[name] for part in self._steps]) for name in self._steps[0]},
            self._requests,
            values,
            np.bincount(inverse, weights=weights, minlength=len(values)).astype(np.float64),
            *self._sizes,
            self._span_s,
            **beside,
        )


class RunFold:
    """The fold in constant memory: it adds one run to running totals.

    `hull` is the range that its cost model was measured on.
    """

    chunk, keeps_rows = CHUNK, False

    def __init__(self, hull: Hull) -> None:
        self._running = compute.RunningTotals()
        self._left: dict[str, Column] = {}  # steps that do not fill a chunk yet
        self._outcome = dict.fromkeys(Outcome, 0)
        self._extrapolated = ExtrapolatedSteps(hull)
        self._span_s = 0.0

    def add_steps(self, steps: Mapping[str, Column]) -> None:
        """The next steps; they are added in whole chunks, wherever they were cut."""
        steps = {name: np.concatenate([self._left.get(name, steps[name][:0]), steps[name]]) for name in steps}
        whole = len(steps["step"]) // CHUNK * CHUNK
        for start in range(0, whole, CHUNK):
            self._fold({name: column[start : start + CHUNK] for name, column in steps.items()})
        self._left = {name: column[whole:] for name, column in steps.items()}

    def add_gaps(self, seconds: FloatArray, weights: FloatArray) -> None:
        """The next gaps."""
        self._running.add_gaps(seconds, weights)

    def add_requests(self, table: Mapping[str, Column]) -> None:
        """The next CHUNK requests that ended, or the last ones."""
        self._running.add_requests(table)
        for outcome in Outcome:
            self._outcome[outcome] += int((table["outcome"] == outcome).sum())

    def close(self, span_s: float) -> None:
        """Add the last steps, which fill no chunk."""
        self._fold(self._left)
        self._span_s = span_s

    def _fold(self, steps: Mapping[str, Column]) -> None:
        self._running.add_steps(steps)
        self._extrapolated.add(steps)

    def prediction(
        self,
        block_size: int,
        capacity_slots: int,
        kv_bytes_per_token: int,
        waste: Mapping[str, float] = MappingProxyType({}),
        tiers: Mapping[str, float] = MappingProxyType({}),
    ) -> Prediction:
        """Metrics as `compute_metrics` gives them for a log; quantiles are right within 0.1 %.

        `waste` are bytes times seconds of all steps by cause, where layers are in groups. `tiers` are metrics.
        """
        running, sizes = self._running, (capacity_slots, kv_bytes_per_token)
        return Prediction(
            compute.metrics_of_totals(running.totals, running.samples, self._span_s, *sizes)
            | compute.waste_shares(waste)
            | dict(tiers),
            {outcome.name.lower(): count for outcome, count in self._outcome.items()},
            self._extrapolated.section(),
            running.totals,
            empty_log(block_size, capacity_slots, kv_bytes_per_token),
        )
