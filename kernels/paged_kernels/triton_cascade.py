"""Launching the Triton cascade: shared prefixes, then every row's own keys, then one merge of both."""

from typing import NamedTuple

import torch
import triton

from paged_kernels.scoring import Scoring
from paged_kernels.triton_config import MAX_SPLITS, SPLIT_TOKENS, LaunchConfig, multiprocessors, prefix_config
from paged_kernels.triton_constants import prefix_constants
from paged_kernels.triton_decode import DecodeLaunch, launch_combine, launch_decode, or_any, plan_launch
from paged_kernels.triton_prefix_kernel import prefix_kernel
from paged_kernels.workspace import Workspace


class SharedPrefixes(NamedTuple):
    """What groups of rows share, all on the device. Group g owns rows `order[bounds[g] : bounds[g + 1]]`."""

    tables: torch.Tensor  # [groups, blocks]
    lens: torch.Tensor  # [groups], tokens
    order: torch.Tensor  # [rows], rows sorted by group, those without a group first
    bounds: torch.Tensor  # [groups + 1]
    group_ids: torch.Tensor  # [rows], -1: none


def sort_groups(tables: torch.Tensor, lens: torch.Tensor, group_ids: torch.Tensor) -> SharedPrefixes:
    """Rows by group, worked out on the device without waiting for it."""
    ids = group_ids.int()
    order = torch.argsort(ids, stable=True)
    groups = torch.arange(len(lens) + 1, dtype=torch.int32, device=ids.device)
    bounds = torch.searchsorted(ids[order], groups, out_int32=True)
    return SharedPrefixes(tables, lens, order.int(), bounds, ids)


def run_cascade(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    shared: SharedPrefixes,
    suffix_table: torch.Tensor,
    suffix_lens: torch.Tensor,
    scoring: Scoring,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    workspace: Workspace | None = None,
    path: str = "auto",
    prefix_splits: int | None = None,
) -> None:
    """One query per row over its group's prefix and its own suffix, into `out` and `lse` as `run_decode` does."""
    workspace = workspace or Workspace()
    launch = plan_launch(
        q,
        key_cache,
        value_cache,
        suffix_table,
        suffix_lens,
        scoring,
        num_splits=None,
        lse=lse is not None,
        workspace=workspace,
        path=path,
    )
    sums = suffix_lens if lse is None else lse
    config = prefix_config(launch.shape, len(q))
    tiles = triton.cdiv(len(q), config.rows // launch.shape.group) + len(shared.lens) - 1
    splits = prefix_splits or pick_prefix_splits(
        tiles * launch.shape.kv_heads, shared.tables.shape[1] * launch.shape.block_size, q.device
    )
    part = workspace.take(
        "prefix_parts", q.shape[0] * splits * q.shape[1] * launch.shape.dv, q, torch.float32
    )
    part_lse = workspace.take("prefix_part_lse", q.shape[0] * splits * q.shape[1], q, torch.float32)
    _launch_prefix(launch, shared, config, (tiles, splits), part, part_lse)
    launch_decode(launch, out, sums, direct=False)
    launch_combine(launch, out, sums, (part, part_lse, shared.group_ids), splits)


def pick_prefix_splits(programs: int, longest: int, device: torch.device) -> int:
    """Parts of the prefix so that two programs a multiprocessor run: packed rows leave few of them.

    A power of two: the number is a constant of the kernel, and an engine's steps shall not compile many.
    """
    most = max(1, min(MAX_SPLITS, longest // SPLIT_TOKENS))
    wanted = min(most, max(1, -(-2 * multiprocessors(device) // programs)))
    return 1 << (wanted.bit_length() - 1)


def _launch_prefix(
    launch: DecodeLaunch,
    shared: SharedPrefixes,
    config: LaunchConfig,
    grid: tuple[int, int],
    part: torch.Tensor,
    part_lse: torch.Tensor,
) -> None:
    q, scoring, shape = launch.q, launch.scoring, launch.shape
    groups, (tiles, splits) = len(shared.lens), grid
    constants = prefix_constants(
        shape, config, launch.features, groups=groups, splits=splits, path=launch.path
    )
    prefix_kernel[(tiles * shape.kv_heads, splits)](
        q, launch.key_cache, launch.value_cache, shared.tables, shared.bounds, shared.order, shared.lens,
        launch.seq_lens, or_any(scoring.alibi, q), part, part_lse,
        scoring.scale * scoring.k_scale, scoring.softcap, scoring.v_scale, scoring.window, groups,
        q.stride(0), q.stride(1), *launch.key_cache.stride()[:3], *launch.value_cache.stride()[:3],
        shared.tables.stride(0), **constants, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
