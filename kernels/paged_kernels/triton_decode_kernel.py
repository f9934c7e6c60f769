"""Triton decode: split-KV attention of one query per sequence, a group's query heads packed as rows of one tile.

A program takes one part of one sequence's keys for one KV head. How sequences are cut is worked out on the device from
the lengths found there: parts of nearly equal size, as many as fill the device, so that one long sequence among short
ones is no cliff and a captured graph may be replayed with other lengths. A sequence in one part is written at once;
`combine_kernel` merges the parts of the others.
"""
# Kernel arguments are pointers and numbers that Triton types itself, and its decorators carry no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl

from paged_kernels.triton_scan import finished, scan_keys


@triton.jit
def parts_of_rows(
    lengths,
    rows,
    window,
    target,
    ROWS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """In how many parts each row's keys are read, int32 [ROWS_PAD]: at least one a row, `rows + target` at most."""
    index = tl.arange(0, ROWS_PAD)
    length = tl.load(lengths + index, mask=index < rows, other=0)
    tiles = tl.cdiv(length, TILE)
    if HAS_WINDOW:
        tiles -= tl.maximum(length - window, 0) // TILE
    share = tl.maximum(tl.cdiv(tl.sum(tiles, 0), target), MIN_TILES)
    return tl.where(index < rows, tl.maximum(tl.cdiv(tiles, share), 1), 0)


@triton.jit(do_not_specialize=["window", "rows", "target", "table_row"])
def decode_kernel(
    q, key_cache, value_cache, table, lengths, sinks, alibi, out, lse, part, part_lse,
    scale, softcap, v_scale, window, rows, target,
    q_row, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_row, out_row, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PATH: tl.constexpr,
    SPLITS: tl.constexpr, ROWS_PAD: tl.constexpr, MIN_TILES: tl.constexpr, DIRECT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_LSE: tl.constexpr, DOT_F32: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """One part of one row and KV head. `SPLITS` 0 cuts by `parts_of_rows`; `DIRECT` lets undivided rows skip the merge.

    Parts are kept normalised, [parts, heads, DV], with their natural-log LSE [parts, heads].
    """
    item, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    if SPLITS > 0:
        row, split, parts = item // SPLITS, item % SPLITS, SPLITS
    else:
        counts = parts_of_rows(lengths, rows, window, target, ROWS_PAD, TILE, MIN_TILES, HAS_WINDOW)
        row = tl.sum((tl.cumsum(counts, 0) <= item).to(tl.int32), 0)
        index = tl.arange(0, ROWS_PAD)
        split = item - tl.sum(tl.where(index < row, counts, 0), 0)
        parts = tl.sum(tl.where(index == row, counts, 0), 0)
    if row < rows:
        length = tl.load(lengths + row)
        first = length * 0
        if HAS_WINDOW:
            first = tl.maximum(length - window, 0) // TILE
        last = tl.cdiv(length, TILE)
        share = tl.cdiv(last - first, parts)
        begin = first + split * share
        end = tl.minimum(begin + share, last)

        wide_row = row.to(tl.int64)
        member, column = tl.arange(0, ROWS), tl.arange(0, DK_PAD)
        real = member < GROUP
        head = kv_head * GROUP + member
        query = tl.load(
            q + wide_row * q_row + head[:, None] * q_head + column[None, :],
            mask=real[:, None] & (column < DK)[None, :],
            other=0.0,
        )
        slope = tl.zeros([ROWS], tl.float32)
        if HAS_ALIBI:
            slope = tl.load(alibi + head, mask=real, other=0.0).to(tl.float32)
        keys, values = key_cache + kv_head * k_head, value_cache + kv_head * v_head
        if PATH == "contiguous":
            keys, values = keys + wide_row * k_block, values + wide_row * v_block
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DV_PAD], tl.float32)
        asked = tl.zeros([ROWS], tl.int32) + (length - 1).to(tl.int32)
        top, total, acc = scan_keys(
            query, asked, slope, keys, values, table + wide_row * table_row, top, total, acc,
            begin, end, length, scale, softcap, window, k_block, k_slot, v_block, v_slot,
            DK, DK_PAD, DV, DV_PAD, BLOCK_SIZE, TILE, PATH, True, False, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI,
            DOT_F32, LOG2E,
        )  # fmt: skip

        wide = tl.arange(0, DV_PAD)
        kept = real[:, None] & (wide < DV)[None, :]
        if DIRECT & (parts == 1):
            sink = tl.zeros([ROWS], tl.float32)
            if HAS_SINKS:
                sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
            whole, whole_lse = finished(top, total, acc, sink, v_scale, HAS_SINKS, LOG2E)
            tl.store(out + wide_row * out_row + head[:, None] * out_head + wide[None, :], whole, mask=kept)
            if HAS_LSE:
                tl.store(lse + wide_row * KV_HEADS * GROUP + head, whole_lse, mask=real)
        else:
            piece, piece_lse = finished(top, total, acc, top, v_scale, False, LOG2E)
            place = item.to(tl.int64) * KV_HEADS * GROUP + head
            tl.store(part + place[:, None] * DV + wide[None, :], piece, mask=kept)
            tl.store(part_lse + place, piece_lse, mask=real)


