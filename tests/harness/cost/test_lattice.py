import numpy as np
import pytest

from harness.cost.lattice import Lattice, octaves, tabulated

AXES = ((1.0, 2.0, 4.0, 8.0), (16.0, 64.0, 256.0), (0.0, 100.0, 1000.0))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_lattice_is_exact_where_the_function_is_linear(count: int) -> None:
    lattice = tabulated(AXES[:count], lambda *place: 3.0 + sum(place))
    place = (3.0, 100.0, 550.0)[:count]
    assert lattice.at(*place) == pytest.approx(3.0 + sum(place), rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_arrays_have_the_bits_of_numbers(count: int) -> None:
    draw = np.random.default_rng(1)
    axes = AXES[:count]
    lattice = Lattice(axes, draw.uniform(1e-6, 1e-3, [len(axis) for axis in axes]))
    places = [draw.uniform(axis[0] * 0.5, axis[-1] * 1.5, 500) for axis in axes]
    many = lattice.at(*places)
    assert isinstance(many, np.ndarray)
    assert many.tolist() == [lattice.at(*map(float, place)) for place in zip(*places, strict=True)]


def test_a_lattice_goes_on_outside_as_between_its_outer_values() -> None:
    lattice = tabulated(((1.0, 2.0, 4.0),), lambda value: value * value)
    assert lattice.at(6.0) == pytest.approx(16.0 + 2.0 * 6.0)


def test_no_place_outside_costs_less_than_nothing() -> None:
    lattice = tabulated(((1.0, 2.0),), lambda value: value - 1.0)
    assert lattice.at(0.0) == 0.0
    assert np.asarray(lattice.at(np.array([0.0]))).tolist() == [0.0]


def test_octaves_hold_all_small_numbers_and_the_last() -> None:
    found = octaves(1, 100, 2, dense_to=4)
    assert found[:5] == (1.0, 2.0, 3.0, 4.0, 6.0)
    assert found[-1] == 100.0


def test_an_axis_has_at_least_two_values() -> None:
    assert octaves(1, 1, 4) == (1.0, 2.0)
