"""Launching the Triton kernels that write caches and merge partial attentions."""

import torch
import triton

from paged_kernels.cache_layout import as_layers, block_width, storable
from paged_kernels.triton_cache_kernel import merge_kernel, move_kernel, store_kernel
from paged_kernels.triton_config import AttentionShape
from paged_kernels.triton_constants import merge_constants, store_constants

CHUNK = 2048  # elements that one program moves


def store(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write `rows` `[tokens, heads, dim]` (any token and head strides) to `slots`; -1 skips a token."""
    _store(rows, None, cache, None, slots, 1.0, 1.0)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write keys and values of all tokens in one launch."""
    _store(key, value, key_cache, value_cache, slots, k_scale, v_scale)


def _store(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slots: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    key = key if key.stride(2) == 1 else key.contiguous()
    second, second_cache = key if value is None else value, key_cache if value_cache is None else value_cache
    second = second if second.stride(2) == 1 else second.contiguous()
    block_size, kv_heads, dk = key_cache.shape[1:]
    shape = AttentionShape(
        key.dtype, key_cache.dtype, kv_heads, kv_heads, dk, second_cache.shape[3], block_size
    )
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
    """Copy whole blocks of `[..., blocks, block_size, heads, dim]`, and of a second tensor of the same form with them.

    All sources are read before any destination is written, through a staging buffer; `disjoint` promises that no
    destination is a source, and saves it.
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
