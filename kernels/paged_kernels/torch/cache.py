"""Writing paged caches on torch: new tokens by slot, block copies for copy-on-write, and swaps to other memory."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from paged_kernels.memory import as_layers, storable


def store(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: float = 1.0) -> None:
    """Write `rows` `[tokens, heads, dim]` (any strides) to `slots` of a paged cache; no slot is -1.

    An 8-bit cache takes rows / `scale`, held within what its dtype can say.
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
    """Write new keys and values `[tokens, kv_heads, dim]` to their slots; a token with slot -1 is skipped."""
    wanted = slot_mapping >= 0
    slots = slot_mapping[wanted].long()
    store(key_cache, key[wanted], slots, k_scale)
    store(value_cache, value[wanted], slots, v_scale)


def copy_blocks(cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy whole blocks at once: every source is read before any destination is written.

    The block axis is the fourth from the end, so that a stack of layers `[layers, blocks, ...]` moves in one call.
    Unwritten slots are copied as they are: poison stays poison.
    """
    cache = storable(cache)
    cache.index_copy_(cache.dim() - 4, destination, cache.index_select(cache.dim() - 4, source))


def swap_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy (source, destination) blocks between two caches, of a device and of the host.

    Pairs that follow each other on both sides move as one run. From and to pinned memory the copies are asynchronous,
    in the order of the current stream.
    """
    read, write = as_layers(storable(source)), as_layers(storable(destination))
    for first, second, count in _runs(pairs):
        for layer in range(read.shape[0]):
            write[layer, second : second + count].copy_(read[layer, first : first + count], non_blocking=True)


def _runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first source, first destination, length) of runs that ascend on both sides."""
    cuts = [0] + [
        index
        for index, (before, after) in enumerate(pairwise(pairs), 1)
        if after != (before[0] + 1, before[1] + 1)
    ]
    ends = [*cuts[1:], len(pairs)]
    return [(*pairs[cut], end - cut) for cut, end in zip(cuts, ends, strict=True) if end > cut]
