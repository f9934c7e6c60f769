"""Paged pools for kernel tests: poisoned, permuted, ragged, with garbage behind every table."""

from dataclasses import dataclass

import pytest
import torch


@dataclass
class PagedCase:
    """A batch over a pool in which every slot that no sequence owns is NaN; block 0 is the null block."""

    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor

    def args(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The positional arguments of `paged_attention_prefill`, values as `dtype`."""
        values = (tensor.to(dtype) for tensor in (self.q, self.key_cache, self.value_cache))
        return (*values, self.block_table, self.seq_lens, self.cu_seqlens_q)


def make_case(
    lengths: list[int],
    queries: list[int],
    block_size: int,
    heads: tuple[int, int] = (8, 4),
    dims: tuple[int, int] = (16, 16),
    seed: int = 0,
) -> PagedCase:
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    blocks = sum(needed) + 3
    order = (torch.randperm(blocks - 1, generator=generator) + 1).tolist()
    width = max(needed) + 2
    table = torch.full((len(lengths), width), 2**30)
    caches = [torch.full((blocks, block_size, heads[1], dim), float("nan")) for dim in dims]
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        mine = torch.tensor([order.pop() for _ in range(count)], dtype=torch.long)
        table[row, :count] = mine
        for cache in caches:
            values = torch.randn(length, heads[1], cache.shape[-1], generator=generator)
            position = torch.arange(length)
            cache[mine[position // block_size], position % block_size] = values
    for cache in caches:
        cache[0] = 0.0
    bounds = torch.tensor([0, *queries]).cumsum(0)
    q = torch.randn(sum(queries), heads[0], dims[0], generator=generator)
    return PagedCase(q, caches[0], caches[1], table, torch.tensor(lengths), bounds)


@pytest.fixture(name="make_case")
def make_case_fixture():
    return make_case
