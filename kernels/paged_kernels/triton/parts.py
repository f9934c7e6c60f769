"""The parts that the rows of a decode are cut into, listed once per step on the device and read by every layer.

The device computes the number of parts of each row from the lengths: parts of nearly equal size, enough to fill the
device. So one long sequence among short ones does not slow the batch down, and a captured graph follows lengths that
change. A decode program reads one entry of the list. To compute it there, each program of each layer would read the
lengths of all rows.
"""

# Triton types the arguments of kernels itself, and its decorators have no types.
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: N803

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from paged_kernels.memory import Workspace
from paged_kernels.triton.launch import ENTRY, plan_constants

MAX_ROWS = 4096  # rows per launch: the program of a row reads the lengths of all of them


@triton.jit
def parts_of_rows(  # type: ignore[no-untyped-def]
    length, real, window, target, TILE: tl.constexpr, MIN_TILES: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Number of parts of each row's keys, int32 as `length`: one at least, `rows + target` at most in all."""
    tiles = tl.cdiv(length, TILE)
    if HAS_WINDOW:
        tiles -= tl.maximum(length - window, 0) // TILE
    share = tl.maximum(tl.cdiv(tl.sum(tiles, 0), target), MIN_TILES)
    return tl.where(real, tl.maximum(tl.cdiv(tiles, share), 1), 0)


@triton.jit
def share_of_part(length, split, parts, window, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """First tile, and last tile + 1, of part number `split` of a row's `parts`."""
    first = length * 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0) // TILE
    last = tl.cdiv(length, TILE)
    share = tl.cdiv(last - first, parts)
    begin = first + split * share
    return begin, tl.minimum(begin + share, last)


@triton.jit(do_not_specialize=["window", "rows", "target"])
def plan_kernel(  # type: ignore[no-untyped-def]
    lengths, entries, spans, window, rows, target,
    ROWS_PAD: tl.constexpr, TILE: tl.constexpr, MIN_TILES: tl.constexpr, HAS_WINDOW: tl.constexpr,
    ENTRY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The entries [rows + target, ENTRY] of one row's parts, and its span [2]: first part and number of parts.

    The program after the last row marks the entries that are left by the row number `rows`.
    """
    row = tl.program_id(0)
    index = tl.arange(0, ROWS_PAD)
    all_lengths = tl.load(lengths + index, mask=index < rows, other=0)
    counts = parts_of_rows(all_lengths, index < rows, window, target, TILE, MIN_TILES, HAS_WINDOW).to(
        tl.int32
    )
    start = tl.sum(tl.where(index < row, counts, 0), 0)
    parts = tl.sum(tl.where(index == row, counts, 0), 0)
    length = tl.sum(tl.where(index == row, all_lengths, 0), 0)
    if row < rows:
        tl.store(spans + 2 * row, start)
        tl.store(spans + 2 * row + 1, parts)
    else:
        parts = rows + target - start
    for first in range(0, parts, CHUNK):
        split = first + tl.arange(0, CHUNK)
        begin, end = share_of_part(length, split, parts, window, TILE, HAS_WINDOW)
        entry, kept = entries + (start + split) * ENTRY, split < parts
        tl.store(entry, tl.zeros([CHUNK], tl.int32) + row, mask=kept)
        tl.store(entry + 1, begin, mask=kept)
        tl.store(entry + 2, end, mask=kept)
        tl.store(entry + 3, tl.zeros([CHUNK], tl.int32) + length.to(tl.int32), mask=kept)
        tl.store(entry + 4, tl.zeros([CHUNK], tl.int32) + parts, mask=kept)


class Parts(NamedTuple):
    """The parts of a batch of rows, on the device."""

    entries: torch.Tensor  # int32 [rows + target, ENTRY], flat
    spans: torch.Tensor  # int32 [rows, 2], flat: first part and number of parts


class PartsOfStep:
    """The lists of one step, each made when a layer asks for it first. Layers with other windows or tiles have others.

    The lengths on the device must not change while it is used: an engine makes a new one for each step. In a captured
    graph the list is made again by every replay, if the first layer asked for it while the graph was captured.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], Parts] = {}

    def of(
        self, lengths: torch.Tensor, *, target: int, tile: int, window: int, workspace: Workspace
    ) -> Parts:
        """The parts of rows of `lengths` [rows], aimed at `target` parts in all beside one of each row."""
        rows = len(lengths)
        key = (lengths.data_ptr(), rows, target, tile, window)
        if key not in self._made:
            # Each list of a step has a buffer of its own, so that none replaces another that is still read.
            number = len(self._made)
            made = Parts(
                workspace.take(f"decode_list_{number}", (rows + target) * ENTRY, lengths, torch.int32),
                workspace.take(f"decode_spans_{number}", 2 * rows, lengths, torch.int32),
            )
            plan_kernel[(rows + 1,)](
                lengths, *made, window, rows, target,
                **plan_constants(rows=rows, tile=tile, window=window > 0), num_warps=4,
            )  # fmt: skip
            self._made[key] = made
        return self._made[key]
