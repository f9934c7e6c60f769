"""Triton kernels that write paged caches (new tokens by slot, block copies) and merge two partial attentions."""

# Triton types the arguments of kernels itself, and its decorators have no types.
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl

from paged_kernels.arguments import as_layers, block_width, storable
from paged_kernels.triton.launch import AttentionShape, merge_constants, store_constants

CHUNK = 2048  # elements that one program copies


@triton.jit
def write_row(  # type: ignore[no-untyped-def]
    rows, cache, token, slot, inverse, row_token, row_head, block_stride, slot_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Copy one token's [HEADS, DIM] to its slot. An 8-bit cache stores it times `inverse`, clamped to LIMIT."""
    element = tl.arange(0, PAD)
    head, column = (element // DIM).to(tl.int64), element % DIM
    inside = element < HEADS * DIM
    values = tl.load(rows + token * row_token + head * row_head + column, mask=inside)
    if LIMIT > 0:
        wide = values.to(tl.float32) * inverse
        values = tl.clamp(wide, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    place = cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + head * head_stride
    tl.store(place + column, values.to(cache.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["limit"])
def store_kernel(  # type: ignore[no-untyped-def]
    key, value, key_cache, value_cache, slots, k_inverse, v_inverse, limit,
    key_token, key_head, value_token, value_head, k_block, k_slot, k_head, v_block, v_slot, v_head,
    HEADS: tl.constexpr, DK: tl.constexpr, K_PAD: tl.constexpr, DV: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One token's K and V. Slot -1 is skipped, and so are slots from `limit` on, which lie outside the cache."""
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
def move_kernel(  # type: ignore[no-untyped-def]
    first_source, second_source, first_destination, second_destination, source_block, destination_block, width,
    source_stride, destination_stride, source_layer, destination_layer, CHUNK: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Copy one chunk of one block of one layer, of the first tensor or (if PAIR) of the second.

    destination[destination_block[i]] = source[source_block[i]]; a block has `width` dense elements.
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
def merge_kernel(  # type: ignore[no-untyped-def]
    o_a, lse_a, o_b, lse_b, out, lse, a_row, a_head, b_row, b_head, out_row, out_head,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """One token: weight two partial attentions by exp(LSE). An empty side has LSE -inf and is ignored."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS_PAD + tl.arange(0, HEADS_PAD)).to(tl.int64)
    column = tl.arange(0, DV_PAD)
    real = head < HEADS
    inside = real[:, None] & (column < DV)[None, :]
    a = tl.load(lse_a + token * HEADS + head, mask=real, other=float("-inf"))
    b = tl.load(lse_b + token * HEADS + head, mask=real, other=float("-inf"))
    top = tl.maximum(a, b)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(a - base), tl.exp(b - base)
    total = weight_a + weight_b
    seen = total != 0  # not `> 0`: a NaN of either side must reach the output
    safe = tl.where(seen, total, 1.0)
    side_a = tl.load(
        o_a + token * a_row + head[:, None] * a_head + column[None, :],
        mask=inside & (weight_a != 0)[:, None],
        other=0.0,
    ).to(tl.float32)
    side_b = tl.load(
        o_b + token * b_row + head[:, None] * b_head + column[None, :],
        mask=inside & (weight_b != 0)[:, None],
        other=0.0,
    ).to(tl.float32)
    merged = side_a * (weight_a / safe)[:, None] + side_b * (weight_b / safe)[:, None]
    tl.store(out + token * out_row + head[:, None] * out_head + column[None, :], merged, mask=inside)
    tl.store(lse + token * HEADS + head, tl.where(seen, base + tl.log(safe), float("-inf")), mask=real)


def store(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write `rows` `[tokens, heads, dim]` (any token and head strides) to `slots`. Slot -1 skips a token."""
    reshape_and_cache(rows, None, cache, None, slots)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slots: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write keys and values `[tokens, kv_heads, dim]` of all tokens in one launch. Slot -1 skips a token.

    Without `value` and `value_cache` only keys are written.
    """
    key = key if key.stride(2) == 1 else key.contiguous()
    second, second_cache = key if value is None else value, key_cache if value_cache is None else value_cache
    second = second if second.stride(2) == 1 else second.contiguous()
    block_size, kv_heads, dk = key_cache.shape[1:]
    dtypes, dv = (key.dtype, key_cache.dtype), second_cache.shape[3]
    shape = AttentionShape(*dtypes, kv_heads, kv_heads, dk, dv, block_size)
    store_kernel[(len(key),)](
        key, second, key_cache, second_cache, slots, 1.0 / k_scale, 1.0 / v_scale, key_cache.shape[0] * block_size,
        key.stride(0), key.stride(1), second.stride(0), second.stride(1),
        *key_cache.stride()[:3], *second_cache.stride()[:3],
        **store_constants(shape, values=value is not None),
    )  # fmt: skip


def copy_blocks(
    cache: torch.Tensor,
    source: torch.Tensor,
    destination: torch.Tensor,
    second: torch.Tensor | None = None,
    *,
    disjoint: bool = False,
) -> None:
    """Copy whole blocks of `[..., blocks, block_size, heads, dim]`, also of a `second` tensor of this shape if given.

    All sources are read before any destination is written, through a staging buffer. `disjoint` promises that no
    destination is a source; then there is no staging buffer.
    """
    caches = [as_layers(storable(tensor)) for tensor in (cache, cache if second is None else second)]
    source, destination = source.contiguous(), destination.contiguous()
    if disjoint:
        _move(caches, caches, source, destination, pair=second is not None)
        return
    shape = (caches[0].shape[0], len(source), block_width(caches[0]), 1, 1)
    staging = [caches[0].new_empty(shape) for _ in caches[: 1 if second is None else 2]]
    staging = [staging[0], staging[-1]]
    place = torch.arange(len(source), device=cache.device)
    _move(caches, staging, source, place, pair=second is not None)
    _move(staging, caches, place, destination, pair=second is not None)


def _move(
    source: list[torch.Tensor],
    destination: list[torch.Tensor],
    read: torch.Tensor,
    write: torch.Tensor,
    *,
    pair: bool,
) -> None:
    layers, width = source[0].shape[0], block_width(source[0])
    grid = (len(read), layers * (2 if pair else 1), triton.cdiv(width, CHUNK))
    move_kernel[grid](
        *source, *destination, read, write, width, source[0].stride(1), destination[0].stride(1),
        source[0].stride(0), destination[0].stride(0), CHUNK=CHUNK, PAIR=pair,
    )  # fmt: skip


def merge_attn_states(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge `[tokens, heads, dv]` of two key sets into `out` and `lse` (float32, contiguous, `[tokens, heads]`)."""
    tokens, heads, dv = o_a.shape
    constants = merge_constants(heads, dv)
    merge_kernel[(tokens, triton.cdiv(heads, constants["HEADS_PAD"]))](
        o_a, lse_a, o_b, lse_b, out, lse, o_a.stride(0), o_a.stride(1), o_b.stride(0), o_b.stride(1),
        out.stride(0), out.stride(1), **constants,
    )  # fmt: skip
