"""Prefill for Hopper (sm_90), in Gluon: three warp groups, of which two multiply in turns and one copies.

The plain kernel (`prefill.py`) waits for its products before it computes the softmax. Here each of two warp groups has
64 query rows. While one has its products on the matrix units, the other computes its softmax; a barrier hands the units
over (FlashAttention-3, Shah et al. 2024, section 3.1).

The third warp group copies K and V, several tiles ahead. Its copies are asynchronous loads of 16 bytes (cp.async) and
not TMA, because a TMA box lies in one block of the cache and this serves every block size.

It is chosen by name (`prefill_kernel="hopper"`), never by default: no GPU has run it. It serves bfloat16 and float16,
K and V of 64 or 128 in the same dtype, a scale above 0, and none of window, softcap, sinks and ALiBi.
"""

# Gluon types the arguments of kernels itself, and its decorators have no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, type-arg, valid-type"
# ruff: noqa: N803, N806

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from paged_kernels.arguments import PagedBatch, Scoring
from paged_kernels.triton.decode import MAX_ROWS, or_any, shape_of
from paged_kernels.triton.launch import LOG2E, AttentionShape, rows_pad

HALF = 64  # query rows of a warp group: those of one instruction (wgmma)
WARPS = 4  # of a warp group
THREADS = 32 * WARPS
# Registers of a thread that multiplies and of one that copies: multiples of 8, twice the first and once the second are
# 3 x 168, as many as the program is given. With 72 for a copying thread ptxas spills.
MULTIPLIER_REGISTERS, COPIER_REGISTERS = 208, 88


@gluon.jit
def plus(a, b):
    """The sum, for a scan."""
    return a + b


@gluon.jit
def tile_of_rows(bounds, count, item, TOKENS: gl.constexpr, COUNT_PAD: gl.constexpr):
    """As `prefill.tile_of_rows`: the span of rows of tile number `item` (`count`: none), and the tile's index in it."""
    row: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    index = gl.arange(0, COUNT_PAD, row)
    start = gl.load(bounds + index, mask=index < count, other=0)
    stop = gl.load(bounds + index + 1, mask=index < count, other=0)
    tiles = (stop - start + TOKENS - 1) // TOKENS
    passed = gl.associative_scan(tiles, 0, plus) <= item
    span = gl.minimum(gl.sum(gl.where(passed, 1, 0), 0), count)
    return span, item - gl.sum(gl.where(passed, tiles, 0), 0)


