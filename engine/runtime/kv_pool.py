"""The KV tensors of all layers, and the poison that makes them an independent witness.

A slot holds numbers if and only if somebody wrote it: the pool is born NaN, and a block whose content became void is
filled with NaN again. Counting numbers then gives the slots in use without asking the bookkeeping, and a read of a
slot that nobody wrote surfaces as NaN in the logits.

In an 8-bit pool a NaN may also be a number that was too large to keep, so that each slot has a mark beside it, set
where K and V are written.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.runtime import huge_pages
from engine.runtime.kv_dtype import KVDtype, kept_as, kv_dtype_of
from engine.runtime.probe import LayerShape
from engine.runtime.slot_marks import SlotMarks
from paged_kernels.torch.cache import copy_blocks

if TYPE_CHECKING:
    from engine.runtime.model import LoadedModel


class KVPool:
    """`num_blocks` usable blocks (ids from 1) for every layer, K and V `[num_blocks + 1, block_size, kv_heads, dim]`.

    Block 0 is the null block: zeros, read where a batch is padded, never written. Layers of one shape share a stack,
    so that poison and copies are one call per shape. `host_blocks` blocks of host memory (pinned beside a GPU) take
    what is swapped out.
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
        kv_dtype: KVDtype | str = KVDtype.MODEL,
    ) -> None:
        self.dtype = kv_dtype_of(kv_dtype, dtype)
        kept, poison = kept_as(self.dtype)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        wanted = [
            shape for layer in shapes for shape in layer
        ]  # K of layer 0, V of layer 0, K of layer 1, ...
        self._stacks = {
            shape: _device_memory((wanted.count(shape), num_blocks + 1, block_size, *shape), kept, device)
            for shape in dict.fromkeys(wanted)
        }
        for stack in self._stacks.values():
            stack.fill_(poison)
            stack[:, 0] = 0
        self._host = {
            shape: _host_memory((len(stack), host_blocks, *stack.shape[2:]), kept, device)
            for shape, stack in self._stacks.items()
        }
        self._poison = poison
        self.marks = SlotMarks(num_blocks, block_size, host_blocks, device) if self.is_narrow else None
        views = {shape: iter(stack.view(self.dtype).unbind(0)) for shape, stack in self._stacks.items()}
        caches = [next(views[shape]) for shape in wanted]
        self.keys, self.values = caches[0::2], caches[1::2]
        # bytes of one token's K and V in the widest layer
        self.token_bytes = max(
            key[0, 0].nbytes + value[0, 0].nbytes for key, value in zip(self.keys, self.values, strict=True)
        )

    @property
    def is_narrow(self) -> bool:
        """Whether K and V are kept in 8 bits."""
        return self.dtype.itemsize == 1

    @property
    def bytes(self) -> int:
        """Bytes of all KV tensors, the null block included."""
        return sum(stack.nbytes for stack in self._stacks.values())

    def poison(self, blocks: Sequence[int]) -> None:
        """Make the content of `blocks` unreadable."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for stack in self._stacks.values():
            stack.index_fill_(1, index, self._poison)
        if self.marks is not None:
            self.marks.void(index)

    def poison_slots(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Make slots `first … end - 1` of (block, first, end) unreadable: tokens that were taken back."""
        slots = [block * self.block_size + slot for block, first, end in spans for slot in range(first, end)]
        index = torch.tensor(slots, dtype=torch.int64, device=self.device)
        for stack in self._stacks.values():
            stack.flatten(1, 2).index_fill_(1, index, self._poison)
        if self.marks is not None:
            self.marks.void_slots(index)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Save (device, host) blocks of every layer in host memory."""
        source, target = torch.tensor(pairs, dtype=torch.int64).unbind(1)
        for shape, stack in self._stacks.items():
            saved = stack.index_select(1, source.to(self.device)).to("cpu")
            self._host[shape].index_copy_(1, target, saved)
        if self.marks is not None:
            self.marks.save(source, target)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Bring (host, device) blocks of every layer back."""
        source, target = torch.tensor(pairs, dtype=torch.int64).unbind(1)
        for shape, stack in self._stacks.items():
            saved = self._host[shape].index_select(1, source).to(self.device)
            stack.index_copy_(1, target.to(self.device), saved)
        if self.marks is not None:
            self.marks.bring_back(source, target)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in every layer, all sources before any destination."""
        source, destination = torch.tensor(copies, dtype=torch.int64, device=self.device).unbind(1)
        for stack in self._stacks.values():
            copy_blocks(stack, source, destination)
        if self.marks is not None:
            self.marks.copy(source, destination)

    def written_slots(self) -> int:
        """Usable slots that hold numbers, counted in the first element of layer 0's keys; in 8 bits the marked."""
        if self.marks is not None:
            return self.marks.count()
        return int(torch.isfinite(self.keys[0][1:, :, 0, 0]).sum())

    def null_block_is_clean(self) -> bool:
        """Whether the null block is still all zeros."""
        return not any(bool(stack[:, 0].any()) for stack in self._stacks.values())


def _device_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return huge_pages.empty(shape, dtype)
    return torch.empty(*shape, dtype=dtype, device=device)


def _host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Pages that a GPU copies from and to without a detour, where there is one."""
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def pool_for(
    loaded: "LoadedModel",
    *,
    num_blocks: int,
    block_size: int,
    host_blocks: int = 0,
    kv_dtype: KVDtype | str = KVDtype.MODEL,
) -> KVPool:
    """A model's pool, on its device, in its type or a narrower one."""
    return KVPool(
        loaded.kv_shapes,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=loaded.dtype,
        device=loaded.device,
        host_blocks=host_blocks,
        kv_dtype=kv_dtype,
    )
