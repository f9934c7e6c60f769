"""Fast prefill on torch: one sequence at a time, its queries in tiles, each tile over the keys that it may see.

The tiles skip most of the masked half of the score matrix. All keys are read from the cache, also those just written,
so a wrong slot shows in the result.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom

from paged_kernels.memory import IntArray, Workspace
from paged_kernels.scoring import Scoring, additive, causal_window
from paged_kernels.torch.gathered import as_query_dtype, explicit_attention, gather_blocks

QUERY_TILE = 128  # queries per tile


@dataclass(frozen=True, slots=True)
class PrefillMetadata:
    """One sequence's chunk: queries `start : stop` of the flat batch, the last ones of `length` cached tokens."""

    start: int
    stop: int
    length: int
    blocks: torch.Tensor  # int64 [ceil(length / block_size)]
    masks: dict[tuple[int, int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, queries: int, keys: int, window: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask `[queries, keys]` for the tile that ends at key `keys`, made once and kept for all layers."""
        found = self.masks.get((keys, window, dtype))
        if found is None:
            visible = causal_window(queries, keys, window, device=self.blocks.device)
            found = self.masks[keys, window, dtype] = additive(visible, dtype)
        return found

    def distance(self, queries: int, keys: int) -> torch.Tensor:
        """Key position - query position, `[queries, keys]`, for the tile that ends at key `keys`."""
        query = torch.arange(keys - queries, keys, device=self.blocks.device).unsqueeze(1)
        return torch.arange(keys, device=self.blocks.device) - query


def prefill_metadata(
    table: IntArray,
    start: int,
    queries: int,
    length: int,
    block_size: int,
    *,
    device: torch.device | str = "cpu",
) -> PrefillMetadata:
    """Metadata of one sequence: `length` tokens in the cache, of which the last `queries` are computed.

    `table` `[blocks]` are its block ids, `start` its first row in the flat batch.
    """
    blocks = torch.from_numpy(np.ascontiguousarray(table[: -(-length // block_size)], dtype=np.int64))
    return PrefillMetadata(start, start + queries, length, blocks.to(device))


def run_prefill(
    metadata: PrefillMetadata,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scoring: Scoring,
    out: torch.Tensor,
    workspace: Workspace,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of rows `start : stop` of q `[tokens, heads, dk]` into the same rows of `out` and `lse`."""
    k, v = (
        as_query_dtype(_gather(metadata, cache, name, scoring.window, workspace), q.dtype, cache.dtype)
        for name, cache in (("prefill_k", key_cache), ("prefill_v", value_cache))
    )
    context = metadata.length - (metadata.stop - metadata.start)
    attend = _fused if scoring.plain and lse is None else _explicit
    for first in range(metadata.start, metadata.stop, QUERY_TILE):
        rows = slice(first, min(first + QUERY_TILE, metadata.stop))
        keys = context + rows.stop - metadata.start
        result, part = attend(q[rows], k[:, :keys], v[:, :keys], metadata, scoring)
        out[rows].copy_(result)
        if lse is not None and part is not None:
            lse[rows] = part


def _gather(
    metadata: PrefillMetadata, cache: torch.Tensor, name: str, window: int, workspace: Workspace
) -> torch.Tensor:
    """The sequence's tokens as `[kv_heads, length, dim]`; the unused slots of its last block are left out.

    Slots that the window of every query has left are 0: they may be NaN, and 0 x NaN is NaN.
    """
    tokens = gather_blocks(cache, metadata.blocks, name, workspace).view(-1, *cache.shape[2:])
    context = metadata.length - (metadata.stop - metadata.start)
    if window:
        tokens[: max(0, context + 1 - window)] = 0
    return tokens[: metadata.length].transpose(0, 1)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: PrefillMetadata, scoring: Scoring
) -> tuple[torch.Tensor, None]:
    square = q.shape[0] == k.shape[1] and not scoring.window
    result = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=None if square else metadata.mask(q.shape[0], k.shape[1], scoring.window, q.dtype),
        is_causal=square,
        scale=scoring.scale * scoring.k_scale,
        enable_gqa=True,
    )[0].transpose(0, 1)
    return (result if scoring.v_scale == 1 else result * scoring.v_scale), None


def _explicit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: PrefillMetadata, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = metadata.mask(q.shape[0], k.shape[1], scoring.window, torch.promote_types(q.dtype, torch.float32))
    distance = metadata.distance(q.shape[0], k.shape[1]) if scoring.alibi is not None else None
    grouped = q.reshape(q.shape[0], k.shape[0], -1, q.shape[2]).permute(1, 2, 0, 3).unsqueeze(0)
    result, lse = explicit_attention(grouped, k[None, :, None], v[None, :, None], mask, scoring, distance)
    return result[0].flatten(0, 1).transpose(0, 1), lse[0].flatten(0, 1).transpose(0, 1)
