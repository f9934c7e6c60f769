"""Triton kernels that write paged caches: new tokens by slot, and block copies."""
# Kernel arguments are pointers and numbers that Triton types itself, and its decorators carry no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit
def write_row(
    rows, cache, token, slot, inverse, row_token, row_head, block_stride, slot_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Copy one token's [HEADS, DIM] to its slot. An 8-bit cache takes it times `inverse`, held within LIMIT."""
    element = tl.arange(0, PAD)
    head, column = element // DIM, element % DIM
    inside = element < HEADS * DIM
    values = tl.load(rows + token * row_token + head * row_head + column, mask=inside)
    if LIMIT > 0:
        wide = values.to(tl.float32) * inverse
        values = tl.clamp(wide, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    place = cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + head * head_stride
    tl.store(place + column, values.to(cache.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["limit"])
def store_kernel(
    key, value, key_cache, value_cache, slots, k_inverse, v_inverse, limit,
    key_token, key_head, value_token, value_head, k_block, k_slot, k_head, v_block, v_slot, v_head,
    HEADS: tl.constexpr, DK: tl.constexpr, K_PAD: tl.constexpr, DV: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One token's K and V. Slot -1 is skipped, and so is a slot at `limit` or behind: it would write elsewhere."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot >= 0) & (slot < limit):
        write_row(
            key, key_cache, token, slot, k_inverse, key_token, key_head, k_block, k_slot, k_head,
            HEADS, DK, K_PAD, BLOCK_SIZE, LIMIT,
        )  # fmt: skip
        if DV > 0:
            write_row(
                value, value_cache, token, slot, v_inverse, value_token, value_head, v_block, v_slot, v_head,
                HEADS, DV, V_PAD, BLOCK_SIZE, LIMIT,
            )  # fmt: skip


@triton.jit
def move_kernel(
    first_source, second_source, first_destination, second_destination, source_block, destination_block, width,
    source_stride, destination_stride, source_layer, destination_layer, CHUNK: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """One chunk of one block of one layer of the first or, where PAIR, of the second tensor.

    destination[destination_block[i]] = source[source_block[i]]; a block is `width` dense elements.
    """
    pair, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    element = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = element < width
    second = layer % 2 == 1
    if PAIR:
        layer = layer // 2
    read = tl.load(source_block + pair).to(tl.int64) * source_stride + layer * source_layer
    write = tl.load(destination_block + pair).to(tl.int64) * destination_stride + layer * destination_layer
    if PAIR and second:
        tl.store(
            second_destination + write + element,
            tl.load(second_source + read + element, mask=inside),
            mask=inside,
        )
    else:
        tl.store(
            first_destination + write + element,
            tl.load(first_source + read + element, mask=inside),
            mask=inside,
        )


@triton.jit
def merge_kernel(
    o_a, lse_a, o_b, lse_b, out, lse, a_row, a_head, b_row, b_head, out_row, out_head,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """One token: weigh two partial attentions by exp(LSE). An empty side has -inf and takes no part."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_PAD + tl.arange(0, HEADS_PAD)
    column = tl.arange(0, DV_PAD)
    real = head < HEADS
    inside = real[:, None] & (column < DV)[None, :]
    a = tl.load(lse_a + token * HEADS + head, mask=real, other=float("-inf"))
    b = tl.load(lse_b + token * HEADS + head, mask=real, other=float("-inf"))
    top = tl.maximum(a, b)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(a - base), tl.exp(b - base)
    total = weight_a + weight_b
    seen = total > 0
    safe = tl.where(seen, total, 1.0)
    side_a = tl.load(
        o_a + token * a_row + head[:, None] * a_head + column[None, :],
        mask=inside & (weight_a > 0)[:, None],
        other=0.0,
    ).to(tl.float32)
    side_b = tl.load(
        o_b + token * b_row + head[:, None] * b_head + column[None, :],
        mask=inside & (weight_b > 0)[:, None],
        other=0.0,
    ).to(tl.float32)
    merged = side_a * (weight_a / safe)[:, None] + side_b * (weight_b / safe)[:, None]
    tl.store(out + token * out_row + head[:, None] * out_head + column[None, :], merged, mask=inside)
    tl.store(lse + token * HEADS + head, tl.where(seen, base + tl.log(safe), float("-inf")), mask=real)
