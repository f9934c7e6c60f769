"""The Triton cascade: attention over the shared prefixes, then over each row's own keys, then one merge of both.

In the prefix kernel a row is (query of the cascade group, query head of the KV head's group). So one program reads a
shared block once for as many queries as its rows hold. The prefix is cut into parts, and `combine_kernel` merges them
with the parts of the sequences' own keys.

A sequence may have several queries, as in `paged_kernels.triton.decode`: each of them sees the whole prefix.
"""

# Triton types the arguments of kernels itself, and its decorators have no types.
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: N803, N806

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from paged_kernels.arguments import Scoring, Workspace
from paged_kernels.cascade_groups import each_query
from paged_kernels.launch_policy import SPLIT_TOKENS
from paged_kernels.triton.decode import (
    PartsOfStep,
    Queries,
    item_of_program,
    launch_combine,
    launch_decode,
    or_any,
    prepare_launch,
    shape_of,
)
from paged_kernels.triton.launch import (
    capability_of,
    chunks_of,
    multiprocessors,
    prefix_config,
    prefix_constants,
    tokens_of,
)
from paged_kernels.triton.prefill import tile_of_rows
from paged_kernels.triton.scan import as_operands, finished, joined, nothing_seen, scan_keys


@triton.jit(do_not_specialize=["window", "groups", "table_row"])
def prefix_kernel(  # type: ignore[no-untyped-def]
    q, key_cache, value_cache, table, bounds, order, prefix_lens, suffix_lens, alibi, part, part_lse,
    scale, softcap, v_scale, window, groups,
    q_row, q_head, k_head, v_head, table_row,
    K_BLOCK: tl.constexpr, K_SLOT: tl.constexpr, V_BLOCK: tl.constexpr, V_SLOT: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PATH: tl.constexpr,
    GROUPS_PAD: tl.constexpr, SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, FOLD: tl.constexpr, PAIRS: tl.constexpr, DOT_F32: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Part [queries, SPLITS, heads, DV] of one tile of a group's queries: `order[bounds[g] : bounds[g + 1]]`."""
    TOKENS: tl.constexpr = ROWS // GROUP if ROWS > GROUP else 1
    item, kv_head, chunk = item_of_program(KV_HEADS, GROUP, ROWS)
    split = tl.program_id(1)
    group, tile = tile_of_rows(bounds, groups, item, TOKENS, GROUPS_PAD)
    if group < groups:
        length = tl.load(prefix_lens + group)
        tiles = tl.cdiv(length, TILE)
        share = tl.cdiv(tiles, SPLITS)
        begin = split * share
        end = tl.minimum(begin + share, tiles)

        member, column = chunk * ROWS + tl.arange(0, ROWS), tl.arange(0, DK_PAD)
        place, stop = tl.load(bounds + group) + tile * TOKENS + member // GROUP, tl.load(bounds + group + 1)
        head = (kv_head * GROUP + member % GROUP).to(tl.int64)
        real = (member < TOKENS * GROUP) & (place < stop)
        row = tl.load(order + place, mask=real, other=0).to(tl.int64)
        own = tl.load(suffix_lens + row, mask=real, other=2**30)
        asked = (length - 1 + own).to(tl.int32)
        query = tl.load(
            q + row[:, None] * q_row + head[:, None] * q_head + column[None, :],
            mask=real[:, None] & (column < DK)[None, :],
            other=0.0,
        )
        slope = tl.zeros([ROWS], tl.float32)
        if HAS_ALIBI:
            slope = tl.load(alibi + head, mask=real, other=0.0).to(tl.float32)
        query, odd_query, power = as_operands(query, PAIRS)
        top, total, acc, odd_acc = nothing_seen(ROWS, DV_PAD, PAIRS)
        top, total, acc, odd_acc = scan_keys(
            query, odd_query, power, asked, slope,
            key_cache + kv_head * k_head, value_cache + kv_head * v_head,
            table + group.to(tl.int64) * table_row, top, total, acc, odd_acc,
            begin, end, length, scale, softcap, window, K_BLOCK, K_SLOT, V_BLOCK, V_SLOT,
            DK, DK_PAD, DV, DV_PAD, False, BLOCK_SIZE, TILE, PATH, True, False, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI,
            FOLD, PAIRS, DOT_F32, LOG2E,
        )  # fmt: skip
        piece, piece_lse = finished(top, total, joined(acc, odd_acc, PAIRS), top, v_scale, False, LOG2E)
        wide = tl.arange(0, DV_PAD)
        where = (row * SPLITS + split) * KV_HEADS * GROUP + head
        tl.store(part + where[:, None] * DV + wide[None, :], piece, mask=real[:, None] & (wide < DV)[None, :])
        tl.store(part_lse + where, piece_lse, mask=real)


class SharedPrefixes(NamedTuple):
    """What groups of queries share, on the device. Group g owns the queries `order[bounds[g] : bounds[g + 1]]`."""

    tables: torch.Tensor  # [groups, blocks]
    lens: torch.Tensor  # [groups], tokens
    order: torch.Tensor  # [queries], sorted by group, those without a group first
    bounds: torch.Tensor  # [groups + 1]
    group_ids: torch.Tensor  # [queries], -1: none
    own: torch.Tensor  # [queries], keys behind the prefix that a query sees


def sort_groups(
    tables: torch.Tensor,
    lens: torch.Tensor,
    group_ids: torch.Tensor,
    suffix_lens: torch.Tensor,
    queries: Queries | None = None,
    count: int = 0,
) -> SharedPrefixes:
    """Sort the queries by group, on the device and without waiting for it.

    `group_ids` and `suffix_lens` are those of rows. A row has one query, or with `queries` some of all `count`.
    """
    ids, own = group_ids, suffix_lens
    if queries is not None:
        _, own, ids = each_query(queries.bounds, count, suffix_lens, group_ids)
    ids = ids.int()
    order = torch.argsort(ids, stable=True)
    groups = torch.arange(len(lens) + 1, dtype=torch.int32, device=ids.device)
    bounds = torch.searchsorted(ids[order], groups, out_int32=True)
    return SharedPrefixes(tables, lens, order.int(), bounds, ids, own)


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
    queries: Queries | None = None,
    workspace: Workspace | None = None,
    parts: PartsOfStep | None = None,
) -> None:
    """Each row's query, or `queries`, over its group's prefix and its own suffix, into `out` and `lse` as a decode."""
    workspace, listed = workspace or Workspace(), parts or PartsOfStep()
    shape, groups = shape_of(q, key_cache, value_cache), len(shared.lens)
    rows = listed.rows(shape, queries, suffix_table, suffix_lens)
    inputs = (q, key_cache, value_cache, rows)
    launch = prepare_launch(inputs, scoring, None, workspace, "auto", listed, lse=lse is not None)
    sums = suffix_lens if lse is None else lse
    config = prefix_config(shape, len(q), capability_of(q.device))
    tiles = triton.cdiv(len(q), tokens_of(shape, config)) + groups - 1
    splits = pick_prefix_splits(tiles * shape.kv_heads, shared.tables.shape[1] * shape.block_size, q.device)
    pieces = q.shape[0] * splits * q.shape[1]
    part = workspace.take("prefix_parts", pieces * shape.dv, q, torch.float32)
    part_lse = workspace.take("prefix_part_lse", pieces, q, torch.float32)
    caches = [shape.as_read(cache) for cache in (key_cache, value_cache)]
    constants = prefix_constants(shape, config, launch.features, groups=groups, splits=splits)
    prefix_kernel[(tiles * shape.kv_heads * chunks_of(shape, config), splits)](
        q, *caches, shared.tables, shared.bounds, shared.order, shared.lens,
        shared.own, or_any(scoring.alibi, q), part, part_lse,
        scoring.scale * scoring.k_scale, scoring.softcap, scoring.v_scale, scoring.window, groups,
        q.stride(0), q.stride(1), *(cache.stride(2) for cache in caches),
        shared.tables.stride(0), **constants, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    launch_decode(launch, out, sums, direct=False)
    launch_combine(launch, out, sums, (part, part_lse, shared.group_ids), splits)


MAX_SPLITS = 32  # of a prefix


def pick_prefix_splits(programs: int, longest: int, device: torch.device) -> int:
    """Parts of the prefix so that two programs run per multiprocessor: packing rows leaves few programs.

    A power of two, because the number is a constant of the kernel and each value is compiled anew.
    """
    most = max(1, min(MAX_SPLITS, longest // SPLIT_TOKENS))
    wanted = min(most, max(1, -(-2 * multiprocessors(device) // programs)))
    return 1 << (wanted.bit_length() - 1)
