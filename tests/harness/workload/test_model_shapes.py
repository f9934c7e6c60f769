"""What is read from a checkpoint's config.json for a prediction, and what is refused because it is not modelled."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.runtime.options import Dtype
from harness.config.compose import compose_config
from harness.config.errors import ConfigError
from harness.config.schema import RunConfig
from harness.point.cost import check_cost
from harness.sweep.plan import run_request
from harness.workload.shapes import model_shape, pool_shape, unmodelled

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
    ({"model_type": "mixtral", "num_local_experts": 8}, "a mixture of experts (num_local_experts = 8)"),
    ({"model_type": "qwen3_moe", "num_experts": 128}, "a mixture of experts (num_experts = 128)"),
    ({"kv_lora_rank": 512}, "latent K and V (kv_lora_rank = 512)"),
    ({"sliding_window": 4096}, "sliding windows of 4096 tokens"),
    ({"moe_num_experts": [64, 64]}, "a mixture of experts (moe_num_experts = [64, 64])"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
    ({"model_type": "falcon_h1"}, "an architecture that it has not been taught (model_type falcon_h1)"),
    ({"layer_types": ["linear_attention", "full_attention"]}, "layers of other kinds (linear_attention)"),
]


@pytest.mark.parametrize(("facts", "words"), NOT_MODELLED)
def test_a_model_that_is_not_modelled_is_not_priced(
    tmp_path: Path, facts: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_cost(config(tmp_path, facts))
    assert words in str(refused.value)


@pytest.mark.parametrize(("facts", "words"), NOT_MODELLED)
def test_its_pool_must_be_set_by_hand(tmp_path: Path, facts: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        pool_shape(config(tmp_path, facts, "cache.pool_tokens=null", "device=h100"))
    assert words in str(refused.value)
    assert pool_shape(config(tmp_path, facts, "cache.pool_tokens=4096")).tokens == 4096


@pytest.mark.parametrize(
    ("facts", "longest"),
    [
        ({}, "null"),
        ({"sliding_window": 4096, "use_sliding_window": False}, "null"),
        ({"sliding_window": 8192}, "null"),
        ({"sliding_window": 4096}, "4096"),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 2}, "null"),
        ({"sliding_window": 4096, "max_window_layers": 2}, "null"),
    ],
)
def test_a_dense_model_is_priced(tmp_path: Path, facts: dict[str, Any], longest: str) -> None:
    dense = config(tmp_path, facts, f"cache.max_model_len={longest}")
    assert unmodelled(dense, dense.model) == ""
    check_cost(dense)


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
        ({"sliding_window": "4096"}, "sliding_window is '4096'"),
        ({"text_config": [1]}, "must be objects"),
    ],
)
def test_a_number_that_is_missing_or_impossible_is_named(
    tmp_path: Path, facts: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_cost(config(tmp_path, facts))
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
    config(draft, {"model_type": "mixtral", "num_local_experts": 8})
    drafting = ("decoding=speculative", "decoding.acceptance=0.7", f"decoding.draft_path={draft}")
    with pytest.raises(ConfigError, match="a mixture of experts"):
        check_cost(config(model, {}, *drafting))
    (draft / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"decoding\.draft_path"):
        check_cost(config(model, {}, *drafting))
