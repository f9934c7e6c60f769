"""Attention with explicit scores, for what torch's fused SDPA does not know: softcap, sinks, ALiBi, and the LSE."""

import torch

from paged_kernels.scoring import Scoring


def explicit_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scoring: Scoring,
    distance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in float32 at least: q `[N, kv_heads, group, T, dk]`, k and v `[N, kv_heads, 1, L, d]`.

    `mask` is additive and broadcasts to `[N, kv_heads, group, T, L]`; the window is part of it. `distance` broadcasts
    alike: key position - query position, for ALiBi. Returns the output `[N, kv_heads, group, T, dv]` in q's dtype and
    the LSE `[N, kv_heads, group, T]`; a query that sees no key has 0 and -inf.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q, k.transpose(-1, -2)).to(wide) * (scoring.scale * scoring.k_scale)
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if scoring.alibi is not None and distance is not None:
        scores = scores + scoring.alibi.to(wide).view(1, scores.shape[1], -1, 1, 1) * distance
    scores = scores + mask
    empty = (scores == float("-inf")).all(-1)
    lse = torch.logsumexp(_with_sinks(scores, scoring.sinks), dim=-1)
    weights = torch.exp(scores - lse.masked_fill(empty, 0.0).unsqueeze(-1))
    return torch.matmul(weights.to(v.dtype), v) * scoring.v_scale, lse.masked_fill(empty, float("-inf"))


def _with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return scores
    column = sinks.to(scores.dtype).view(1, scores.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1)
