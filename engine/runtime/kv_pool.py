"""The KV cache tensors of all layers, and a count of the slots that were written.

Slots start as NaN, and the content of freed blocks is set back to NaN. So the audit counts the slots that were written
without asking the KV cache manager, and reading a slot that was never written gives NaN logits. In an 8-bit pool a
number that is too large also becomes NaN, so `SlotMarks` keeps one mark per slot instead.
"""

import mmap
from collections.abc import Sequence
from math import prod

import torch

from engine.runtime.errors import ModelError
from engine.runtime.options import KVDtype
from paged_kernels.torch_backend import copy_blocks

LayerShape = tuple[tuple[int, int], tuple[int, int]]  # (kv_heads, dk) of K and (kv_heads, dv) of V
_FP8_NAN = 0xFF  # NaN in e4m3, a type without infinity; four of them are NaN in float32, two in 16 bits
_HUGE_BYTES = 8 << 20  # a smaller tensor gains nothing from huge pages


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor on the CPU with undefined content, in pages of 2 MiB if it is large and the system has them.

    The CPU then translates fewer addresses: reading a large KV pool takes about a sixth less time.
    """
    size = prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or size < _HUGE_BYTES:
        return torch.empty(*shape, dtype=dtype)
    memory = mmap.mmap(-1, size)
    try:
        memory.madvise(advice)
    except OSError:  # the kernel was built without huge pages
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def memory_on(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor with undefined content on a device."""
    return (
        host_memory(shape, dtype) if device.type == "cpu" else torch.empty(*shape, dtype=dtype, device=device)
    )


class SlotMarks:
    """One bool per KV slot, whether it was written: `table` is `[num_blocks + 1, block_size]`."""

    def __init__(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        # one more entry in front takes the marks of slot -1: of padded rows of a recorded step
        self._all = torch.zeros((num_blocks + 1) * block_size + 1, dtype=torch.bool, device=device)
        self.table = self._all[1:].view(num_blocks + 1, block_size)

    def write(self, slots: torch.Tensor) -> None:
        """Mark slots `[tokens]` as written; slot -1 is ignored."""
        self._all.index_fill_(0, slots + 1, True)

    def count(self) -> int:
        """Number of marked slots in usable blocks."""
        return int(self.table[1:].sum())


class KVPool:
    """The KV cache of one model: `num_blocks` usable blocks of `block_size` slots in every layer, with ids from 1.

    `keys[layer]` and `values[layer]` are `[num_blocks + 1, block_size, kv_heads, dim]`. Block 0 is the null block: all
    zeros, read where a batch is padded, and never written. Slots start as NaN, and `poison` sets freed blocks back to
    NaN, so that `written_slots` can count. Swapped-out blocks, and those of a tier, go to `host_blocks` blocks of host
    memory, NaN at first too, which is pinned if the device is a GPU. Layers of one shape share a tensor, so every
    operation is one call per shape.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        host_blocks: int = 0,
        kv_dtype: KVDtype | str = KVDtype.model,
    ) -> None:
        self.dtype = kv_dtype_of(kv_dtype, dtype)
        stored, poison = storage_of(self.dtype)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        # K of layer 0, V of layer 0, K of layer 1, ...
        wanted = [shape for layer in shapes for shape in layer]
        self._stacks = {
            shape: memory_on(device, (wanted.count(shape), num_blocks + 1, block_size, *shape), stored)
            for shape in dict.fromkeys(wanted)
        }
        for stack in self._stacks.values():
            stack.fill_(poison)
            stack[:, 0] = 0
        self.marks = SlotMarks(num_blocks, block_size, device) if self.dtype.itemsize == 1 else None
        # What moves with a block, `[n, num_blocks + 1, block_size, heads, dim]`, and what is in a void slot.
        self._voids: list[tuple[torch.Tensor, float]] = [(stack, poison) for stack in self._stacks.values()]
        if self.marks is not None:
            self._voids.append((self.marks.table[None, :, :, None, None], False))
        pinned = device.type == "cuda"  # so that copies need no intermediate buffer
        self._host = [
            torch.empty(len(each), host_blocks, *each.shape[2:], dtype=each.dtype, pin_memory=pinned).fill_(
                void
            )
            for each, void in self._voids
        ]
        views = {shape: iter(stack.view(self.dtype).unbind(0)) for shape, stack in self._stacks.items()}
        caches = [next(views[shape]) for shape in wanted]
        self.keys, self.values = caches[0::2], caches[1::2]
        # bytes of one token's K and V in the largest layer
        self.token_bytes = max(
            key[0, 0].nbytes + value[0, 0].nbytes for key, value in zip(self.keys, self.values, strict=True)
        )

    @property
    def bytes(self) -> int:
        """Bytes of all KV tensors, the null block included."""
        return sum(stack.nbytes for stack in self._stacks.values())

    def poison(self, blocks: Sequence[int]) -> None:
        """Set all slots of `blocks` to NaN."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for each, void in self._voids:
            each.index_fill_(1, index, void)

    def poison_slots(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Set slots `first … end - 1` of each (block, first, end) to NaN: their tokens were taken back."""
        slots = [block * self.block_size + slot for block, first, end in spans for slot in range(first, end)]
        index = torch.tensor(slots, dtype=torch.int64, device=self.device)
        for each, void in self._voids:
            each.flatten(1, 2).index_fill_(1, index, void)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of every layer to host memory; pairs (device block, host block)."""
        source, target = torch.tensor(pairs, dtype=torch.int64).unbind(1)
        for (each, _), host in zip(self._voids, self._host, strict=True):
            host.index_copy_(1, target, each.index_select(1, source.to(self.device)).to("cpu"))

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of every layer back from host memory; pairs (host block, device block)."""
        source, target = torch.tensor(pairs, dtype=torch.int64).unbind(1)
        for (each, _), host in zip(self._voids, self._host, strict=True):
            each.index_copy_(1, target.to(self.device), host.index_select(1, source).to(self.device))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in every layer; all sources are read before any destination is written."""
        source, destination = torch.tensor(copies, dtype=torch.int64, device=self.device).unbind(1)
        for each, _ in self._voids:
            copy_blocks(each, source, destination)

    def written_slots(self) -> int:
        """Number of written slots in usable blocks: finite first elements of layer 0's keys, or marks in 8 bits."""
        if self.marks is not None:
            return self.marks.count()
        return int(torch.isfinite(self.keys[0][1:, :, 0, 0]).sum())


def kv_dtype_of(name: KVDtype | str, model_dtype: torch.dtype) -> torch.dtype:
    """The element type of K and V for an option. Raises ModelError for an unknown name."""
    if name not in set(KVDtype):
        raise ModelError(f"kv_dtype {str(name)!r} does not exist; choose {', '.join(KVDtype)}")
    return model_dtype if name == KVDtype.model else torch.float8_e4m3fn


def storage_of(dtype: torch.dtype) -> tuple[torch.dtype, float]:
    """The type that torch moves K and V in, and the value of NaN in it. 8-bit floats are moved as bytes."""
    return (torch.uint8, _FP8_NAN) if dtype.itemsize == 1 else (dtype, float("nan"))
