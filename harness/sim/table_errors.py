"""The held-out errors of the two kinds of grid: the one that a calibration measures, and the one of timed kernels."""

from collections.abc import Callable, Sequence

import numpy as np

from harness.sim.table import Grid, grid_of
from harness.sim.table_heldout import left_out_errors
from harness.sim.table_surface import SurfaceError, TimedShape, surface

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
