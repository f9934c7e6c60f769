"""The pool of a GPU: vLLM's arithmetic, held against what vLLM's own logs say."""

from typing import Any

import pytest

from harness.config.checks import check_config
from harness.config.compose import compose_config
from harness.config.errors import ConfigError
from harness.config.overrides import parse_overrides
from harness.config.schema import RunConfig
from harness.workload.deployment import activation_bytes, deployment_of, device_memory, model_shape

GIB = 2**30


def composed(*texts: str) -> RunConfig:
    texts = ("measure=false", "cost=roofline", "cache.max_model_len=null", *texts)
    return compose_config([axis.settings[0] for axis in parse_overrides(texts)])


def limits(tokens: int, rows: int) -> tuple[str, str]:
    return f"scheduler.max_batched_tokens={tokens}", f"scheduler.max_running={rows}"


QWEN25_32B = (
    *("model=qwen3_32b", "model.heads=40", "model.intermediate=27648", "model.vocab=152064"),
    "device.tensor_parallel=2",
)
QWEN25_1B5 = (
    *("model=qwen3_8b", "model.layers=28", "model.hidden=1536", "model.heads=12", "model.kv_heads=2"),
    *("model.intermediate=8960", "model.tied_embeddings=true"),
)
# What vLLM logged: (settings, total memory in GiB, utilization, KV in GiB). The error of the formula is within `most`.
LOGS: list[Any] = [
    # RTX 4090, vLLM 0.19.0: 2,588 blocks of 16; bench/examples/RTX4090/Llama-3.1-8B/vllm/meta.json of
    # github.com/casys-kaist/LLMServingSim.
    pytest.param(
        ("model=llama31_8b", *limits(2048, 256)), 23.5165, 0.9, 5.0547, 0.045, id="4090-llama31-8b-0.19.0"
    ),
    # A100-SXM4-40GB, vLLM 0.19.1: "Available KV cache memory: 19.36 GiB", 140,960 tokens. The log's own ratio of graph
    # memory and utilization (2.35 GiB are 0.0596) gives a total of 39.4 GiB. A published note on serving Qwen3-8B.
    pytest.param(("model=qwen3_8b", *limits(2048, 256)), 39.42, 0.9, 19.36, 0.02, id="a100-qwen3-8b-0.19.1"),
    # A100 80GB, vLLM 0.19.0: weights 13.72 GiB (padded MXFP4 experts), KV 36.56 GiB;
    # myoceane.fr/index.php/ai-vllm-a100-gemma-4.
    pytest.param(
        ("model=gpt_oss_20b", "cache.max_model_len=128", *limits(2048, 256)),
        79.25,
        0.65,
        36.56,
        0.025,
        id="a100-gpt-oss-20b-0.19.0",
    ),
    # H100 80GB, vLLM 0.6: weights 14.96 GiB, peak activation 1.26 GiB of 71.29 usable, before its counting of other
    # memory was mended; github.com/vllm-project/vllm/pull/10511.
    pytest.param(("model=llama3_8b", *limits(8192, 256)), 79.22, 0.9, 55.07, 0.01, id="h100-llama3-8b-0.6"),
    # 2 x L40S, vLLM 0.8: KV 7.71 GiB on each, 3,947 blocks; github.com/vllm-project/vllm/issues/15815. Its NCCL buffers
    # (0.30 GiB of other memory) are not in the formula.
    pytest.param((*QWEN25_32B, *limits(10_000, 256)), 44.42, 0.9, 7.71, 0.06, id="2xl40s-qwen25-32b-0.8"),
    # T4, vLLM 0.7 without chunked prefill: peak activation 2.02 GiB, 5,519 blocks; a public notebook.
    pytest.param((*QWEN25_1B5, *limits(32_768, 256)), 14.56, 0.5, 2.36, 0.055, id="t4-qwen25-1.5b-0.7"),
]


