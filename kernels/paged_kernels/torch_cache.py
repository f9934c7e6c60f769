"""Writing to paged caches with torch: new tokens by slot, and block copies for copy-on-write."""

import torch


def store(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write `rows` `[tokens, heads, dim]` (any strides) to `slots` of a paged cache; no slot is -1."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write new keys and values `[tokens, kv_heads, dim]` to their slots; a token with slot -1 is skipped."""
    wanted = slot_mapping >= 0
    slots = slot_mapping[wanted].long()
    store(key_cache, key[wanted], slots)
    store(value_cache, value[wanted], slots)


def copy_blocks(cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy whole blocks at once: every source is read before any destination is written.

    The block axis is the fourth from the end, so that a stack of layers `[layers, blocks, ...]` moves in one call.
    Unwritten slots are copied as they are: poison stays poison.
    """
    cache.index_copy_(cache.dim() - 4, destination, cache.index_select(cache.dim() - 4, source))
