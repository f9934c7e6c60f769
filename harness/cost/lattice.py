"""Seconds at the points of a lattice, and between them: linear along each axis, for numbers and for arrays alike."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, log2

import numpy as np

from harness.metrics.log import FloatArray
from harness.replay.cost_model import Amount


def octaves(first: int, last: int, per_octave: int, *, dense_to: int = 0) -> tuple[float, ...]:
    """Whole numbers from `first` to at least `last`: all of them up to `dense_to`, then `per_octave` in each octave.

    At least two numbers are given, so that there is something to interpolate between.
    """
    last = max(last, first + 1)
    found = {*range(first, min(dense_to, last) + 1), first, last}
    start = max(first, dense_to, 1)
    steps = ceil(per_octave * log2(max(last / start, 1.0)))
    found |= {min(round(start * 2.0 ** (step / per_octave)), last) for step in range(steps + 1)}
    return tuple(float(value) for value in sorted(found))


@dataclass(frozen=True)
class Lattice:
    """`seconds` at every combination of the values of its axes, float64 `[len(axis) for axis in axes]`.

    Between the values it is linear along each axis (multilinear). Outside it goes on as between the two outer values,
    and is never below 0.
    """

    axes: tuple[tuple[float, ...], ...]
    seconds: FloatArray

    def at(self, *place: Amount) -> Amount:
        """Seconds at one place, or at many: float64 `[places]`. Both are computed in the same order."""
        for value in place:
            if isinstance(value, np.ndarray):
                return self._many([np.asarray(one, dtype=np.float64) for one in np.broadcast_arrays(*place)])
        return self._one(place)

    def _one(self, place: Sequence[Amount]) -> float:
        """The axes one after the other: a replay calls this for every step."""
        flat, axes = self._flat, self.axes
        if len(axes) == 1:
            low, share = _cell(axes[0], place[0])
            found = flat[low] + share * (flat[low + 1] - flat[low])
        elif len(axes) == 2:
            (row, across), (column, along) = _cell(axes[0], place[0]), _cell(axes[1], place[1])
            near = row * self._strides[0] + column
            far = near + self._strides[0]
            start = flat[near] + along * (flat[near + 1] - flat[near])
            end = flat[far] + along * (flat[far + 1] - flat[far])
            found = start + across * (end - start)
        else:
            cells_of = [_cell(axis, value) for axis, value in zip(axes, place, strict=True)]
            offset = sum(low * stride for (low, _), stride in zip(cells_of, self._strides, strict=True))
            cells = [flat[offset + corner] for corner in self._corners]
            for _, share in reversed(cells_of):
                cells = [cells[i] + share * (cells[i + 1] - cells[i]) for i in range(0, len(cells), 2)]
            found = cells[0]
        return found if found > 0.0 else 0.0

    def _many(self, place: Sequence[FloatArray]) -> FloatArray:
        offset = np.zeros(place[0].shape, dtype=np.int64)
        shares = []
        for axis, stride, value in zip(self._arrays, self._strides, place, strict=True):
            low = np.clip(np.searchsorted(axis, value, "right") - 1, 0, len(axis) - 2)
            shares.append((value - axis[low]) / (axis[low + 1] - axis[low]))
            offset += low * stride
        flat = self.seconds.ravel()
        cells = [flat[offset + corner] for corner in self._corners]
        for share in reversed(shares):
            cells = [cells[i] + share * (cells[i + 1] - cells[i]) for i in range(0, len(cells), 2)]
        return np.maximum(cells[0], 0.0)

    @cached_property
    def _flat(self) -> list[float]:
        return [float(value) for value in self.seconds.ravel()]

    @cached_property
    def _arrays(self) -> list[FloatArray]:
        return [np.array(axis) for axis in self.axes]

    @cached_property
    def _strides(self) -> list[int]:
        lengths = [len(axis) for axis in self.axes]
        return [int(np.prod(lengths[i + 1 :])) for i in range(len(lengths))]

    @cached_property
    def _corners(self) -> list[int]:
        """Offsets of the corners of a cell; the last axis runs fastest."""
        return [sum(corner) for corner in product(*((0, stride) for stride in self._strides))]


def _cell(axis: tuple[float, ...], value: Amount) -> tuple[int, float]:
    """The place in the axis at or before a value, never the last, and the share of the way to the next."""
    low = bisect_right(axis, value) - 1
    if low < 0:
        low = 0
    elif low > len(axis) - 2:
        low = len(axis) - 2
    start = axis[low]
    return low, float((value - start) / (axis[low + 1] - start))


def tabulated(axes: Sequence[tuple[float, ...]], seconds: Callable[..., float]) -> Lattice:
    """The lattice of a function of one number for each axis."""
    cells = [seconds(*place) for place in product(*axes)]
    return Lattice(tuple(axes), np.array(cells, dtype=np.float64).reshape([len(axis) for axis in axes]))
