"""A deployment becomes one configuration: its settings, its model, its device. What is not simulated is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.config.errors import UserError
from harness.deployment.configured import configured, preset_of, preset_of_device
from harness.deployment.log import Deployment
from harness.deployment.reading import read_deployment
from harness.workload.shapes import pool_shape

RECORDED = Path(__file__).resolve().parents[2] / "data" / "deployments" / "servingsim-recorder"


@pytest.fixture(scope="module")
def recorded() -> Deployment:
    return read_deployment(RECORDED)


def with_settings(deployment: Deployment, **values: Any) -> Deployment:
    return replace(deployment, settings=replace(deployment.settings, **values))


def test_the_settings_of_the_log_are_configured(recorded: Deployment) -> None:
    config = configured(recorded, ("device=rtx_pro_6000",)).config
    assert config.model.name == "llama-3.1-8b"
    assert (config.scheduler.max_running, config.scheduler.max_batched_tokens) == (128, 2048)
    assert config.scheduler.async_scheduling is True
    assert config.measure is False


def test_an_override_wins_over_the_log(recorded: Deployment) -> None:
    config = configured(recorded, ("device=rtx_pro_6000", "scheduler.max_running=7")).config
    assert config.scheduler.max_running == 7


def test_the_pool_of_the_log_is_the_pool(recorded: Deployment) -> None:
    found = configured(with_settings(recorded, pool_blocks=2588), ("device=rtx4090",))
    assert found.config.cache.pool_tokens == 2588 * 16
    assert not any("does not give the pool" in note for note in found.notes)


def test_a_pool_that_is_computed_is_said(recorded: Deployment) -> None:
    notes = configured(recorded, ("device=rtx_pro_6000",)).notes
    assert any("does not give the pool" in note for note in notes)


def test_a_device_that_the_log_names_is_taken(recorded: Deployment) -> None:
    found = configured(with_settings(recorded, device="NVIDIA GeForce RTX 4090"), ())
    assert found.config.device.name == "rtx4090"


def test_a_default_that_depends_on_the_device_is_filled_in(recorded: Deployment) -> None:
    found = configured(
        with_settings(recorded, max_running=None, max_batched_tokens=None), ("device=rtx4090",)
    )
    assert (found.config.scheduler.max_running, found.config.scheduler.max_batched_tokens) == (256, 2048)
    assert found.settings.origin["max_running"] == "default of vLLM 0.19.0"


def test_a_default_of_our_own_is_said(recorded: Deployment) -> None:
    unknown = with_settings(recorded, engine="unknown", version=None, max_running=None)
    notes = configured(unknown, ("device=rtx4090",)).notes
    assert any("does not give scheduler.max_running: PageTwin's own default" in note for note in notes)


def test_replicas_of_a_dense_model_are_configured(recorded: Deployment) -> None:
    assert (
        configured(with_settings(recorded, data_parallel=4), ("device=h100",)).config.device.data_parallel
        == 4
    )


def test_tensor_parallel_and_quantised_weights_are_configured(recorded: Deployment) -> None:
    found = configured(
        with_settings(recorded, tensor_parallel=2, quantization="fp8"), ("device=h100",)
    ).config
    assert found.device.tensor_parallel == 2
    assert found.model.weight_dtype == "fp8"


@pytest.mark.parametrize(
    ("values", "overrides", "said"),
    [
        ({}, (), "does not say on which device it ran"),
        ({"device": "Gaudi 3"}, (), "no preset describes the device Gaudi 3"),
        ({"model": "org/novel-9b"}, ("device=h100",), "no preset describes the model org/novel-9b"),
        ({"model": None}, ("device=h100",), "does not say which model ran"),
        ({"unmodelled": {"pipeline_parallel_size": "2"}}, ("device=h100",), "pipeline_parallel_size = 2"),
        (
            {"data_parallel": 4, "model": "Qwen/Qwen3-30B-A3B"},
            ("device=h100",),
            "found 4, but replicas of a mixture of experts",
        ),
        ({"quantization": "bitsandbytes"}, ("device=h100",), "quantization is bitsandbytes"),
        ({}, ("device=h100,a100_80gb",), "makes a sweep"),
        ({}, ("device=h100", "cache.block_size=0"), "cache.block_size"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(
    recorded: Deployment, values: dict[str, Any], overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        configured(with_settings(recorded, **values), overrides)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.1-8B", "llama31_8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama31_8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3_30b_a3b"),
        ("google/gemma-3-27b-it", "gemma3_27b"),
        ("/models/Qwen3-32B/", "qwen3_32b"),
        ("Qwen/Qwen3-32B-FP8", None),
        ("org/novel", None),
    ],
)
def test_a_name_on_the_hub_has_a_preset(name: str, preset: str | None) -> None:
    assert preset_of(name) == preset


@pytest.mark.parametrize(
    ("key", "value", "blocks"), [("pool_blocks", 3000, 3000), ("pool_tokens", 1600, 100)]
)
def test_either_key_of_the_pool_wins_over_the_log(
    recorded: Deployment, key: str, value: int, blocks: int
) -> None:
    found = configured(
        with_settings(recorded, pool_blocks=5000), ("device=rtx_pro_6000", f"cache.{key}={value}")
    )
    assert pool_shape(found.config).num_blocks == blocks


def test_a_setting_that_replaces_that_of_the_log_is_said(recorded: Deployment) -> None:
    found = configured(recorded, ("device=rtx_pro_6000", "scheduler.max_running=7"))
    assert "scheduler.max_running: the log says 128; what you set instead is simulated." in found.notes


def test_a_setting_that_repeats_the_log_is_no_contradiction(recorded: Deployment) -> None:
    assert not configured(recorded, ("device=rtx_pro_6000", "scheduler.max_running=128")).replaced


def test_a_model_other_than_that_of_the_log_is_said(recorded: Deployment) -> None:
    notes = configured(recorded, ("device=rtx_pro_6000", "model=qwen3_8b")).notes
    assert any("meta-llama/Llama-3.1-8B ran; qwen3-8b is simulated" in note for note in notes)


def test_a_gb200_is_no_b200(recorded: Deployment) -> None:
    assert preset_of_device("NVIDIA B200") == "b200"
    with pytest.raises(UserError, match="no preset describes the device NVIDIA GB200"):
        configured(with_settings(recorded, device="NVIDIA GB200"), ())


@pytest.mark.parametrize(("device", "noted"), [("device=h100", True), ("device=rtx4090", False)])
def test_a_device_other_than_the_log_s_is_noted(recorded: Deployment, device: str, noted: bool) -> None:
    found = configured(with_settings(recorded, device="NVIDIA GeForce RTX 4090"), (device,))
    words = "The log says that NVIDIA GeForce RTX 4090 ran; h100 is simulated, as you set it."
    assert (words in found.notes) is noted
