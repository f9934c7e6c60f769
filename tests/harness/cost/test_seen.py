"""Tests of what a fit keeps of what it has seen, and of what is said and widened outside of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiers import cases

from harness.capacity.slo import parse_slo
from harness.cli.workload import case_of
from harness.config.compose import compose_config
from harness.config.errors import ConfigError
from harness.config.overrides import parse_overrides
from harness.config.schema import DeviceConfig, RunConfig
from harness.cost.seen import LARGEST, seen, seen_of
from harness.point.bands import bands, beyond, decode_step_s, fits_text, possible, unseen
from harness.point.cost import check_cost, cost_model
from harness.point.record import PointRecord
from harness.point.run import run_point
from harness.report.verdict_text import beside_figures
from harness.workload.deployment import deployment_of, settings_text
from harness.workload.point import Point, resolve
from harness.workload.simulate import predict

SERVER = (
    "measure=false",
    "device=h100",
    "cost=roofline",
    "workload.num_requests=12",
    "workload.length_scale=0.1",
)


def config(*words: str) -> RunConfig:
    axes = parse_overrides([*SERVER, *words])
    return compose_config(axis.settings[0] for axis in axes)


def steps(**largest: float) -> Mapping[str, np.ndarray]:
    """Two steps, the larger one with these values."""
    return {name: np.array([1.0, largest.get(name, 1.0)]) for name in LARGEST}


def fitted(**largest: float) -> DeviceConfig:
    """An H100 with a fit of Llama-3.1-8B, which has seen steps up to these."""
    deployment = deployment_of(config("model=llama31_8b"))
    known = seen(deployment.shape, 1, steps(**largest), largest.get("longest", 8192.0))
    rows, context, _ = known.step
    known = replace(known, step=(rows, context, decode_step_s(deployment, rows, context)))
    fits = fits_text([{"step_overhead_us": 500.0}] * 12)
    return replace(deployment.device, fitted_from="a log", fits=fits, seen=str(known))


WIDE = {"rows": 64.0, "query_tokens": 8192.0, "kv_read_tokens": 1e6, "waiting": 64.0}


def point(*words: str, device: DeviceConfig) -> Point:
    """A point of a model on the fitted device."""
    found = config(*words)
    return resolve(replace(found, device=device))


def simulated(one: Point) -> tuple[Mapping[str, float], Mapping[str, np.ndarray]]:
    found = predict(one, cost_model(one.deployment), rows=True)
    return found.metrics, found.log.steps


def shares(one: Point) -> tuple[float, float]:
    """The band of TPOT as shares of it."""
    metrics, rows = simulated(one)
    drawn = [simulated(other)[0] for other in possible(one, beyond(one, rows))]
    return bands(metrics, drawn, one.deployment.device)["tpot_p50"].shares(metrics["tpot_p50"])


def test_what_a_fit_has_seen_is_read_as_it_was_written() -> None:
    text = fitted(**WIDE).seen
    assert text is not None
    assert str(seen_of(text)) == text


@pytest.mark.parametrize(
    "text", ["", "model.layers=4", "rows", "model.layers=x; step_rows=1", "other.layers=4"]
)
def test_a_text_that_is_none_is_refused_by_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"device\.seen"):
        seen_of(text)


def test_the_model_and_the_load_of_the_fit_need_no_words_and_no_wider_band() -> None:
    one = point("model=llama31_8b", device=fitted(**WIDE))
    assert unseen(one, simulated(one)[1]) == ""
    assert shares(one)[1] < 0.05


def test_a_fit_whose_steps_are_priced_otherwise_than_when_it_was_made_is_said() -> None:
    known = seen_of(fitted(**WIDE).seen or "")
    rows, context, seconds = known.step
    older = replace(fitted(**WIDE), seen=str(replace(known, step=(rows, context, 0.9 * seconds))))
    assert "priced in another form than the fit's" in unseen(point("model=llama31_8b", device=older))


def planted_band(words: Sequence[str]) -> tuple[float, float, float]:
    """Of the typical step: least and most that it may take, and what the band of a step of another model holds."""
    device = fitted(**WIDE)
    known = seen_of(device.seen or "")
    other = point(*words, device=device).deployment
    least, most = known.work_range(other.shape, 1)
    predicted = decode_step_s(other, *known.step[:2]) / known.step[2]
    return least / predicted, most / predicted, shares(point(*words, device=device))[1]


@cases("words", [("model=llama31_8b", "model.layers=64"), ("model=qwen3_32b",), ("model=qwen25_15b",)], day=1)
def test_the_band_of_another_model_holds_a_step_that_did_not_change_and_one_that_follows_its_work(
    words: Sequence[str],
) -> None:
    least, most, reach = planted_band(words)
    assert least < 1.02
    assert most > 0.98
    assert 1 + reach > 0.97 * most
    assert 1 / (1 + reach) < least / 0.97


def test_another_model_is_named_with_both_values() -> None:
    said = unseen(point("model=llama31_8b", "model.layers=16", device=fitted(**WIDE)))
    assert said == "the fit has not seen this model shape: layers 16 (it saw 32)"


@pytest.mark.parametrize("word", ["model.dtype=float32", "model.kv_dtype=fp8_e4m3", "model.weight_dtype=fp8"])
def test_another_element_type_is_another_shape(word: str) -> None:
    assert "this model shape" in unseen(point("model=llama31_8b", word, device=fitted(**WIDE)))


@pytest.mark.parametrize("name", [*LARGEST, "longest"])
def test_a_larger_load_is_named_by_what_is_larger(name: str) -> None:
    one = point(
        "model=llama31_8b", device=fitted(**WIDE | {name: 0.0, "longest": 8192.0 * (name != "longest")})
    )
    reached = dict.fromkeys(LARGEST, 1.0) | {name: 4.0}
    said = unseen(one, steps(**reached))
    assert said.startswith("the fit has not seen this load: ")
    assert said.count("it saw at most 0") <= 1


def test_a_band_is_wider_for_steps_with_more_requests_than_the_fit_has_seen() -> None:
    few, many = fitted(**WIDE | {"rows": 1.0}), fitted(**WIDE)
    assert (
        shares(point("model=llama31_8b", device=few))[1]
        > 1.5 * shares(point("model=llama31_8b", device=many))[1]
    )


@cases("model", ["qwen3_30b_a3b", "deepseek_v2_lite", "gemma3_12b"], day=1)
def test_a_model_with_another_kind_of_layers_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"device\.seen.*differ in"):
        check_cost(deployment_of(replace(config(f"model={model}"), device=fitted(**WIDE))))


def recorded(*words: str) -> PointRecord:
    return run_point(replace(config(*words), device=fitted(**WIDE))).record


def test_a_run_says_that_the_fit_has_not_seen_its_model() -> None:
    assert any(
        "has not seen this model shape" in line for line in beside_figures([recorded("model=qwen3_8b")])
    )
    assert not any("has not seen" in line for line in beside_figures([recorded("model=llama31_8b")]))


def test_a_fit_that_does_not_keep_what_it_has_seen_says_so() -> None:
    device = replace(fitted(**WIDE), seen=None)
    record = run_point(replace(config("model=llama31_8b"), device=device)).record
    assert any("does not keep what its log has shown" in line for line in beside_figures([record]))
    assert "does not keep" in unseen(point("model=llama31_8b", device=device))


def test_a_run_counts_the_time_in_steps_that_the_fit_has_not_seen() -> None:
    small = replace(config("model=llama31_8b"), device=fitted(rows=1.0))
    section = run_point(small).record.cost["extrapolated"]
    assert section["share_of_time"] > 0.5


def test_advise_says_before_its_answers_that_the_fit_has_not_seen_the_model(tmp_path: Path) -> None:
    served = replace(config("model=qwen3_8b"), device=fitted(**WIDE))
    file = tmp_path / "served.yaml"
    file.write_text(settings_text(served))
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{0.1 * row},100,10\n" for row in range(40))
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    found = case_of(trace, [f"deployment={file}"], parse_slo("ttft_p99<1"))
    assert any("has not seen this model shape" in line for line in found.said)
