"""CPU attention beside the least that it could do: gather the blocks into a standing buffer, attend over the buffer.

Both sides move the same bytes and run the same product, so that the ratio says what our own path adds (about nothing),
and little about the CPU. Losing the standing buffer or the packed heads multiplies it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROWS, HEADS, KV_HEADS, DIM, CONTEXT, BLOCK_SIZE = 8, 16, 4, 64, 512, 16


@dataclass(frozen=True)
class _Inputs:
    q: "torch.Tensor"
    keys: "torch.Tensor"
    values: "torch.Tensor"
    table: "torch.Tensor"
    lengths: "torch.Tensor"


def attention_pair() -> tuple[Callable[[], object], Callable[[], object]]:
    """(our decode over paged KV, its yardstick), float32, one thread."""
    import torch

    torch.set_num_threads(1)
    inputs = _inputs()
    return _ours(inputs), _gather_and_attend(inputs)


def _inputs() -> _Inputs:
    import torch

    generator = torch.Generator().manual_seed(0)
    per_row = CONTEXT // BLOCK_SIZE
    table = torch.randperm(ROWS * per_row, generator=generator).view(ROWS, per_row) + 1
    shape = (ROWS * per_row + 1, BLOCK_SIZE, KV_HEADS, DIM)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    q = torch.randn(ROWS, HEADS, DIM, generator=generator)
    return _Inputs(q, keys, values, table.int(), torch.full((ROWS,), CONTEXT, dtype=torch.int32))


def _ours(inputs: _Inputs) -> Callable[[], object]:
    import torch

    from paged_kernels import Workspace, paged_attention_decode

    workspace, out = Workspace(), torch.empty_like(inputs.q)
    caches = inputs.keys, inputs.values, inputs.table, inputs.lengths
    return lambda: paged_attention_decode(
        inputs.q, *caches, scale=DIM**-0.5, out=out, workspace=workspace, backend="torch"
    )


def _gather_and_attend(inputs: _Inputs) -> Callable[[], object]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    buffers = [torch.empty(inputs.table.numel(), BLOCK_SIZE, KV_HEADS, DIM) for _ in range(2)]
    blocks = inputs.table.flatten().long()
    q = inputs.q.view(ROWS, KV_HEADS, HEADS // KV_HEADS, DIM)

    def run() -> object:
        for buffer, cache in zip(buffers, (inputs.keys, inputs.values), strict=True):
            torch.index_select(cache, 0, blocks, out=buffer)
        k, v = (buffer.view(ROWS, CONTEXT, KV_HEADS, DIM).transpose(1, 2) for buffer in buffers)
        return scaled_dot_product_attention(q, k, v)

    return run
