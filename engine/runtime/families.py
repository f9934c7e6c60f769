"""How each family of models spells its shape in a transformers config, and which shapes it can have."""

from collections.abc import Callable, Mapping
from typing import Any

from engine.runtime.errors import ModelError
from engine.runtime.spec import ModelSpec

Config = Mapping[str, Any]

_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _llama_like(spec: ModelSpec) -> Config:
    return {
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": spec.max_position,
        "initializer_range": spec.initializer_range,
    }


def _gpt2(spec: ModelSpec) -> Config:
    return {
        "n_embd": spec.hidden,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_inner": spec.intermediate,
        "n_positions": spec.max_position,
        "initializer_range": spec.initializer_range,
    }


def _opt(spec: ModelSpec) -> Config:
    return {
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "ffn_dim": spec.intermediate,
        "word_embed_proj_dim": spec.hidden,
        "max_position_embeddings": spec.max_position,
        "init_std": spec.initializer_range,
    }


FAMILIES: Mapping[str, Callable[[ModelSpec], Config]] = {
    "llama": _llama_like,
    "qwen3": _llama_like,
    "mistral": _llama_like,
    "gemma2": _llama_like,
    "gpt2": _gpt2,
    "opt": _opt,
}
_MULTI_HEAD_ONLY = frozenset({"gpt2", "opt"})


def config_values(spec: ModelSpec) -> Config:
    """Keyword arguments for the family's transformers config. No special tokens: every id is an ordinary one."""
    return {"vocab_size": spec.vocab, **_NO_SPECIAL_TOKENS, **FAMILIES[spec.family](spec)}


def check_shape(spec: ModelSpec) -> None:
    """Raise ModelError for a family that cannot be built from a shape, or a shape that the family cannot have."""
    if spec.family not in FAMILIES:
        raise ModelError(
            f"model {spec.name}: family {spec.family!r} cannot be built from a shape; choose one of "
            f"{', '.join(FAMILIES)}, or give model.path a checkpoint directory"
        )
    if spec.heads % spec.kv_heads:
        raise ModelError(f"model {spec.name}: {spec.heads} heads are no multiple of {spec.kv_heads} kv_heads")
    if spec.hidden % spec.heads:  # transformers refuses it, whatever head_dim says
        raise ModelError(f"model {spec.name}: hidden {spec.hidden} is no multiple of {spec.heads} heads")
    if spec.family in _MULTI_HEAD_ONLY:
        if (spec.kv_heads, spec.heads * spec.head_dim) != (spec.heads, spec.hidden):
            raise ModelError(
                f"model {spec.name}: {spec.family} has one KV head per head and hidden = heads x head_dim; found "
                f"heads {spec.heads}, kv_heads {spec.kv_heads}, head_dim {spec.head_dim}, hidden {spec.hidden}"
            )
    elif spec.head_dim % 2:
        raise ModelError(f"model {spec.name}: rotary embedding needs an even head_dim, found {spec.head_dim}")
