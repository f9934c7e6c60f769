"""A deployment becomes one configuration: its settings, its model, its device. What is not simulated is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.config.checks import checked
from harness.config.errors import UserError
from harness.config.values import replaced
from harness.twin.configured import configured, preset_of, preset_of_device
from harness.twin.log import EngineLog
from harness.twin.reading import read_engine_log
from harness.twin.settings import VLLM
from harness.twin.what_ifs import _asked
from harness.workload.deployment import deployment_of
from harness.workload.point import resolve
from traces.trace import Client, ClientKind

RECORDED = Path(__file__).resolve().parents[2] / "data" / "deployments" / "servingsim-recorder"


@pytest.fixture(scope="module")
def recorded() -> EngineLog:
    return read_engine_log(RECORDED)


def with_settings(log: EngineLog, **values: Any) -> EngineLog:
    return replace(log, settings=replace(log.settings, **values))


def test_the_settings_of_the_log_are_configured(recorded: EngineLog) -> None:
    config = configured(recorded, ("device=rtx_pro_6000",)).config
    assert config.model.name == "llama-3.1-8b"
    assert (config.scheduler.max_running, config.scheduler.max_batched_tokens) == (128, 2048)
    assert config.scheduler.async_scheduling is True
    assert config.measure is False


def test_an_override_wins_over_the_log(recorded: EngineLog) -> None:
    config = configured(recorded, ("device=rtx_pro_6000", "scheduler.max_running=7")).config
    assert config.scheduler.max_running == 7


def test_the_pool_of_the_log_is_the_pool(recorded: EngineLog) -> None:
    found = configured(with_settings(recorded, pool_blocks=2588), ("device=rtx4090",))
    assert found.config.cache.pool_tokens == 2588 * 16
    assert not any("does not give the pool" in note for note in found.notes)


def test_the_bytes_of_a_pool_on_each_device_are_the_pool(recorded: EngineLog) -> None:
    """128 KiB a token of Llama-3.1-8B, half of it on each of two devices; a block is vLLM's null block."""
    read = VLLM.read({"kv_cache_memory_bytes": "10G"}, "serve.sh")
    said = with_settings(recorded, pool_bytes=read.pool_bytes, tensor_parallel=2)
    found = configured(said, ("device=rtx4090",))
    assert found.config.cache.pool_tokens == (10 * 2**30 // 2**20 - 1) * 16
    assert not any("does not give the pool" in note for note in found.notes)
    assert configured(said, ("device=rtx4090", "cache.pool_tokens=1600")).config.cache.pool_tokens == 1600


def test_pages_of_a_group_of_layers_are_a_part_of_the_pool(recorded: EngineLog) -> None:
    """vLLM's pages of gpt-oss hold 12 of the 24 layers, unless it runs without groups."""
    said = with_settings(recorded, pool_blocks=2588, model="openai/gpt-oss-20b")
    found = configured(said, ("device=h100",))
    assert found.config.cache.pool_tokens == 2588 * 16 // 2
    assert any("windowed layers keep every block" in warning for warning in found.warnings)
    one = with_settings(said, unmapped={"disable_hybrid_kv_cache_manager": "True"})
    whole = configured(one, ("device=h100",))
    assert whole.config.cache.pool_tokens == 2588 * 16
    assert not any("windowed layers keep every block" in warning for warning in whole.warnings)


def test_a_what_if_keeps_the_memory_of_pages_in_groups(recorded: EngineLog) -> None:
    words = ("device=h100", "cache.groups=uniform", "scheduler.async_scheduling=false")
    config = configured(with_settings(recorded, pool_blocks=2588, model="openai/gpt-oss-20b"), words).config
    assert deployment_of(config).pool.page_counts == (2588,)
    _, values, _ = _asked(config, recorded.workload, "scheduler.max_running=64")
    assert deployment_of(replaced(config, values)).pool.page_counts == (2588,)


def test_a_what_if_may_give_the_pool_in_blocks(recorded: EngineLog) -> None:
    """It was refused, because the tokens of the log stood beside it."""
    config = configured(with_settings(recorded, pool_blocks=2588), ("device=rtx4090",)).config
    _, values, _ = _asked(config, recorded.workload, "cache.pool_blocks=500")
    assert deployment_of(checked(replaced(config, values))).pool.num_blocks == 500


@pytest.mark.parametrize(("version", "pool"), [("0.19.0", 41408), ("0.33.0", None)])
def test_tokens_that_are_no_pages_give_no_pool(recorded: EngineLog, version: str, pool: int | None) -> None:
    said = with_settings(recorded, pool_tokens=41408, model="openai/gpt-oss-20b", version=version)
    found = configured(said, ("device=h100",))
    assert found.config.cache.pool_tokens == pool
    assert any("the 41,408 tokens of the log say" in text for text in found.warnings) == (pool is None)
    told = with_settings(said, origin={"pool_tokens": "inferred from the KV use"})
    assert configured(told, ("device=h100",)).config.cache.pool_tokens == 41408
    own = configured(said, ("device=h100", "cache.pool_tokens=41408"))
    assert not any("tokens of the log say" in text for text in own.warnings)


def test_a_pool_that_is_computed_is_said(recorded: EngineLog) -> None:
    notes = configured(recorded, ("device=rtx_pro_6000",)).notes
    assert any("does not give the pool" in note for note in notes)


def test_replicas_may_hold_whole_experts(recorded: EngineLog) -> None:
    said = with_settings(recorded, data_parallel=2, expert_parallel=True, model="Qwen/Qwen3-30B-A3B")
    device = configured(said, ("device=rtx_pro_6000",)).config.device
    assert (device.data_parallel, device.expert_parallel) == (2, True)


def test_a_device_that_the_log_names_is_taken(recorded: EngineLog) -> None:
    found = configured(with_settings(recorded, device="NVIDIA GeForce RTX 4090"), ())
    assert found.config.device.name == "rtx4090"


def test_a_default_that_depends_on_the_device_is_filled_in(recorded: EngineLog) -> None:
    found = configured(
        with_settings(recorded, max_running=None, max_batched_tokens=None), ("device=rtx4090",)
    )
    assert (found.config.scheduler.max_running, found.config.scheduler.max_batched_tokens) == (256, 2048)
    assert found.settings.origin["max_running"] == "default of vLLM 0.19.0"


def test_a_default_of_our_own_is_said(recorded: EngineLog) -> None:
    unknown = with_settings(recorded, engine="unknown", version=None, max_running=None)
    warnings = configured(unknown, ("device=rtx4090",)).warnings
    assert any("PageTwin's own defaults are simulated (scheduler.max_running=" in said for said in warnings)


def test_replicas_of_a_dense_model_are_configured(recorded: EngineLog) -> None:
    assert (
        configured(with_settings(recorded, data_parallel=4), ("device=h100",)).config.device.data_parallel
        == 4
    )


def test_tensor_parallel_and_quantised_weights_are_configured(recorded: EngineLog) -> None:
    found = configured(
        with_settings(recorded, tensor_parallel=2, quantization="fp8"), ("device=h100",)
    ).config
    assert found.device.tensor_parallel == 2
    assert found.model.weight_dtype == "fp8"


def test_weights_of_an_unknown_quantiser_are_as_wide_as_the_user_says(recorded: EngineLog) -> None:
    said = with_settings(recorded, quantization="compressed-tensors")
    found = configured(said, ("device=h100", "model.weight_dtype=int8")).config.model
    assert found.weight_dtype == "int8"


@pytest.mark.parametrize(
    ("values", "overrides", "said"),
    [
        ({}, (), "does not say on which device it ran"),
        ({"device": "Gaudi 3"}, (), "no preset describes the device Gaudi 3"),
        ({"model": "org/novel-9b"}, ("device=h100",), "no preset describes the model org/novel-9b"),
        ({"model": None}, ("device=h100",), "does not say which model ran"),
        ({"unmodelled": {"pipeline_parallel_size": "2"}}, ("device=h100",), "pipeline_parallel_size = 2"),
        ({"quantization": "bitsandbytes"}, ("device=h100",), "quantization is bitsandbytes"),
        ({}, ("device=h100,a100_80gb",), "write one value for device=h100,a100_80gb"),
        ({}, ("device=h100", "cache.block_size=0"), "cache.block_size"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(
    recorded: EngineLog, values: dict[str, Any], overrides: tuple[str, ...], said: str
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
    recorded: EngineLog, key: str, value: int, blocks: int
) -> None:
    found = configured(
        with_settings(recorded, pool_blocks=5000), ("device=rtx_pro_6000", f"cache.{key}={value}")
    )
    assert deployment_of(found.config).pool.num_blocks == blocks


def test_a_setting_that_replaces_that_of_the_log_is_said(recorded: EngineLog) -> None:
    found = configured(recorded, ("device=rtx_pro_6000", "scheduler.max_running=7"))
    assert "scheduler.max_running: the log says 128; what you set instead is simulated." in found.notes


def test_a_setting_that_repeats_the_log_is_no_contradiction(recorded: EngineLog) -> None:
    assert not configured(recorded, ("device=rtx_pro_6000", "scheduler.max_running=128")).replaced


def test_a_model_other_than_that_of_the_log_is_said(recorded: EngineLog) -> None:
    notes = configured(recorded, ("device=rtx_pro_6000", "model=qwen3_8b")).notes
    assert any("meta-llama/Llama-3.1-8B ran; qwen3-8b is simulated" in note for note in notes)


def test_a_gb200_is_no_b200(recorded: EngineLog) -> None:
    assert preset_of_device("NVIDIA B200") == "b200"
    assert preset_of_device("NVIDIA GeForce RTX 4090") == "rtx4090"
    laptops = (
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    )
    for name in (*laptops, "NVIDIA GeForce RTX 4090 D", "NVIDIA H200 NVL"):
        assert preset_of_device(name) is None
    with pytest.raises(UserError, match="no preset describes the device NVIDIA GB200"):
        configured(with_settings(recorded, device="NVIDIA GB200"), ())


@pytest.mark.parametrize(("device", "noted"), [("device=h100", True), ("device=rtx4090", False)])
def test_a_device_other_than_the_log_s_is_noted(recorded: EngineLog, device: str, noted: bool) -> None:
    found = configured(with_settings(recorded, device="NVIDIA GeForce RTX 4090"), (device,))
    words = "The log says that NVIDIA GeForce RTX 4090 ran; h100 is simulated, as you set it."
    assert (words in found.notes) is noted


# -- what is said before any figure -------------------------------------------------------------------------------


TWO = Client(ClientKind.capped, 2)


def capped(log: EngineLog) -> EngineLog:
    """The same requests, from a client with at most two in flight."""
    return replace(log, workload=log.workload.changed(log.workload.requests, "capped", client=TWO))


def test_a_log_is_replayed_by_its_own_client(recorded: EngineLog) -> None:
    found = configured(capped(recorded), ("device=rtx_pro_6000",))
    assert found.warnings == ()
    assert resolve(found.config, capped(recorded).workload).workload.traffic.client == TWO


@pytest.mark.parametrize(
    "words", [("replay=closed", "replay.users=4"), ("replay.max_in_flight=0",), ("replay.max_in_flight=5",)]
)
def test_another_client_than_the_log_s_is_warned_of(recorded: EngineLog, words: tuple[str, ...]) -> None:
    found = configured(capped(recorded), ("device=rtx_pro_6000", *words))
    assert found.warnings[0].startswith("Warning: the requests are sent otherwise, as you set it")


@pytest.mark.parametrize(
    ("settings", "said", "spread"),
    [
        ({"engine": "sglang", "version": None}, "SGLang overlaps its steps", 0.0),
        ({"version": "0.7.3"}, "vLLM 0.7.3 runs its first scheduler", 0.7),
    ],
)
def test_an_engine_whose_scheduler_is_not_simulated_is_said_first_with_a_wide_band(
    recorded: EngineLog, settings: dict[str, Any], said: str, spread: float
) -> None:
    found = configured(with_settings(recorded, **settings), ("device=rtx_pro_6000",))
    assert said in found.warnings[0]
    assert found.config.device.step_spread == spread
    assert found.config.device.ttft_spread >= 0.4


@pytest.mark.parametrize(("words", "ahead"), [((), True), (("scheduler.async_scheduling=false",), False)])
def test_sglang_schedules_ahead_unless_log_or_user_says_otherwise(
    recorded: EngineLog, words: tuple[str, ...], ahead: bool
) -> None:
    log = with_settings(recorded, engine="sglang", version=None, async_scheduling=None)
    found = configured(log, ("device=rtx_pro_6000", *words))
    assert found.config.scheduler.async_scheduling is ahead
    assert any("does not say whether" in note for note in found.notes) is ahead


def test_host_memory_for_kv_blocks_is_said_first_with_the_key_that_simulates_it(recorded: EngineLog) -> None:
    log = with_settings(recorded, host_memory_gb=10 * 2**30 / 1e9)
    found = configured(log, ("device=rtx_pro_6000",))
    tokens = 10 * 2**30 // resolve(found.config).pool.kv_bytes_per_token
    assert "10.7 GB of host memory (kv_offloading_size) is computed again here" in found.warnings[0]
    assert f"Set cache.tier_tokens={tokens} to simulate" in found.warnings[0]
    simulated = configured(log, ("device=rtx_pro_6000", f"cache.tier_tokens={tokens}"))
    assert (simulated.warnings, simulated.config.cache.tier_tokens) == ((), tokens)


def test_the_scheduler_of_a_newer_vllm_needs_no_warning(recorded: EngineLog) -> None:
    assert not any(
        "scheduler" in warning for warning in configured(recorded, ("device=rtx_pro_6000",)).warnings
    )


def test_requests_that_failed_are_said_first(recorded: EngineLog) -> None:
    failed = replace(recorded, dropped={"failed": 5, "written twice, with the same times": 9})
    assert configured(failed, ("device=rtx_pro_6000",)).warnings == (
        "Warning: 20 % of the log's requests (5 of 25: 5 failed) are not simulated, and the engine had their load.",
    )


def test_an_element_type_of_the_kv_other_than_the_logs_is_said(recorded: EngineLog) -> None:
    notes = configured(recorded, ("device=rtx_pro_6000", "model.kv_dtype=fp8_e4m3")).notes
    assert "model.kv_dtype: the log says model; what you set instead is simulated." in notes


def test_an_override_without_effect_is_said_before_any_figure(recorded: EngineLog) -> None:
    heard = configured(recorded, ("device=rtx_pro_6000", "device.bandwidth_efficiency=0.7"))
    assert not any("without effect" in each for each in heard.warnings)
    found = configured(recorded, ("device=rtx_pro_6000", "device.link_gbs=9", "model.experts_per_token=2"))
    said = "without effect beside the other settings: device.link_gbs, model.experts_per_token."
    assert f"Warning: {said}" in found.warnings
