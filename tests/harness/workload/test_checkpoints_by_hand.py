"""Hybrid, windowed, nested and quantised models, written by hand: read as transformers reads them, or refused."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine.core.options import GroupKind
from harness.config.errors import ConfigError
from harness.cost.model_shape import Experts, ModelShape
from harness.workload import architecture
from harness.workload.architecture import CheckpointFacts, checkpoint_shape, unknown_parts
from harness.workload.deployment import layer_sets

LAYERS = 12
BASE = {
    "hidden_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "vocab_size": 300_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def of(family: str, **more: Any) -> dict[str, Any]:
    return BASE | {"model_type": family} | more


def nested(family: str, text: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model_type": family, "text_config": text, **more}


def quantised(method: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **more}}


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
HYBRID = ["linear_attention"] * 9 + ["full_attention"] * 3
WINDOWED = ["sliding_attention"] * 5 + ["full_attention"] * 7
UNTIED = {name: value for name, value in of("llama").items() if name != "tie_word_embeddings"}
SCOUT = {
    "head_dim": 64,
    "attention_chunk_size": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "no_rope_layers": [],
    "intermediate_size_mlp": 2048,
}
READ = {
    "llama4 nested": nested("llama4", of("llama4_text", **SCOUT)),
    "cohere2 (Command-R7B)": of("cohere2", sliding_window=128, sliding_window_pattern=4),
    "exaone4": of("exaone4", sliding_window=128, sliding_window_pattern=4),
    "gemma2": of("gemma2", sliding_window=128),
    "gemma3 nested": nested("gemma3", of("gemma3_text", sliding_window=128, sliding_window_pattern=6)),
    "gemma3 without its pattern": of("gemma3_text", sliding_window=128),
    "gpt_oss mxfp4": of(
        "gpt_oss", sliding_window=128, num_local_experts=8, num_experts_per_tok=2, **quantised("mxfp4")
    ),
    "mistral": of("mistral", sliding_window=128),
    "mistral3 nested": nested("mistral3", of("mistral", sliding_window=None)),
    "ministral": of("ministral", sliding_window=128),
    "mixtral": of("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=128),
    "qwen2 windows above a layer": of(
        "qwen2", use_sliding_window=True, sliding_window=128, max_window_layers=8
    ),
    "qwen2 windows off": of("qwen2", use_sliding_window=False, sliding_window=128, max_window_layers=8),
    "qwen3": of("qwen3", sliding_window=128),
    "smollm3": of("smollm3", no_rope_layer_interval=4),
    "phi3": of("phi3", sliding_window=128, pad_token_id=0),
    "llava nested, quantised outside": nested(
        "llava", of("llama"), **quantised("awq", bits=4, group_size=128)
    ),
    "llama gptq": of("llama", **quantised("gptq", bits=4, group_size=128)),
    "llama fp8 but its head": of("llama", **quantised("fp8", modules_to_not_convert=["lm_head"])),
    "qwen3_moe": of("qwen3_moe", **EXPERTS),
    "gpt_oss with a list of its own": of(
        "gpt_oss", sliding_window=64, num_local_experts=8, num_experts_per_tok=2, layer_types=WINDOWED
    ),
    "gemma2 without a window in its list": of(
        "gemma2", sliding_window=128, layer_types=["full_attention"] * LAYERS
    ),
    "qwen2 whose list overrules its rule": of(
        "qwen2", use_sliding_window=True, sliding_window=128, max_window_layers=4, layer_types=WINDOWED
    ),
    "qwen3 windows above a layer": of(
        "qwen3", use_sliding_window=True, sliding_window=128, max_window_layers=4
    ),
    "smollm3 windows by rotary layers": of("smollm3", use_sliding_window=True, sliding_window=128),
    "starcoder2": of("starcoder2", sliding_window=128),
    "llava awq but its eyes and routers": nested(
        "llava",
        of("llama"),
        **quantised(
            "awq",
            bits=4,
            group_size=128,
            modules_to_not_convert=["visual.blocks.0.attn.qkv", "model.layers.3.mlp.gate"],
        ),
    ),
    "llama with a window that it does not heed": of("llama", sliding_window=128),
    "qwen3_moe, whose windows are in all layers": of(
        "qwen3_moe", use_sliding_window=True, sliding_window=128, max_window_layers=4, **EXPERTS
    ),
}
REFUSED = {
    "gptq of the head too": of("llama", **quantised("gptq", bits=4, group_size=128, lm_head=True)),
    "gptq of one matrix alone": of(
        "llama",
        **quantised("gptq", bits=4, group_size=128, modules_in_block_to_quantize=[["self_attn.q_proj"]]),
    ),
    "gptq of true bits": of("llama", **quantised("gptq", bits=True, group_size=128)),
    "mxfp4 of a dense model": of("llama", **quantised("mxfp4")),
    "mistral with a list that transformers does not read": of(
        "mistral", sliding_window=128, layer_types=WINDOWED
    ),
    "llama with a list of windows": of("llama", sliding_window=128, layer_types=WINDOWED),
    "opt whose embeddings are narrower": of("opt", ffn_dim=1024, word_embed_proj_dim=128),
    "gpt2 that attends to an encoder": of("gpt2", add_cross_attention=True),
    "llama4 with experts in every other layer": of("llama4_text", **SCOUT | {"interleave_moe_layer_step": 2}),
    "qwen3_next without its list": of("qwen3_next", shared_expert_intermediate_size=256, **EXPERTS),
    "qwen3_next": of("qwen3_next", shared_expert_intermediate_size=256, layer_types=HYBRID, **EXPERTS),
    "qwen3_5 nested": nested("qwen3_5", of("qwen3_5_text", full_attention_interval=4)),
    "jamba": of("jamba", attn_layer_period=4, attn_layer_offset=1, num_experts=4, num_experts_per_tok=2),
    "bamba": of("bamba", attn_layer_indices=[3, 7]),
    "falcon_h1": of("falcon_h1"),
    "olmo3": of("olmo3", sliding_window=128),
    "exaone4 with a pattern in letters": of("exaone4", sliding_window=128, sliding_window_pattern="LLLG"),
    "llama fp8 but a layer": of(
        "llama", **quantised("fp8", modules_to_not_convert=["lm_head", "model.layers.0"])
    ),
    "awq but a matrix of an unknown name": of(
        "llama", **quantised("awq", bits=4, group_size=128, modules_to_not_convert=["c_attn"])
    ),
    "compressed-tensors of a first version": of(
        "llama", compression_config={"quant_method": "compressed-tensors", "format": "pack-quantized"}
    ),
    "llava tied outside alone": nested("llava", UNTIED, tie_word_embeddings=True),
    "mpt with grouped heads": {
        "model_type": "mpt",
        "d_model": 512,
        "n_heads": 8,
        "n_layers": LAYERS,
        "vocab_size": 300_000,
        "attn_config": {"kv_n_heads": 2},
    },
    "qwen3_moe whose first layer is dense": of("qwen3_moe", mlp_only_layers=[0], **EXPERTS),
    "lfm2": of("lfm2", layer_types=["conv"] * 8 + ["full_attention"] * 4),
    "gemma3n, which shares K and V": nested("gemma3n", of("gemma3n_text", num_kv_shared_layers=4)),
    "gptq by a rule": of("llama", **quantised("gptq", bits=4, group_size=128, dynamic={"-:.*attn": {}})),
    "fbgemm_fp8 without attention": of(
        "llama", **quantised("fbgemm_fp8", modules_to_not_convert=["model.layers.0.self_attn.q_proj"])
    ),
    "compressed-tensors": of("llama", **quantised("compressed-tensors", format="float-quantized")),
    "bitsandbytes": nested("llava", of("llama"), **quantised("bitsandbytes", load_in_4bit=True)),
}
BITS = {
    "gpt_oss mxfp4": (None, 4.25),
    "llava nested, quantised outside": (4.15625, 4.15625),
    "llama gptq": (4.15625, 4.15625),
    "llava awq but its eyes and routers": (4.15625, 4.15625),
    "llama fp8 but its head": (8.0, 8.0),
}


def shape_of(folder: Path, facts: dict[str, Any]) -> ModelShape | None:
    """The shape as read; None where it is refused."""
    (folder / "config.json").write_text(json.dumps(facts))
    try:
        found = CheckpointFacts(str(folder))
        return None if unknown_parts(found, states=False) else checkpoint_shape(found, 2, None)
    except ConfigError:
        return None


def kinds_of(facts: dict[str, Any]) -> dict[str, Any]:
    """The layers as transformers reads them: those with a window, the window, heads of K and V, their width."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    read = CONFIG_MAPPING[facts["model_type"]].from_dict(facts).get_text_config(decoder=True)
    kinds = getattr(read, "layer_types", None)
    heeded = hasattr(type(read)(), "sliding_window")  # else it is a key that no code of the family reads
    window = read.sliding_window if heeded else None
    if read.model_type == "llama4_text":
        window = read.attention_chunk_size
    windowed = sum(kind != "full_attention" for kind in kinds) if kinds else LAYERS * bool(window)
    return {
        "layers": read.num_hidden_layers,
        "windowed_layers": windowed,
        "window": window if windowed else None,
        "kv_heads": read.num_key_value_heads,
        "head_dim": read.head_dim,
        "tied_embeddings": bool(read.tie_word_embeddings),
    }


