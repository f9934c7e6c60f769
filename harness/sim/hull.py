"""Which steps of a prediction lie outside what the cost model was measured on."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from harness.metrics.log import Column
from harness.sim.cost import Amount, CostSource

COLUMNS = ("rows", "query_tokens", "prefill_tokens", "kv_read_tokens", "copies")
"""Columns of the step table that span the measured range."""

Hull = Mapping[str, tuple[float, float]]
BoolArray = npt.NDArray[np.bool_]
DECODE_GRID, PREFILL_GRID = "decode rows outside the timed grid", "chunks outside the timed grid"


def hull_of(steps: Mapping[str, Column]) -> dict[str, tuple[float, float]]:
    """The range of each column over measured steps."""
    return {name: (float(np.min(steps[name])), float(np.max(steps[name]))) for name in COLUMNS}


class TimedGrid(Protocol):
    """Attention seconds that were timed on a grid of two axes."""

    def at(self, across: Amount, along: Amount) -> Amount:
        """Seconds at each place; NaN outside of the grid."""
        ...


class GridHull(dict[str, tuple[float, float]]):
    """The ranges of a fitted model's steps, and the grids that a table looks attention up in before it asks the fit.

    A step of decode rows alone, or of prefill chunks alone, shows where in its grid it lies; one that mixes them shows
    no more than its ranges.
    """

    decode: TimedGrid | None = None
    prefill: TimedGrid | None = None  # over (tokens of a chunk, its context with these tokens)

    def outside_grids(self, steps: Mapping[str, Column]) -> Iterator[tuple[str, BoolArray]]:
        """(what, which steps) for steps whose attention no grid knows."""
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
    """Counts the steps of a prediction that lie outside a hull; an empty hull has no outside."""

    def __init__(self, hull: Hull) -> None:
        self._hull = hull
        self._steps = self._outside = 0
        self._seconds = self._outside_s = 0.0
        self._by = dict.fromkeys(hull, 0)

    def add(self, steps: Mapping[str, Column]) -> None:
        """Look at more steps."""
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
        """As the record keeps it: shares of the steps and of their time, and steps by column; None without a hull."""
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
    """How much of a finished prediction is extrapolation; None where the model was not measured."""
    found = ExtrapolatedSteps(source.hull)
    found.add(steps)
    return found.section()
