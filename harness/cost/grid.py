"""The table of timed shapes in which cost models look seconds up: interpolation, what fills it, and its held-out error.

A `Grid` interpolates linearly. `grid_of` fills it from measured points, `tabulated` from a function, and
`interpolated_grid` from timed shapes, between which it interpolates in logarithms. The held-out error leaves out every
other value of an axis and predicts it from the rest.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import ceil, exp, log, log2, prod
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np

from harness.cost.fitted import held_out_error
from harness.metrics.log import FloatArray
from harness.replay.cost_model import Amount
from harness.replay.features import AT

DECODE_AXES = ("rows", "KV slots a row")
PREFILL_AXES = ("chunk", "context")
GRID_BLOCK_SIZE = 16  # tokens a block in the runs that measure the decode grid
Axes = tuple[tuple[float, ...], ...]
Pair = tuple[float, float]
GridPoint = tuple[float, float, float]  # place on the first axis, place on the second, seconds
Key = TypeVar("Key")
_NODES_PER_OCTAVE = 4
_INWARDS = 1 - 1e-9  # moves nodes on the rim inside, since rounding could put them outside


# Of a chunk whose keys are read in parts, as those of decode rows (`paged_kernels.operations`).
SHORT_QUERIES = 64


def short_as_decodes(
    features: Sequence[Amount], decode: Callable[[Amount, Amount], Amount], least: Amount, otherwise: Amount
) -> Amount:
    """Seconds of the attention of a step's chunks, of which short ones (drafts that are verified, tails) are decodes.

    Kernels split the keys of a few queries over the device, as those of one, while a timed prefill lets one program
    read them all. So chunks of at most SHORT_QUERIES queries, by their mean, take what `decode(rows, KV slots a row)`
    says of as many rows, and no less than `least`; others, and those that it does not know, take `otherwise`.
    """
    chunks, tokens = features[AT.prefill_rows], features[AT.prefill_tokens]
    short = (tokens <= SHORT_QUERIES * chunks) & (chunks > 0)
    if not np.any(short):
        return otherwise
    rows = np.maximum(chunks, 1)
    read = np.maximum(decode(rows, features[AT.prefill_kv] / rows), least)
    found: FloatArray = np.where(short & ~np.isnan(read), read, otherwise)
    return found if isinstance(chunks, np.ndarray) else float(found)


class TimedShape(NamedTuple):
    """Seconds of one attention shape: rows by KV slots a row, or query tokens by KV slots of a chunk."""

    across: float
    along: float
    block_size: int
    seconds: float


class GridError(ValueError):
    """Too few shapes for an interpolation, or all on one line."""


@dataclass(frozen=True, eq=False)
class Grid:
    """`seconds` at every combination of the values of its axes, float64 `[len(axis) for axis in axes]`; NaN: not known.

    Between the values it is linear along each axis (multilinear). Outside it is NaN; an `endless` grid goes on as
    between the two outer values, and is never below 0.
    """

    axes: Axes
    seconds: FloatArray
    endless: bool = False

    def at(self, *place: Amount) -> Amount:
        """Seconds at one place, or at many: float64 `[places]`. Both are computed in the same order.

        NaN where a corner of the cell is NaN, unless it has no weight.
        """
        for value in place:
            if isinstance(value, np.ndarray):
                return self._many(np.broadcast_arrays(*place))
        return self._one(place)

    def _one(self, place: Sequence[Amount]) -> float:
        """At one place, in plain numbers: a replay calls this for every step."""
        shares: list[float] = []
        offset = 0
        for (axis, stride, last), value in zip(self._lookup, place, strict=True):
            if not (self.endless or axis[0] <= value <= axis[-1]):
                return np.nan
            low = bisect_right(axis, value, 1, last) - 1
            shares.append(float((value - axis[low]) / (axis[low + 1] - axis[low])))
            offset += low * stride
        flat = self._flat
        cells = [flat[offset + corner] for corner in self._corners]
        while shares:
            share, ends = shares.pop(), iter(cells)
            cells = [
                near if share == 0 else far if share == 1 else near + share * (far - near)
                for near, far in zip(ends, ends, strict=True)
            ]
        return 0.0 if self.endless and cells[0] < 0.0 else cells[0]

    def _many(self, place: Sequence[FloatArray]) -> FloatArray:
        inside, offset, shares = np.True_, np.zeros(place[0].shape, dtype=np.int64), []
        for (values, stride, last), value in zip(self._lookup, place, strict=True):
            axis = np.array(values)
            low = np.clip(np.searchsorted(axis, value, "right"), 1, last) - 1
            shares.append((value - axis[low]) / (axis[low + 1] - axis[low]))
            offset += low * stride
            inside = inside & (axis[0] <= value) & (value <= axis[-1])
        cells = [self.seconds.ravel()[offset + corner] for corner in self._corners]
        for share in reversed(shares):
            ends = iter(cells)
            cells = [
                np.where(share == 0, near, np.where(share == 1, far, near + share * (far - near)))
                for near, far in zip(ends, ends, strict=True)
            ]
        return np.maximum(cells[0], 0.0) if self.endless else np.where(inside, cells[0], np.nan)

    @cached_property
    def _flat(self) -> list[float]:
        return [float(value) for value in self.seconds.ravel()]

    @cached_property
    def _lookup(self) -> list[tuple[tuple[float, ...], int, int]]:
        """Of each axis its values, the distance of neighbours in `_flat`, and the place of its last value."""
        lengths = [len(axis) for axis in self.axes]
        return [(axis, prod(lengths[i + 1 :]), len(axis) - 1) for i, axis in enumerate(self.axes)]

    @cached_property
    def _corners(self) -> list[int]:
        """Offsets of the corners of a cell; the last axis runs fastest."""
        return [sum(corner) for corner in product(*((0, stride) for _, stride, _ in self._lookup))]

    def section(self) -> dict[str, Any]:
        """A grid of two axes for a JSON file, which has no NaN: a cell that is not known is null."""
        cells = [[None if cell != cell else cell for cell in row] for row in self.seconds.tolist()]
        return {"across": self.axes[0], "along": self.axes[1], "seconds": cells}

    @classmethod
    def of_section(cls, section: Mapping[str, Any]) -> "Grid":
        """The grid of such a section."""
        cells = np.array(section["seconds"], dtype=np.float64)
        return cls((tuple(section["across"]), tuple(section["along"])), cells)


class LogGrid:
    """A grid that is linear in logarithms of places and seconds; a power law of each axis is met exactly."""

    def __init__(self, axes: Sequence[Sequence[float]], seconds: FloatArray) -> None:
        self._logs = Grid(tuple(tuple(np.log(axis).tolist()) for axis in axes), np.log(seconds))

    def at(self, *place: Amount) -> Amount:
        """Seconds at one place, or at many; NaN outside."""
        with np.errstate(divide="ignore"):
            found: Amount = np.exp(self._logs.at(*(np.log(value) for value in place)))
        return found


def some(count: Amount) -> Amount:
    """At least one, to divide by: what a step lacks has no mean length."""
    return np.maximum(count, 1) if isinstance(count, np.ndarray) else max(count, 1)


def where_any(count: Amount, value: Amount, otherwise: Amount = 0.0) -> Amount:
    """`value` where `count` is not zero, else `otherwise`."""
    if isinstance(count, np.ndarray):
        return np.where(count > 0, value, otherwise)
    return value if count else otherwise


def where_known(value: Amount, otherwise: Amount) -> Amount:
    """`value`, or `otherwise` where it is NaN: outside of a grid."""
    if isinstance(value, np.ndarray) or isinstance(otherwise, np.ndarray):
        return np.where(np.isnan(value), otherwise, value)
    return otherwise if value != value else float(value)


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


def tabulated(axes: Sequence[tuple[float, ...]], seconds: Callable[..., float]) -> Grid:
    """The endless grid of a function of one number for each axis."""
    cells = [seconds(*place) for place in product(*axes)]
    shape = [len(axis) for axis in axes]
    return Grid(tuple(axes), np.array(cells, dtype=np.float64).reshape(shape), endless=True)


def medians(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """The median of the values of each key."""
    seen: dict[Key, list[float]] = {}
    for key, value in pairs:
        seen.setdefault(key, []).append(value)
    return {key: float(median(values)) for key, values in seen.items()}


def grid_of(points: Sequence[GridPoint | TimedShape]) -> Grid:
    """A grid from measured (across, along, ..., seconds); pairs measured more than once take their median.

    Raises:
        GridError: an axis has fewer than two values.
    """
    return Grid(*_cells(medians((point[:2], point[-1]) for point in points)))


def _cells(seconds: Mapping[Pair, float]) -> tuple[Axes, FloatArray]:
    """Axes and cells of timed pairs; NaN where a pair was not timed."""
    across, along = (tuple(sorted({float(pair[axis]) for pair in seconds})) for axis in (0, 1))
    if min(len(across), len(along)) < 2:
        count = "1 timed shape" if len(seconds) == 1 else f"{len(seconds)} timed shapes"
        found = f"found {len(across)} by {len(along)}"
        raise GridError(f"{count}; a grid needs two values on each axis, {found}")
    return (across, along), np.array([[seconds.get((a, b), np.nan) for b in along] for a in across])


def interpolated_grid(shapes: Sequence[TimedShape], block_size: int) -> Grid:
    """The grid at one block size, refined between the timed shapes; NaN outside of them.

    Raises:
        GridError: there are too few shapes, or no shape was timed at or on both sides of `block_size`.
    """
    seconds = seconds_at_block_size(shapes, block_size)
    axes, timed = _cells(seconds)
    fine = tuple(map(_refined, axes))
    places = np.stack(np.meshgrid(*fine, indexing="ij"), axis=-1)
    cells = np.asarray(LogGrid(axes, timed).at(places[..., 0], places[..., 1]))
    if np.isnan(timed).any():
        cells = np.where(np.isnan(cells), _in_triangles(seconds, places), cells)
    return Grid(fine, cells)


def _refined(axis: Sequence[float]) -> tuple[float, ...]:
    """The values of an axis with others between them, evenly in logarithms."""
    found: list[float] = []
    for low, high in pairwise(axis):
        steps = max(1, ceil(_NODES_PER_OCTAVE * log2(high / low)))
        found += [low * (high / low) ** (step / steps) for step in range(steps)]
    return (*found, float(axis[-1]))


def _in_triangles(seconds: Mapping[Pair, float], places: FloatArray) -> FloatArray:
    """Seconds at places `[..., 2]` that lack a timed corner, log-log over Delaunay triangles of timed pairs."""
    from scipy.interpolate import LinearNDInterpolator
    from scipy.spatial import QhullError

    timed = np.log(np.array(list(seconds)))
    try:
        between = LinearNDInterpolator(timed, np.log(list(seconds.values())), rescale=True)
    except QhullError as error:
        reason = f"{len(seconds)} timed shapes, which lie on one line; a grid needs an area"
        raise GridError(reason) from error
    middle = timed.mean(axis=0)
    return np.asarray(np.exp(between(middle + (np.log(places) - middle) * _INWARDS)))


def seconds_at_block_size(shapes: Sequence[TimedShape], block_size: int) -> dict[Pair, float]:
    """Seconds by (across, along) at a block size that was timed, or lies between timed ones.

    A pair that was not timed on both sides of it changes by the factors of the other pairs, or is left out.

    Raises:
        GridError: the block size lies outside of the timed ones.
    """
    timed = sorted({shape.block_size for shape in shapes})
    if not timed or not timed[0] <= block_size <= timed[-1]:
        raise GridError(
            f"block size {block_size} lies outside of the timed ones ({', '.join(map(str, timed)) or 'none'})"
        )
    ends = {max(one for one in timed if one <= block_size), min(one for one in timed if one >= block_size)}
    profiles: dict[Pair, dict[int, float]] = {}
    timings = medians(((shape[:2], shape.block_size), shape.seconds) for shape in shapes)
    for (pair, size), seconds in timings.items():
        profiles.setdefault(pair, {})[size] = seconds
    found = {}
    for pair, profile in profiles.items():
        if not min(profile) <= block_size <= max(profile):
            nearest = min(sorted(profile), key=lambda size: abs(log(size / block_size)))
            factors = {end: _factor(nearest, end, profiles.values()) for end in ends}
            profile = {end: profile[nearest] * factor for end, factor in factors.items() if factor}
            if len(profile) < len(ends):
                continue
        sizes = sorted(profile)
        logs = np.interp(log(block_size), np.log(sizes), np.log([profile[size] for size in sizes]))
        found[pair] = profile.get(block_size) or exp(logs)
    return found


def _factor(one: int, other: int, profiles: Iterable[Mapping[int, float]]) -> float | None:
    """Seconds at block size `other` over those at `one`: the median over all pairs that were timed at both."""
    ratios = [profile[other] / profile[one] for profile in profiles if {one, other} <= profile.keys()]
    return median(ratios) if ratios else None


def left_out_errors(
    part: str,
    shapes: Sequence[TimedShape],
    axes: Sequence[str],
    grid: Callable[[Sequence[TimedShape], int], Grid],
) -> dict[str, dict[str, float]]:
    """Errors by '<part> grid along <axis>', as `held_out_error` gives them; axes without inner values are absent.

    `axes` names the first fields of a shape; `grid` makes a grid of the shapes that are kept at a block size.
    """
    found = {}
    for place, name in enumerate(axes):
        inner = sorted({shape[place] for shape in shapes})[1:-1]
        pairs: list[Pair] = []
        for gone in (inner[0::2], inner[1::2]):
            kept = [shape for shape in shapes if shape[place] not in gone]
            pairs += _predicted(kept, [shape for shape in shapes if shape[place] in gone], grid)
        predicted, measured = np.array(pairs).reshape(-1, 2).T
        known = ~np.isnan(predicted)
        if known.any():
            found[f"{part} grid along {name}"] = held_out_error(predicted[known], measured[known])
    return found


def _predicted(
    kept: Sequence[TimedShape], out: Sequence[TimedShape], grid: Callable[[Sequence[TimedShape], int], Grid]
) -> list[Pair]:
    """(predicted, measured) seconds of the shapes left out, for which the others make a grid."""
    grids = {}
    for size in {shape.block_size for shape in out}:
        with suppress(GridError):
            grids[size] = grid(kept, size)
    known = ((grids[shape.block_size], shape) for shape in out if shape.block_size in grids)
    return [(float(grid.at(shape.across, shape.along)), shape.seconds) for grid, shape in known]


def grid_errors(part: str, grid: Grid, names: tuple[str, str]) -> dict[str, dict[str, float]]:
    """Errors of a measured grid by axis; both axes are linear, as the grid is."""
    across, along = grid.axes
    cells = zip(product(across, along), grid.seconds.ravel().tolist(), strict=True)
    shapes = [TimedShape(*place, 0, seconds) for place, seconds in cells if seconds == seconds]
    return left_out_errors(part, shapes, names, lambda kept, _: grid_of(kept))


def shape_errors(
    part: str, shapes: Sequence[TimedShape], names: tuple[str, str]
) -> dict[str, dict[str, float]]:
    """Errors of timed shapes, block size as a third axis."""
    return left_out_errors(part, shapes, (*names, "block size"), interpolated_grid)
