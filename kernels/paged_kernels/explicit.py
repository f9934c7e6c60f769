"""Attention with explicit scores, for what torch's fused SDPA does not know: softcap, sinks, and the LSE."""

import torch

from paged_kernels.scoring import Scoring


def explicit_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in float32 at least: q `[N, kv_heads, group, T, dk]`, k and v `[N, kv_heads, 1, L, d]`.

    `mask` is additive and broadcasts to `[N, kv_heads, group, T, L]`; the window is part of it.
    Returns the output `[N, kv_heads, group, T, dv]` in q's dtype and the LSE `[N, kv_heads, group, T]`.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q, k.transpose(-1, -2)).to(wide) * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores + mask
    lse = torch.logsumexp(_with_sinks(scores, scoring.sinks), dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    return torch.matmul(weights.to(v.dtype), v), lse


def _with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return scores
    column = sinks.to(scores.dtype).view(1, scores.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1)
