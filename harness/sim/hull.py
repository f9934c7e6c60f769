"""Which steps of a prediction lie outside what the cost model was measured on."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from harness.metrics.log import Column
from harness.sim.cost import CostSource

COLUMNS = ("rows", "query_tokens", "prefill_tokens", "kv_read_tokens", "copies")
"""Columns of the step table that span the measured range."""

Hull = Mapping[str, tuple[float, float]]


def hull_of(steps: Mapping[str, Column]) -> dict[str, tuple[float, float]]:
    """The range of each column over measured steps."""
    return {name: (float(np.min(steps[name])), float(np.max(steps[name]))) for name in COLUMNS}


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
        for name, (low, high) in self._hull.items():
            beyond = (steps[name] < low) | (steps[name] > high)
            self._by[name] += int(beyond.sum())
            outside |= beyond
        self._steps += len(seconds)
        self._outside += int(outside.sum())
        self._seconds += float(seconds.sum())
        self._outside_s += float(seconds[outside].sum())

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