@gluon.jit
def copy_tiles(
    keys, values, table, k_tiles, v_tiles, k_full, v_full, k_free, v_free, tiles, limit,
    K_BLOCK: gl.constexpr, K_SLOT: gl.constexpr, V_BLOCK: gl.constexpr, V_SLOT: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values before `limit`, tile by tile, each into its buffer as soon as both readers left it.

    What is not copied is filled with zeros, because NaN times a zero weight is NaN.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    each: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])  # one key per thread
    copied: gl.constexpr = gl.SliceLayout(1, layout)
    key, column = gl.arange(0, TILE, each), gl.arange(0, D, gl.SliceLayout(0, layout))
    row = gl.arange(0, TILE, copied)
    block = gl.load(table + key // BLOCK_SIZE, mask=key < limit, other=0)
    for tile in range(tiles):
        stage, phase = tile % STAGES, (tile // STAGES) & 1
        position = tile * TILE + key
        inside = (tile * TILE + row < limit)[:, None]
        # A thread finds the place of one key, a tile ahead, and the places go to the threads that copy. If each thread
        # found its 16 places, they would not fit in its registers, and loads of the table would wait for each other.
        wide, inner = block.to(gl.int64), position % BLOCK_SIZE
        following = position + TILE
        block = gl.load(table + following // BLOCK_SIZE, mask=following < limit, other=0)
        k_place = gl.convert_layout(wide * K_BLOCK + inner * K_SLOT, copied)
        v_place = k_place
        if V_BLOCK != K_BLOCK or V_SLOT != K_SLOT:
            v_place = gl.convert_layout(wide * V_BLOCK + inner * V_SLOT, copied)
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        async_copy.async_copy_global_to_shared(
            k_tiles.index(stage), keys + (k_place[:, None] + column[None, :]), mask=inside
        )
        async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        async_copy.async_copy_global_to_shared(
            v_tiles.index(stage), values + (v_place[:, None] + column[None, :]), mask=inside
        )
        async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)


@gluon.jit
def softmax(scores, top, total, factor):
    """The weights of a tile, the factor of what was summed before, and the new `top` (in base 2) and `total`."""
    higher = gl.maximum(top, gl.max(scores, 1) * factor)
    base = gl.where(higher == float("-inf"), 0.0, higher)
    weight = gl.exp2(scores * factor - base[:, None])
    keep = gl.exp2(top - base)
    return weight, keep, higher, total * keep + gl.sum(weight, 1)


@gluon.jit
def hidden(scores, tile, open_tiles, asked, TILE: gl.constexpr, layout: gl.constexpr):
    """The scores with the keys after each row's own position at minus infinity. `open_tiles` have none of these."""
    if tile >= open_tiles:
        position = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))
        scores = gl.where(position[None, :] <= asked[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def multiply(
    half: gl.constexpr, queries, k_tiles, v_tiles, k_full, v_full, k_free, v_free, turns, tiles, open_tiles,
    out, lse, factor, v_scale, first_row, first_token, count, context, last_key, first_head, out_row, out_head,
    GROUP: gl.constexpr, HEADS: gl.constexpr, TOKENS: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, HAS_LSE: gl.constexpr, LOG2E: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The output of 64 rows. In its turn a warp group multiplies weights by values, and queries by the next keys."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    w_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    query = queries.index(half)
    member = half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    asked = gl.minimum(context + first_token + member // GROUP, last_key - 1)
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    nothing = gl.zeros([ROWS, TILE], gl.float32, s_layout)
    mbarrier.wait(k_full.index(0), 0)
    fence_async_shared()  # the copies of other threads become visible to the matrix units
    pending = warpgroup_mma(query, k_tiles.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[pending])
    mbarrier.arrive(k_free.index(0), count=1)
    for tile in range(tiles - 1):
        stage, following = tile % STAGES, (tile + 1) % STAGES
        scores = hidden(scores, tile, open_tiles, asked, TILE, s_layout)
        weight, keep, top, total = softmax(scores, top, total, factor)
        acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, o_layout))[:, None]
        weights = gl.convert_layout(weight.to(query.dtype), w_layout)
        mbarrier.wait(turns.index(half), tile & 1)
        mbarrier.wait(v_full.index(stage), (tile // STAGES) & 1)
        mbarrier.wait(k_full.index(following), ((tile + 1) // STAGES) & 1)
        fence_async_shared()
        summed = warpgroup_mma(weights, v_tiles.index(stage), acc, is_async=True)
        pending = warpgroup_mma(
            query, k_tiles.index(following).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        acc, scores = warpgroup_mma_wait(0, deps=[summed, pending])
        mbarrier.arrive(turns.index(1 - half), count=1)
        mbarrier.arrive(v_free.index(stage), count=1)
        mbarrier.arrive(k_free.index(following), count=1)
    last = tiles - 1
    scores = hidden(scores, last, open_tiles, asked, TILE, s_layout)
    weight, keep, top, total = softmax(scores, top, total, factor)
    acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, o_layout))[:, None]
    weights = gl.convert_layout(weight.to(query.dtype), w_layout)
    mbarrier.wait(turns.index(half), last & 1)
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    fence_async_shared()
    summed = warpgroup_mma(weights, v_tiles.index(last % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[summed])
    mbarrier.arrive(turns.index(1 - half), count=1)
    seen = total != 0  # not `> 0`: a NaN among the keys must reach the output
    safe = gl.where(seen, total, 1.0)
    inverse = gl.where(seen, v_scale / safe, 0.0)
    if HAS_LSE:
        logsum = gl.where(seen, (gl.where(seen, top, 0.0) + gl.log2(safe)) / LOG2E, float("-inf"))
        token = first_token + member // GROUP
        place = (first_row + token).to(gl.int64) * HEADS + first_head + member % GROUP
        gl.store(lse + place, logsum, mask=(member < TOKENS * GROUP) & (token < count))
    result = acc * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]
    rows = gl.convert_layout(result.to(query.dtype), store_layout)
    member = half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, store_layout))
    column = gl.arange(0, D, gl.SliceLayout(0, store_layout))
    token = first_token + member // GROUP
    place = (first_row + token).to(gl.int64) * out_row + (first_head + member % GROUP) * out_head
    real = (member < TOKENS * GROUP) & (token < count)
    gl.store(out + (place[:, None] + column[None, :]), rows, mask=real[:, None])


@gluon.jit(do_not_specialize=["sequences", "table_row"])
def hopper_prefill_kernel(
    q, key_cache, value_cache, table, lengths, bounds, out, lse,
    scale, v_scale, sequences, q_row, q_head, k_head, v_head, table_row, out_row, out_head,
    K_BLOCK: gl.constexpr, K_SLOT: gl.constexpr, V_BLOCK: gl.constexpr, V_SLOT: gl.constexpr,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, ROWS_PAD: gl.constexpr, HAS_LSE: gl.constexpr, LOG2E: gl.constexpr,
    MULTIPLIER: gl.constexpr, COPIER: gl.constexpr, READERS: gl.constexpr,
):  # fmt: skip
    """Output rows and natural-log LSE of one tile of 2 x ROWS rows, in the order of `prefill_kernel`."""
    TOKENS: gl.constexpr = 2 * ROWS // GROUP
    program = gl.program_id(0)
    kv_head = (program % KV_HEADS).to(gl.int64)
    item = gl.num_programs(0) // KV_HEADS - 1 - program // KV_HEADS
    sequence, tile = tile_of_rows(bounds, sequences, item, TOKENS, ROWS_PAD)
    if sequence < sequences:
        start, length = gl.load(bounds + sequence).to(gl.int32), gl.load(lengths + sequence).to(gl.int32)
        count = gl.load(bounds + sequence + 1).to(gl.int32) - start
        first_token = (tile * TOKENS).to(gl.int32)
        context = length - count
        last_key = gl.minimum(length, context + first_token + TOKENS)
        # a tile without keys reads one tile of zeros, all of them hidden
        tiles = gl.maximum((last_key + TILE - 1) // TILE, 1)
        open_tiles = gl.maximum(gl.minimum(context + first_token + 1, last_key), 0) // TILE
        first_head = kv_head * GROUP
        kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, D], key_cache.dtype.element_ty)
        q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], q.dtype.element_ty)
        k_tiles = gl.allocate_shared_memory(key_cache.dtype.element_ty, [STAGES, TILE, D], kv_layout)
        v_tiles = gl.allocate_shared_memory(value_cache.dtype.element_ty, [STAGES, TILE, D], kv_layout)
        queries = gl.allocate_shared_memory(q.dtype.element_ty, [2, ROWS, D], q_layout)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(k_full.index(stage), count=READERS)
            mbarrier.init(v_full.index(stage), count=READERS)
            mbarrier.init(k_free.index(stage), count=2)
            mbarrier.init(v_free.index(stage), count=2)
        mbarrier.init(turns.index(0), count=1)
        mbarrier.init(turns.index(1), count=1)
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        column = gl.arange(0, D, gl.SliceLayout(0, layout))
        for half in gl.static_range(2):
            member = half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            token = first_token + member // GROUP
            place = (start + token).to(gl.int64) * q_row + (first_head + member % GROUP) * q_head
            real = (member < TOKENS * GROUP) & (token < count)
            rows = gl.load(q + (place[:, None] + column[None, :]), mask=real[:, None], other=0.0)
            queries.index(half).store(rows)
        fence_async_shared()
        mbarrier.arrive(turns.index(0), count=1)  # the first half begins
        factor = scale * LOG2E
        keys, values = key_cache + kv_head * k_head, value_cache + kv_head * v_head
        my_table = table + sequence.to(gl.int64) * table_row
        gl.warp_specialize(
            [
                (
                    multiply,
                    (
                        gl.constexpr(0), queries, k_tiles, v_tiles, k_full, v_full, k_free, v_free, turns, tiles,
                        open_tiles, out, lse, factor, v_scale, start, first_token, count, context, last_key,
                        first_head, out_row, out_head,
                        GROUP, KV_HEADS * GROUP, TOKENS, TILE, D, STAGES, HAS_LSE, LOG2E, ROWS,
                    ),
                ),
                (
                    multiply,
                    (
                        gl.constexpr(1), queries, k_tiles, v_tiles, k_full, v_full, k_free, v_free, turns, tiles,
                        open_tiles, out, lse, factor, v_scale, start, first_token, count, context, last_key,
                        first_head, out_row, out_head,
                        GROUP, KV_HEADS * GROUP, TOKENS, TILE, D, STAGES, HAS_LSE, LOG2E, ROWS,
                    ),
                ),
                (
                    copy_tiles,
                    (
                        keys, values, my_table, k_tiles, v_tiles, k_full, v_full, k_free, v_free, tiles, last_key,
                        K_BLOCK, K_SLOT, V_BLOCK, V_SLOT, BLOCK_SIZE, TILE, D, STAGES,
                    ),
                ),
            ],
            [4, 4],
            [MULTIPLIER, COPIER],
        )  # fmt: skip


