"""A case's KV laid out in one piece per sequence, and pools without poison: what other implementations start from."""

import torch

from paged_kernels.cache_layout import storable
from paged_kernels.providers.case import Case


def contiguous_kv(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[sequences, longest, kv_heads, dim]`, zeros behind each sequence's end, in the cache's dtype."""
    pair = []
    for cache in (case.key_cache, case.value_cache):
        held = storable(cache)
        laid = held.new_zeros(len(case.lengths), max(case.lengths), *held.shape[2:])
        for row, length in enumerate(case.lengths):
            position = torch.arange(length, device=held.device)
            blocks = case.block_table[row, position // case.block_size].long()
            laid[row, :length] = held[blocks, position % case.block_size]
        pair.append(laid.view(cache.dtype))
    return pair[0], pair[1]


def without_poison(cache: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides in which unwritten slots are zeros: others multiply what they mask out."""
    clean = torch.empty_like(storable(cache))  # keeps the strides of NHD and HND
    clean.copy_(storable(cache))
    clean = clean.view(cache.dtype)
    for some in clean.split(1024):  # type: ignore[no-untyped-call]
        storable(some)[torch.isnan(some.float() if cache.dtype.itemsize == 1 else some)] = 0
    return clean
