"""A grid for the table model from single timed shapes, and the held-out error of a grid.

Between timed shapes the interpolation is linear in logarithms. The held-out error leaves out every other value of an
axis and predicts it from the rest.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import ceil, exp, log, log2
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np

from harness.cost.fitted import held_out_error
from harness.cost.table import Grid, grid_of
from harness.replay.cost_model import FloatArray

_NODES_PER_OCTAVE = 4
_INWARDS = 1 - 1e-9  # towards the middle: a node on the rim is inside in spite of rounding


class TimedShape(NamedTuple):
    """Seconds of one attention shape: rows by KV slots a row, or query tokens by KV slots of a chunk."""

    across: float
    along: float
    block_size: int
    seconds: float


Pair = tuple[float, float]
Profile = Mapping[int, float]  # seconds by block size


class SurfaceError(ValueError):
    """Shapes between which nothing can be interpolated: too few, or all on one line."""


def surface(shapes: Sequence[TimedShape], block_size: int) -> Grid:
    """The grid at one block size; NaN outside of the timed shapes.

    Raises SurfaceError where a grid needs more shapes, or where no shape was timed at or on both sides of `block_size`.
    """
    seconds = at_block_size(shapes, block_size)
    across, along = (sorted({pair[axis] for pair in seconds}) for axis in (0, 1))
    if min(len(across), len(along)) < 2:
        raise SurfaceError(
            f"{_counted(seconds)}; a grid needs two values on each axis, found {len(across)} by {len(along)}"
        )
    logs = np.array([[log(seconds[a, b]) if (a, b) in seconds else np.nan for b in along] for a in across])
    rows, columns = _places(across), _places(along)
    cells = _between_corners(logs, rows, columns)
    if np.isnan(logs).any():
        cells = _filled(seconds, rows, columns, cells)
    return Grid(
        tuple(row.value for row in rows), tuple(column.value for column in columns), _rows(np.exp(cells))
    )


def at_block_size(shapes: Sequence[TimedShape], block_size: int) -> dict[Pair, float]:
    """Seconds by (across, along) at a block size that was timed, or lies between ones that were.

    Raises SurfaceError beyond the block sizes that were timed.
    """
    profiles = _profiles(shapes)
    timed = sorted({shape.block_size for shape in shapes})
    if not timed or not timed[0] <= block_size <= timed[-1]:
        raise SurfaceError(
            f"block size {block_size} lies outside of the timed ones ({', '.join(map(str, timed)) or 'none'})"
        )
    ends = _ends(timed, block_size)
    found = {pair: _seconds_at(profile, block_size, ends, profiles) for pair, profile in profiles.items()}
    return {pair: seconds for pair, seconds in found.items() if seconds is not None}


def _profiles(shapes: Iterable[TimedShape]) -> dict[Pair, Profile]:
    """Seconds by block size for every pair; a shape timed more than once takes its median."""
    seen: dict[Pair, dict[int, list[float]]] = {}
    for shape in shapes:
        seen.setdefault(shape[:2], {}).setdefault(shape.block_size, []).append(shape.seconds)
    return {pair: {size: median(all_) for size, all_ in sizes.items()} for pair, sizes in seen.items()}


def _ends(timed: Sequence[int], wanted: float) -> tuple[int, int]:
    """The nearest timed values on both sides of a wanted one; itself twice where it was timed."""
    return max(one for one in timed if one <= wanted), min(one for one in timed if one >= wanted)


def _seconds_at(
    profile: Profile, block_size: int, ends: tuple[int, int], profiles: Mapping[Pair, Profile]
) -> float | None:
    """One pair's seconds at a block size, from its own profile or by the factors of other pairs; None: unknown."""
    own = sorted(profile)
    if own[0] <= block_size <= own[-1]:
        low, high = _ends(own, block_size)
        return _between(block_size, (low, profile[low]), (high, profile[high]))
    nearest = min(own, key=lambda size: abs(log(size / block_size)))
    factors = [_factor(nearest, end, profiles) for end in ends]
    if None in factors:
        return None
    near, far = (profile[nearest] * factor for factor in factors if factor is not None)
    return _between(block_size, (ends[0], near), (ends[1], far))


def _between(wanted: float, low: Pair, high: Pair) -> float:
    """Log-log between two (place, seconds)."""
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


class _Place(NamedTuple):
    """A node of a refined axis: between which timed values it lies, how far, and where."""

    below: int
    share: float
    value: float


