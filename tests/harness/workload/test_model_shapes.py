"""What is read from a checkpoint's config.json for a prediction, and what is refused because it is not modelled."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tiers import cases

from engine.runtime.options import Dtype
from harness.config.compose import compose_config
from harness.config.errors import ConfigError
from harness.config.schema import ModelConfig, RunConfig
from harness.cost.model_shape import Experts, LatentKV, ModelShape
from harness.point.cost import check_cost
from harness.sweep.plan import run_request
from harness.workload import architecture
from harness.workload.architecture import CheckpointFacts, checkpoint_shape, unknown_parts
from harness.workload.deployment import deployment_of, max_position, model_shape, unmodelled

PYTHON = os.environ.get("PAGETWIN_VLLM")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
}


def config(folder: Path, facts: dict[str, Any], *overrides: str) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA | facts))
    request = run_request(
        (
            f"model.path={folder}",
            "measure=false",
            "cost=roofline",
            "cache.max_model_len=null",
            "decoding.beam_width=1",
            *overrides,
        )
    )
    return compose_config(axis.settings[0] for axis in request.axes)


NOT_MODELLED = [
    ({"model_type": "olmoe", "num_experts": 64}, "a mixture of experts (num_experts = 64)"),
    (
        {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
        "experts in some layers only (decoder_sparse_step = 2)",
    ),
    (
        {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
        "experts in some layers only (mlp_only_layers = [1])",
    ),
    ({"kv_lora_rank": 512}, "latent K and V (kv_lora_rank = 512)"),
    ({"moe_num_experts": [64, 64]}, "a mixture of experts (moe_num_experts = [64, 64])"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights of a kind that it does not know"),
    ({"quantization_config": {"quant_method": "vptq"}}, "quantised weights of a kind that it does not know"),
    ({"model_type": "persimmon"}, "an architecture that it has not been taught (model_type persimmon)"),
    ({"model_type": "gemma4_text"}, "layers whose heads differ in width or number (per_layer_config)"),
    (
        {"model_type": "gemma4_text", "num_kv_shared_layers": 1},
        "layers that read K and V of others (num_kv_shared_layers = 1)",
    ),
    ({"model_type": "falcon_h1"}, "layers of other kinds (hybrid)"),
    ({"layer_types": ["linear_attention", "full_attention"]}, "layers of other kinds (linear_attention)"),
]


@pytest.mark.parametrize(("facts", "words"), NOT_MODELLED)
def test_a_model_that_is_not_modelled_is_not_priced(
    tmp_path: Path, facts: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_cost(deployment_of(config(tmp_path, facts)))
    assert words in str(refused.value)


@pytest.mark.parametrize(("facts", "words"), NOT_MODELLED)
def test_its_pool_must_be_set_by_hand(tmp_path: Path, facts: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        deployment_of(
            config(tmp_path, facts, "cache.pool_tokens=null", "device=h100", "model.dtype=bfloat16")
        )
    assert words in str(refused.value)
    assert deployment_of(config(tmp_path, facts, "cache.pool_tokens=4096")).pool.tokens == 4096


@pytest.mark.parametrize(
    ("facts", "longest"),
    [
        ({}, "null"),
        ({"sliding_window": 4096, "use_sliding_window": False}, "null"),
        ({"sliding_window": 8192}, "null"),
        ({"sliding_window": 4096, "model_type": "mistral"}, "4096"),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 2, "model_type": "qwen2"}, "null"),
        ({"sliding_window": 4096, "max_window_layers": 2, "model_type": "qwen2"}, "null"),
    ],
)
def test_a_dense_model_is_priced(tmp_path: Path, facts: dict[str, Any], longest: str) -> None:
    dense = config(tmp_path, facts, f"cache.max_model_len={longest}")
    assert unmodelled(dense.model) == ""
    check_cost(deployment_of(dense))


@pytest.mark.parametrize(
    ("facts", "given"),
    [
        ({"model_type": "qwen3_next"}, "model_type is qwen3_next"),
        ({"model_type": "qwen3_next", "full_attention_interval": 4}, "full_attention_interval is 4"),
        (
            {"model_type": "cohere2", "sliding_window": 4096, "sliding_window_pattern": 4},
            "sliding_window_pattern is 4",
        ),
        ({"model_type": "exaone4", "sliding_window": 4096}, "model_type is exaone4"),
    ],
)
def test_without_transformers_layers_of_several_kinds_that_are_not_listed_are_refused(
    tmp_path: Path, facts: dict[str, Any], given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "find_spec", lambda _: None)
    facts = {"head_dim": 16, "shared_expert_intermediate_size": 0, **facts}
    with pytest.raises(ConfigError, match=f"layer_types is None, must be a list of 2 kinds, because {given}"):
        model_shape(config(tmp_path, facts).model)


VARIANTS: list[dict[str, Any]] = [
    *({}, {"head_dim": 32}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
    *({"sliding_window": 128}, {"sliding_window": None}, {"sliding_window": 64, "sliding_window_pattern": 3}),
    {"sliding_window": 128, "head_dim": 32},
    {"sliding_window": 128, "use_sliding_window": True, "head_dim": 32},
    {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 4, "head_dim": 32},
    {"layer_types": ["full_attention"] * 12, "head_dim": 32, "sliding_window": None},
    {"layer_types": ["sliding_attention"] * 5 + ["full_attention"] * 7, "sliding_window": 64},
    {"full_attention_interval": 3, "head_dim": 32, "shared_expert_intermediate_size": 64},
    *({"multi_query": True}, {"multi_query": False}, {"new_decoder_architecture": True, "num_kv_heads": 2}),
    *({"first_k_dense_replace": 2}, {"decoder_sparse_step": 2}, {"shared_expert_intermediate_size": 64}),
    {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}, "head_dim": 32},
    {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": None},
    {
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "num_key_value_heads": 4,
    },
]


@cases("family", sorted(set(architecture.KNOWN)), day=sorted(set(architecture.KNOWN))[::8])
def test_without_transformers_a_shape_is_the_same_or_refused(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = LLAMA | {"model_type": family, "num_hidden_layers": 12, "qk_nope_head_dim": 16}
    if family in architecture.WITH_EXPERTS:
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        facts |= dict.fromkeys(names, 8) | {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

    def read(variant: dict[str, Any]) -> tuple[ModelShape, list[str]] | None:
        (tmp_path / "config.json").write_text(json.dumps(facts | variant))
        found = CheckpointFacts(str(tmp_path))
        try:
            return checkpoint_shape(found, 2, None), unknown_parts(found, states=True)
        except ConfigError:
            return None

    right = [read(variant) for variant in VARIANTS]
    monkeypatch.setattr(architecture, "find_spec", lambda _: None)
    for variant, truth in zip(VARIANTS, right, strict=True):
        raw = read(variant)
        if raw and not raw[1]:  # it is modelled
            assert raw == truth, variant


def test_a_checkpoint_that_transformers_cannot_read_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read it as 'exaone4' \(ZeroDivisionError"):
        model_shape(config(tmp_path, {"model_type": "exaone4", "sliding_window": None}).model)


@pytest.mark.parametrize(("tied", "matrices"), [(True, 1), (False, 2)])
def test_tied_embeddings_take_memory_once(tmp_path: Path, tied: bool, matrices: int) -> None:
    shape = model_shape(config(tmp_path, {"tie_word_embeddings": tied}).model)
    layers = shape.layers * shape.layer_weights
    assert shape.weight_bytes == (layers + matrices * 64 * 1000) * shape.bytes_per_element
    assert shape.step_bytes == (layers + 64 * 1000) * shape.bytes_per_element


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("opt", True), ("gemma2", True)])
def test_a_family_ties_as_transformers_does_where_the_checkpoint_does_not_say(
    tmp_path: Path, family: str, tied: bool
) -> None:
    assert model_shape(config(tmp_path, {"model_type": family}).model).tied_embeddings is tied


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("word", ["bfloat16", "torch.bfloat16"])
def test_a_checkpoint_keeps_its_element_type(tmp_path: Path, key: str, word: str) -> None:
    assert config(tmp_path, {key: word}).model.dtype is Dtype.bfloat16


def test_an_element_type_that_the_user_names_counts(tmp_path: Path) -> None:
    assert config(tmp_path, {"dtype": "bfloat16"}, "model.dtype=float32").model.dtype is Dtype.float32


@pytest.mark.parametrize(
    "dtype", ["float64", ["bfloat16"], {"": "bfloat16"}], ids=["float64", "list", "object"]
)
def test_a_checkpoint_of_another_element_type_is_refused(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"found .* in .*config\.json; allowed: float32"):
        config(tmp_path, {"dtype": dtype})


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"hidden_size": None}, "has none of hidden_size, n_embd, d_model"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3, must be a whole number of at least 1"),
        ({"num_attention_heads": "32"}, "num_attention_heads is '32'"),
        ({"sliding_window": "4096", "model_type": "phi3"}, "sliding_window' expected int"),
        ({"text_config": [1]}, "must be objects"),
    ],
)
def test_a_number_that_is_missing_or_impossible_is_named(
    tmp_path: Path, facts: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_cost(deployment_of(config(tmp_path, facts)))
    assert words in str(refused.value)
    assert "config.json" in str(refused.value)


@pytest.mark.parametrize(
    "text", ["[1, 2]", "null", "3", "[" * 100_000, "{"], ids=["list", "null", "3", "deep", "cut"]
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str) -> None:
    broken = config(tmp_path, {})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_shape(broken.model)


@pytest.mark.parametrize(
    ("facts", "kv_heads"),
    [
        ({}, 2),
        ({"num_key_value_heads": None}, 4),
        ({"num_key_value_heads": None, "multi_query": True}, 1),
        (
            {
                "model_type": "falcon",
                "num_key_value_heads": None,
                "multi_query": True,
                "new_decoder_architecture": True,
                "num_kv_heads": 2,
            },
            2,
        ),
    ],
)
def test_heads_of_keys_and_values_are_found_under_any_name(
    tmp_path: Path, facts: dict[str, Any], kv_heads: int
) -> None:
    assert model_shape(config(tmp_path, facts).model).kv_heads == kv_heads


def test_a_draft_that_is_not_modelled_is_not_priced(tmp_path: Path) -> None:
    model, draft = tmp_path / "model", tmp_path / "draft"
    model.mkdir()
    draft.mkdir()
    config(draft, {"model_type": "olmoe", "num_experts": 8})
    drafting = ("decoding=speculative", "decoding.acceptance=0.7", f"decoding.draft_path={draft}")
    with pytest.raises(ConfigError, match="a mixture of experts"):
        check_cost(deployment_of(config(model, {}, *drafting)))
    (draft / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"decoding\.draft_path"):
        check_cost(deployment_of(config(model, {}, *drafting)))


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96}
QWEN2_MOE = {
    "model_type": "qwen2_moe",
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 96,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
}
DEEPSEEK = {
    "model_type": "deepseek_v2",
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "intermediate_size": 48,
    "quantization_config": {"quant_method": "mxfp4"},
}


@pytest.mark.parametrize(
    ("facts", "experts"),
    [
        (MIXTRAL, Experts(8, 2, 96)),
        (QWEN2_MOE, Experts(60, 4, 24, shared=96)),
        (QWEN3_MOE, Experts(16, 4, 24)),
        (DEEPSEEK, Experts(16, 6, 24, shared=48, dense_layers=1)),
        (GPT_OSS, Experts(32, 4, 48)),
    ],
    ids=["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "gpt_oss"],
)
def test_experts_are_read_under_the_names_of_their_family(
    tmp_path: Path, facts: dict[str, Any], experts: Experts
) -> None:
    sparse = config(tmp_path, facts)
    assert model_shape(sparse.model).experts == experts
    assert unmodelled(sparse.model) == ""
    check_cost(deployment_of(sparse))


def test_latent_attention_is_read_and_keeps_one_vector_and_one_key(tmp_path: Path) -> None:
    shape = model_shape(config(tmp_path, DEEPSEEK | {"dtype": "bfloat16"}).model)
    assert shape.latent == LatentKV(rank=32, rope_dim=8, value_dim=12)
    assert shape.kv_bytes_per_token == 2 * (32 + 8) * 2  # layers, elements, bytes
    by_hand = 64 * 4 * 24 + 64 * 40 + 32 * 4 * (16 + 12) + 4 * 12 * 64
    assert shape.attention_weights == by_hand


@pytest.mark.parametrize(
    ("facts", "layers"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 2),
        ({"model_type": "gemma2", "sliding_window": 4096}, 1),
        ({"model_type": "gemma3_text", "sliding_window": 512, "num_hidden_layers": 62}, 52),
        ({"sliding_window": 64}, 0),  # a llama, which does not heed it
        ({"model_type": "qwen3", "sliding_window": 64, "max_window_layers": 1}, 0),
        (
            {"model_type": "qwen3", "sliding_window": 64, "max_window_layers": 1, "use_sliding_window": True},
            1,
        ),
        ({"model_type": "cohere2", "sliding_window": 4096, "num_hidden_layers": 32}, 24),
        (
            {
                "model_type": "exaone4",
                "sliding_window": 64,
                "sliding_window_pattern": 4,
                "num_hidden_layers": 8,
            },
            6,
        ),
        ({"model_type": "qwen3", "sliding_window": 64, "use_sliding_window": False}, 0),
    ],
)
def test_windowed_layers_are_counted_as_the_family_has_them(
    tmp_path: Path, facts: dict[str, Any], layers: int
) -> None:
    shape = model_shape(config(tmp_path, facts).model)
    assert (shape.window, shape.windowed_layers) == (facts["sliding_window"] if layers else None, layers)


def test_the_element_type_of_a_checkpoint_that_does_not_say_is_not_guessed_for_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not say the element type of the weights"):
        config(tmp_path, {}, "device=h100")
    assert config(tmp_path, {}, "device=h100", "model.dtype=float32").model.dtype is Dtype.float32
    assert config(tmp_path, {}, "device=cpu").model.dtype is Dtype.float32


def test_float32_weights_are_no_prediction_of_a_gpu_unless_they_are_named(tmp_path: Path) -> None:
    """vLLM serves such a checkpoint in 16 bits, so it has half the bytes."""
    facts = {"torch_dtype": "float32"}
    with pytest.raises(
        ConfigError, match=r"config\.json says float32, and vLLM loads such weights in 16 bits"
    ):
        config(tmp_path, facts, "device=h100")
    assert config(tmp_path, facts, "device=h100", "model.dtype=bfloat16").model.dtype is Dtype.bfloat16
    assert config(tmp_path, facts, "device=cpu").model.dtype is Dtype.float32


def test_the_automatic_pool_of_a_model_with_windows_says_which_vllm_it_is_like(tmp_path: Path) -> None:
    facts = {"model_type": "mistral", "sliding_window": 4096}
    long = deployment_of(
        config(tmp_path, facts, "cache.pool_tokens=null", "device=h100", "model.dtype=bfloat16")
    ).pool
    assert (
        "windowed layers keep every block, as in vLLM with --disable-hybrid-kv-cache-manager" in long.origin
    )
    short = config(
        tmp_path,
        facts,
        "cache.pool_tokens=null",
        "device=h100",
        "model.dtype=bfloat16",
        "cache.max_model_len=4096",
    )
    assert deployment_of(short).pool.note == ""
    assert (
        deployment_of(config(tmp_path, facts, "cache.pool_tokens=8192")).pool.origin
        == "set by cache.pool_tokens"
    )


@pytest.mark.parametrize(
    ("section", "bits"),
    [
        ({"quant_method": "fp8"}, 8.0),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64),
    ],
)
def test_quantised_weights_count_with_their_scales(
    tmp_path: Path, section: dict[str, Any], bits: float
) -> None:
    plain = model_shape(config(tmp_path, {"dtype": "bfloat16"}).model)
    shape = model_shape(config(tmp_path, {"dtype": "bfloat16", "quantization_config": section}).model)
    embeddings = 2 * 64 * 1000 * 2
    assert shape.weight_bytes - embeddings == pytest.approx((plain.weight_bytes - embeddings) * bits / 16)


def test_mxfp4_is_the_width_of_routed_experts_alone(tmp_path: Path) -> None:
    shape = model_shape(config(tmp_path, GPT_OSS).model)
    assert (shape.layer_bits, shape.expert_bits) == (None, 4.25)


PUBLISHED = [  # 10^9 parameters: all, and those that a token meets, from the model cards
    ("llama31_8b", 8.03, 8.03),
    ("llama31_70b", 70.6, 70.6),
    ("qwen3_8b", 8.2, 8.2),
    ("qwen3_32b", 32.8, 32.8),
    ("qwen3_30b_a3b", 30.5, 3.3),
    ("mistral_7b", 7.25, 7.25),
    ("mixtral_8x7b", 46.7, 12.9),
    ("gemma2_9b", 9.24, 9.24),
    ("gemma3_12b", 11.8, 11.8),
    ("gemma3_27b", 27.0, 27.0),
    ("deepseek_v2_lite", 15.7, 2.4),
    ("gpt_oss_20b", 20.9, 3.6),
    ("llama4_scout", 107.8, 17.2),  # without the 0.9 billion of its vision encoder
]


@cases(("name", "everything", "met"), PUBLISHED, day=5)
def test_a_preset_has_the_published_number_of_parameters(name: str, everything: float, met: float) -> None:
    """Two cards count the parameters that a token meets without the input embedding, the others with it."""
    request = run_request((f"model={name}", "model.weight_dtype=model"))
    shape = model_shape(compose_config(axis.settings[0] for axis in request.axes).model)
    without = name in ("gpt_oss_20b", "deepseek_v2_lite")
    inputs = 0 if shape.tied_embeddings or without else shape.hidden * shape.vocab
    active = shape.token_weights + shape.hidden * shape.vocab + inputs
    assert shape.weight_bytes / 2e9 == pytest.approx(everything, rel=0.01)
    assert active / 1e9 == pytest.approx(met, rel=0.03)


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "model_type": "deepseek_v2",
    "n_routed_experts": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        (_LATENT | _EXPERTS | {"first_k_dense_replace": 3}, "first_k_dense_replace is 3"),
        (_LATENT | _EXPERTS | {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        (_LATENT | _EXPERTS | {"first_k_dense_replace": "one"}, "first_k_dense_replace"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 64}, "layer_types is"),
        ({"layer_types": ["full_attention"]}, "layer_types is"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 10*, must be at most 1,000,000"),
    ],
)
def test_a_shape_that_no_model_can_have_is_refused(tmp_path: Path, facts: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_shape(config(tmp_path, facts).model)


def test_weights_of_fewer_than_one_bit_are_not_priced(tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "awq", "bits": -4, "group_size": 128}}
    assert "quantised weights of a kind" in unmodelled(config(tmp_path, quantised).model)


@pytest.mark.parametrize(("devices", "held"), [(1, 2), (2, 1), (4, 1), (8, 1)])
def test_more_devices_than_kv_heads_repeat_the_heads(devices: int, held: int) -> None:
    """Each device holds a whole head at least."""
    assert ModelShape(1, 64, 8, 2, 8, 128, 1000, 2).kv_share(devices) * 2 == held


def test_every_device_holds_the_latent_vector() -> None:
    shape = ModelShape(1, 64, 8, 2, 8, 128, 1000, 2, latent=LatentKV(16, 4, 8, 0))
    assert shape.kv_share(8) == 1.0


def test_a_checkpoint_without_a_length_has_none_of_ours(tmp_path: Path) -> None:
    unsaid = config(tmp_path, {"model_type": "bloom", "max_position_embeddings": None})
    with pytest.raises(ConfigError, match="has none of max_position_embeddings, n_positions"):
        deployment_of(unsaid)
    longer = config(tmp_path, {"model_type": "bloom", "model_max_length": 131072})  # vLLM takes it first
    assert deployment_of(longer).pool.max_model_len == 131072


LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}
LAYERS = {
    "model_type": "olmo3",
    "architectures": ["Olmo3ForCausalLM"],
    "layer_types": ["full_attention", "sliding_attention"],
}


def by_layers(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return LAYERS | {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


STRETCHED = [
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 32768),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 16384),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 8192),  # which is in the positions already
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3}}, 8192),
    ({"rope_scaling": LONG, "original_max_position_embeddings": 4096}, 4096),
    ({"rope_parameters": {"rope_type": "proportional", "factor": 4.0, "rope_theta": 1e4}}, 32768),
    (by_layers(LINEAR, PLAIN), 65536),
    (by_layers(LINEAR, {**LINEAR, "factor": 2.0}), 16384),  # the last one's
    (by_layers(PLAIN, {**LINEAR, "rope_type": "dynamic"}), 65536),
    ({"rope_parameters": {"full_attention": LINEAR}}, 8192),  # a llama's layers have no kinds
]
LONGEST = """
import json, sys
from vllm.config import ModelConfig
asked = json.load(sys.stdin)
print(json.dumps([ModelConfig(model=one, skip_tokenizer_init=True).max_model_len for one in asked]))
"""


def test_the_longest_sequences_are_those_that_vllm_finds(tmp_path: Path) -> None:
    if PYTHON is None:
        pytest.skip("PAGETWIN_VLLM=PATH/bin/python names an environment that has vLLM")
    folders = [tmp_path / str(number) for number in range(len(STRETCHED))]
    for folder, (facts, _) in zip(folders, STRETCHED, strict=True):
        folder.mkdir()
        whole = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"} | LLAMA | facts
        (folder / "config.json").write_text(json.dumps(whole))
    asked = json.dumps([*map(str, folders)])
    done = subprocess.run([PYTHON, "-c", LONGEST], input=asked, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [longest for _, longest in STRETCHED]


@pytest.mark.parametrize(("facts", "longest"), STRETCHED)
def test_the_longest_sequence_is_vllms_where_positions_are_stretched(
    tmp_path: Path, facts: dict[str, Any], longest: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | facts))
    assert max_position(ModelConfig(path=str(tmp_path))) == longest
