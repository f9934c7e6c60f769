"""Ragged queries over paged KV as one value, and how the two fast backends run it."""

from typing import NamedTuple

import numpy as np
import torch

from paged_kernels.scoring import Scoring
from paged_kernels.torch_decode import IntArray, plan_decode, run_decode
from paged_kernels.torch_prefill import plan_prefill, run_prefill
from paged_kernels.workspace import Workspace


class PagedBatch(NamedTuple):
    """What both attention calls come down to: ragged queries over paged KV."""

    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int


def run_triton(
    batch: PagedBatch,
    scoring: Scoring,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    num_splits: int | None,
    workspace: Workspace | None,
) -> None:
    """One launch for the whole batch (and a second one that combines the parts of a decode)."""
    from paged_kernels import triton_decode, triton_prefill

    q, key_cache, value_cache, table, lengths, bounds, widest = batch
    if widest == 1 and len(q) == len(lengths):
        arguments = (q, key_cache, value_cache, table, lengths, scoring, out, lse, num_splits)
        triton_decode.run_decode(*arguments, workspace=workspace)
    else:
        spans = (table, lengths, bounds, widest)
        triton_prefill.run_prefill(q, key_cache, value_cache, *spans, scoring, out, lse)


def run_torch(
    batch: PagedBatch, scoring: Scoring, out: torch.Tensor, lse: torch.Tensor | None, workspace: Workspace
) -> None:
    """Sort the rows into decode, prefill and empty ones, and run each kind."""
    table = batch.block_table.cpu().numpy().astype(np.int64)
    lengths, bounds = (value.cpu().numpy().astype(np.int64) for value in (batch.seq_lens, batch.cu_seqlens_q))
    queries = np.diff(bounds)
    decode = np.flatnonzero((queries == 1) & (lengths > 0))
    if len(decode):
        _run_torch_decode(batch, table[decode], lengths[decode], bounds[decode], scoring, out, lse, workspace)
    for row in np.flatnonzero((queries > 1) & (lengths > 0)):
        plan = plan_prefill(
            table[row],
            int(bounds[row]),
            int(queries[row]),
            int(lengths[row]),
            batch.key_cache.shape[1],
            device=out.device,
        )
        run_prefill(plan, batch.q, batch.key_cache, batch.value_cache, scoring, out, workspace, lse)
    for row in np.flatnonzero(lengths == 0):
        out[bounds[row] : bounds[row + 1]] = 0.0
        if lse is not None:
            lse[bounds[row] : bounds[row + 1]] = float("-inf")


def _run_torch_decode(
    batch: PagedBatch,
    table: IntArray,
    lengths: IntArray,
    first: IntArray,
    scoring: Scoring,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: Workspace,
) -> None:
    """The one-query rows, wherever they stand in the flat batch."""
    key_cache, value_cache = batch.key_cache, batch.value_cache
    token_bytes = key_cache[0, 0].nbytes + value_cache[0, 0].nbytes
    plan = plan_decode(table, lengths, key_cache.shape[1], token_bytes=token_bytes, device=out.device)
    rows = torch.from_numpy(first).to(out.device)
    part = out.new_empty(len(first), *out.shape[1:])
    sums = None if lse is None else lse.new_empty(len(first), lse.shape[1])
    run_decode(plan, batch.q[rows], key_cache, value_cache, scoring, part, workspace, sums)
    out[rows] = part
    if lse is not None and sums is not None:
        lse[rows] = sums
