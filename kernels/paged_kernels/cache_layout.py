"""How a cache lies in memory: layers, blocks, and what a block of it holds, whatever its strides."""

import torch

from paged_kernels.errors import StrideError


def as_layers(cache: torch.Tensor) -> torch.Tensor:
    """`[layers, blocks, block_size, heads, dim]` of a cache with or without a layer axis in front."""
    return cache if cache.dim() == 5 else cache.unsqueeze(0)


def storable(cache: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that may be indexed and copied: torch indexes no 8-bit floats on the CPU."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def block_width(layers: torch.Tensor) -> int:
    """Elements of one block, which must be dense in memory. Raises `StrideError` where it is not."""
    inner = sorted(zip(layers.stride()[2:], layers.shape[2:], strict=True))
    expected = 1
    for stride, size in inner:
        if size > 1 and stride != expected:
            raise StrideError(
                f"a block {tuple(layers.shape[2:])} with strides {tuple(layers.stride()[2:])} is not dense in memory; "
                "copies move whole blocks (NHD or HND)"
            )
        expected *= size
    return expected
