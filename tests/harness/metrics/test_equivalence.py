"""Equivalence tests: bounds that cover, a noise floor from halves, and no verdict from a single run."""

import numpy as np
import pytest

from harness.metrics.verdict import PointError, error_bounds, noise_floor


def points(errors, noise=0.0, runs=3, seed=0):
    draw = np.random.default_rng(seed)
    return [
        PointError(str(place), error, tuple(error + noise * draw.standard_normal(runs)), noise)
        for place, error in enumerate(errors)
    ]


def test_the_bound_of_the_typical_error_lies_above_it_and_below_the_reach():
    found = error_bounds(points(np.linspace(0.0, 0.2, 21)))
    assert 0.1 < found.typical < found.reach <= 0.2


def test_noise_widens_the_bound():
    quiet, noisy = (error_bounds(points([0.01] * 20, noise)) for noise in (0.0, 0.05))
    assert quiet.typical == pytest.approx(0.01)
    assert noisy.typical > 0.01


@pytest.mark.nightly
def test_the_bound_is_seldom_below_the_truth():
    draw = np.random.default_rng(1)
    truth = 0.6745 * 0.05  # the median size of a normal error of 5 %
    found = [error_bounds(points(draw.normal(0, 0.05, 30), seed=seed)).typical for seed in range(100)]
    assert sum(bound >= truth for bound in found) >= 90


def test_few_points_are_bounded_by_their_worst_run():
    assert error_bounds([PointError("a", 0.01, (0.0, 0.03))]).typical == 0.03


def test_one_run_of_one_point_has_no_bound():
    assert error_bounds([PointError("a", 0.01, (0.01,))]) is None


def test_equal_errors_give_equal_bounds_each_time():
    found = points(np.linspace(0, 0.1, 9), 0.01)
    assert error_bounds(found) == error_bounds(found)


def test_the_noise_floor_is_what_one_half_of_the_runs_misses_of_the_other():
    assert noise_floor([[1.0, 1.1]], share=False) == pytest.approx((1 / 10 + 1 / 11) / 2)
    assert noise_floor([[0.5, 0.6]], share=True) == pytest.approx(0.1)


def test_single_runs_have_no_noise_floor():
    assert noise_floor([[1.0], [2.0]], share=False) is None
