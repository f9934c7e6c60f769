"""How far a table's grid is off between its nodes: every other value of an axis is left out and then predicted.

The grid that predicts has then twice the spacing of the one in use, so the errors are upper estimates. Ends of an axis
stay: beyond them nothing is interpolated. Inner values are left out in two halves, so that each is predicted once.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from harness.sim.fitted import held_out_error

Shape = TypeVar("Shape")


def left_out_errors(
    shapes: Sequence[Shape],
    axes: Mapping[str, Callable[[Shape], float]],
    predict: Callable[[Sequence[Shape], Sequence[Shape]], Sequence[float]],
    seconds: Callable[[Shape], float],
) -> dict[str, dict[str, float]]:
    """Errors by axis, as `held_out_error` gives them; an axis without an inner value has none.

    Args:
        shapes: everything that was timed.
        axes: name and value of each axis.
        predict: (shapes kept, shapes left out) to the seconds of the latter; NaN where the rest says nothing.
        seconds: what was measured.
    """
    found = {name: _along(shapes, value, predict, seconds) for name, value in axes.items()}
    return {name: errors for name, errors in found.items() if errors is not None}


def _along(
    shapes: Sequence[Shape],
    value: Callable[[Shape], float],
    predict: Callable[[Sequence[Shape], Sequence[Shape]], Sequence[float]],
    seconds: Callable[[Shape], float],
) -> dict[str, float] | None:
    inner = sorted({value(shape) for shape in shapes})[1:-1]
    predicted: list[float] = []
    measured: list[float] = []
    for gone in (set[Hashable](inner[0::2]), set[Hashable](inner[1::2])):
        out = [shape for shape in shapes if value(shape) in gone]
        if out:
            predicted += predict([shape for shape in shapes if value(shape) not in gone], out)
            measured += map(seconds, out)
    known = ~np.isnan(np.array(predicted, dtype=np.float64))
    if not known.any():
        return None
    return held_out_error(np.array(predicted)[known], np.array(measured)[known])
