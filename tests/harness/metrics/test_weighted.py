"""Weighted samples must behave as the repeated samples that they stand for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.metrics.compute import weighted_mean, weighted_quantiles

LEVELS = np.array([0.0, 0.25, 0.5, 0.9, 0.99, 1.0])
SAMPLES = st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 5)), min_size=1, max_size=30).filter(
    lambda samples: any(weight for _, weight in samples)
)


@given(samples=SAMPLES)
def test_quantiles_equal_those_of_repeated_samples(samples):
    values, weights = np.array(samples, dtype=np.float64).T
    repeated = np.repeat(values, weights.astype(int))
    expected = np.quantile(repeated, LEVELS)
    assert weighted_quantiles(values, weights, LEVELS) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(samples=SAMPLES)
def test_mean_equals_that_of_repeated_samples(samples):
    values, weights = np.array(samples, dtype=np.float64).T
    expected = np.repeat(values, weights.astype(int)).mean()
    assert weighted_mean(values, weights) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_no_weight_has_no_mean():
    assert weighted_mean(np.array([1.0]), np.array([0.0])) is None
