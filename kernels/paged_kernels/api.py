"""The operations on a paged KV cache, one call each, dispatched by `backend`.

Caches are `[blocks, block_size, kv_heads, dim]`; K and V may differ in `dim`. Block 0 is the null block, all zeros.
An engine that serves many layers with the same tables plans once (`plan_decode`, `plan_prefill`) and calls
`run_decode` and `run_prefill` itself; these functions plan on every call.
"""

import torch

from paged_kernels import reference, torch_cache
from paged_kernels.backends import resolve_backend
from paged_kernels.batch import PagedBatch, run_torch, run_triton
from paged_kernels.checks import check_caches, check_lengths, check_queries, check_tables
from paged_kernels.scoring import Scoring
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
    chosen = resolve_backend(backend, key_cache.device)
    check_caches(key_cache, value_cache)
    if chosen == "triton":
        from paged_kernels import triton_cache

        triton_cache.store(key_cache, key, slot_mapping)
        triton_cache.store(value_cache, value, slot_mapping)
    else:
        torch_cache.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


def copy_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, block_mapping: torch.Tensor, *, backend: str = "auto"
) -> None:
    """Copy blocks `[n, 2]` (source, destination) of both caches; all sources are read before any write.

    A cache may be a stack of layers `[layers, blocks, block_size, kv_heads, dim]`.
    """
    source, destination = block_mapping.long().unbind(1)
    copy = torch_cache.copy_blocks
    if resolve_backend(backend, key_cache.device) == "triton":
        from paged_kernels import triton_cache

        copy = triton_cache.copy_blocks
    copy(key_cache, source, destination)
    copy(value_cache, source, destination)


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
    num_splits: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One query per sequence: q `[rows, heads, dk]` over `seq_lens` cached tokens each, the query's own included.

    Returns `out` `[rows, heads, dv]`; fills `lse` `[rows, heads]` (natural log) if given. A row of length 0 gives
    zeros and -inf. Table entries behind a sequence's last block may be anything. `num_splits` fixes in how many parts
    the triton kernel reads each sequence; None lets it choose.
    """
    bounds = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    scoring = Scoring(scale, window, softcap, sinks)
    batch = PagedBatch(q, key_cache, value_cache, block_table, seq_lens, bounds, 1)
    return _dispatch(batch, scoring, out, lse, workspace, resolve_backend(backend, q.device), num_splits)


def paged_attention_prefill(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int | None = None,
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
    a prompt sees the whole prefix. `max_seqlen_q` bounds the queries of any sequence; None looks on the device.
    Returns and fills as decode does.
    """
    widest = max_seqlen_q or int(cu_seqlens_q.diff().max())
    batch = PagedBatch(q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, widest)
    scoring = Scoring(scale, window, softcap, sinks)
    return _dispatch(batch, scoring, out, lse, workspace, resolve_backend(backend, q.device), None)


def _dispatch(
    batch: PagedBatch,
    scoring: Scoring,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    workspace: Workspace | None,
    backend: str,
    num_splits: int | None,
) -> torch.Tensor:
    check_caches(batch.key_cache, batch.value_cache)
    check_queries(batch.q, batch.key_cache)
    check_tables(batch.block_table, batch.seq_lens, batch.cu_seqlens_q)
    if out is None:
        out = batch.q.new_empty(*batch.q.shape[:2], batch.value_cache.shape[-1])
    if backend == "triton":
        run_triton(batch, scoring, out, lse, num_splits)
    elif backend == "torch_ref":
        check_lengths(batch.block_table, batch.seq_lens, batch.key_cache.shape[1])
        result, sums = reference.paged_attention(*batch[:6], scoring)
        out.copy_(result)
        if lse is not None:
            lse.copy_(sums)
    else:
        check_lengths(batch.block_table, batch.seq_lens, batch.key_cache.shape[1])
        run_torch(batch, scoring, out, lse, workspace or DEFAULT_WORKSPACE)
    return out
