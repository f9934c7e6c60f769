"""The reference: what every attention kernel must compute, in readable torch, as a loop over sequences.

It computes in the dtype of its inputs. All tests compare with it in float64. It is not fast. It reads only
slots that belong to a sequence, so NaN in unwritten slots cannot reach the result.
"""

import torch

from paged_kernels.arguments import Scoring, causal_window, storable


def gather_kv(cache: torch.Tensor, block_table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of one sequence, `[length, kv_heads, dim]`; 8-bit floats become float32, exactly."""
    block_size = cache.shape[1]
    position = torch.arange(length, device=cache.device)
    tokens = storable(cache)[block_table.long()[position // block_size], position % block_size]
    return tokens.view(cache.dtype).float() if cache.dtype.itemsize == 1 else tokens


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last `T` positions of one sequence: q `[T, heads, dk]`, k and v `[L, kv_heads, d]`.

    Returns the output `[T, heads, dv]` and the natural-log sum of exponentials `[T, heads]`, sinks included. Query
    head h reads key head h // (heads / kv_heads). Without any key the output is 0 and the LSE is -inf.
    """
    if not len(k):
        return q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full(q.shape[:2], float("-inf"))
    group = q.shape[1] // k.shape[1]
    k, v = k.to(q.dtype) * scoring.k_scale, v.to(q.dtype) * scoring.v_scale
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, dim=1)) * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if scoring.alibi is not None:
        query = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)
        distance = torch.arange(k.shape[0], device=q.device) - query.unsqueeze(1)
        scores = scores + scoring.alibi.to(scores.dtype).view(-1, 1, 1) * distance
    visible = causal_window(q.shape[0], k.shape[0], scoring.window, device=q.device)
    scores = scores.masked_fill(~visible, float("-inf"))
    if scoring.sinks is not None:
        column = scoring.sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    out = torch.einsum("hqk,khd->qhd", weights[..., : k.shape[0]], v.repeat_interleave(group, dim=1))
    return out, lse.transpose(0, 1)


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of flattened sequences over paged KV; sequence i owns rows `cu_seqlens_q[i] : cu_seqlens_q[i + 1]`.

    q `[tokens, heads, dk]`; `seq_lens` counts the tokens of each sequence in the cache, its own queries included
    (they are the last ones). Returns output `[tokens, heads, dv]` and LSE `[tokens, heads]`, in q's dtype. With
    float64 queries all sums are in float64, whatever the dtype of the cache.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], value_cache.shape[-1])
    lse = q.new_full((q.shape[0], q.shape[1]), float("-inf"))
    bounds = cu_seqlens_q.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        rows = slice(bounds[row], bounds[row + 1])
        k = gather_kv(key_cache, block_table[row], length)
        v = gather_kv(value_cache, block_table[row], length)
        out[rows], lse[rows] = attend(q[rows], k, v, scoring)
    return out, lse


def cascade_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    shared_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    suffix_table: torch.Tensor,
    suffix_lens: torch.Tensor,
    group_ids: torch.Tensor,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query per row over its group's prefix and its own suffix, which are concatenated.

    Arguments as in `cascade_attention_decode`. Returns output `[rows, heads, dv]` and LSE `[rows, heads]`.
    """
    out = q.new_zeros(*q.shape[:2], value_cache.shape[-1])
    lse = q.new_full(q.shape[:2], float("-inf"))
    for row, (group, length) in enumerate(zip(group_ids.tolist(), suffix_lens.tolist(), strict=True)):
        parts = [(suffix_table[row], length)]
        if group >= 0:
            parts.insert(0, (shared_table[group], int(prefix_lens[group])))
        k, v = (
            torch.cat([gather_kv(cache, table, count) for table, count in parts])
            for cache in (key_cache, value_cache)
        )
        out[row : row + 1], lse[row : row + 1] = attend(q[row : row + 1], k, v, scoring)
    return out, lse