def hopper_constants(shape: AttentionShape, *, sequences: int, lse: bool) -> dict[str, Any]:
    """Constants of `hopper_prefill_kernel`. With 128 keys in a tile, two stages of 128 numbers fit, or three of 64."""
    return {
        **dict(zip(("K_BLOCK", "K_SLOT", "V_BLOCK", "V_SLOT"), shape.strides, strict=True)),
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "ROWS": HALF,
        "D": shape.dk,
        "BLOCK_SIZE": shape.block_size,
        "TILE": 128,
        "STAGES": 2 if shape.dk == 128 else 3,
        "ROWS_PAD": rows_pad(sequences),
        "HAS_LSE": lse,
        "LOG2E": LOG2E,
        "MULTIPLIER": MULTIPLIER_REGISTERS,
        "COPIER": COPIER_REGISTERS,
        "READERS": THREADS,
    }


def run_hopper_prefill(
    batch: PagedBatch, scoring: Scoring, out: torch.Tensor, lse: torch.Tensor | None = None
) -> None:
    """As `prefill.run_prefill`. The caller has asked `backends.check_prefill_kernel`, which refuses other cases."""
    q, key_cache, value_cache, tables, seq_lens, cu_seqlens_q, max_seqlen_q = batch
    shape = shape_of(q, key_cache, value_cache)
    tokens = 2 * HALF // shape.group
    for first in range(0, len(seq_lens), MAX_ROWS):
        some = slice(first, first + MAX_ROWS)
        bounds, lengths, table = cu_seqlens_q[first : first + MAX_ROWS + 1], seq_lens[some], tables[some]
        sequences = len(lengths)
        # each span ends in at most one partly filled tile
        tiles = min(triton.cdiv(len(q), tokens) + sequences, sequences * triton.cdiv(max_seqlen_q, tokens))
        hopper_prefill_kernel[(tiles * shape.kv_heads,)](
            q, key_cache, value_cache, table, lengths, bounds, out, or_any(lse, q),
            scoring.scale * scoring.k_scale, scoring.v_scale, sequences,
            q.stride(0), q.stride(1), key_cache.stride(2), value_cache.stride(2), table.stride(0),
            out.stride(0), out.stride(1),
            **hopper_constants(shape, sequences=sequences, lse=lse is not None), num_warps=WARPS,
        )  # fmt: skip