@triton.jit
def merge_parts(
    part, part_lse, place, count, step, top, total, acc,
    DV: tl.constexpr, DV_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Carry (top, total, acc) of one head over `count` parts that lie `step` apart; empty ones take no part."""
    column = tl.arange(0, DV_PAD)
    for begin in range(0, count, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        where = place + index * step
        sums = tl.load(part_lse + where, mask=index < count, other=float("-inf"))
        filled = sums > float("-inf")
        pieces = tl.load(
            part + where[:, None] * DV + column[None, :],
            mask=filled[:, None] & (column < DV)[None, :],
            other=0.0,
        )
        higher = tl.maximum(top, tl.max(sums, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(sums - base)
        keep = tl.exp(top - base)
        total = total * keep + tl.sum(weight, 0)
        acc = acc * keep + tl.sum(pieces * weight[:, None], 0)
        top = higher
    return top, total, acc


@triton.jit(do_not_specialize=["window", "rows", "target"])
def combine_kernel(
    part, part_lse, prefix, prefix_lse, group_ids, lengths, sinks, out, lse, window, rows, target, out_row, out_head,
    HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    ROWS_PAD: tl.constexpr, MIN_TILES: tl.constexpr, PREFIX_SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """One row and head: merge its parts, and those of a shared prefix ([rows, PREFIX_SPLITS, heads, DV]) if any."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if SPLITS > 0:
        start, count = row * SPLITS, SPLITS
    else:
        counts = parts_of_rows(lengths, rows, window, target, ROWS_PAD, TILE, MIN_TILES, HAS_WINDOW)
        index = tl.arange(0, ROWS_PAD)
        start = tl.sum(tl.where(index < row, counts, 0), 0).to(tl.int64)
        count = tl.sum(tl.where(index == row, counts, 0), 0)
    if PREFIX_SPLITS > 0 or count > 1:
        column = tl.arange(0, DV_PAD)
        top, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
        acc = tl.zeros([DV_PAD], tl.float32)
        top, total, acc = merge_parts(
            part, part_lse, start * HEADS + head, count, HEADS, top, total, acc, DV, DV_PAD, CHUNK
        )
        if PREFIX_SPLITS > 0:
            shared = tl.where(tl.load(group_ids + row) >= 0, PREFIX_SPLITS, 0)
            top, total, acc = merge_parts(
                prefix, prefix_lse, row * PREFIX_SPLITS * HEADS + head, shared, HEADS, top, total, acc,
                DV, DV_PAD, CHUNK,
            )  # fmt: skip
        seen = total > 0
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
            base = tl.where(seen, top, 0.0)
            higher = tl.maximum(base, sink)
            total = tl.where(seen, total * tl.exp(base - higher) + tl.exp(sink - higher), 0.0)
            acc = acc * tl.exp(base - higher)
            top = higher
        safe = tl.where(seen, total, 1.0)
        tl.store(out + row * out_row + head * out_head + column, acc / safe, mask=column < DV)
        if HAS_LSE:
            logsum = tl.where(seen, tl.where(seen, top, 0.0) + tl.log(safe), float("-inf"))
            tl.store(lse + row * HEADS + head, logsum)
