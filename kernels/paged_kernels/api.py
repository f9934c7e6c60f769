"""The operations on a paged KV cache, one call each, dispatched by `backend`.

Caches are `[blocks, block_size, kv_heads, dim]`; K and V may differ in `dim`. Block 0 is the null block, all zeros.
An engine that serves many layers with the same tables plans once (`plan_decode`, `plan_prefill`) and calls
`run_decode` and `run_prefill` itself; these functions plan on every call.
"""

import numpy as np
import torch

from paged_kernels import reference, torch_cache
from paged_kernels.backends import resolve_backend
from paged_kernels.checks import check_caches, check_queries, check_tables
from paged_kernels.scoring import Scoring
from paged_kernels.torch_decode import plan_decode, run_decode
from paged_kernels.torch_prefill import plan_prefill, run_prefill
from paged_kernels.workspace import DEFAULT_WORKSPACE, Workspace


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Write keys and values `[tokens, kv_heads, dim]` to slots (block x block_size + offset); slot -1 skips a token."""
    resolve_backend(backend, key_cache.device)
    check_caches(key_cache, value_cache)
    torch_cache.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


def copy_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, block_mapping: torch.Tensor, *, backend: str = "auto"
) -> None:
    """Copy blocks `[n, 2]` (source, destination) of both caches; all sources are read before any write.

    A cache may be a stack of layers `[layers, blocks, block_size, kv_heads, dim]`.
    """
    resolve_backend(backend, key_cache.device)
    source, destination = block_mapping.long().unbind(1)
    torch_cache.copy_blocks(key_cache, source, destination)
    torch_cache.copy_blocks(value_cache, source, destination)


def paged_attention_decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One query per sequence: q `[rows, heads, dk]` over `seq_lens` cached tokens each, the query's own included.

    Returns `out` `[rows, heads, dv]`; fills `lse` `[rows, heads]` (natural log) if given. A row of length 0 gives
    zeros and -inf. Table entries behind a sequence's last block may be anything.
    """
    bounds = torch.arange(q.shape[0] + 1, device=q.device)
    return paged_attention_prefill(
        q,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        bounds,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        out=out,
        lse=lse,
        workspace=workspace,
        backend=backend,
    )


def paged_attention_prefill(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Ragged queries over paged KV, causal: sequence i owns rows `cu_seqlens_q[i] : cu_seqlens_q[i + 1]` of q.

    q `[tokens, heads, dk]` holds the last positions of each sequence's `seq_lens` cached tokens, so that a chunk of
    a prompt sees the whole prefix. One-query sequences run as decode rows. Returns and fills as decode does.
    """
    chosen = resolve_backend(backend, q.device)
    check_caches(key_cache, value_cache)
    check_queries(q, key_cache)
    check_tables(block_table, seq_lens, cu_seqlens_q, key_cache.shape[1])
    scoring = Scoring(scale, window, softcap, sinks)
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], value_cache.shape[-1])
    if chosen == "torch_ref":
        result, sums = reference.paged_attention(
            q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, scoring
        )
        out.copy_(result)
        if lse is not None:
            lse.copy_(sums)
        return out
    _run_torch(
        q,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        cu_seqlens_q,
        scoring,
        out,
        workspace or DEFAULT_WORKSPACE,
        lse,
    )
    return out


def _run_torch(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scoring: Scoring,
    out: torch.Tensor,
    workspace: Workspace,
    lse: torch.Tensor | None,
) -> None:
    """Sort the rows into decode, prefill and empty ones, and run each kind."""
    table = block_table.cpu().numpy().astype(np.int64)
    lengths, bounds = seq_lens.cpu().numpy().astype(np.int64), cu_seqlens_q.cpu().numpy().astype(np.int64)
    queries, block_size = np.diff(bounds), key_cache.shape[1]
    decode = np.flatnonzero((queries == 1) & (lengths > 0))
    if len(decode):
        plan = plan_decode(
            table[decode],
            lengths[decode],
            block_size,
            token_bytes=key_cache[0, 0].nbytes + value_cache[0, 0].nbytes,
            device=q.device,
        )
        rows = torch.from_numpy(bounds[decode]).to(q.device)
        part = out.new_empty(len(decode), *out.shape[1:])
        sums = None if lse is None else lse.new_empty(len(decode), lse.shape[1])
        run_decode(plan, q[rows], key_cache, value_cache, scoring, part, workspace, sums)
        out[rows] = part
        if lse is not None and sums is not None:
            lse[rows] = sums
    for row in np.flatnonzero((queries > 1) & (lengths > 0)):
        start, count = int(bounds[row]), int(queries[row])
        chunk = plan_prefill(table[row], start, count, int(lengths[row]), block_size, device=q.device)
        run_prefill(chunk, q, key_cache, value_cache, scoring, out, workspace, lse)
    for row in np.flatnonzero(lengths == 0):
        out[bounds[row] : bounds[row + 1]] = 0.0
        if lse is not None:
            lse[bounds[row] : bounds[row + 1]] = float("-inf")
