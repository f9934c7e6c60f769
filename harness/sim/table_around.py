"""What an engine adds around a timed kernel: storing K and V, launching, Python. A calibration saw it, a bench did not.

In the engine attention took what the fitted model says; the kernel alone takes what its grid says. The difference,
over the timed shapes that the calibration covers, is fitted as seconds a step and seconds a row (or chunk and token),
neither below zero, residuals relative as in `fit_cost`. So the shape is the kernel's and the level the engine's.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from harness.sim.cost import FloatArray
from harness.sim.table import Grid


class Around(NamedTuple):
    """Seconds beside the kernel: per step that calls it, and per unit of the grid's first axis."""

    step_s: float
    each_s: float


def around(
    timed: Mapping[tuple[float, float], float], in_engine: Callable[[float, float], float | None]
) -> Around:
    """What is missing in `timed`, seconds of all layers by shape; `in_engine(across, along)` None: not calibrated."""
    from scipy.optimize import nnls

    rows: list[tuple[float, float]] = []
    missing: list[float] = []
    for (across, along), kernel in timed.items():
        whole = in_engine(across, along)
        if whole is not None and whole > 0:
            rows.append((1 / whole, across / whole))
            missing.append((whole - kernel) / whole)
    if not rows:
        return Around(0.0, 0.0)
    matrix: FloatArray = np.array(rows)
    unit = matrix.max(axis=0)
    found, _ = nnls(matrix / unit, np.array(missing))
    return Around(*(float(value) for value in found / unit))


def with_around(grid: Grid, extra: Around) -> Grid:
    """The grid with what the engine adds; linear in rows, so interpolation keeps it."""
    cells = (
        tuple(cell + extra.step_s + extra.each_s * across for cell in row)
        for across, row in zip(grid.across, grid.seconds, strict=True)
    )
    return replace(grid, seconds=tuple(cells))
