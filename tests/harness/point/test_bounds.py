"""The datasheet's bound and the expected value stand side by side, each under its own name."""

from dataclasses import replace

import pytest

from harness.config.compose import compose_config, normalise
from harness.config.overrides import parse_overrides
from harness.config.schema import DeviceConfig
from harness.cost.roofline import ASSUMED, origins
from harness.metrics.record import PointRecord
from harness.point.cost import METRICS
from harness.point.run import run_point
from harness.report.provenance import bounds_table


def record_of(*texts: str) -> PointRecord:
    texts = (
        *("measure=false", "cost=roofline", "workload.num_requests=12", "model=llama31_8b", "device=h100"),
        *("cache.pool_blocks=2000", "cache.max_model_len=2048", "workload.length_scale=0.1", *texts),
    )
    return run_point(normalise(compose_config([each.settings[0] for each in parse_overrides(texts)]))).record


@pytest.fixture(scope="module")
def record() -> PointRecord:
    return record_of()


def test_the_expected_value_lies_between_its_ends_and_beyond_the_bound(record: PointRecord) -> None:
    expected, bounds = record.simulated, record.bounds
    for name in ("ttft_p50", "tpot_p50"):
        values = [
            bounds["datasheet"][name],
            bounds["fast_end"][name],
            expected[name],
            bounds["slow_end"][name],
        ]
        assert values == sorted(values), name
        assert values[0] < values[2]


def test_the_bound_of_a_decode_step_is_its_bytes_over_the_datasheets_bandwidth(
    record: PointRecord,
) -> None:
    """One token of Llama 3.1 8B reads 15.0 GB of weights and little KV: 4.5 ms at 3,350 GB/s."""
    weights = 2 * (32 * (4096 * 10_240 + 3 * 4096 * 14_336) + 4096 * 128_256)
    assert record.bounds["datasheet"]["tpot_p50"] == pytest.approx(weights / 3.35e12, rel=0.05)


@pytest.mark.parametrize("narrow", ["model.weight_dtype=fp8", "model.kv_dtype=fp8_e4m3"])
def test_a_bound_is_one_where_matrix_units_multiply_narrow_elements_faster(narrow: str) -> None:
    """Of prompts that computing bounds; H100 multiplies 8 bits at twice the rate of 16, which no price counts on."""
    long = ("workload.length_scale=0.5", "cost.bounds=true")
    plain, other = (record_of(*long, *words).bounds["datasheet"]["ttft_p50"] for words in ((), (narrow,)))
    assert other < plain / 2


def test_each_constant_says_where_it_comes_from(record: PointRecord) -> None:
    provenance = record.cost["provenance"]
    assert provenance["model"] == "llama-3.1-8b"
    assert provenance["from"]["bandwidth_gbs"] == "datasheet"
    assert provenance["from"]["kv_efficiency"] == "assumed, usually 0.8 to 1"
    assert set(ASSUMED) < set(provenance["from"])


def test_constants_that_were_fitted_name_their_log_and_have_no_ends() -> None:
    fitted = record_of("device.fitted_from=my-log.jsonl")
    assert fitted.cost["provenance"]["from"]["compute_efficiency"] == "fitted to my-log.jsonl"
    assert set(fitted.bounds) == {"datasheet"}


@pytest.mark.parametrize("texts", [("cost.bounds=false",), ("device=cpu", "model=tiny_llama")])
def test_there_is_no_bound_where_none_is_asked_for_or_known(texts: tuple[str, ...]) -> None:
    assert not record_of(*texts).bounds


def test_the_report_has_a_row_for_each_metric(record: PointRecord) -> None:
    table = bounds_table([replace(record, overrides=["device=h100"])])
    assert table is not None
    assert len(table.rows) == len(METRICS)
    assert bounds_table([replace(record, bounds={})]) is None


def test_many_requests_are_replayed_once_unless_bounds_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.point.cost.MOST_REQUESTS", 10)
    assert not record_of().bounds
    assert record_of("cost.bounds=true").bounds


def test_what_a_preset_assumes_is_not_called_a_datasheets() -> None:
    found = origins(preset("a10g"))
    assert found["multiprocessors"] == "assumed by the preset a10g; no datasheet has it"
    assert found["bandwidth_gbs"] == "datasheet"


def test_a_rate_that_differs_from_the_preset_of_its_name_is_the_users() -> None:
    found = origins(replace(preset("h100"), bandwidth_gbs=2000.0))
    assert found["bandwidth_gbs"] == "as the user set it; the preset h100 has 3350"


def test_the_rates_of_a_device_of_ones_own_are_as_described() -> None:
    assert origins(DeviceConfig(name="mine"))["tflops"] == "as the description of the device has it"


def preset(name: str) -> DeviceConfig:
    texts = ("measure=false", f"device={name}")
    return compose_config([each.settings[0] for each in parse_overrides(texts)]).device
