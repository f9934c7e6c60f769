"""Steps that the torch paths share: gather blocks into a reused buffer, attend over them, merge two results.

`fused_attention` is torch's SDPA. `explicit_attention` computes the scores itself. It serves what SDPA does not
support: softcap, sinks, ALiBi, and the LSE on a GPU.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom

from paged_kernels.memory import Workspace, storable
from paged_kernels.private import flash_with_lse
from paged_kernels.scoring import Scoring


def merge_reference(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attn_states` in readable torch, in the dtype that its inputs promote to. Returns output and LSE."""
    top = torch.maximum(lse_a, lse_b)
    base = top.masked_fill(top == float("-inf"), 0.0)
    weight_a, weight_b = torch.exp(lse_a - base), torch.exp(lse_b - base)
    total = weight_a + weight_b
    seen = total != 0  # not `> 0`: a NaN of either side must reach the output
    safe = total.masked_fill(~seen, 1.0)
    merged = _weighed(o_a, weight_a / safe) + _weighed(o_b, weight_b / safe)
    return merged, (base + safe.log()).masked_fill(~seen, float("-inf"))


def _weighed(out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`out` x weight, and 0 where the weight is 0: the output of an empty side is undefined."""
    return torch.where(weight.unsqueeze(-1) != 0, out * weight.unsqueeze(-1), 0.0)


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, name: str, workspace: Workspace) -> torch.Tensor:
    """`[blocks, block_size, heads, dim]` of `blocks`, in the workspace's memory. 8-bit floats stay bytes."""
    cache = storable(cache)
    buffer = workspace.take(name, len(blocks) * cache[0].numel(), cache)
    gather_into(cache, blocks, buffer)
    return buffer.view(-1, *cache.shape[1:])


def gather_into(cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy blocks into a flat buffer. Blocks that are dense in NHD order are copied whole, others by element."""
    if cache[0].is_contiguous():
        torch.index_select(cache.flatten(1), 0, blocks, out=buffer.view(len(blocks), -1))
    else:
        torch.index_select(cache, 0, blocks, out=buffer.view(len(blocks), *cache.shape[1:]))


def as_query_dtype(values: torch.Tensor, dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.Tensor:
    """Gathered values in the queries' dtype: bytes of an 8-bit cache are converted, others already have it."""
    return values.view(kv_dtype).to(dtype) if kv_dtype.itemsize == 1 else values


def gives_lse(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `fused_attention` can return the LSE over k and v `[..., d]`.

    torch's public call does not, its CPU kernel does, for K and V of one width.
    """
    return flash_with_lse is not None and k.device.type == "cpu" and k.shape[-1] == v.shape[-1]


def fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
    *,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output `[N, kv_heads, rows, dv]` in q's dtype and, if asked for, the natural-log LSE `[N, kv_heads, rows]`.

    q `[N, kv_heads, rows, dk]`, k and v `[N, kv_heads, L, d]`; `mask` is additive in q's dtype and broadcasts.
    """
    scale, sums = scoring.scale * scoring.k_scale, None
    if lse:
        result, sums = flash_with_lse(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    else:
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return (result if scoring.v_scale == 1 else result * scoring.v_scale), sums


def explicit_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scoring: Scoring,
    distance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with scores in float32 or wider: q `[N, kv_heads, group, T, dk]`, k and v `[N, kv_heads, 1, L, d]`.

    `mask` is additive and broadcasts to `[N, kv_heads, group, T, L]`; the window is part of it. `distance` broadcasts
    to the same shape: key position - query position, for ALiBi. Returns the output `[N, kv_heads, group, T, dv]` in
    q's dtype and the LSE `[N, kv_heads, group, T]`; a query that sees no key gets 0 and -inf.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q, k.transpose(-1, -2)).to(wide) * (scoring.scale * scoring.k_scale)
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if scoring.alibi is not None and distance is not None:
        scores = scores + scoring.alibi.to(wide).view(1, scores.shape[1], -1, 1, 1) * distance
    scores = scores + mask
    empty = (scores == float("-inf")).all(-1)
    with_sinks = scores
    if scoring.sinks is not None:
        column = scoring.sinks.to(wide).view(1, scores.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        with_sinks = torch.cat([scores, column], dim=-1)
    lse = torch.logsumexp(with_sinks, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(empty, 0.0).unsqueeze(-1))
    return torch.matmul(weights.to(v.dtype), v) * scoring.v_scale, lse.masked_fill(empty, float("-inf"))