@pytest.mark.parametrize(("settings", "total_gib", "share", "kv_gib", "most"), LOGS)
def test_the_pool_is_near_the_one_that_vllm_logged(
    settings: tuple[str, ...], total_gib: float, share: float, kv_gib: float, most: float
) -> None:
    config = composed("device=h100", *settings, f"device.memory_gb={total_gib * GIB / 1e9}",
                      f"device.memory_utilization={share}")  # fmt: skip
    shape = model_shape(config.model)
    memory = device_memory(config.device, config.scheduler, shape, shape.weight_bytes)
    assert memory.kv / GIB == pytest.approx(kv_gib, rel=most)


def test_the_blocks_of_a_4090_are_within_five_percent_of_vllms() -> None:
    pool = deployment_of(
        composed("device=rtx4090", "model=llama31_8b", *limits(2048, 256), "cache.pool_tokens=null")
    ).pool
    assert pool.block_size == 16
    assert pool.num_blocks == pytest.approx(2588, rel=0.05)
    assert pool.sized_by == "device.memory_gb"


def test_the_parts_of_the_memory_add_up_to_what_is_usable() -> None:
    pool = deployment_of(
        composed("device=rtx4090", "model=llama31_8b", *limits(2048, 256), "cache.pool_tokens=null")
    ).pool
    memory = pool.memory
    assert memory is not None
    assert (
        memory.weights == 8_030_261_248 * 2 - 2 * 4096 * 65
    )  # all parameters but the norms of 32 layers and the end
    whole = memory.weights + memory.activations + memory.other + memory.graphs + memory.kv
    assert whole == pytest.approx(0.9 * 25.25e9)
    assert memory.kv - pool.tokens * pool.kv_bytes_per_token < 16 * pool.kv_bytes_per_token


def test_a_log_may_say_what_the_formula_estimates() -> None:
    said = ("device.activation_gb=1.0", "device.other_memory_gb=0.1", "device.graph_memory_gb=0.5")
    memory = deployment_of(
        composed("device=rtx4090", "model=llama31_8b", "cache.pool_tokens=null", *said)
    ).pool.memory
    assert memory is not None
    assert (memory.activations, memory.other, memory.graphs) == (1.0e9, 0.1e9, 0.5e9)


def test_the_sampler_of_many_rows_needs_more_than_the_layers() -> None:
    shape = model_shape(composed("model=llama31_8b").model)
    few, many = (composed(*limits(2048, rows)).scheduler for rows in (8, 1024))
    assert activation_bytes(shape, few) == 2048 * (4 * 4096 + 3 * 14336) * 2
    assert activation_bytes(shape, many) == 2048 * 4096 * 2 + 1024 * 128_256 * 26


def test_latent_kv_lies_whole_on_each_of_the_devices() -> None:
    one, two = (
        deployment_of(
            composed(
                "device=h100",
                "model=deepseek_v2_lite",
                "cache.pool_tokens=null",
                f"device.tensor_parallel={n}",
            )
        ).pool
        for n in (1, 2)
    )
    assert one.memory is not None
    assert two.memory is not None
    assert two.memory.weights == one.memory.weights / 2
    assert two.num_blocks == two.memory.kv // (16 * one.kv_bytes_per_token)


def test_blocks_set_the_pool_as_they_stand_in_a_log() -> None:
    pool = deployment_of(composed("cache.pool_blocks=2588")).pool
    assert (pool.num_blocks, pool.tokens, pool.sized_by) == (2588, 41_408, "cache.pool_blocks")
    assert deployment_of(composed("cache.pool_tokens=4096")).pool.sized_by == "cache.pool_tokens"


def test_blocks_and_tokens_together_are_refused() -> None:
    errors = check_config(composed("cache.pool_blocks=100", "cache.pool_tokens=1600"))
    assert [error.key for error in errors] == ["cache.pool_blocks"]
    assert "cache.pool_tokens=1600 sets the pool too" in str(errors[0])


def test_blocks_need_a_cache_that_has_blocks() -> None:
    errors = check_config(composed("cache=contiguous_max", "cache.pool_blocks=100"))
    assert any("has no blocks; use cache.pool_tokens" in str(error) for error in errors)


def test_weights_that_do_not_fit_are_refused_with_their_size() -> None:
    with pytest.raises(ConfigError, match=r"no KV fits beside llama-3\.1-70b: each h100 has 76\.6 GB usable"):
        deployment_of(composed("device=h100", "model=llama31_70b", "cache.pool_tokens=null"))
