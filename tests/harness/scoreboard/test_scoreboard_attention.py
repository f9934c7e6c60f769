"""The fits and held-out errors of the scoreboard, on timings that a form itself made."""

from dataclasses import replace

import numpy as np
import pytest

from harness.scoreboard.attention import (
    FORMS,
    Gpu,
    Timings,
    cached_form,
    fitted,
    held_out,
    plain_form,
    transfer_error,
)

GPU = Gpu("some_gpu", "1", 2000e9, 50e6)
TRUE = np.array([11.0, 0.18, 0.9])
CACHED = np.array([11.0, 0.18, 0.9, 2.5, 0.7, 1.8])


def timings(gpu: Gpu = GPU) -> Timings:
    rows, slots = (axis.ravel() for axis in np.meshgrid(2.0 ** np.arange(9), 2.0 ** np.arange(4, 15)))
    return Timings(gpu, rows, slots, np.ones_like(rows))


def made_by(constants: np.ndarray, gpu: Gpu = GPU) -> Timings:
    form = plain_form if len(constants) == 3 else cached_form
    return replace(timings(gpu), us=form(constants, timings(gpu)))


def test_a_fit_finds_the_constants_of_the_plain_form() -> None:
    assert fitted("plain form", [made_by(TRUE)]) == pytest.approx(TRUE, rel=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_constants_of_two_gpus_price_a_third_of_the_same_law(form: str) -> None:
    known = [made_by(TRUE), made_by(TRUE, replace(GPU, bandwidth=3350e9))]
    error = transfer_error(form, known, made_by(TRUE, replace(GPU, bandwidth=4800e9)))
    assert error["mape"] < 0.02


def test_the_plain_form_cannot_follow_a_cache_and_the_other_can() -> None:
    table = made_by(CACHED)
    plain, cached = (transfer_error(form, [table], table)["mape"] for form in FORMS)
    assert cached < 0.01 < 0.03 < plain


@pytest.mark.parametrize("axis", ["rows", "slots"])
def test_the_ratio_to_the_true_form_predicts_what_was_left_out(axis: str) -> None:
    assert held_out(made_by(TRUE), axis, "plain form")["mape"] < 1e-3


@pytest.mark.parametrize("axis", ["rows", "slots"])
def test_every_inner_value_of_an_axis_is_left_out_once(axis: str) -> None:
    inner, other = (7, 11) if axis == "rows" else (9, 9)
    assert held_out(made_by(TRUE), axis, None)["n"] == inner * other


def test_a_spike_that_was_left_out_is_an_error() -> None:
    table = made_by(TRUE)
    us = np.where((table.rows == 16) & (table.slots == 256), 3.0 * table.us, table.us)
    assert held_out(replace(table, us=us), "rows", "plain form")["max"] > 0.5
