"""Gathering a sequence's blocks into a reused buffer: the torch paths read KV through this."""

import torch

from paged_kernels.cache_layout import storable
from paged_kernels.workspace import Workspace


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, name: str, workspace: Workspace) -> torch.Tensor:
    """`[blocks, block_size, heads, dim]` of the wanted blocks, in the workspace's memory; 8-bit floats as bytes."""
    cache = storable(cache)
    buffer = workspace.take(name, len(blocks) * cache[0].numel(), cache)
    gather_into(cache, blocks, buffer)
    return buffer.view(-1, *cache.shape[1:])


def gather_into(cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor) -> None:
    """Fill a flat buffer. Blocks that are dense in NHD order move as rows, others element by element."""
    if cache[0].is_contiguous():
        torch.index_select(cache.flatten(1), 0, blocks, out=buffer.view(len(blocks), -1))
    else:
        torch.index_select(cache, 0, blocks, out=buffer.view(len(blocks), *cache.shape[1:]))


def widened(values: torch.Tensor, dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.Tensor:
    """Gathered values as the queries' dtype: bytes of an 8-bit cache become numbers, others are what they are."""
    return values.view(kv_dtype).to(dtype) if kv_dtype.itemsize == 1 else values
