"""Private names of torch and transformers: all that we touch, and what happens where a version has one no more.

| name | what for | without it |
|---|---|---|
| `torch.ops.mkldnn._reorder_linear_weight`, `_linear_pointwise` | products with packed weights on CPUs | torch's own |
| `torch.ops.mkldnn._is_mkldnn_bf16_supported` | whether oneDNN multiplies bfloat16 | it packs float32 alone |
| `torch.ops.aten._scaled_dot_product_flash_attention_for_cpu` | attention with its LSE | in steps, slower |
| `torch.cuda._sleep` | all work is queued before it is timed | some launches are timed too |
| `torch._inductor.cpp_builder` | whether flex attention compiles on a CPU | flex is not timed there |
| `config._attn_implementation` | which attention a model has | it is refused at load |
| `PreTrainedModel._from_config` | the guard's small copy | the model itself is compared |
| `AttentionMaskInterface._global_mapping` | masks are no longer made | it is refused at load |

The nightly run against the newest transformers (`tests/nightly/newest_transformers.py`) shows which are gone.
"""

from collections.abc import Callable
from typing import Any

import torch

PackedProduct = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]

# q, k, v, dropout, is_causal, and by name attn_mask and scale: attention and its LSE; None: this torch has it not
flash_with_lse: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def has_packed_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies by packed weights of this type on this CPU."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    if not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return False
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)
    return dtype is torch.float32 or (dtype is torch.bfloat16 and bool(asked()))


def packed_product(weight: torch.Tensor, rows: int) -> PackedProduct:
    """The product of rows and a copy of a weight `[out, in]`, in the order that oneDNN reads best for so many rows."""
    with torch.no_grad():
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    run = torch.ops.mkldnn._linear_pointwise.default
    return lambda x, bias: run(x, packed, bias, "none", [], "")


def sleep_on_device(cycles: int) -> None:
    """Let the GPU wait, so that the work behind is queued before it begins."""
    getattr(torch.cuda, "_sleep", lambda _: None)(cycles)


def why_no_cpp_compiler() -> str | None:
    """Why torch compiles no C++; None: it does."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:
        return f"finds no C++ compiler: {error}"
    return None


def attention_of(model: Any) -> str:
    """The name of the attention that a model of transformers runs. Raises AttributeError."""
    return str(model.config._attn_implementation)


def new_model(kind: Any, config: Any) -> Any:
    """A model of transformers in float32 with random weights and its own attention. Raises AttributeError."""
    return kind._from_config(config, dtype=torch.float32, attn_implementation="eager")


def forget_masks(name: str) -> None:
    """Let transformers make no masks for an attention any more. Raises AttributeError."""
    from transformers import AttentionMaskInterface

    AttentionMaskInterface._global_mapping.pop(name)
