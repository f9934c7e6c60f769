"""Triton kernels that write paged caches: new tokens by slot, and block copies."""
# Kernel arguments are pointers and numbers that Triton types itself, and its decorators carry no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl


@triton.jit
def store_kernel(
    rows, cache, slots, row_token, row_head, WIDTH: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr
):
    """One token: copy its [heads, dim] row to its slot; slot -1 is skipped. The cache is contiguous."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        element = tl.arange(0, PAD)
        inside = element < WIDTH
        source = rows + token * row_token + (element // DIM) * row_head + element % DIM
        tl.store(cache + slot * WIDTH + element, tl.load(source, mask=inside), mask=inside)


@triton.jit
def move_kernel(
    source,
    destination,
    source_block,
    destination_block,
    source_layer,
    destination_layer,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of one block of one layer: destination[destination_block[i]] = source[source_block[i]]."""
    pair, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    element = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = element < WIDTH
    read = tl.load(source_block + pair).to(tl.int64) * WIDTH + layer * source_layer
    write = tl.load(destination_block + pair).to(tl.int64) * WIDTH + layer * destination_layer
    values = tl.load(source + read + element, mask=inside)
    tl.store(destination + write + element, values, mask=inside)


def store(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write `rows` `[tokens, heads, dim]` (any token and head strides) to `slots`; -1 skips a token."""
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    width, dim = rows.shape[1] * rows.shape[2], rows.shape[2]
    pad = triton.next_power_of_2(width)
    store_kernel[(rows.shape[0],)](
        rows, cache, slots, rows.stride(0), rows.stride(1), WIDTH=width, DIM=dim, PAD=pad
    )


def copy_blocks(cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy whole blocks of `[..., blocks, block_size, heads, dim]` through a staging buffer: reads come first."""
    layers = cache.view(-1, *cache.shape[-4:])
    staging = layers.new_empty(layers.shape[0], len(source), *layers.shape[2:])
    place = torch.arange(len(source), device=cache.device)
    _move(layers, staging, source.contiguous(), place)
    _move(staging, layers, place, destination.contiguous())


def _move(source: torch.Tensor, destination: torch.Tensor, read: torch.Tensor, write: torch.Tensor) -> None:
    width, chunk = source[0, 0].numel(), 2048
    grid = (len(read), source.shape[0], triton.cdiv(width, chunk))
    move_kernel[grid](
        source, destination, read, write, source.stride(0), destination.stride(0), WIDTH=width, CHUNK=chunk
    )
