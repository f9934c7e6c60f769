"""Launching the Triton prefill."""

import torch
import triton

from paged_kernels.scoring import Scoring
from paged_kernels.triton_config import capability_of, prefill_config
from paged_kernels.triton_constants import Features, prefill_constants
from paged_kernels.triton_decode import MAX_ROWS, or_any, shape_of
from paged_kernels.triton_prefill_kernel import prefill_kernel


def run_prefill(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    scoring: Scoring,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    path: str = "auto",
) -> None:
    """Attention of the rows `cu_seqlens_q[i] : cu_seqlens_q[i + 1]` of q `[tokens, heads, dk]` for every sequence i.

    Lengths, bounds and tables (int32) are read on the device; `max_seqlen_q` bounds the queries of any sequence. Rows
    outside all spans are left alone. Any strides, but the last of each tensor is 1; `lse` is float32 and contiguous.
    """
    for first in range(0, len(seq_lens), MAX_ROWS):
        some = slice(first, first + MAX_ROWS)
        bounds = cu_seqlens_q[first : first + MAX_ROWS + 1]
        spans = (block_table[some], seq_lens[some], bounds, max_seqlen_q)
        _launch(q, key_cache, value_cache, *spans, scoring, out, lse, path)


def _launch(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    bounds: torch.Tensor,
    max_seqlen_q: int,
    scoring: Scoring,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    path: str,
) -> None:
    shape, sequences = shape_of(q, key_cache, value_cache), len(seq_lens)
    config, features = (
        prefill_config(shape, capability_of(q.device)),
        Features.of(scoring, lse=lse is not None),
    )
    tokens = config.rows // shape.group
    # Ragged spans end in at most one unfilled tile each.
    tiles = min(triton.cdiv(len(q), tokens) + sequences, sequences * triton.cdiv(max_seqlen_q, tokens))
    prefill_kernel[(tiles * shape.kv_heads,)](
        q, key_cache, value_cache, block_table, seq_lens, bounds,
        or_any(scoring.sinks, q), or_any(scoring.alibi, q), out, or_any(lse, q),
        scoring.scale * scoring.k_scale, scoring.softcap, scoring.v_scale, scoring.window, sequences,
        q.stride(0), q.stride(1), *key_cache.stride()[:3], *value_cache.stride()[:3],
        block_table.stride(0), out.stride(0), out.stride(1),
        **prefill_constants(shape, config, features, sequences=sequences, path=path),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