def wrong(folder: Path, expected: dict[str, dict[str, Any]]) -> list[str]:
    """The models whose shape is read, and differs from transformers' reading."""
    found = []
    for name, facts in (READ | REFUSED).items():
        shape = shape_of(folder, facts)
        if shape is None:
            continue
        ours = {key: getattr(shape, key) for key in expected[name]}
        bits = BITS.get(name, (None, None))
        if ours != expected[name] or (shape.layer_bits, shape.expert_bits) != bits:
            found.append(f"{name}: {ours}, {shape.layer_bits} and {shape.expert_bits} bits")
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Any]]:
    return {name: kinds_of(facts) for name, facts in READ.items()}


def test_what_is_read_is_read_as_transformers_reads_it(
    tmp_path: Path, expected: dict[str, dict[str, Any]]
) -> None:
    refused = [name for name, facts in READ.items() if shape_of(tmp_path, facts) is None]
    assert (refused, wrong(tmp_path, expected)) == ([], [])


def test_llama_4_attends_in_chunks_and_has_a_shared_expert(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, READ["llama4 nested"])
    assert shape is not None
    assert shape.experts == Experts(count=16, active=1, intermediate=1024, shared=1024)
    assert [(each.kind, each.layers, each.window) for each in layer_sets(shape)] == [
        (GroupKind.chunk, 9, 128),
        (GroupKind.full, 3, None),
    ]


@pytest.mark.parametrize("beside", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_weights_whose_quantisation_stands_in_a_file_beside_are_refused(tmp_path: Path, beside: str) -> None:
    (tmp_path / beside).write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert shape_of(tmp_path, of("llama")) is None
    assert shape_of(tmp_path, of("llama", **quantised("fp8"))) is not None


def test_what_is_not_described_is_refused(tmp_path: Path) -> None:
    assert [name for name, facts in REFUSED.items() if shape_of(tmp_path, facts)] == []


def test_without_transformers_each_is_read_alike_or_refused(
    tmp_path: Path, expected: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        architecture, "find_spec", lambda name: None if name == "transformers" else find_spec(name)
    )
    assert wrong(tmp_path, expected) == []
