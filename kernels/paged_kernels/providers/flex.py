"""torch's flex attention directly on the paged cache: the block table becomes its block mask."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paged_kernels.providers.case import Case, Run, UnsupportedCaseError, without_poison

LEAST_PAGE = 16  # a block of the mask is a page, and the kernel's tile must fit into it


@dataclass(frozen=True, slots=True)
class FlexAttention:
    """Decode by `flex_attention`, whose blocks are those of the cache. The first use compiles it for some seconds."""

    name: str = "flex"
    capturable: bool = True
    compiled: bool = True

    def available(self, device: torch.device) -> str | None:
        """It is part of torch since 2.5; on the CPU it compiles with the machine's C++ compiler."""
        if device.type == "cuda" or not self.compiled:
            return None
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:
            return f"finds no C++ compiler: {error}"
        return None

    def prepare(self, case: Case) -> Run:
        """Turn tables into a block mask over a copy of the cache without NaN, and compile."""
        if (
            not case.decode
            or not case.scoring.plain
            or case.key_cache.dtype.itemsize == 1
            or 0 in case.lengths
        ):
            raise UnsupportedCaseError(
                f"{case.name}: flex serves decodes without softcap, sinks or ALiBi, of caches in the queries' dtype"
            )
        if case.block_size < LEAST_PAGE:
            raise UnsupportedCaseError(f"{case.name}: flex needs blocks of {LEAST_PAGE} tokens or more")
        from torch.nn.attention.flex_attention import flex_attention

        attend: Any = torch.compile(flex_attention, dynamic=False) if self.compiled else flex_attention
        keys, values = (
            without_poison(cache).flatten(0, 1).transpose(0, 1).unsqueeze(0)
            for cache in (case.key_cache, case.value_cache)
        )
        run = partial(
            attend,
            case.q.unsqueeze(2),
            keys,
            values,
            block_mask=_block_mask(case),
            scale=case.scoring.scale,
            enable_gqa=case.heads != case.kv_heads,
        )
        return lambda: run().squeeze(2)


def _block_mask(case: Case) -> Any:
    """The mask: sequence b sees its own blocks of the cache, and in them the positions before its end."""
    from torch.nn.attention.flex_attention import BlockMask

    size, device = case.block_size, case.device
    counts = [-(-length // size) for length in case.lengths]
    whole = [
        0 if case.scoring.window else length // size for length in case.lengths
    ]  # full blocks, which need no mask inside
    widest, blocks = max(counts), case.key_cache.shape[0]
    place = torch.arange(widest, dtype=torch.int32, device=device).expand(len(counts), -1)
    used = place < torch.tensor(counts, device=device).unsqueeze(1)
    physical = torch.where(used, case.block_table[:, :widest], 0).int()
    logical = torch.full((len(counts), blocks), -1, dtype=torch.int32, device=device)
    rows = torch.arange(len(counts), device=device).unsqueeze(1).expand(-1, widest)
    logical[rows[used], physical[used].long()] = place[used]
    lengths, window = case.seq_lens, case.scoring.window or 2**30

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        block = logical[b, kv // size]
        position = block * size + kv % size
        return (block >= 0) & (position < lengths[b]) & (position >= lengths[b] - window)

    rest = [count - first for count, first in zip(counts, whole, strict=True)]
    return BlockMask.from_kv_blocks(
        *_listed(physical, whole, rest, blocks),
        *_listed(physical, [0] * len(whole), whole, blocks),
        BLOCK_SIZE=(128, size),
        mask_mod=visible,
        seq_lengths=(1, blocks * size),
    )


def _listed(
    physical: torch.Tensor, skipped: list[int], counts: list[int], blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(number, ids) of each sequence's blocks from `skipped` on. Each list is as long as the cache has blocks."""
    place = torch.arange(blocks, device=physical.device) + torch.tensor(
        skipped, device=physical.device
    ).unsqueeze(1)
    ids = physical.gather(1, place.clamp_max(physical.shape[1] - 1)).view(len(counts), 1, 1, blocks)
    return torch.tensor(counts, dtype=torch.int32, device=physical.device).view(-1, 1, 1), ids
