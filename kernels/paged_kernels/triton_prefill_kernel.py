"""Triton prefill: causal attention of ragged query chunks over paged KV, with their cached prefixes.

A program takes one sequence, one KV head and a tile of query rows; a row is one (token, head of the group), so that a
group reads its keys once. Which sequence a program serves is found on the device from the bounds there, so that short
and long chunks in one batch leave no idle programs. Keys that every row of the tile sees are scanned without a mask.
"""
# Kernel arguments are pointers and numbers that Triton types itself, and its decorators carry no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from paged_kernels.triton_scan import finished, scan_keys


@triton.jit
def tile_of_rows(bounds, count, item, TOKENS: tl.constexpr, COUNT_PAD: tl.constexpr):
    """The span of rows that tile number `item` falls in, and which tile of it; `count` itself where there is none.

    Span i has rows `bounds[i] : bounds[i + 1]`, cut into tiles of TOKENS.
    """
    index = tl.arange(0, COUNT_PAD)
    start = tl.load(bounds + index, mask=index < count, other=0)
    stop = tl.load(bounds + index + 1, mask=index < count, other=0)
    tiles = tl.cdiv(stop - start, TOKENS)
    passed = tl.cumsum(tiles, 0) <= item
    span = tl.minimum(tl.sum(passed.to(tl.int32), 0), count)
    return span, item - tl.sum(tl.where(passed, tiles, 0), 0)


@triton.jit(do_not_specialize=["window", "sequences", "table_row"])
def prefill_kernel(
    q, key_cache, value_cache, table, lengths, bounds, sinks, alibi, out, lse,
    scale, softcap, v_scale, window, sequences,
    q_row, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_row, out_row, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PATH: tl.constexpr,
    ROWS_PAD: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_LSE: tl.constexpr, DOT_F32: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Output rows and natural-log LSE of one tile. The last tiles, which see most keys, start first."""
    TOKENS: tl.constexpr = ROWS // GROUP
    item, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    item = tl.num_programs(0) // KV_HEADS - 1 - item
    sequence, tile = tile_of_rows(bounds, sequences, item, TOKENS, ROWS_PAD)
    if sequence < sequences:
        start, length = tl.load(bounds + sequence), tl.load(lengths + sequence)
        queries = tl.load(bounds + sequence + 1) - start
        first_token = tile * TOKENS
        member, column = tl.arange(0, ROWS), tl.arange(0, DK_PAD)
        token, head = first_token + member // GROUP, kv_head * GROUP + member % GROUP
        real = (member < TOKENS * GROUP) & (token < queries)
        context = length - queries
        last_key = tl.minimum(length, context + first_token + TOKENS)
        asked = tl.minimum(context + token, last_key - 1).to(tl.int32)
        flat = (start + token).to(tl.int64)
        query = tl.load(
            q + flat[:, None] * q_row + head[:, None] * q_head + column[None, :],
            mask=real[:, None] & (column < DK)[None, :],
            other=0.0,
        )
        slope = tl.zeros([ROWS], tl.float32)
        if HAS_ALIBI:
            slope = tl.load(alibi + head, mask=real, other=0.0).to(tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DV_PAD], tl.float32)
        keys, values = key_cache + kv_head * k_head, value_cache + kv_head * v_head
        my_table = table + sequence.to(tl.int64) * table_row
        begin, end = length * 0, tl.cdiv(last_key, TILE)
        if HAS_WINDOW:
            begin = tl.maximum(context + first_token - window + 1, 0) // TILE
        else:
            open_to_all = tl.maximum(tl.minimum(context + first_token + 1, last_key), 0) // TILE
            top, total, acc = scan_keys(
                query, asked, slope, keys, values, my_table, top, total, acc,
                begin, open_to_all, last_key, scale, softcap, window, k_block, k_slot, v_block, v_slot,
                DK, DK_PAD, DV, DV_PAD, BLOCK_SIZE, TILE, PATH, False, False, False, HAS_SOFTCAP, HAS_ALIBI,
                DOT_F32, LOG2E,
            )  # fmt: skip
            begin = open_to_all
        top, total, acc = scan_keys(
            query, asked, slope, keys, values, my_table, top, total, acc,
            begin, end, last_key, scale, softcap, window, k_block, k_slot, v_block, v_slot,
            DK, DK_PAD, DV, DV_PAD, BLOCK_SIZE, TILE, PATH, True, True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI,
            DOT_F32, LOG2E,
        )  # fmt: skip
        sink = tl.zeros([ROWS], tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        result, logsum = finished(top, total, acc, sink, v_scale, HAS_SINKS, LOG2E)
        wide = tl.arange(0, DV_PAD)
        place = out + flat[:, None] * out_row + head[:, None] * out_head + wide[None, :]
        tl.store(place, result, mask=real[:, None] & (wide < DV)[None, :])
        if HAS_LSE:
            tl.store(lse + flat * KV_HEADS * GROUP + head, logsum, mask=real)
