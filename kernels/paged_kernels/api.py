"""Attention over a paged KV cache, one call each, dispatched by `backend`.

Caches are `[blocks, block_size, kv_heads, dim]`; K and V may differ in `dim`. Block 0 is the null block, all zeros.
An engine that serves many layers with the same tables plans once (`plan_decode`, `plan_prefill`) and calls
`run_decode` and `run_prefill` itself; these functions plan and check on every call.
"""

import torch

from paged_kernels import reference
from paged_kernels.backends import Demand, choose_backend
from paged_kernels.batch import PagedBatch, run_torch, run_triton
from paged_kernels.checks import (
    check_caches,
    check_outputs,
    check_queries,
    check_scoring,
    check_tables,
    check_values,
)
from paged_kernels.errors import OptionError
from paged_kernels.scoring import Scoring
from paged_kernels.workspace import DEFAULT_WORKSPACE, Workspace


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
    alibi: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    num_splits: int | None = None,
    backend: str = "auto",
    validate: bool = True,
) -> torch.Tensor:
    """One query per sequence: q `[rows, heads, dk]` over `seq_lens` cached tokens each, the query's own included.

    Returns `out` `[rows, heads, dv]`; fills `lse` `[rows, heads]` (natural log) if given. A row of length 0 gives
    zeros and -inf. Table entries behind a sequence's last block may be anything. `num_splits` fixes in how many parts
    the triton kernel reads each sequence; None balances them on the device. `validate` looks at lengths and tables,
    which waits for the device (never during graph capture). Raises a `KernelError` before anything is launched.
    """
    if num_splits is not None and not 1 <= num_splits <= 256:
        raise OptionError(f"num_splits {num_splits}; allowed are 1 to 256, or None")
    bounds = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    batch = PagedBatch(q, key_cache, value_cache, block_table, seq_lens, bounds, 1)
    scoring = Scoring(scale, window, softcap, sinks, alibi, k_scale, v_scale)
    return _dispatch(batch, scoring, out, lse, workspace, backend, num_splits, validate=validate)


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
    alibi: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    backend: str = "auto",
    validate: bool = True,
) -> torch.Tensor:
    """Ragged queries over paged KV, causal: sequence i owns rows `cu_seqlens_q[i] : cu_seqlens_q[i + 1]` of q.

    q `[tokens, heads, dk]` holds the last positions of each sequence's `seq_lens` cached tokens, so that a chunk of
    a prompt sees the whole prefix. `max_seqlen_q` bounds the queries of any sequence; None looks on the device.
    Returns, fills, checks and raises as decode does.
    """
    widest = max_seqlen_q or max(1, int(cu_seqlens_q.diff().max()))
    batch = PagedBatch(q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, widest)
    scoring = Scoring(scale, window, softcap, sinks, alibi, k_scale, v_scale)
    return _dispatch(batch, scoring, out, lse, workspace, backend, None, validate=validate)


def _dispatch(
    batch: PagedBatch,
    scoring: Scoring,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    workspace: Workspace | None,
    backend: str,
    num_splits: int | None,
    *,
    validate: bool,
) -> torch.Tensor:
    check_batch(batch, scoring, validate=validate)
    q, dv = batch.q, batch.value_cache.shape[-1]
    out = q.new_empty(*q.shape[:2], dv) if out is None else out
    check_outputs(q, dv, out, lse)
    demand = Demand.of(q, batch.key_cache, batch.value_cache)
    chosen = choose_backend(backend, q.device, demand).backend
    if not len(batch.seq_lens):
        return out
    if chosen == "triton":
        run_triton(batch, scoring, out, lse, num_splits, workspace)
    elif chosen == "torch_ref":
        result, sums = reference.paged_attention(*batch[:6], scoring)
        out.copy_(result)
        if lse is not None:
            lse.copy_(sums)
    else:
        run_torch(batch, scoring, out, lse, workspace or DEFAULT_WORKSPACE)
    return out


def check_batch(batch: PagedBatch, scoring: Scoring, *, validate: bool) -> None:
    """All that can be wrong with a batch before it runs; values only if `validate`."""
    check_caches(batch.key_cache, batch.value_cache)
    check_queries(batch.q, batch.key_cache)
    check_tables(batch.block_table, batch.seq_lens, batch.cu_seqlens_q, batch.q.device)
    check_scoring(scoring, batch.q)
    if validate:
        check_values(batch.block_table, batch.seq_lens, batch.cu_seqlens_q, batch.key_cache, len(batch.q))
