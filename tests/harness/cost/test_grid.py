"""Grids of timed kernels: log-log between scattered shapes, unknown outside, with an error of their own."""

import numpy as np
import pytest

from harness.cost.grid import (
    DECODE_AXES,
    Grid,
    GridError,
    LogGrid,
    TimedShape,
    grid_errors,
    grid_of,
    interpolated_grid,
    octaves,
    seconds_at_block_size,
    shape_errors,
    tabulated,
)
from harness.cost.table import engine_overhead, with_overhead
from harness.metrics.log import STEP_COLUMNS
from harness.replay.folds import DECODE_GRID, PREFILL_GRID, ExtrapolatedSteps, GridHull

AXES = ("rows", "KV slots a row")
THREE_AXES = ((1.0, 2.0, 4.0, 8.0), (16.0, 64.0, 256.0), (0.0, 100.0, 1000.0))


def power(rows: float, slots: float, size: float) -> float:
    """A power law in every axis: what log-log interpolation follows exactly."""
    return float(2e-6 * rows**0.8 * slots**0.9 * size**-0.2)


def shapes(rows=(1, 4, 32), slots=(64, 512, 4096), sizes=(16,), law=power):
    return [TimedShape(r, k, s, law(r, k, s)) for r in rows for k in slots for s in sizes]


def test_between_its_shapes_a_surface_follows_a_power_law_within_one_percent():
    grid = interpolated_grid(shapes(), 16)
    for rows, slots in [(1, 64), (2, 100), (7.5, 3000), (32, 4096), (20, 64)]:
        assert grid.at(rows, slots) == pytest.approx(power(rows, slots, 16), rel=0.01)


def test_timed_shapes_are_met_exactly():
    grid = interpolated_grid(shapes(), 16)
    assert all(grid.at(one.across, one.along) == pytest.approx(one.seconds) for one in shapes())


def test_pairs_that_were_never_timed_are_filled_inside_and_unknown_outside():
    cross = [one for one in shapes() if one.across == 4 or one.along == 512]
    grid = interpolated_grid(cross, 16)
    assert grid.at(4, 4096) == pytest.approx(power(4, 4096, 16))
    assert grid.at(8, 700) == pytest.approx(power(8, 700, 16), rel=0.01)
    assert np.isnan(grid.at(30, 4000))
    assert np.isnan(grid.at(1, 64))


def test_a_block_size_between_timed_ones_is_interpolated():
    found = seconds_at_block_size(shapes(sizes=(8, 32)), 16)
    assert found[4, 512] == pytest.approx(power(4, 512, 16))


def test_a_shape_timed_at_one_block_size_changes_by_the_factor_of_the_others():
    only = [*shapes(sizes=(16,)), *shapes(rows=(4,), slots=(512,), sizes=(8, 32, 128))]
    found = seconds_at_block_size(only, 64)
    assert found[32, 4096] == pytest.approx(power(32, 4096, 64))
    assert len(found) == 9


@pytest.mark.parametrize("size", [4, 256])
def test_beyond_the_timed_block_sizes_nothing_is_guessed(size):
    with pytest.raises(GridError, match=rf"block size {size} lies outside of the timed ones \(8, 16, 128\)"):
        interpolated_grid(shapes(sizes=(8, 16, 128)), size)


def test_one_value_on_an_axis_makes_no_grid():
    with pytest.raises(GridError, match=r"3 timed shapes; .* found 1 by 3"):
        interpolated_grid(shapes(rows=(4,)), 16)


def test_shapes_on_one_line_make_no_grid():
    line = [TimedShape(2**step, 64 * 2**step, 16, 1e-5) for step in range(4)]
    with pytest.raises(GridError, match="4 timed shapes, which lie on one line"):
        interpolated_grid(line, 16)


def test_a_repeated_shape_takes_its_median():
    noisy = [*shapes(), TimedShape(4, 512, 16, 1.0), TimedShape(4, 512, 16, power(4, 512, 16))]
    assert interpolated_grid(noisy, 16).at(4, 512) == pytest.approx(power(4, 512, 16))


def test_left_out_values_of_a_power_law_are_predicted_within_one_percent():
    errors = shape_errors("decode", shapes(sizes=(8, 16, 64)), AXES)
    assert set(errors) == {
        *("decode grid along rows", "decode grid along KV slots a row", "decode grid along block size")
    }
    assert all(found["max"] < 0.01 for found in errors.values())
    assert errors["decode grid along rows"]["n"] == 9


def test_left_out_values_of_a_staircase_show_its_height():
    def stairs(rows: float, slots: float, size: float) -> float:
        return 2.0 if rows >= 4 else 1.0

    errors = shape_errors("decode", shapes(rows=(1, 4, 16), law=stairs), AXES)["decode grid along rows"]
    assert errors["bias"] == pytest.approx(2**0.5 / 2 - 1, rel=0.01)
    assert errors["mape"] == errors["p95"] == errors["max"] == pytest.approx(-errors["bias"])


def test_every_inner_value_is_left_out_once():
    many = shapes(rows=(1, 2, 4, 8, 16), slots=(64, 128))
    assert shape_errors("decode", many, AXES)["decode grid along rows"]["n"] == 3 * 2


def test_an_axis_without_an_inner_value_has_no_error():
    assert shape_errors("decode", shapes(rows=(1, 4), slots=(64, 512)), AXES) == {}


def test_a_measured_grid_that_is_affine_has_no_error():
    grid = grid_of([(r, k, 1e-5 + 1e-6 * r * k) for r in (1, 4, 16, 64) for k in (16, 128, 512)])
    errors = grid_errors("decode", grid, DECODE_AXES)
    assert [found["max"] for found in errors.values()] == pytest.approx([0, 0], abs=1e-9)
    assert [found["n"] for found in errors.values()] == [6, 4]


