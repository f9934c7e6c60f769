"""Launching the Triton decode: over paged KV, and over contiguous KV with the same code to see what paging costs."""

from typing import Any, NamedTuple

import torch

from paged_kernels.scoring import Scoring
from paged_kernels.triton_config import AttentionShape, LaunchConfig, decode_config, target_parts
from paged_kernels.triton_constants import Features, combine_constants, decode_constants
from paged_kernels.triton_decode_kernel import combine_kernel, decode_kernel
from paged_kernels.workspace import Workspace

MAX_ROWS = 4096  # rows whose lengths one program looks through; more rows are more launches


class DecodeLaunch(NamedTuple):
    """One decode over rows of q: what both of its kernels need to know."""

    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    scoring: Scoring
    shape: AttentionShape
    config: LaunchConfig
    features: Features
    splits: int  # parts of every row; 0: balanced on the device
    target: int
    path: str
    part: torch.Tensor  # float32 [parts, heads, dv], flat
    part_lse: torch.Tensor  # float32 [parts, heads], flat


def run_decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scoring: Scoring,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    *,
    workspace: Workspace | None = None,
    path: str = "auto",
) -> None:
    """Attention of one query per row, q `[rows, heads, dk]`, into `out` `[rows, heads, dv]` and `lse` `[rows, heads]`.

    Tables (int32) and lengths (int32) are read on the device. `num_splits` None balances the parts there. Any strides,
    but the last of each tensor is 1; `lse` is float32 and contiguous.
    """
    for start in range(0, len(q), MAX_ROWS):
        rows = slice(start, start + MAX_ROWS)
        launch = plan_launch(
            q[rows],
            key_cache,
            value_cache,
            block_table[rows],
            seq_lens[rows],
            scoring,
            num_splits=num_splits,
            lse=lse is not None,
            workspace=workspace,
            path=path,
        )
        sums = seq_lens if lse is None else lse[rows]
        launch_decode(launch, out[rows], sums, direct=True)
        if launch.splits != 1:
            launch_combine(launch, out[rows], sums)


def run_contiguous_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
    scoring: Scoring,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    *,
    workspace: Workspace | None = None,
) -> None:
    """The twin over `[rows, length, kv_heads, dim]`: the paged kernel with plain addressing in place of the table."""
    table = seq_lens.unsqueeze(1)  # not read
    options: dict[str, Any] = {"workspace": workspace, "path": "contiguous"}
    run_decode(q, keys, values, table, seq_lens, scoring, out, lse, num_splits, **options)


def plan_launch(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scoring: Scoring,
    *,
    num_splits: int | None,
    lse: bool,
    workspace: Workspace | None,
    path: str,
) -> DecodeLaunch:
    """Shape, launch numbers and scratch of one decode."""
    shape = shape_of(q, key_cache, value_cache)
    splits, target = num_splits or 0, target_parts(shape.kv_heads, q.device)
    parts = 0 if splits == 1 else len(q) * splits if splits else len(q) + target
    scratch = workspace or Workspace()
    part = scratch.take("decode_parts", parts * shape.heads * shape.dv, q, torch.float32)
    part_lse = scratch.take("decode_part_lse", parts * shape.heads, q, torch.float32)
    features, config = Features.of(scoring, lse=lse), decode_config(shape)
    return DecodeLaunch(
        q, key_cache, value_cache, block_table, seq_lens, scoring, shape, config, features,
        splits, target, path, part, part_lse,
    )  # fmt: skip


def shape_of(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> AttentionShape:
    """What the kernels are compiled for, from the tensors."""
    block_size, kv_heads, dk = key_cache.shape[1:]
    return AttentionShape(
        q.dtype, key_cache.dtype, q.shape[1], kv_heads, dk, value_cache.shape[3], block_size
    )


def launch_decode(launch: DecodeLaunch, out: torch.Tensor, lse: torch.Tensor, *, direct: bool) -> None:
    """The first kernel: rows in one part go to `out` if `direct`, all others to the scratch."""
    q, scoring, shape = launch.q, launch.scoring, launch.shape
    rows = len(q)
    parts = rows * launch.splits if launch.splits else rows + launch.target
    constants = decode_constants(
        shape,
        launch.config,
        launch.features,
        splits=launch.splits,
        rows=rows,
        direct=direct,
        path=launch.path,
    )
    decode_kernel[(parts * shape.kv_heads,)](
        q, launch.key_cache, launch.value_cache, launch.block_table, launch.seq_lens,
        or_any(scoring.sinks, q), or_any(scoring.alibi, q), out, lse, launch.part, launch.part_lse,
        scoring.scale * scoring.k_scale, scoring.softcap, scoring.v_scale, scoring.window, rows, launch.target,
        q.stride(0), q.stride(1), *launch.key_cache.stride()[:3], *launch.value_cache.stride()[:3],
        launch.block_table.stride(0), out.stride(0), out.stride(1),
        **constants, num_warps=launch.config.warps, num_stages=launch.config.stages,
    )  # fmt: skip


def launch_combine(
    launch: DecodeLaunch,
    out: torch.Tensor,
    lse: torch.Tensor,
    prefix: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    prefix_splits: int = 0,
) -> None:
    """The second kernel: merge parts, and with them those of a shared prefix (parts, their LSE, group ids)."""
    shape, rows = launch.shape, len(launch.q)
    shared, shared_lse, group_ids = prefix or (launch.part, launch.part_lse, launch.seq_lens)
    constants = combine_constants(
        shape,
        launch.config,
        launch.features,
        splits=launch.splits,
        rows=rows,
        prefix_splits=prefix_splits,
    )
    combine_kernel[(rows, shape.heads)](
        launch.part, launch.part_lse, shared, shared_lse, group_ids, launch.seq_lens,
        or_any(launch.scoring.sinks, launch.q), out, lse, launch.scoring.window, rows, launch.target,
        out.stride(0), out.stride(1), **constants, num_warps=4,
    )  # fmt: skip


def or_any(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A pointer that the kernel will not follow stands in for a tensor that is not there."""
    return other if tensor is None else tensor
