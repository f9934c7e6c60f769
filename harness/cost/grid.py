"""Grids of measured attention seconds, how to make one from timed shapes, and the held-out error of a grid.

`Grid` interpolates linearly. `interpolated_grid` makes a fine grid from timed shapes, between which it interpolates
linearly in logarithms. The held-out error leaves out every other value of an axis and predicts it from the rest.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil, exp, log, log2
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np

from harness.cost.fitted import held_out_error
from harness.metrics.log import FloatArray
from harness.replay.cost_model import Amount

DECODE_AXES = ("rows", "KV slots a row")
PREFILL_AXES = ("chunk", "context")
Pair = tuple[float, float]
GridPoint = tuple[float, float, float]  # place on the first axis, place on the second, seconds
Profile = Mapping[int, float]  # seconds by block size
Shape = TypeVar("Shape")
_NODES_PER_OCTAVE = 4
_INWARDS = 1 - 1e-9  # moves nodes on the rim inside, since rounding could put them outside


class TimedShape(NamedTuple):
    """Seconds of one attention shape: rows by KV slots a row, or query tokens by KV slots of a chunk."""

    across: float
    along: float
    block_size: int
    seconds: float


class GridError(ValueError):
    """Too few shapes for an interpolation, or all on one line."""


@dataclass(frozen=True)
class Grid:
    """Seconds measured at pairs of `across` and `along`, float64 `[len(across), len(along)]`; NaN: not measured."""

    across: tuple[float, ...]
    along: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, across: Amount, along: Amount) -> Amount:
        """Bilinear between the four measured neighbours; NaN outside, and where a neighbour that counts is NaN."""
        if isinstance(across, np.ndarray) or isinstance(along, np.ndarray):
            return self._many(*np.broadcast_arrays(across, along))
        return self._one(float(across), float(along))

    def _one(self, across: float, along: float) -> float:
        ends = self.across[0] <= across <= self.across[-1] and self.along[0] <= along <= self.along[-1]
        if not ends:
            return np.nan
        row = min(bisect_right(self.across, across), len(self.across) - 1) - 1
        column = min(bisect_right(self.along, along), len(self.along) - 1) - 1
        u = (across - self.across[row]) / (self.across[row + 1] - self.across[row])
        v = (along - self.along[column]) / (self.along[column + 1] - self.along[column])
        near, far = self.seconds[row], self.seconds[row + 1]
        left = _share(near[column], far[column], u)
        right = _share(near[column + 1], far[column + 1], u)
        return _share(left, right, v)

    def _many(self, across: FloatArray, along: FloatArray) -> FloatArray:
        """The same for arrays, with the same operations in the same order."""
        rows, columns, table = self._arrays
        row = np.clip(np.searchsorted(rows, across, "right") - 1, 0, len(rows) - 2)
        column = np.clip(np.searchsorted(columns, along, "right") - 1, 0, len(columns) - 2)
        u = (across - rows[row]) / (rows[row + 1] - rows[row])
        v = (along - columns[column]) / (columns[column + 1] - columns[column])
        left = _shares(table[row, column], table[row + 1, column], u)
        right = _shares(table[row, column + 1], table[row + 1, column + 1], u)
        found = _shares(left, right, v)
        outside = (across < rows[0]) | (across > rows[-1]) | (along < columns[0]) | (along > columns[-1])
        return np.where(outside, np.nan, found)

    @cached_property
    def _arrays(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        return np.array(self.across), np.array(self.along), np.array(self.seconds)


def _share(low: float, high: float, share: float) -> float:
    """The value at `share` of the way from `low` to `high`; an end without weight may be NaN."""
    return low if share == 0 else high if share == 1 else low + share * (high - low)


def _shares(low: FloatArray, high: FloatArray, share: FloatArray) -> FloatArray:
    """The same for arrays, with the same operations in the same order."""
    return np.where(share == 0, low, np.where(share == 1, high, low + share * (high - low)))


def grid_of(points: Sequence[tuple[float, float, float]]) -> Grid:
    """A grid from measured (across, along, seconds); pairs measured more than once take their median.

    Raises:
        ValueError: an axis has fewer than two values.
    """
    across = tuple(sorted({float(point[0]) for point in points}))
    along = tuple(sorted({float(point[1]) for point in points}))
    if min(len(across), len(along)) < 2:
        raise ValueError(f"a grid needs two values on each axis, found {len(across)} by {len(along)}")
    seen: dict[tuple[float, float], list[float]] = {}
    for one, other, seconds in points:
        seen.setdefault((float(one), float(other)), []).append(seconds)
    cells = tuple(
        tuple(float(np.median(seen[a, b])) if (a, b) in seen else np.nan for b in along) for a in across
    )
    return Grid(across, along, cells)


def interpolated_grid(shapes: Sequence[TimedShape], block_size: int) -> Grid:
    """The grid at one block size, refined between the timed shapes; NaN outside of them.

    Raises:
        GridError: there are too few shapes, or no shape was timed at or on both sides of `block_size`.
    """
    seconds = seconds_at_block_size(shapes, block_size)
    across, along = (sorted({pair[axis] for pair in seconds}) for axis in (0, 1))
    if min(len(across), len(along)) < 2:
        raise GridError(
            f"{_shape_count(seconds)}; a grid needs two values on each axis, found {len(across)} by {len(along)}"
        )
    logs = np.array([[log(seconds[a, b]) if (a, b) in seconds else np.nan for b in along] for a in across])
    rows, columns = _nodes(across), _nodes(along)
    cells = _between_corners(logs, rows, columns)
    if np.isnan(logs).any():
        cells = _filled(seconds, rows, columns, cells)
    return Grid(
        tuple(row.value for row in rows), tuple(column.value for column in columns), _as_tuples(np.exp(cells))
    )


def seconds_at_block_size(shapes: Sequence[TimedShape], block_size: int) -> dict[Pair, float]:
    """Seconds by (across, along) at a block size that was timed, or lies between timed ones.

    Raises:
        GridError: the block size lies outside of the timed ones.
    """
    profiles = _profiles(shapes)
    timed = sorted({shape.block_size for shape in shapes})
    if not timed or not timed[0] <= block_size <= timed[-1]:
        raise GridError(
            f"block size {block_size} lies outside of the timed ones ({', '.join(map(str, timed)) or 'none'})"
        )
    ends = _neighbours(timed, block_size)
    found = {pair: _seconds_at(profile, block_size, ends, profiles) for pair, profile in profiles.items()}
    return {pair: seconds for pair, seconds in found.items() if seconds is not None}


def _profiles(shapes: Iterable[TimedShape]) -> dict[Pair, Profile]:
    """Seconds by block size for every pair; a shape timed more than once takes its median."""
    seen: dict[Pair, dict[int, list[float]]] = {}
    for shape in shapes:
        seen.setdefault(shape[:2], {}).setdefault(shape.block_size, []).append(shape.seconds)
    return {pair: {size: median(all_) for size, all_ in sizes.items()} for pair, sizes in seen.items()}


def _neighbours(timed: Sequence[int], wanted: float) -> tuple[int, int]:
    """The nearest timed values on both sides of `wanted`; twice `wanted` itself where it was timed."""
    return max(one for one in timed if one <= wanted), min(one for one in timed if one >= wanted)


def _seconds_at(
    profile: Profile, block_size: int, ends: tuple[int, int], profiles: Mapping[Pair, Profile]
) -> float | None:
    """Seconds of one pair at a block size, from its own profile or by the factors of other pairs; None: unknown."""
    own = sorted(profile)
    if own[0] <= block_size <= own[-1]:
        low, high = _neighbours(own, block_size)
        return _log_log(block_size, (low, profile[low]), (high, profile[high]))
    nearest = min(own, key=lambda size: abs(log(size / block_size)))
    factors = [_factor(nearest, end, profiles) for end in ends]
    if None in factors:
        return None
    near, far = (profile[nearest] * factor for factor in factors if factor is not None)
    return _log_log(block_size, (ends[0], near), (ends[1], far))


def _log_log(wanted: float, low: Pair, high: Pair) -> float:
    """Log-log interpolation between two (place, seconds)."""
    if low[0] == high[0]:
        return low[1]
    share = log(wanted / low[0]) / log(high[0] / low[0])
    return exp((1 - share) * log(low[1]) + share * log(high[1]))


def _factor(one: int, other: int, profiles: Mapping[Pair, Profile]) -> float | None:
    """Seconds at block size `other` over those at `one`: the median over all pairs that were timed at both."""
    ratios = [
        profile[other] / profile[one] for profile in profiles.values() if {one, other} <= profile.keys()
    ]
    return median(ratios) if ratios else None


class _Node(NamedTuple):
    """A node of a refined axis: the index of the timed value below it, the share of the way up, and its value."""

    below: int
    share: float
    value: float


def _nodes(axis: Sequence[float]) -> list[_Node]:
    found = []
    for index, (low, high) in enumerate(pairwise(axis)):
        steps = max(1, ceil(_NODES_PER_OCTAVE * log2(high / low)))
        found += [_Node(index, step / steps, low * (high / low) ** (step / steps)) for step in range(steps)]
    return [*found, _Node(len(axis) - 2, 1.0, float(axis[-1]))]


def _between_corners(logs: FloatArray, rows: Sequence[_Node], columns: Sequence[_Node]) -> FloatArray:
    """Refined nodes from the four timed ones around each, log-log; NaN where one with weight was not timed."""
    share = np.array([column.share for column in columns])
    left, right = (logs[:, [column.below + side for column in columns]] for side in (0, 1))
    wide = _shares(left, right, share)
    low, high = (wide[[row.below + side for row in rows]] for side in (0, 1))
    return _shares(low, high, np.array([[row.share] for row in rows]))


def _filled(
    seconds: Mapping[Pair, float], rows: Sequence[_Node], columns: Sequence[_Node], cells: FloatArray
) -> FloatArray:
    """Nodes that lack a timed corner, interpolated in triangles of timed shapes."""
    from scipy.interpolate import LinearNDInterpolator
    from scipy.spatial import QhullError

    places = np.log(np.array(list(seconds)))
    try:
        between = LinearNDInterpolator(places, np.log(list(seconds.values())), rescale=True)
    except QhullError as error:
        raise GridError(f"{_shape_count(seconds)}, which lie on one line; a grid needs an area") from error
    axes = ([place.value for place in rows], [place.value for place in columns])
    nodes = np.stack(np.meshgrid(*map(np.log, axes), indexing="ij"), axis=-1)
    middle = places.mean(axis=0)
    return np.where(np.isnan(cells), between(middle + (nodes - middle) * _INWARDS), cells)


def _as_tuples(cells: FloatArray) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, cells.tolist()))


def _shape_count(seconds: Mapping[Pair, float]) -> str:
    return f"{len(seconds)} timed shapes" if len(seconds) != 1 else "1 timed shape"


def left_out_errors(
    shapes: Sequence[Shape],
    axes: Mapping[str, Callable[[Shape], float]],
    predict: Callable[[Sequence[Shape], Sequence[Shape]], Sequence[float]],
    seconds: Callable[[Shape], float],
) -> dict[str, dict[str, float]]:
    """Errors by axis, as `held_out_error` gives them; axes without inner values are absent.

    Args:
        shapes: everything that was timed.
        axes: name and value of each axis.
        predict: gives (shapes kept, shapes left out) the seconds of the latter; NaN where they are unknown.
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


