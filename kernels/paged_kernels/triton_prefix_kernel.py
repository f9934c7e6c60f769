"""Triton kernel for the shared half of a cascade: all queries of a group against the prefix that the group shares.

Rows are (sequence of the group, head of the KV head's group), so that one program reads a shared block once for as
many sequences as fit its rows. The prefix is cut into parts; `combine_kernel` merges them with the sequences' own.
"""
# Kernel arguments are pointers and numbers that Triton types itself, and its decorators carry no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from paged_kernels.triton_prefill_kernel import tile_of_rows
from paged_kernels.triton_scan import finished, scan_keys


@triton.jit(do_not_specialize=["window", "groups", "table_row"])
def prefix_kernel(
    q, key_cache, value_cache, table, bounds, order, prefix_lens, suffix_lens, alibi, part, part_lse,
    scale, softcap, v_scale, window, groups,
    q_row, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PATH: tl.constexpr,
    GROUPS_PAD: tl.constexpr, SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, DOT_F32: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Part [rows, SPLITS, heads, DV] of one tile of a group's rows; group g owns `order[bounds[g] : bounds[g + 1]]`."""
    TOKENS: tl.constexpr = ROWS // GROUP
    item, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    group, tile = tile_of_rows(bounds, groups, item, TOKENS, GROUPS_PAD)
    if group < groups:
        length = tl.load(prefix_lens + group)
        tiles = tl.cdiv(length, TILE)
        share = tl.cdiv(tiles, SPLITS)
        begin = split * share
        end = tl.minimum(begin + share, tiles)

        member, column = tl.arange(0, ROWS), tl.arange(0, DK_PAD)
        place, stop = tl.load(bounds + group) + tile * TOKENS + member // GROUP, tl.load(bounds + group + 1)
        head = kv_head * GROUP + member % GROUP
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
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DV_PAD], tl.float32)
        top, total, acc = scan_keys(
            query, asked, slope, key_cache + kv_head * k_head, value_cache + kv_head * v_head,
            table + group.to(tl.int64) * table_row, top, total, acc,
            begin, end, length, scale, softcap, window, k_block, k_slot, v_block, v_slot,
            DK, DK_PAD, DV, DV_PAD, BLOCK_SIZE, TILE, PATH, True, False, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI,
            DOT_F32, LOG2E,
        )  # fmt: skip
        piece, piece_lse = finished(top, total, acc, top, v_scale, False, LOG2E)
        wide = tl.arange(0, DV_PAD)
        where = (row * SPLITS + split) * KV_HEADS * GROUP + head
        tl.store(part + where[:, None] * DV + wide[None, :], piece, mask=real[:, None] & (wide < DV)[None, :])
        tl.store(part_lse + where, piece_lse, mask=real)
