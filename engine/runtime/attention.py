"""The attention function that transformers calls in every layer: it hands over to the step's paged KV."""

from typing import Any

import torch

from engine.runtime.errors import ModelError
from paged_kernels import Scoring

IMPLEMENTATION = "pagetwin"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: Any = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """One layer of a flattened step: q `[1, heads, tokens, dk]`, k and v `[1, kv_heads, tokens, d]` after RoPE.

    Returns `[1, tokens, heads, dv]`. `paged` is what the model was called with: the step's `PagedStep`, or a probe.
    """
    if paged is None:
        raise ModelError(
            f"{type(module).__name__} was reached without the paged KV: its model drops extra arguments"
        )
    scoring = Scoring(scaling, sliding_window or 0, softcap or 0.0, s_aux)
    if attention_mask is not None:
        rest["attention_mask"] = attention_mask
    return paged.attend(module, query, key, value, scoring, rest), None


def use_paged_attention(model: Any, name: str) -> None:
    """Make `paged_attention` the model's attention. Raises ModelError if transformers does not really do so.

    The name is registered for attention alone and not for masks: without a mask function transformers builds none.
    """
    from transformers import AttentionInterface
    from transformers.utils import logging

    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # the check below says the same, as an error
    try:
        model.set_attn_implementation(IMPLEMENTATION)
    finally:
        logging.set_verbosity(level)
    if model.config._attn_implementation != IMPLEMENTATION:
        raise ModelError(
            f"model {name}: the attention of {model.config.model_type} cannot be replaced: "
            "transformers does not route it through its attention interface"
        )
