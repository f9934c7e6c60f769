"""Tests of the bands of predicted figures."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from harness.config.compose import compose_config
from harness.config.errors import ConfigError
from harness.config.overrides import parse_overrides
from harness.config.schema import DeviceConfig
from harness.cost.fitted import spread_of_repeats
from harness.point.bands import Band, bands, fits_of, fits_text, jittered, possible, possible_devices
from harness.point.cost import cost_model
from harness.workload.point import Point, resolve
from harness.workload.simulate import predict

SERVER = ("measure=false", "model=llama31_8b", "workload.num_requests=12", "workload.length_scale=0.1")


def point(*words: str) -> Point:
    """A point of some requests on a GPU."""
    axes = parse_overrides([*SERVER, *words])
    return resolve(compose_config(axis.settings[0] for axis in axes))


def fitted(device: DeviceConfig, overheads: Sequence[float], step_spread: float = 0.0) -> DeviceConfig:
    """The device after a fit that allows these overheads of a step."""
    fits = fits_text([{"step_overhead_us": value} for value in overheads])
    return replace(device, fitted_from="a log", fits=fits, step_spread=step_spread)


def width(device: DeviceConfig) -> float:
    """How far above the value the band of TPOT reaches, as a share of it."""
    served = point("device=h100")
    served = replace(served, deployment=replace(served.deployment, device=device))
    metrics, *drawn = (
        predict(one, cost_model(one.deployment), rows=False).metrics for one in (served, *possible(served))
    )
    return bands(metrics, drawn, device)["tpot_p50"].shares(metrics["tpot_p50"])[1]


def test_a_description_has_a_band_from_the_ranges_of_what_it_assumes() -> None:
    assert 0.05 < width(point("device=h100").deployment.device) < 0.5


def test_fits_that_agree_leave_a_band_of_repeats_alone() -> None:
    assert width(fitted(point("device=h100").deployment.device, [500.0, 500.0, 500.0])) < 0.05


def test_a_band_is_wider_where_a_log_leaves_steps_unexplained() -> None:
    device = point("device=h100").deployment.device
    same = [device.step_overhead_us] * 12
    assert width(fitted(device, same, step_spread=0.1)) > 3 * width(fitted(device, same))


def test_a_band_is_wider_for_steps_that_are_not_simulated() -> None:
    device = point("device=h100").deployment.device
    assert width(replace(device, step_spread=0.7)) > 1.5 > 2 * width(device)


def test_a_band_has_the_unit_of_its_figure_and_holds_it() -> None:
    found = bands({"tpot_p50": 2.0}, [{"tpot_p50": 1.9}, {"tpot_p50": 2.1}], DeviceConfig())["tpot_p50"]
    assert found.low < 1.9 < 2.1 < found.high
    assert found.holds(2.0)


def test_prices_that_do_not_follow_the_constants_have_no_band() -> None:
    assert possible_devices(point("device=cpu", "cache.pool_blocks=2000").deployment) == []
    unknown = replace(point("device=h100").deployment.device, fitted_from="a log, before bands were kept")
    assert possible_devices(replace(point("device=h100").deployment, device=unknown)) == []


def test_few_repeats_say_less_of_the_next_one_than_many() -> None:
    few, many = [1.0, 1.02, 0.98], [1.0, 1.02, 0.98] * 4
    assert spread_of_repeats([1.0]) == 0.0
    assert spread_of_repeats(few) > 1.8 * spread_of_repeats(many)


def test_a_band_that_is_too_wide_to_be_of_use_has_no_upper_end() -> None:
    assert Band(1.0, 3.9).words(str) == "1.0 to 3.9"
    assert Band(0.1, 35.0).words(str) == "at least 0.1, not bounded above"


def test_fits_are_read_as_they_were_written() -> None:
    fits = [
        {"step_overhead_us": 512.5, "kv_efficiency": 0.8},
        {"step_overhead_us": 480.0, "kv_efficiency": 0.85},
    ]
    assert fits_of(fits_text(fits)) == fits


@pytest.mark.parametrize("text", ["", "step_overhead_us", "name=1,2", "step_overhead_us=1,x", "a=1; b=1,2"])
def test_fits_that_cannot_be_read_are_refused_by_their_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"device\.fits"):
        fits_of(text)


def test_jittered_arrivals_keep_their_order() -> None:
    trace = point("device=h100").trace
    moved = [row.arrival_us for row in jittered(trace, 3).requests]
    assert moved == sorted(moved)
    assert moved != [row.arrival_us for row in trace.requests]