def grid_errors(part: str, grid: Grid, names: tuple[str, str]) -> dict[str, dict[str, float]]:
    """Errors of a measured grid by '<part> grid along <axis>'; both axes are linear, as the grid is."""
    points = [
        (across, along, seconds)
        for across, row in zip(grid.across, grid.seconds, strict=True)
        for along, seconds in zip(grid.along, row, strict=True)
        if seconds == seconds
    ]
    axes: dict[str, Callable[[GridPoint], float]] = {
        _error_name(part, names[0]): lambda point: point[0],
        _error_name(part, names[1]): lambda point: point[1],
    }
    return left_out_errors(points, axes, _predict_points, lambda point: point[2])


def shape_errors(
    part: str, shapes: Sequence[TimedShape], names: tuple[str, str]
) -> dict[str, dict[str, float]]:
    """Errors of timed shapes, block size as a third axis."""
    axes: dict[str, Callable[[TimedShape], float]] = {
        _error_name(part, names[0]): lambda shape: shape.across,
        _error_name(part, names[1]): lambda shape: shape.along,
        _error_name(part, "block size"): lambda shape: shape.block_size,
    }
    return left_out_errors(shapes, axes, _predict_shapes, lambda shape: shape.seconds)


def _error_name(part: str, axis: str) -> str:
    return f"{part} grid along {axis}"


def _predict_points(kept: Sequence[GridPoint], out: Sequence[GridPoint]) -> list[float]:
    try:
        grid = grid_of(kept)
    except ValueError:
        return [np.nan] * len(out)
    return [float(grid.at(point[0], point[1])) for point in out]


def _predict_shapes(kept: Sequence[TimedShape], out: Sequence[TimedShape]) -> list[float]:
    grids = {size: _grid_or_none(kept, size) for size in {shape.block_size for shape in out}}
    found = ((grids[shape.block_size], shape) for shape in out)
    return [np.nan if grid is None else float(grid.at(shape.across, shape.along)) for grid, shape in found]


def _grid_or_none(shapes: Sequence[TimedShape], block_size: int) -> Grid | None:
    try:
        return interpolated_grid(shapes, block_size)
    except GridError:
        return None
