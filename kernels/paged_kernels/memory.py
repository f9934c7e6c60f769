"""Memory: the layout of a paged cache, and scratch buffers that are used again.

A new buffer costs one page fault per 4 KiB, which is several times the cost of the gather into it. So a `Workspace`
keeps its buffers.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paged_kernels.checks import StrideError, WorkspaceError

IntArray = npt.NDArray[np.int64]  # tables and lengths on the host


class PagedBatch(NamedTuple):
    """Ragged queries over paged KV: the common form of decode and prefill. Shapes as in `paged_attention_prefill`."""

    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int


def as_layers(cache: torch.Tensor) -> torch.Tensor:
    """The cache as `[layers, blocks, block_size, heads, dim]`; adds the layer axis if there is none."""
    return cache if cache.dim() == 5 else cache.unsqueeze(0)


def storable(cache: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that can be indexed and copied: torch cannot index 8-bit floats on the CPU."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def token_bytes(key_cache: torch.Tensor, value_cache: torch.Tensor) -> int:
    """Bytes of one token's K and V in one layer."""
    return key_cache[0, 0].nbytes + value_cache[0, 0].nbytes


def block_width(layers: torch.Tensor) -> int:
    """Elements of one block. Raises `StrideError` if the block is not dense in memory."""
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


class Workspace:
    """Named flat buffers that grow and are reused. Two calls must not use one workspace at the same time.

    A captured CUDA graph keeps the addresses that it saw: run the largest case once, `freeze`, then capture.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self._frozen = False

    def take(
        self, name: str, numel: int, like: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A flat tensor of `numel` elements on the device of `like`, with its dtype unless `dtype` is given.

        Its content is undefined. Raises `WorkspaceError` if the workspace is frozen and too small.
        """
        key = (name, dtype or like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[key] = self._grown(name, numel, buffer, key[1], key[2])
        return buffer[:numel]

    def freeze(self) -> None:
        """From now on, a call that needs a larger buffer raises `WorkspaceError`."""
        self._frozen = True

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _grown(
        self, name: str, numel: int, buffer: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        held = 0 if buffer is None else buffer.numel()
        if self._frozen:
            raise WorkspaceError(
                f"the frozen workspace holds {held} elements of {dtype} for {name!r} on {device} and the call needs "
                f"{numel}: run the largest case once before freeze()"
            )
        # The size at least doubles, so that growing contexts need few new buffers. On the CPU the buffer is zeroed, so
        # that the page faults happen here and not in the middle of a gather.
        make = torch.zeros if device.type == "cpu" else torch.empty
        return make(max(numel, 2 * held), dtype=dtype, device=device)


DEFAULT_WORKSPACE = Workspace()
