"""Decode over a shared prefix: blocks that several sequences have in common are read once for all of them."""

import torch

from paged_kernels import reference, torch_cascade
from paged_kernels.api import check_batch
from paged_kernels.backends import Demand, choose_backend
from paged_kernels.batch import PagedBatch
from paged_kernels.checks import check_outputs, waits
from paged_kernels.errors import DeviceError, ShapeError, TableError
from paged_kernels.scoring import Scoring
from paged_kernels.workspace import DEFAULT_WORKSPACE, Workspace


def cascade_attention_decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    shared_block_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    suffix_block_table: torch.Tensor,
    suffix_lens: torch.Tensor,
    group_ids: torch.Tensor | None = None,
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
    """One query per row, q `[rows, heads, dk]`: row i sees its group's prefix and then its own suffix.

    `shared_block_table` `[groups, blocks]` and `prefix_lens` `[groups]` (tokens) say what each group shares;
    `suffix_block_table` `[rows, blocks]` and `suffix_lens` `[rows]` what is a row's own, its query's token included.
    `group_ids` `[rows]` names each row's group, -1 for none; without it there is one group of all rows. The result is
    that of `paged_attention_decode` over prefix and suffix as one sequence. Whether it pays is for `plan_cascade` to
    say. Fills, checks and raises as decode does.
    """
    rows = q.shape[0]
    if group_ids is None:
        group_ids = torch.zeros(rows, dtype=torch.int32, device=q.device)
    scoring = Scoring(scale, window, softcap, sinks, alibi, k_scale, v_scale)
    bounds = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
    batch = PagedBatch(q, key_cache, value_cache, suffix_block_table, suffix_lens, bounds, 1)
    check_batch(batch, scoring, validate=validate)
    _check_groups(batch, shared_block_table, prefix_lens, group_ids, validate=validate)
    out = q.new_empty(rows, q.shape[1], value_cache.shape[3]) if out is None else out
    check_outputs(q, value_cache.shape[3], out, lse)
    shared = (shared_block_table, prefix_lens)
    chosen = choose_backend(backend, q.device, Demand.of(q, key_cache, value_cache)).backend
    if chosen == "triton":
        from paged_kernels import triton_cascade

        groups = triton_cascade.sort_groups(*shared, group_ids)
        triton_cascade.run_cascade(*batch[:3], groups, *batch[3:5], scoring, out, lse, workspace=workspace)
    elif chosen == "torch_ref":
        result, sums = reference.cascade_attention(*batch[:3], *shared, *batch[3:5], group_ids, scoring)
        out.copy_(result)
        if lse is not None:
            lse.copy_(sums)
    else:
        scratch = workspace or DEFAULT_WORKSPACE
        halves = torch_cascade.plan_halves(
            *shared,
            batch.block_table,
            batch.seq_lens,
            group_ids,
            block_size=key_cache.shape[1],
            token_bytes=_token_bytes(key_cache, value_cache),
        )
        torch_cascade.run_cascade(*batch[:3], halves, scoring, out, lse, scratch)
    return out


def _token_bytes(key_cache: torch.Tensor, value_cache: torch.Tensor) -> int:
    """What one token's K and V take in one layer."""
    return key_cache[0, 0].nbytes + value_cache[0, 0].nbytes


def _check_groups(
    batch: PagedBatch, tables: torch.Tensor, lens: torch.Tensor, group_ids: torch.Tensor, *, validate: bool
) -> None:
    rows, groups = len(batch.q), len(tables)
    if tables.dim() != 2 or lens.shape != (groups,) or group_ids.shape != (rows,):
        raise ShapeError(
            f"shared_block_table {tuple(tables.shape)}, prefix_lens {tuple(lens.shape)} and group_ids "
            f"{tuple(group_ids.shape)} must be [groups, blocks], [groups] and [{rows}]"
        )
    for name, tensor in (("shared_block_table", tables), ("prefix_lens", lens), ("group_ids", group_ids)):
        if tensor.device != batch.q.device:
            raise DeviceError(f"{name} is on {tensor.device} and q on {batch.q.device}")
    if not validate or not waits(lens):
        return
    bounds = torch.zeros(groups + 1, dtype=torch.int32, device=lens.device)
    prefixes = batch._replace(block_table=tables, seq_lens=lens, cu_seqlens_q=bounds)
    check_batch(prefixes, Scoring(1.0), validate=True)
    if rows and not -1 <= int(group_ids.min()) <= int(group_ids.max()) < groups:
        raise TableError(
            f"group_ids from {int(group_ids.min())} to {int(group_ids.max())}; allowed are -1 (none) to {groups - 1}"
        )
