"""Merging two partial attentions over disjoint keys of the same queries (prefix + suffix, split + split)."""

import torch

from paged_kernels.backends import resolve_backend
from paged_kernels.checks import check_states


def merge_attn_states(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the union of two key sets: outputs `[tokens, heads, dv]`, natural-log LSE `[tokens, heads]`.

    Each output is weighted by exp(lse - max). A side that saw no key has LSE -inf and takes no part; when both are
    empty the output is 0 and the LSE is -inf. Fills `out` and `lse` where given.
    """
    check_states(o_a, lse_a, o_b, lse_b)
    out = torch.empty_like(o_a) if out is None else out
    lse = torch.empty_like(lse_a) if lse is None else lse
    if resolve_backend(backend, o_a.device) == "triton":
        from paged_kernels import triton_cache

        triton_cache.merge_attn_states(o_a, lse_a, o_b, lse_b, out, lse)
    else:
        merged, sums = merge_reference(o_a, lse_a, o_b, lse_b)
        out.copy_(merged)
        lse.copy_(sums)
    return out, lse


def merge_reference(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The merge in readable torch, in the dtype that its inputs promote to."""
    top = torch.maximum(lse_a, lse_b)
    base = top.masked_fill(top == float("-inf"), 0.0)
    weight_a, weight_b = torch.exp(lse_a - base), torch.exp(lse_b - base)
    total = weight_a + weight_b
    seen = total > 0
    safe = total.masked_fill(~seen, 1.0)
    merged = _weighed(o_a, weight_a / safe) + _weighed(o_b, weight_b / safe)
    return merged, (base + safe.log()).masked_fill(~seen, float("-inf"))


def _weighed(out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`out` x weight, and 0 where the weight is: what an empty side holds is undefined."""
    return torch.where(weight.unsqueeze(-1) > 0, out * weight.unsqueeze(-1), 0.0)
