"""Host memory in pages of 2 MiB, where the operating system offers them.

The CPU then translates fewer addresses: reading a large KV pool takes about a sixth less time. The KV pool and the
packed weights (`models/cpu_layers.py`) both use it, so it is a file of its own.
"""

import mmap
from collections.abc import Sequence
from math import prod

import torch

_MIN_BYTES = 8 << 20  # a smaller tensor gains nothing


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor on the CPU with undefined content, in huge pages if it is large."""
    size = prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or size < _MIN_BYTES:
        return torch.empty(*shape, dtype=dtype)
    memory = mmap.mmap(-1, size)
    try:
        memory.madvise(advice)
    except OSError:  # the kernel was built without huge pages
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
