"""Triton prefill: causal attention of query chunks of any length over paged KV, with their cached prefixes.

A program computes one tile of query rows for one sequence and one KV head. A row is one (token, query head of the
group), so a group reads its keys once. Each program finds its sequence from the bounds on the device. So a batch of
short and long chunks has no idle programs. Keys that every row of the tile may see are read without a mask.
Rows of a few queries are left to the decode kernel, which reads their keys in parts.
"""

# Triton types the arguments of kernels itself, and its decorators have no types.
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl

from paged_kernels.arguments import PagedBatch, Scoring
from paged_kernels.triton.decode import MAX_ROWS, item_of_program, or_any, shape_of
from paged_kernels.triton.launch import (
    Features,
    capability_of,
    chunks_of,
    prefill_config,
    prefill_constants,
    tokens_of,
)
from paged_kernels.triton.scan import as_operands, finished, joined, nothing_seen, scan_keys


@triton.jit
def tile_of_rows(bounds, count, item, TOKENS: tl.constexpr, COUNT_PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """The span of rows that tile number `item` belongs to, and the tile's index in that span.

    The span is `count` if there is no such tile. Span i has rows `bounds[i] : bounds[i + 1]`, cut into tiles of TOKENS.
    """
    index = tl.arange(0, COUNT_PAD)
    start = tl.load(bounds + index, mask=index < count, other=0)
    stop = tl.load(bounds + index + 1, mask=index < count, other=0)
    tiles = tl.cdiv(stop - start, TOKENS)
    passed = tl.cumsum(tiles, 0) <= item
    span = tl.minimum(tl.sum(passed.to(tl.int32), 0), count)
    return span, item - tl.sum(tl.where(passed, tiles, 0), 0)


@triton.jit(do_not_specialize=["window", "sequences", "table_row"])
def prefill_kernel(  # type: ignore[no-untyped-def]
    q, key_cache, value_cache, table, lengths, bounds, sinks, alibi, out, lse,
    scale, softcap, v_scale, window, sequences,
    q_row, q_head, k_head, v_head, table_row, out_row, out_head,
    K_BLOCK: tl.constexpr, K_SLOT: tl.constexpr, V_BLOCK: tl.constexpr, V_SLOT: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PATH: tl.constexpr,
    ROWS_PAD: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr, FOLD: tl.constexpr, HAS_LSE: tl.constexpr, PAIRS: tl.constexpr, DOT_F32: tl.constexpr,
    LOG2E: tl.constexpr,
):  # fmt: skip
    """Output rows and natural-log LSE of one tile. The last tiles see the most keys, so they start first."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    TOKENS: tl.constexpr = (
        ROWS // GROUP if ROWS > GROUP else 1
    )  # a group of more than ROWS takes several programs
    item, kv_head, chunk = item_of_program(KV_HEADS, GROUP, ROWS)
    item = tl.num_programs(0) // (KV_HEADS * ((GROUP + ROWS - 1) // ROWS)) - 1 - item
    sequence, tile = tile_of_rows(bounds, sequences, item, TOKENS, ROWS_PAD)
    if sequence < sequences:
        start, length = tl.load(bounds + sequence), tl.load(lengths + sequence)
        queries = tl.load(bounds + sequence + 1) - start
        first_token = tile * TOKENS
        member, column = chunk * ROWS + tl.arange(0, ROWS), tl.arange(0, DK_PAD)
        token, head = first_token + member // GROUP, (kv_head * GROUP + member % GROUP).to(tl.int64)
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
        top, total, acc, odd_acc = nothing_seen(ROWS, DV_PAD, PAIRS)
        query, odd_query, power = as_operands(query, PAIRS)
        keys, values = key_cache + kv_head * k_head, value_cache + kv_head * v_head
        my_table = table + sequence.to(tl.int64) * table_row
        begin, end = length * 0, tl.cdiv(last_key, TILE)
        masked_from = tl.maximum(tl.minimum(context + first_token + 1, last_key), 0) // TILE
        if HAS_WINDOW:
            masked_from = tl.maximum(context + first_token - window + 1, 0) // TILE
        for MASKED in tl.static_range(1 if HAS_WINDOW else 0, 2):
            top, total, acc, odd_acc = scan_keys(
                query, odd_query, power, asked, slope, keys, values, my_table, top, total, acc, odd_acc,
                masked_from if MASKED else begin, end if MASKED else masked_from, last_key, scale, softcap, window,
                K_BLOCK, K_SLOT, V_BLOCK, V_SLOT, DK, DK_PAD, DV, DV_PAD, False, BLOCK_SIZE, TILE, PATH,
                MASKED > 0, MASKED > 0, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, FOLD, PAIRS, DOT_F32, LOG2E,
            )  # fmt: skip
        sink = tl.zeros([ROWS], tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        result, logsum = finished(top, total, joined(acc, odd_acc, PAIRS), sink, v_scale, HAS_SINKS, LOG2E)
        wide = tl.arange(0, DV_PAD)
        place = out + flat[:, None] * out_row + head[:, None] * out_head + wide[None, :]
        tl.store(place, result, mask=real[:, None] & (wide < DV)[None, :])
        if HAS_LSE:
            tl.store(lse + flat * HEADS + head, logsum, mask=real)


def run_prefill(
    batch: PagedBatch, scoring: Scoring, out: torch.Tensor, lse: torch.Tensor | None = None
) -> None:
    """Attention of the rows `cu_seqlens_q[i] : cu_seqlens_q[i + 1]` of q `[tokens, heads, dk]` for every sequence i.

    Lengths, bounds and tables (int32) are read on the device; `max_seqlen_q` bounds the queries of any sequence. Rows
    outside all spans stay unchanged. The last stride of each tensor must be 1; the others are free. `lse` is float32
    and contiguous.
    """
    q = batch.q
    shape = shape_of(q, batch.key_cache, batch.value_cache)
    config, features = (
        prefill_config(shape, capability_of(q.device)),
        Features.of(scoring, lse=lse is not None),
    )
    tokens, caches = tokens_of(shape, config), [shape.as_read(cache) for cache in batch[1:3]]
    for first in range(0, len(batch.seq_lens), MAX_ROWS):
        table, lengths = (each[first : first + MAX_ROWS] for each in (batch.block_table, batch.seq_lens))
        sequences = len(lengths)
        # Each span ends in at most one partly filled tile.
        tiles = min(
            triton.cdiv(len(q), tokens) + sequences, sequences * triton.cdiv(batch.max_seqlen_q, tokens)
        )
        prefill_kernel[(tiles * shape.kv_heads * chunks_of(shape, config),)](
            q, *caches, table, lengths, batch.cu_seqlens_q[first : first + MAX_ROWS + 1],
            or_any(scoring.sinks, q), or_any(scoring.alibi, q), out, or_any(lse, q),
            scoring.scale * scoring.k_scale, scoring.softcap, scoring.v_scale, scoring.window, sequences,
            q.stride(0), q.stride(1), *(cache.stride(2) for cache in caches),
            table.stride(0), out.stride(0), out.stride(1),
            **prefill_constants(shape, config, features, sequences=sequences),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
