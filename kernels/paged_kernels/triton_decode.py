"""Triton decode: split-KV attention of one query per sequence, a group's query heads packed as rows of one tile.

Each program takes one sequence, one KV head and one part of the keys, with the softmax kept online in base 2; a second
kernel combines the parts. The next tile's block ids are loaded one tile ahead, so that the table does not stall the
pipeline. The tile of keys is independent of the block size.
"""
# Kernel arguments are pointers and numbers that Triton types itself, and its decorators carry no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl

from paged_kernels.scoring import Scoring
from paged_kernels.triton_config import LOG2E, decode_config, interpreted, pick_splits


@triton.jit
def block_ids(table, position, inside, BLOCK_SIZE: tl.constexpr):
    """Blocks of the key positions `inside`; entries behind the end are garbage and not read."""
    return tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)


@triton.jit
def load_tile(
    cache,
    block,
    position,
    inside,
    block_stride,
    slot_stride,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Rows [tile, PAD] of one head. What is not `inside` reads as 0: poison times a zero weight would be NaN."""
    column = tl.arange(0, PAD)
    place = block * block_stride + (position % BLOCK_SIZE) * slot_stride
    return tl.load(
        cache + place[:, None] + column[None, :], mask=inside[:, None] & (column < DIM)[None, :], other=0.0
    )


@triton.jit
def matmul(a, b, DOT_F32: tl.constexpr):
    """a @ b in float32. The interpreter multiplies bfloat16 wrongly, so there both are widened first."""
    if DOT_F32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def capped(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """tanh(scores / softcap) x softcap, with tanh from the sigmoid: the interpreter has no libdevice."""
    if HAS_SOFTCAP:
        return softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit
def decode_kernel(
    q, key_cache, value_cache, table, lengths, sinks, out, lse,
    scale, softcap, window,
    q_row, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, DOT_F32: tl.constexpr,
    LOG2E: tl.constexpr,
):  # fmt: skip
    """Partial output [rows, heads, SPLITS, DV] (normalised) and natural-log LSE [rows, heads, SPLITS]."""
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first = length * 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    low, high = first // TILE, tl.cdiv(length, TILE)
    share = tl.cdiv(high - low, SPLITS)
    begin = low + split * share
    end = tl.minimum(begin + share, high)

    member, column = tl.arange(0, ROWS), tl.arange(0, DK_PAD)
    real = member < GROUP
    head = kv_head * GROUP + member
    query = tl.load(
        q + row * q_row + head[:, None] * q_head + column[None, :],
        mask=real[:, None] & (column < DK)[None, :],
        other=0.0,
    )
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # the sink is a key without a value: the state that the first part starts from
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        top = tl.where(split == 0, sink, top)
        total = tl.where(split == 0, total + 1.0, total)
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    keys, values = key_cache + kv_head * k_head, value_cache + kv_head * v_head
    my_table = table + row * table_row
    position = begin * TILE + tl.arange(0, TILE)
    block = block_ids(my_table, position, position < length, BLOCK_SIZE)
    for tile in range(begin, end):
        position = tile * TILE + tl.arange(0, TILE)
        ahead = position + TILE
        next_block = block_ids(my_table, ahead, ahead < length, BLOCK_SIZE)
        inside = position < length
        if HAS_WINDOW:
            inside = inside & (position >= first)
        k = load_tile(keys, block, position, inside, k_block, k_slot, DK, DK_PAD, BLOCK_SIZE)
        v = load_tile(values, block, position, inside, v_block, v_slot, DV, DV_PAD, BLOCK_SIZE)
        scores = capped(matmul(query, tl.trans(k), DOT_F32) * scale, softcap, HAS_SOFTCAP) * LOG2E
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(scores - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(weight, 1)
        acc = acc * keep[:, None] + matmul(weight.to(v.dtype), v, DOT_F32)
        top = higher
        block = next_block

    seen = total > 0
    safe = tl.where(seen, total, 1.0)
    wide = tl.arange(0, DV_PAD)
    place = (row * tl.num_programs(1) * GROUP + head) * SPLITS + split
    tl.store(
        out + place[:, None] * DV + wide[None, :],
        acc / safe[:, None],
        mask=real[:, None] & (wide < DV)[None, :],
    )
    logsum = tl.where(seen, (tl.where(seen, top, 0.0) + tl.log2(safe)) / LOG2E, float("-inf"))
    tl.store(lse + place, logsum, mask=real)


@triton.jit
def combine_kernel(
    part, part_lse, out, lse, out_row, out_head,
    HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """One row and head: weigh the parts by exp(LSE). A part without a key has -inf; if all have, the output is 0."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, column = tl.arange(0, SPLITS_PAD), tl.arange(0, DV_PAD)
    place = (row * HEADS + head) * SPLITS + split
    sums = tl.load(part_lse + place, mask=split < SPLITS, other=float("-inf"))
    top = tl.max(sums, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(sums - base)
    total = tl.sum(weight, 0)
    safe = tl.where(total > 0, total, 1.0)
    inside = (split < SPLITS)[:, None] & (column < DV)[None, :]
    parts = tl.load(part + place[:, None] * DV + column[None, :], mask=inside, other=0.0)
    merged = tl.sum(parts * weight[:, None], 0) / safe
    tl.store(out + row * out_row + head * out_head + column, merged, mask=column < DV)
    tl.store(lse + row * HEADS + head, tl.where(total > 0, base + tl.log(safe), float("-inf")))


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
) -> None:
    """Attention of one query per row, q `[rows, heads, dk]`, into `out` `[rows, heads, dv]` and `lse` `[rows, heads]`.

    Tables and lengths are read on the device; `num_splits` None chooses by the table's width. Any strides, but the
    last of each tensor is 1.
    """
    rows, heads, dk = q.shape
    block_size, kv_heads, dv = key_cache.shape[1], key_cache.shape[2], value_cache.shape[3]
    config = decode_config(heads // kv_heads, max(dk, dv) * key_cache.element_size())
    splits = num_splits or pick_splits(rows * kv_heads, block_table.shape[1] * block_size, q.device)
    part = torch.empty(rows, heads, splits, dv, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    decode_kernel[(rows, kv_heads, splits)](
        q, key_cache, value_cache, block_table, seq_lens, scoring.sinks if scoring.sinks is not None else q,
        part, part_lse, scoring.scale, scoring.softcap, scoring.window,
        q.stride(0), q.stride(1), *key_cache.stride()[:3], *value_cache.stride()[:3], block_table.stride(0),
        GROUP=heads // kv_heads, ROWS=config.rows, DK=dk, DK_PAD=triton.next_power_of_2(dk), DV=dv,
        DV_PAD=triton.next_power_of_2(dv), BLOCK_SIZE=block_size, TILE=config.tile, SPLITS=splits,
        HAS_WINDOW=scoring.window > 0, HAS_SOFTCAP=scoring.softcap > 0, HAS_SINKS=scoring.sinks is not None,
        DOT_F32=interpreted(), LOG2E=LOG2E, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    sums = lse if lse is not None else torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    combine_kernel[(rows, heads)](
        part, part_lse, out, sums, out.stride(0), out.stride(1),
        HEADS=heads, DV=dv, DV_PAD=triton.next_power_of_2(dv), SPLITS=splits,
        SPLITS_PAD=triton.next_power_of_2(splits),
    )  # fmt: skip
