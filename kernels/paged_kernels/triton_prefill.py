"""Triton prefill: causal attention of ragged query chunks over paged KV, with their cached prefixes.

A program takes one sequence, one KV head and a tile of query rows; a row is one (token, head of the group), so that a
group reads its keys once. The tile of keys is independent of the block size.
"""
# Kernel arguments are pointers and numbers that Triton types itself, and its decorators carry no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl

from paged_kernels.scoring import Scoring
from paged_kernels.triton_config import LOG2E, interpreted, prefill_config
from paged_kernels.triton_decode import block_ids, capped, load_tile, matmul


@triton.jit
def prefill_kernel(
    q, key_cache, value_cache, table, lengths, bounds, sinks, out, lse,
    scale, softcap, window,
    q_row, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_row, out_row, out_head, lse_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, DOT_F32: tl.constexpr,
    LOG2E: tl.constexpr,
):  # fmt: skip
    """Output rows and natural-log LSE of one tile; tiles behind a sequence's queries do nothing."""
    TOKENS: tl.constexpr = ROWS // GROUP
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, length = tl.load(bounds + sequence), tl.load(lengths + sequence)
    queries = tl.load(bounds + sequence + 1) - start
    first_token = tl.program_id(2) * TOKENS
    if first_token < queries:
        member, column = tl.arange(0, ROWS), tl.arange(0, DK_PAD)
        token, head = first_token + member // GROUP, kv_head * GROUP + member % GROUP
        real = (member < TOKENS * GROUP) & (token < queries)
        query_position = length - queries + token
        flat = (start + token).to(tl.int64)
        query = tl.load(
            q + flat[:, None] * q_row + head[:, None] * q_head + column[None, :],
            mask=real[:, None] & (column < DK)[None, :],
            other=0.0,
        )
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if HAS_SINKS:
            top = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
            total = tl.full([ROWS], 1.0, tl.float32)
        acc = tl.zeros([ROWS, DV_PAD], tl.float32)
        keys, values = key_cache + kv_head * k_head, value_cache + kv_head * v_head
        my_table = table + sequence * table_row
        last_key = tl.minimum(length, length - queries + first_token + TOKENS)
        begin = length * 0
        if HAS_WINDOW:
            begin = tl.maximum(length - queries + first_token - window + 1, 0) // TILE
        position = begin * TILE + tl.arange(0, TILE)
        block = block_ids(my_table, position, position < last_key, BLOCK_SIZE)
        for tile in range(begin, tl.cdiv(last_key, TILE)):
            position = tile * TILE + tl.arange(0, TILE)
            ahead = position + TILE
            next_block = block_ids(my_table, ahead, ahead < last_key, BLOCK_SIZE)
            inside = position < last_key
            k = load_tile(keys, block, position, inside, k_block, k_slot, DK, DK_PAD, BLOCK_SIZE)
            v = load_tile(values, block, position, inside, v_block, v_slot, DV, DV_PAD, BLOCK_SIZE)
            scores = capped(matmul(query, tl.trans(k), DOT_F32) * scale, softcap, HAS_SOFTCAP) * LOG2E
            visible = inside[None, :] & (position[None, :] <= query_position[:, None])
            if HAS_WINDOW:
                visible = visible & (position[None, :] > query_position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
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
        place = out + flat[:, None] * out_row + head[:, None] * out_head + wide[None, :]
        tl.store(place, acc / safe[:, None], mask=real[:, None] & (wide < DV)[None, :])
        logsum = tl.where(seen, (tl.where(seen, top, 0.0) + tl.log2(safe)) / LOG2E, float("-inf"))
        tl.store(lse + flat * lse_row + head, logsum, mask=real)


def run_prefill(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    scoring: Scoring,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of the rows `cu_seqlens_q[i] : cu_seqlens_q[i + 1]` of q `[tokens, heads, dk]` for every sequence i.

    `max_seqlen_q` bounds the queries of any sequence, so that the grid needs no look at the device. Rows outside all
    spans are left alone. Any strides, but the last of each tensor is 1.
    """
    heads, dk = q.shape[1:]
    block_size, kv_heads, dv = key_cache.shape[1], key_cache.shape[2], value_cache.shape[3]
    group = heads // kv_heads
    config = prefill_config(group, max(dk, dv) * key_cache.element_size())
    sums = lse if lse is not None else torch.empty(q.shape[0], heads, dtype=torch.float32, device=q.device)
    grid = (seq_lens.shape[0], kv_heads, triton.cdiv(max_seqlen_q, config.rows // group))
    prefill_kernel[grid](
        q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q,
        scoring.sinks if scoring.sinks is not None else q, out, sums,
        scoring.scale, scoring.softcap, scoring.window,
        q.stride(0), q.stride(1), *key_cache.stride()[:3], *value_cache.stride()[:3], block_table.stride(0),
        out.stride(0), out.stride(1), sums.stride(0),
        GROUP=group, ROWS=config.rows, DK=dk, DK_PAD=triton.next_power_of_2(dk), DV=dv,
        DV_PAD=triton.next_power_of_2(dv), BLOCK_SIZE=block_size, TILE=config.tile,
        HAS_WINDOW=scoring.window > 0, HAS_SOFTCAP=scoring.softcap > 0, HAS_SINKS=scoring.sinks is not None,
        DOT_F32=interpreted(), LOG2E=LOG2E, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