def _places(axis: Sequence[float]) -> list[_Place]:
    found = []
    for index, (low, high) in enumerate(pairwise(axis)):
        steps = max(1, ceil(_NODES_PER_OCTAVE * log2(high / low)))
        found += [_Place(index, step / steps, low * (high / low) ** (step / steps)) for step in range(steps)]
    return [*found, _Place(len(axis) - 2, 1.0, float(axis[-1]))]


def _between_corners(logs: FloatArray, rows: Sequence[_Place], columns: Sequence[_Place]) -> FloatArray:
    """Refined nodes from the four timed ones around each, log-log; NaN where one that counts was not timed."""
    share = np.array([column.share for column in columns])
    left, right = (logs[:, [column.below + side for column in columns]] for side in (0, 1))
    wide = _mixed(left, right, share)
    low, high = (wide[[row.below + side for row in rows]] for side in (0, 1))
    return _mixed(low, high, np.array([[row.share] for row in rows]))


def _mixed(low: FloatArray, high: FloatArray, share: FloatArray) -> FloatArray:
    return np.where(share == 0, low, np.where(share == 1, high, low + share * (high - low)))


def _filled(
    seconds: Mapping[Pair, float], rows: Sequence[_Place], columns: Sequence[_Place], cells: FloatArray
) -> FloatArray:
    """Nodes that lack a timed corner, from the triangles of what was timed."""
    from scipy.interpolate import LinearNDInterpolator
    from scipy.spatial import QhullError

    places = np.log(np.array(list(seconds)))
    try:
        between = LinearNDInterpolator(places, np.log(list(seconds.values())), rescale=True)
    except QhullError as error:
        raise SurfaceError(f"{_counted(seconds)}, which lie on one line; a grid needs an area") from error
    axes = ([place.value for place in rows], [place.value for place in columns])
    nodes = np.stack(np.meshgrid(*map(np.log, axes), indexing="ij"), axis=-1)
    middle = places.mean(axis=0)
    return np.where(np.isnan(cells), between(middle + (nodes - middle) * _INWARDS), cells)


def _rows(cells: FloatArray) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, cells.tolist()))


def _counted(seconds: Mapping[Pair, float]) -> str:
    return f"{len(seconds)} timed shapes" if len(seconds) != 1 else "1 timed shape"


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


Point = tuple[float, float, float]
DECODE_AXES = ("rows", "KV slots a row")
PREFILL_AXES = ("chunk", "context")


def grid_errors(part: str, grid: Grid, names: tuple[str, str]) -> dict[str, dict[str, float]]:
    """Errors of a measured grid by '<part> grid along <axis>'; both axes are linear, as the grid is."""
    points = [
        (across, along, seconds)
        for across, row in zip(grid.across, grid.seconds, strict=True)
        for along, seconds in zip(grid.along, row, strict=True)
        if seconds == seconds
    ]
    axes: dict[str, Callable[[Point], float]] = {
        _title(part, names[0]): lambda point: point[0],
        _title(part, names[1]): lambda point: point[1],
    }
    return left_out_errors(points, axes, _from_points, lambda point: point[2])


def shape_errors(
    part: str, shapes: Sequence[TimedShape], names: tuple[str, str]
) -> dict[str, dict[str, float]]:
    """Errors of timed shapes, block size as a third axis."""
    axes: dict[str, Callable[[TimedShape], float]] = {
        _title(part, names[0]): lambda shape: shape.across,
        _title(part, names[1]): lambda shape: shape.along,
        _title(part, "block size"): lambda shape: shape.block_size,
    }
    return left_out_errors(shapes, axes, _from_shapes, lambda shape: shape.seconds)


def _title(part: str, axis: str) -> str:
    return f"{part} grid along {axis}"


def _from_points(kept: Sequence[Point], out: Sequence[Point]) -> list[float]:
    try:
        grid = grid_of(kept)
    except ValueError:
        return [np.nan] * len(out)
    return [float(grid.at(point[0], point[1])) for point in out]


def _from_shapes(kept: Sequence[TimedShape], out: Sequence[TimedShape]) -> list[float]:
    grids = {size: _surface(kept, size) for size in {shape.block_size for shape in out}}
    found = ((grids[shape.block_size], shape) for shape in out)
    return [np.nan if grid is None else float(grid.at(shape.across, shape.along)) for grid, shape in found]


def _surface(shapes: Sequence[TimedShape], block_size: int) -> Grid | None:
    try:
        return surface(shapes, block_size)
    except SurfaceError:
        return None
