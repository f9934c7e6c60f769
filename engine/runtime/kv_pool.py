"""The KV cache tensors of all layers, and a count of the slots that were written.

Slots start as NaN, and the content of freed blocks is set back to NaN. So the audit counts the slots that were written
without asking the block manager, and reading a slot that was never written gives NaN logits. In an 8-bit pool a number
that is too large also becomes NaN, so `SlotMarks` keeps one mark per slot instead. `Lanes` applies a step's block
operations to the model's pool and to the draft model's pool, which use the same block ids.
"""

from collections.abc import Sequence

import torch

from engine.core.plan import StepPlan
from engine.runtime import huge_pages
from engine.runtime.errors import ModelError
from engine.runtime.options import KVDtype
from paged_kernels.torch.cache import copy_blocks

LayerShape = tuple[tuple[int, int], tuple[int, int]]


class SlotMarks:
    """Marks `[num_blocks + 1, block_size]`, and of the host's blocks. They go where the slots' content goes."""

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int, device: torch.device) -> None:
        self._size = block_size
        # one entry more in front: where padded rows of a recorded step, whose slot is -1, leave their mark
        self._all = torch.zeros((num_blocks + 1) * block_size + 1, dtype=torch.bool, device=device)
        self._marks = self._all[1:].view(num_blocks + 1, block_size)
        self._host = torch.zeros(host_blocks, block_size, dtype=torch.bool)

    def write(self, slots: torch.Tensor) -> None:
        """Mark slots `[tokens]`; -1 is nobody's."""
        self._all.index_fill_(0, slots + 1, True)

    def void(self, blocks: torch.Tensor) -> None:
        """Take the marks of whole blocks away."""
        self._marks.index_fill_(0, blocks, False)

    def void_slots(self, slots: torch.Tensor) -> None:
        """Take the marks of single slots away."""
        self._all.index_fill_(0, slots + 1, False)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Blocks were copied, all sources read before any destination is written."""
        self._marks.index_copy_(0, destination, self._marks.index_select(0, source))

    def save(self, blocks: torch.Tensor, host: torch.Tensor) -> None:
        """Blocks were saved in host memory."""
        self._host.index_copy_(0, host, self._marks.index_select(0, blocks.to(self._marks.device)).cpu())

    def bring_back(self, host: torch.Tensor, blocks: torch.Tensor) -> None:
        """Blocks came back from host memory."""
        saved = self._host.index_select(0, host).to(self._marks.device)
        self._marks.index_copy_(0, blocks.to(self._marks.device), saved)

    def count(self) -> int:
        """Marked slots of usable blocks."""
        return int(self._marks[1:].sum())


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


class Lanes:
    """Moves blocks as a plan says, in its order: void stale slots, save, void free blocks, bring back, copy."""

    def __init__(self, pools: Sequence[KVPool]) -> None:
        self.pools = pools

    def void_stale(self, plan: StepPlan) -> None:
        """Poison what is void in blocks that are in use, before a swap saves it with its block."""
        if plan.stale:
            for pool in self.pools:
                pool.poison_slots(plan.stale)

    def save(self, plan: StepPlan) -> None:
        """Swap out, before the blocks are anyone else's."""
        if plan.swap_out:
            for pool in self.pools:
                pool.swap_out(plan.swap_out)

    def void(self, plan: StepPlan) -> None:
        """Poison what nobody may read any more."""
        for pool in self.pools:
            if plan.frees:
                pool.poison(plan.frees)

    def fill(self, plan: StepPlan) -> None:
        """Swap in, then copy."""
        for pool in self.pools:
            if plan.swap_in:
                pool.swap_in(plan.swap_in)
            if plan.copies:
                pool.copy(plan.copies)


_FP8_NAN = 0x7F  # of e4m3: the type has no infinity, and one NaN of either sign


def kv_dtype_of(name: KVDtype | str, model_dtype: "torch.dtype") -> "torch.dtype":
    """The element type for a name. Raises ModelError for a name that does not exist."""
    import torch

    if name not in set(KVDtype):
        raise ModelError(f"kv_dtype {str(name)!r} does not exist; choose {', '.join(KVDtype)}")
    return model_dtype if name == KVDtype.MODEL else torch.float8_e4m3fn


def kv_item_bytes(name: KVDtype | str, model_dtype: "torch.dtype") -> int:
    """Bytes of one number in the pool. Raises ModelError."""
    return kv_dtype_of(name, model_dtype).itemsize


def kept_as(dtype: "torch.dtype") -> tuple["torch.dtype", float]:
    """What the memory is to torch, and the value that poisons it: 8-bit floats are moved as bytes."""
    import torch

    return (torch.uint8, _FP8_NAN) if dtype.itemsize == 1 else (dtype, float("nan"))
