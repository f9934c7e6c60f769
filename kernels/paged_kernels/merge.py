"""Merging two partial attentions over disjoint keys of the same queries (prefix + suffix, split + split)."""

import torch


def merge_attn_states(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the union of two key sets: outputs `[tokens, heads, dv]`, natural-log LSE `[tokens, heads]`.

    Each output is weighted by exp(lse - max). A side that saw no key has LSE -inf and takes no part; when both are
    empty the output is 0 and the LSE is -inf.
    """
    top = torch.maximum(lse_a, lse_b)
    base = top.masked_fill(top == float("-inf"), 0.0)
    weight_a, weight_b = torch.exp(lse_a - base), torch.exp(lse_b - base)
    total = weight_a + weight_b
    scale = torch.where(total > 0, 1.0 / total.clamp_min(torch.finfo(total.dtype).tiny), 0.0)
    out = o_a * (weight_a * scale).unsqueeze(-1) + o_b * (weight_b * scale).unsqueeze(-1)
    return out, base + torch.where(total > 0, total.log(), float("-inf"))