def test_cells_that_were_not_measured_are_not_judged():
    points = [(r, k, 1.0) for r in (1, 4, 16) for k in (16, 128) if (r, k) != (4, 128)]
    assert grid_errors("decode", grid_of(points), DECODE_AXES)["decode grid along rows"]["n"] == 1


def test_a_node_on_the_rim_of_what_is_known_keeps_its_value():
    grid = grid_of([(1, 16, 1.0), (1, 64, 2.0), (4, 16, 3.0)])
    assert grid.at(1, 64) == 2.0
    assert grid.at(np.array([1.0, 4.0]), np.array([64.0, 16.0])).tolist() == [2.0, 3.0]  # type: ignore[union-attr]


def test_what_the_engine_adds_is_found_and_added():
    timed = {(one.across, one.along): one.seconds for one in shapes()}
    extra = engine_overhead(timed, lambda rows, slots: timed[rows, slots] + 3e-5 + 2e-6 * rows)
    assert extra == pytest.approx((3e-5, 2e-6), rel=1e-6)
    grid = interpolated_grid(shapes(), 16)
    assert with_overhead(grid, extra).at(7, 300) == pytest.approx(float(grid.at(7, 300)) + 3e-5 + 14e-6)


def test_an_engine_that_is_faster_than_its_kernel_adds_nothing():
    assert engine_overhead({(4, 64): 1e-3, (8, 64): 2e-3}, lambda rows, slots: 1e-4 * rows) == (0, 0)


def test_without_a_calibrated_shape_nothing_is_added():
    assert engine_overhead({(4, 64): 1e-3}, lambda rows, slots: None) == (0, 0)


def steps(**columns):
    length = len(next(iter(columns.values())))
    empty = {name: np.zeros(length) for name in STEP_COLUMNS}
    return {**empty, "seconds": np.ones(length), **{key: np.array(value) for key, value in columns.items()}}


def test_steps_outside_the_timed_grid_count_as_extrapolated():
    hull = GridHull({"rows": (1.0, 64.0)})
    hull.decode = interpolated_grid(shapes(), 16)
    found = ExtrapolatedSteps(hull)
    found.add(steps(rows=[4, 4, 50, 70], decode_rows=[4, 4, 50, 70], kv_read_tokens=[400, 8, 50_000, 7e4]))
    section = found.section()
    assert section is not None
    assert section["steps"] == 3
    assert section["by"] == {"rows": 1, DECODE_GRID: 3}
    assert section["share_of_time"] == 0.75


def test_chunks_outside_the_timed_grid_count_too():
    hull = GridHull({"rows": (1.0, 64.0)})
    hull.prefill = interpolated_grid(shapes(rows=(16, 64, 256), slots=(256, 512, 4096)), 16)
    found = ExtrapolatedSteps(hull)
    found.add(steps(rows=[1, 1], prefill_tokens=[64, 8], kv_read_tokens=[300, 300]))
    assert found.section()["by"] == {PREFILL_GRID: 1}  # type: ignore[index]


def test_a_step_that_mixes_rows_and_chunks_shows_no_place_in_a_grid():
    hull = GridHull({"rows": (1.0, 64.0)})
    hull.decode = hull.prefill = interpolated_grid(shapes(), 16)
    found = ExtrapolatedSteps(hull)
    found.add(steps(rows=[3], decode_rows=[2], prefill_tokens=[9999], kv_read_tokens=[1]))
    assert found.section()["steps"] == 0  # type: ignore[index]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_endless_grid_is_exact_where_the_function_is_linear(count: int) -> None:
    grid = tabulated(THREE_AXES[:count], lambda *place: 3.0 + sum(place))
    place = (3.0, 100.0, 550.0)[:count]
    assert grid.at(*place) == pytest.approx(3.0 + sum(place), rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_arrays_have_the_bits_of_numbers(count: int) -> None:
    draw = np.random.default_rng(1)
    axes = THREE_AXES[:count]
    grid = Grid(axes, draw.uniform(1e-6, 1e-3, [len(axis) for axis in axes]), endless=True)
    places = [draw.uniform(axis[0] * 0.5, axis[-1] * 1.5, 500) for axis in axes]
    many = grid.at(*places)
    assert isinstance(many, np.ndarray)
    assert many.tolist() == [grid.at(*map(float, place)) for place in zip(*places, strict=True)]


def test_an_endless_grid_goes_on_outside_as_between_its_outer_values() -> None:
    grid = tabulated(((1.0, 2.0, 4.0),), lambda value: value * value)
    assert grid.at(6.0) == pytest.approx(16.0 + 2.0 * 6.0)


def test_no_place_outside_costs_less_than_nothing() -> None:
    grid = tabulated(((1.0, 2.0),), lambda value: value - 1.0)
    assert grid.at(0.0) == 0.0
    assert np.asarray(grid.at(np.array([0.0]))).tolist() == [0.0]


def test_octaves_hold_all_small_numbers_and_the_last() -> None:
    found = octaves(1, 100, 2, dense_to=4)
    assert found[:5] == (1.0, 2.0, 3.0, 4.0, 6.0)
    assert found[-1] == 100.0


def test_an_axis_has_at_least_two_values() -> None:
    assert octaves(1, 1, 4) == (1.0, 2.0)


def test_a_grid_of_logarithms_meets_a_power_law_and_ends_where_it_was_timed() -> None:
    grid = LogGrid(((1, 8, 512),), np.array([1e-6, 4e-6, 64e-6]))
    assert [grid.at(1.0), grid.at(64.0), grid.at(512.0)] == pytest.approx([1e-6, 16e-6, 64e-6], rel=1e-12)
    assert np.isnan(np.asarray(grid.at(np.array([0.0, 513.0])))).all()
