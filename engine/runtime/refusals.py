"""Models that must not run on paged KV, by name: each would give wrong tokens without an error."""

from collections.abc import Iterator, Mapping
from typing import Any

from engine.runtime.errors import ModelError

_OWN_ATTENTION = "its attention is written out in its own code, so transformers cannot replace it"
_POSITION_BIAS = "it adds position biases to its scores, which the paged kernels do not know"
_NO_KV = "it keeps a recurrent state and no KV cache per token"
_DROPS_KEYWORDS = "it does not hand extra arguments to its attention, so the paged KV never arrives there"
_MASK_ONLY = "its chunked attention exists only as a mask, which the paged kernels never see"

REFUSED_TYPES: Mapping[str, str] = {
    "gptj": _OWN_ATTENTION,
    "falcon": _OWN_ATTENTION,
    "codegen": _OWN_ATTENTION,
    "gpt_neo": _OWN_ATTENTION,
    "xglm": _OWN_ATTENTION,
    "bloom": _POSITION_BIAS,
    "mpt": _POSITION_BIAS,
    "mamba": _NO_KV,
    "mamba2": _NO_KV,
    "falcon_mamba": _NO_KV,
    "rwkv": _NO_KV,
    "stablelm": _DROPS_KEYWORDS,
    "nemotron": _DROPS_KEYWORDS,
    "llama4": _MASK_ONLY,
    "llama4_text": _MASK_ONLY,
}

REFUSED_ROPE = {
    "dynamic": "its rotation changes with the longest sequence of a batch, so one request would alter another",
    "longrope": "its rotation switches with the longest sequence of a batch, so one request would alter another",
}


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError if a model with this transformers config (as a dictionary) is known not to work."""
    kind = str(config.get("model_type"))
    if kind in REFUSED_TYPES:
        raise ModelError(f"model {name}: {kind} cannot run on paged KV: {REFUSED_TYPES[kind]}")
    for rope in _rope_types(config):
        if rope in REFUSED_ROPE:
            raise ModelError(f"model {name}: RoPE type {rope!r} is refused: {REFUSED_ROPE[rope]}")


def _rope_types(config: Mapping[str, Any]) -> Iterator[str]:
    """RoPE types wherever a config names them: flat, or one per kind of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        pending = [config.get(key)]
        while pending:
            value = pending.pop()
            if isinstance(value, Mapping):
                yield from (value[name] for name in ("rope_type", "type") if isinstance(value.get(name), str))
                pending.extend(value.values())
