"""Fast decode on torch: gather the blocks of a few sequences into a reused buffer, then one SDPA over them.

The query heads of a group become extra query rows of their key head. That is several times faster than repeating the
keys. Sequences are taken in batch order, a few at a time, so the gathered KV is still in the CPU cache when it is read.
A caller that sorts rows by length avoids padding. All index tensors are made once per step and serve every layer.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from paged_kernels.memory import IntArray, Workspace, storable
from paged_kernels.scoring import Scoring, additive
from paged_kernels.torch.gathered import (
    as_query_dtype,
    explicit_attention,
    fused_attention,
    gather_into,
    gives_lse,
)

CPU_GATHER_BYTES = 4 << 20  # K and V of one gather; more would not stay in the CPU cache until they are read
GPU_GATHER_BYTES = 256 << 20  # large, because a GPU is faster with few launches


class _Views(NamedTuple):
    """The buffers that a chunk is gathered into, in the forms that gather, clearing and SDPA need."""

    k_flat: torch.Tensor
    v_flat: torch.Tensor
    k_slots: torch.Tensor
    v_slots: torch.Tensor
    k: torch.Tensor  # [rows, kv_heads, width, dk]
    v: torch.Tensor


@dataclass(slots=True)
class DecodeChunk:
    """Consecutive sequences that are gathered together, padded to the longest of them."""

    start: int
    stop: int
    blocks: torch.Tensor  # int64 [rows * width_blocks], padded with the null block 0
    void: torch.Tensor | None  # gathered slots after the end of a sequence; they may be NaN and are zeroed
    lengths: torch.Tensor  # int64 [rows, 1]
    width: int  # gathered slots per sequence
    masks: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)
    views: dict[tuple[int, int, int, torch.dtype], _Views] = field(default_factory=dict)

    def mask(self, window: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask `[rows, 1, 1, width]`, made once and kept for all layers with this window."""
        found = self.masks.get((window, dtype))
        if found is None:
            position = torch.arange(self.width, device=self.lengths.device).unsqueeze(0)
            visible = position < self.lengths
            if window:
                visible &= position >= self.lengths - window
            found = self.masks[window, dtype] = additive(visible, dtype)[:, None, None, :]
        return found

    def distance(self) -> torch.Tensor:
        """Key position - query position, `[rows, 1, 1, 1, width]`."""
        position = torch.arange(self.width, device=self.lengths.device).unsqueeze(0)
        return (position - (self.lengths - 1))[:, None, None, None, :]


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """Everything about a batch of one-token rows that does not depend on the layer."""

    chunks: tuple[DecodeChunk, ...]
    block_size: int


