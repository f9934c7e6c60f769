"""Write paged caches on torch: new tokens by slot, block copies for copy-on-write, and swaps to other memory."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from paged_kernels.memory import as_layers, storable


def store(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: float = 1.0) -> None:
    """Write `rows` `[tokens, heads, dim]` (any strides) to `slots` of a paged cache. No slot may be -1.

    An 8-bit cache stores rows / `scale`, clamped to the range of its dtype.
    """
    if cache.dtype.itemsize == 1:
        most = torch.finfo(cache.dtype).max
        rows = (rows.float() / scale).clamp(-most, most).to(cache.dtype).view(torch.uint8)
        cache = storable(cache)
    if cache.is_contiguous():
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)
    else:
        cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write new keys and values `[tokens, kv_heads, dim]` to their slots. A token with slot -1 is skipped."""
    wanted = slot_mapping >= 0
    slots = slot_mapping[wanted].long()
    store(key_cache, key[wanted], slots, k_scale)
    store(value_cache, value[wanted], slots, v_scale)


def copy_blocks(cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy whole blocks at once: every source is read before any destination is written.

    The block axis is the fourth from the end, so that a stack of layers `[layers, blocks, ...]` is copied in one call.
    Unwritten slots stay NaN in the copy.
    """
    cache = storable(cache)
    cache.index_copy_(cache.dim() - 4, destination, cache.index_select(cache.dim() - 4, source))


def swap_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy (source, destination) blocks between a cache on a device and one on the host.

    Pairs that are consecutive on both sides are copied together. With pinned memory the copies are asynchronous, in
    the order of the current stream.
    """
    read, write = as_layers(storable(source)), as_layers(storable(destination))
    for first, second, count in _consecutive(pairs):
        for layer in range(read.shape[0]):
            write[layer, second : second + count].copy_(read[layer, first : first + count], non_blocking=True)


def _consecutive(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first source, first destination, length) of pairs that are consecutive on both sides."""
    cuts = [0] + [
        index
        for index, (before, after) in enumerate(pairwise(pairs), 1)
        if after != (before[0] + 1, before[1] + 1)
    ]
    ends = [*cuts[1:], len(pairs)]
    return [(*pairs[cut], end - cut) for cut, end in zip(cuts, ends, strict=True) if end > cut]
