"""A grid for the `table` model from shapes that were timed here and there: interpolated log-log between them.

Kernel benchmarks vary one axis at a time around a few shapes, so that most pairs of an axis product were never timed.
Between four timed corners a node is bilinear in the logarithms of both axes and of the seconds; elsewhere inside the
timed shapes it is linear in them over Delaunay triangles; outside it stays unknown. Nodes are set so densely that the
straight lines which `Grid` draws between them follow a power law within 1 %.

Block size is an axis of its own: a shape's seconds at another block size lie log-log between those of its own timed
block sizes, or, where it has none on both sides, change by the factor that other shapes show.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import ceil, exp, log, log2
from statistics import median
from typing import NamedTuple

import numpy as np

from harness.sim.cost import FloatArray
from harness.sim.table import Grid

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
