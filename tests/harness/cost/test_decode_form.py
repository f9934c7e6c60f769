"""The form of decode attention, and the grid that is interpolated by the ratio to it."""

import numpy as np
import pytest

from harness.cost.grid import TimedShape, interpolated_grid, shape_errors
from harness.cost.operators import (
    AttentionMachine,
    Timings,
    decode_errors,
    decode_grid,
    fitted_form,
    form_us,
)

MACHINE = AttentionMachine(864e9, 4096.0, 8, 142, 96 * 2**20, 2.52)
CONSTANTS = np.array([12.5, 9.0, 8.7, 4.0, 0.8, 17.0, 1.0, 0.03, 2.1])
ROWS, SLOTS = 2.0 ** np.arange(10), 2.0 ** np.arange(4, 16)


def timings(machine: AttentionMachine = MACHINE) -> Timings:
    rows, slots = (axis.ravel() for axis in np.meshgrid(ROWS, SLOTS))
    return Timings(machine, rows, slots, form_us(CONSTANTS, machine, rows, slots))


def shapes(machine: AttentionMachine = MACHINE, bend: float = 0.0) -> list[TimedShape]:
    """Timed by the form, and by a smooth factor beside it."""
    known = timings(machine)
    factor = np.exp(bend * np.sin(0.5 * np.log2(known.rows)) * np.cos(0.4 * np.log2(known.slots)))
    return [
        TimedShape(rows, slots, 16, us * 1e-6)
        for rows, slots, us in zip(known.rows, known.slots, known.us * factor, strict=True)
    ]


def one(rows: float, slots: float, machine: AttentionMachine = MACHINE) -> float:
    return float(form_us(CONSTANTS, machine, np.array([rows]), np.array([slots]))[0])


def test_rows_of_one_wave_take_as_long_as_each_other() -> None:
    assert one(17, 16) == pytest.approx(one(9, 16), rel=0.01)


def test_a_row_more_than_a_wave_holds_takes_another_wave() -> None:
    """142 multiprocessors hold 17 rows of 8 KV heads."""
    assert one(18, 16) - one(17, 16) == pytest.approx(4.0, rel=0.02)


def test_a_split_row_takes_the_time_to_combine() -> None:
    assert one(2, 129) - one(2, 128) == pytest.approx(8.7 / 2.52, rel=0.02)


def test_kv_beyond_the_cache_is_read_at_the_memorys_rate() -> None:
    longer = one(512, 32768) - one(512, 16384)
    assert longer == pytest.approx(512 * 16384 * 4096 / (0.8 * 864e9) * 1e6, rel=1e-3)


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    found = form_us(fitted_form([timings()]), MACHINE, timings().rows, timings().slots)
    assert found == pytest.approx(timings().us, rel=5e-3)


def test_a_timed_shape_keeps_its_time_exactly() -> None:
    grid = decode_grid(shapes(bend=0.1), MACHINE)
    found = [grid.at(shape.across, shape.along) for shape in shapes(bend=0.1)]
    assert found == pytest.approx([shape.seconds for shape in shapes(bend=0.1)], rel=1e-6)


def test_the_ratio_predicts_what_was_left_out_better_than_logarithms_do() -> None:
    ratio, logs = (
        decode_errors(shapes(bend=0.1), MACHINE),
        shape_errors("decode", shapes(bend=0.1), ("rows", "x")),
    )
    assert ratio["decode grid along rows"]["mape"] < 0.02 < 0.05 < logs["decode grid along rows"]["mape"]


def test_without_figures_of_a_datasheet_the_cache_is_found_in_the_times() -> None:
    unknown = AttentionMachine(864e9, 4096.0, 8)
    assert decode_errors(shapes(bend=0.1), unknown)["decode grid along rows"]["mape"] < 0.04


def test_a_shape_outside_of_the_timed_ones_has_no_time() -> None:
    assert np.isnan(float(decode_grid(shapes(), MACHINE).at(1024, 64)))


def test_few_shapes_are_interpolated_on_logarithms() -> None:
    few = [shape for shape in shapes() if shape.across <= 4 and shape.along <= 64]
    found, plain = decode_grid(few, MACHINE), interpolated_grid(few, 16)
    assert found.axes == plain.axes
    assert np.array_equal(found.seconds, plain.seconds, equal_nan=True)
