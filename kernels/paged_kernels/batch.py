"""Ragged queries over paged KV as one value, and how the two fast backends run it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from paged_kernels.scoring import Scoring
from paged_kernels.torch_decode import IntArray, plan_decode, run_decode
from paged_kernels.torch_prefill import plan_prefill, run_prefill
from paged_kernels.workspace import Workspace

Run = Callable[[], None]


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
    """Plan the batch and run it."""
    planned_torch(batch, scoring, out, lse, workspace)()


def planned_torch(
    batch: PagedBatch, scoring: Scoring, out: torch.Tensor, lse: torch.Tensor | None, workspace: Workspace
) -> Run:
    """Sort the rows into decode, prefill and empty ones and plan each kind; the call that is returned runs them.

    An engine plans once a step and runs once a layer, so the two are apart.
    """
    table = batch.block_table.cpu().numpy().astype(np.int64)
    lengths, bounds = (value.cpu().numpy().astype(np.int64) for value in (batch.seq_lens, batch.cu_seqlens_q))
    queries = np.diff(bounds)
    decode = np.flatnonzero((queries == 1) & (lengths > 0))
    runs: list[Run] = []
    if len(decode):
        arguments = (batch, table[decode], lengths[decode], bounds[decode], scoring, out, lse, workspace)
        runs.append(_planned_decode(*arguments))
    size, caches = batch.key_cache.shape[1], (batch.key_cache, batch.value_cache)
    for row in np.flatnonzero((queries > 1) & (lengths > 0)):
        spans = (int(bounds[row]), int(queries[row]), int(lengths[row]))
        plan = plan_prefill(table[row], *spans, size, device=out.device)
        runs.append(partial(run_prefill, plan, batch.q, *caches, scoring, out, workspace, lse))
    empty = (slice(bounds[row], bounds[row + 1]) for row in np.flatnonzero(lengths == 0))
    runs += [partial(_empty, rows, out, lse) for rows in empty]
    return partial(_run_all, runs)


def _run_all(runs: Sequence[Run]) -> None:
    for run in runs:
        run()


def _empty(rows: slice, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Rows that see no key."""
    out[rows] = 0.0
    if lse is not None:
        lse[rows] = float("-inf")


def _planned_decode(
    batch: PagedBatch,
    table: IntArray,
    lengths: IntArray,
    first: IntArray,
    scoring: Scoring,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: Workspace,
) -> Run:
    """The one-query rows, wherever they stand in the flat batch; where they are all of it nothing is moved."""
    caches = (batch.key_cache, batch.value_cache)
    token_bytes = sum(cache[0, 0].nbytes for cache in caches)
    plan = plan_decode(table, lengths, caches[0].shape[1], token_bytes=token_bytes, device=out.device)
    if len(first) == len(out):
        return partial(run_decode, plan, batch.q, *caches, scoring, out, workspace, lse)
    rows = torch.from_numpy(first).to(out.device)

    def run() -> None:
        part = out.new_empty(len(first), *out.shape[1:])
        sums = None if lse is None else lse.new_empty(len(first), lse.shape[1])
        run_decode(plan, batch.q[rows], *caches, scoring, part, workspace, sums)
        out[rows] = part
        if lse is not None and sums is not None:
            lse[rows] = sums

    return run