def decode_metadata(
    block_table: IntArray,
    seq_lens: IntArray,
    block_size: int,
    *,
    token_bytes: int,
    device: torch.device | str = "cpu",
) -> DecodeMetadata:
    """Metadata for tables `[rows, blocks]` and lengths `[rows]`, each at least 1.

    Entries after the blocks that a length needs may be anything. Block 0 must be the null block, all zeros.
    `token_bytes` are the bytes of one token's K and V in one layer.
    """
    needed = -(-seq_lens // block_size)
    limit = CPU_GATHER_BYTES if torch.device(device).type == "cpu" else GPU_GATHER_BYTES
    chunks = []
    start = 0
    while start < len(seq_lens):
        stop = _chunk_end(needed, start, max(1, limit // (token_bytes * block_size)))
        rows = slice(start, stop)
        chunks.append(_make_chunk(block_table[rows], seq_lens[rows], needed[rows], block_size, start, device))
        start = stop
    return DecodeMetadata(tuple(chunks), block_size)


def _chunk_end(needed: IntArray, start: int, limit_blocks: int) -> int:
    """Where the rows of one gather end: padded to the widest they have at most `limit_blocks`, but at least one row."""
    widest = np.maximum.accumulate(needed[start:])
    area = widest * np.arange(1, len(widest) + 1)
    return start + max(1, int(np.searchsorted(area, limit_blocks, side="right")))


def _make_chunk(
    table: IntArray,
    lengths: IntArray,
    needed: IntArray,
    block_size: int,
    start: int,
    device: torch.device | str,
) -> DecodeChunk:
    width_blocks = int(needed.max())
    blocks = np.where(np.arange(width_blocks) < needed[:, None], table[:, :width_blocks], 0)
    width = width_blocks * block_size
    behind = lengths[:, None] + np.arange(block_size - 1)
    local = behind + np.arange(len(lengths))[:, None] * width
    void = local[behind < (needed * block_size)[:, None]]
    return DecodeChunk(
        start=start,
        stop=start + len(lengths),
        blocks=torch.from_numpy(blocks.reshape(-1)).to(device),
        void=torch.from_numpy(void).to(device) if len(void) else None,
        lengths=torch.from_numpy(lengths.reshape(-1, 1)).to(device),
        width=width,
    )


def run_decode(
    metadata: DecodeMetadata,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scoring: Scoring,
    out: torch.Tensor,
    workspace: Workspace,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of one query per row, q `[rows, heads, dk]`, into `out` and `lse` `[rows, heads]`."""
    kv_heads = key_cache.shape[2]
    attend = _fused if scoring.plain and (lse is None or gives_lse(q.device)) else _explicit
    for chunk in metadata.chunks:
        k, v = (
            as_query_dtype(values, q.dtype, key_cache.dtype)
            for values in _gather(chunk, key_cache, value_cache, workspace)
        )
        rows = slice(chunk.start, chunk.stop)
        packed = q[rows].reshape(chunk.stop - chunk.start, kv_heads, -1, q.shape[2])
        result, part = attend(packed, k, v, chunk, scoring, lse=lse is not None)
        out[rows].copy_(result.reshape(out[rows].shape))
        if lse is not None and part is not None:
            lse[rows] = part


def _fused(
    packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: DecodeChunk, scoring: Scoring, *, lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    mask = chunk.mask(scoring.window, packed.dtype)
    result, sums = fused_attention(packed, k, v, mask, scoring, lse=lse)
    return result, None if sums is None else sums.flatten(1)


def _explicit(
    packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: DecodeChunk, scoring: Scoring, *, lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = chunk.mask(scoring.window, torch.promote_types(packed.dtype, torch.float32)).unsqueeze(2)
    distance = chunk.distance() if scoring.alibi is not None else None
    queries, k, v = packed.unsqueeze(3), k.unsqueeze(2), v.unsqueeze(2)
    result, sums = explicit_attention(queries, k, v, mask, scoring, distance)
    return result.squeeze(3), sums.flatten(1)


def _gather(
    chunk: DecodeChunk, key_cache: torch.Tensor, value_cache: torch.Tensor, workspace: Workspace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the chunk's blocks, and zero the slots after each sequence's end, because 0 x NaN is NaN."""
    key_cache, value_cache = storable(key_cache), storable(value_cache)
    shape = (key_cache.shape[2], key_cache.shape[3], value_cache.shape[3], key_cache.dtype)
    views = chunk.views.get(shape)
    if views is None:
        views = chunk.views[shape] = _views(chunk, key_cache, value_cache, workspace)
    gather_into(key_cache, chunk.blocks, views.k_flat)
    gather_into(value_cache, chunk.blocks, views.v_flat)
    if chunk.void is not None:
        views.k_slots.index_fill_(0, chunk.void, 0)
        views.v_slots.index_fill_(0, chunk.void, 0)
    return views.k, views.v


def _views(
    chunk: DecodeChunk, key_cache: torch.Tensor, value_cache: torch.Tensor, workspace: Workspace
) -> _Views:
    rows, slots = chunk.stop - chunk.start, (chunk.stop - chunk.start) * chunk.width
    flat = [
        workspace.take(name, slots * cache.shape[2] * cache.shape[3], cache)
        for name, cache in (("decode_k", key_cache), ("decode_v", value_cache))
    ]
    by_slot = [buffer.view(slots, -1) for buffer in flat]
    heads = [
        buffer.view(rows, chunk.width, cache.shape[2], cache.shape[3]).transpose(1, 2)
        for buffer, cache in zip(flat, (key_cache, value_cache), strict=True)
    ]
    return _Views(flat[0], flat[1], by_slot[0], by_slot[1], heads[0], heads[1])
