"""The torch backend, for any device: gather blocks into a reused buffer, then one SDPA over them; writes to caches.

Decode takes a few sequences at a time. The query heads of a group become extra query rows of their key head, which is
several times faster than repeating the keys. Sequences are taken in batch order, so the gathered KV is still in the CPU
cache when it is read. A caller that sorts rows by length avoids padding. A cascade attends to each row's own keys,
gathers each prefix once for all of its rows, and merges both.

Prefill takes one sequence at a time, its queries in tiles, each tile over the keys that it may see, which skips most of
the masked half of the score matrix. All keys are read from the cache, also those just written, so a wrong slot shows in
the result.

All index tensors are made once per step and serve every layer. `fused_attention` is torch's SDPA. `explicit_attention`
computes the scores itself. It serves what SDPA does not support: softcap, sinks, ALiBi, and the LSE on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom

from paged_kernels.arguments import IntArray, Scoring, Workspace, additive, as_layers, causal_window, storable
from paged_kernels.private import flash_with_lse

CPU_GATHER_BYTES = 4 << 20  # K and V of one gather; more would not stay in the CPU cache until they are read
GPU_GATHER_BYTES = 256 << 20  # large, because a GPU is faster with few launches
QUERY_TILE = 128  # queries per tile


def merge_reference(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attn_states` in readable torch, in the dtype that its inputs promote to. Returns output and LSE."""
    top = torch.maximum(lse_a, lse_b)
    base = top.masked_fill(top == float("-inf"), 0.0)
    weight_a, weight_b = torch.exp(lse_a - base), torch.exp(lse_b - base)
    total = weight_a + weight_b
    seen = total != 0  # not `> 0`: a NaN of either side must reach the output
    safe = total.masked_fill(~seen, 1.0)
    merged = _weighed(o_a, weight_a / safe) + _weighed(o_b, weight_b / safe)
    return merged, (base + safe.log()).masked_fill(~seen, float("-inf"))


def _weighed(out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`out` x weight, and 0 where the weight is 0: the output of an empty side is undefined."""
    return torch.where(weight.unsqueeze(-1) != 0, out * weight.unsqueeze(-1), 0.0)


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, name: str, workspace: Workspace) -> torch.Tensor:
    """`[blocks, block_size, heads, dim]` of `blocks`, in the workspace's memory. 8-bit floats stay bytes."""
    cache = storable(cache)
    buffer = workspace.take(name, len(blocks) * cache[0].numel(), cache)
    gather_into(cache, blocks, buffer)
    return buffer.view(-1, *cache.shape[1:])


def gather_into(cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy blocks into a flat buffer. Blocks that are dense in NHD order are copied whole, others by element."""
    if cache[0].is_contiguous():
        torch.index_select(cache.flatten(1), 0, blocks, out=buffer.view(len(blocks), -1))
    else:
        torch.index_select(cache, 0, blocks, out=buffer.view(len(blocks), *cache.shape[1:]))


def as_query_dtype(values: torch.Tensor, dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.Tensor:
    """Gathered values in the queries' dtype: bytes of an 8-bit cache are converted, others already have it."""
    return values.view(kv_dtype).to(dtype) if kv_dtype.itemsize == 1 else values


def gives_lse(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `fused_attention` can return the LSE over k and v `[..., d]`.

    torch's public call does not, its CPU kernel does, for K and V of one width.
    """
    return flash_with_lse is not None and k.device.type == "cpu" and k.shape[-1] == v.shape[-1]


def fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
    *,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output `[N, kv_heads, rows, dv]` in q's dtype and, if asked for, the natural-log LSE `[N, kv_heads, rows]`.

    q `[N, kv_heads, rows, dk]`, k and v `[N, kv_heads, L, d]`; `mask` is additive in q's dtype and broadcasts.
    """
    scale, sums = scoring.scale * scoring.k_scale, None
    if lse:
        result, sums = flash_with_lse(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    else:
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return (result if scoring.v_scale == 1 else result * scoring.v_scale), sums


def explicit_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scoring: Scoring,
    distance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with scores in float32 or wider: q `[N, kv_heads, group, T, dk]`, k and v `[N, kv_heads, 1, L, d]`.

    `mask` is additive and broadcasts to `[N, kv_heads, group, T, L]`; the window is part of it. `distance` broadcasts
    to the same shape: key position - query position, for ALiBi. Returns the output `[N, kv_heads, group, T, dv]` in
    q's dtype and the LSE `[N, kv_heads, group, T]`; a query that sees no key gets 0 and -inf.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * (scoring.scale * scoring.k_scale)
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if scoring.alibi is not None and distance is not None:
        scores = scores + scoring.alibi.to(wide).view(1, scores.shape[1], -1, 1, 1) * distance
    scores = scores + mask
    empty = (scores == float("-inf")).all(-1)
    with_sinks = scores
    if scoring.sinks is not None:
        column = scoring.sinks.to(wide).view(1, scores.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        with_sinks = torch.cat([scores, column], dim=-1)
    lse = torch.logsumexp(with_sinks, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(empty, 0.0).unsqueeze(-1))
    return torch.matmul(weights.to(v.dtype), v) * scoring.v_scale, lse.masked_fill(empty, float("-inf"))


class _Views(NamedTuple):
    """The buffers of K and of V that a chunk is gathered into, in the forms that gather, clearing and SDPA need."""

    flat: list[torch.Tensor]
    slots: list[torch.Tensor]
    heads: list[torch.Tensor]  # [rows, kv_heads, width, dim]


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
    behind: dict[int, torch.Tensor] = field(default_factory=dict)

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

    def left(self, window: int) -> torch.Tensor | None:
        """Gathered slots that a window has left; they may be NaN. None without a window."""
        if not window:
            return None
        if window not in self.behind:
            position = torch.arange(self.width, device=self.lengths.device)
            self.behind[window] = (position < self.lengths - window).flatten().nonzero().squeeze(1)
        return self.behind[window]

    def distance(self) -> torch.Tensor:
        """Key position - query position, `[rows, 1, 1, 1, width]`."""
        position = torch.arange(self.width, device=self.lengths.device).unsqueeze(0)
        return (position - (self.lengths - 1))[:, None, None, None, :]


# Everything about a batch of one-token rows that does not depend on the layer
DecodeMetadata = tuple[DecodeChunk, ...]


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
        # padded to the widest, rows of one gather have at most so many blocks, but there is at least one row
        most = max(1, limit // (token_bytes * block_size))
        area = np.maximum.accumulate(needed[start:]) * np.arange(1, len(needed) - start + 1)
        stop = start + max(1, int(np.searchsorted(area, most, side="right")))
        rows = slice(start, stop)
        chunks.append(_make_chunk(block_table[rows], seq_lens[rows], needed[rows], block_size, start, device))
        start = stop
    return tuple(chunks)


def _make_chunk(
    table: IntArray, lengths: IntArray, needed: IntArray, size: int, start: int, device: torch.device | str
) -> DecodeChunk:
    width_blocks = int(needed.max())
    blocks = np.where(np.arange(width_blocks) < needed[:, None], table[:, :width_blocks], 0)
    width = width_blocks * size
    behind = lengths[:, None] + np.arange(size - 1)
    local = behind + np.arange(len(lengths))[:, None] * width
    void = local[behind < (needed * size)[:, None]]
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
    for chunk in metadata:
        k, v = (
            as_query_dtype(values, q.dtype, key_cache.dtype)
            for values in _gather(chunk, key_cache, value_cache, scoring.window, workspace)
        )
        rows = slice(chunk.start, chunk.stop)
        packed = q[rows].reshape(chunk.stop - chunk.start, kv_heads, -1, q.shape[2])
        result, part = _attend(packed, k, v, chunk, scoring, lse=lse is not None)
        out[rows].copy_(result.reshape(out[rows].shape))
        if lse is not None and part is not None:
            lse[rows] = part


def _attend(
    packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: DecodeChunk, scoring: Scoring, *, lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if scoring.plain and (not lse or gives_lse(k, v)):
        mask = chunk.mask(scoring.window, packed.dtype)
        result, sums = fused_attention(packed, k, v, mask, scoring, lse=lse)
        return result, None if sums is None else sums.flatten(1)
    mask = chunk.mask(scoring.window, torch.promote_types(packed.dtype, torch.float32)).unsqueeze(2)
    distance = chunk.distance() if scoring.alibi is not None else None
    queries, k, v = packed.unsqueeze(3), k.unsqueeze(2), v.unsqueeze(2)
    result, sums = explicit_attention(queries, k, v, mask, scoring, distance)
    return result.squeeze(3), sums.flatten(1)


def _gather(
    chunk: DecodeChunk, key_cache: torch.Tensor, value_cache: torch.Tensor, window: int, workspace: Workspace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the chunk's blocks, and zero the slots that no query sees, because 0 x NaN is NaN."""
    key_cache, value_cache = storable(key_cache), storable(value_cache)
    shape = (key_cache.shape[2], key_cache.shape[3], value_cache.shape[3], key_cache.dtype)
    views = chunk.views.get(shape)
    if views is None:
        views = chunk.views[shape] = _views(chunk, key_cache, value_cache, workspace)
    for cache, flat, slots in zip((key_cache, value_cache), views.flat, views.slots, strict=True):
        gather_into(cache, chunk.blocks, flat)
        for unseen in (chunk.void, chunk.left(window)):
            if unseen is not None:
                slots.index_fill_(0, unseen, 0)
    return views.heads[0], views.heads[1]


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
    return _Views(flat, by_slot, heads)


class _Group(NamedTuple):
    """A prefix and the rows that share it."""

    rows: torch.Tensor
    asked: torch.Tensor  # [rows], position of each row's query
    blocks: torch.Tensor  # block ids of the prefix
    length: int  # tokens of the prefix
    least: int  # the least of `asked`


@dataclass(frozen=True, slots=True)
class CascadeMetadata:
    """What a cascade needs from tables and lengths: made once per step, used by every layer."""

    own: torch.Tensor  # rows with keys of their own
    decode: DecodeMetadata | None  # of these rows
    groups: tuple[_Group, ...]


def cascade_metadata(
    shared_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    suffix_table: torch.Tensor,
    suffix_lens: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    block_size: int,
    token_bytes: int,
) -> CascadeMetadata:
    """Prepare the suffixes as a decode, and list which rows read which prefix.

    Tensors as in `cascade_attention_decode`, `token_bytes` as in `decode_metadata`.
    """
    own = torch.nonzero(suffix_lens > 0).squeeze(1)
    tables, lengths = (
        value.cpu().numpy().astype(np.int64) for value in (suffix_table[own], suffix_lens[own])
    )
    device = suffix_lens.device
    decode = None
    if len(own):
        decode = decode_metadata(tables, lengths, block_size, token_bytes=token_bytes, device=device)
    groups = []
    for group, length in enumerate(prefix_lens.tolist()):
        rows = torch.nonzero(group_ids == group).squeeze(1)
        if length and len(rows):
            blocks = shared_table[group][: -(-length // block_size)].long()
            asked = length - 1 + suffix_lens[rows]
            groups.append(_Group(rows, asked, blocks, length, int(asked.min())))
    return CascadeMetadata(own, decode, tuple(groups))


def run_cascade(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: CascadeMetadata,
    scoring: Scoring,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: Workspace,
) -> None:
    """One query per row, q `[rows, heads, dk]`, over its group's prefix and its own suffix, into `out` and `lse`."""
    plain = scoring._replace(sinks=None)  # a sink is added once, at the end
    wide = torch.promote_types(q.dtype, torch.float32)
    merged = q.new_zeros(*q.shape[:2], value_cache.shape[3], dtype=wide)
    sums = q.new_full(q.shape[:2], float("-inf"), dtype=wide)
    if metadata.decode is not None:
        own = metadata.own
        part, part_lse = merged[own].to(q.dtype), sums[own]
        run_decode(metadata.decode, q[own], key_cache, value_cache, plain, part, workspace, part_lse)
        merged[own], sums[own] = part.to(wide), part_lse
    for group in metadata.groups:
        rows = group.rows
        state = _prefix(q[rows], group, key_cache, value_cache, plain, workspace)
        merged[rows], sums[rows] = merge_reference(merged[rows], sums[rows], *state)
    if scoring.sinks is not None:
        empty = sums == float("-inf")
        with_sink = torch.logaddexp(sums, scoring.sinks.to(wide)).masked_fill(empty, float("-inf"))
        merged *= torch.exp(sums - with_sink).masked_fill(empty, 0.0).unsqueeze(-1)
        sums = with_sink
    out.copy_(merged)
    if lse is not None:
        lse.copy_(sums)


def _prefix(
    q: torch.Tensor,
    group: _Group,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scoring: Scoring,
    workspace: Workspace,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[rows, heads, dv]` and LSE of the group's rows over its prefix."""
    length, asked = group.length, group.asked
    unseen = group.least + 1 - scoring.window if scoring.window else 0
    k, v = _gather_tokens(group.blocks, length, unseen, (key_cache, value_cache), q.dtype, workspace)
    wide = torch.promote_types(q.dtype, torch.float32)
    packed = q.view(len(q), k.shape[0], -1, q.shape[2])
    if scoring.plain and not scoring.window and gives_lse(k, v):
        rows = packed.transpose(0, 1).flatten(1, 2).unsqueeze(0)
        result, sums = fused_attention(rows, k.unsqueeze(0), v.unsqueeze(0), None, scoring, lse=True)
        if sums is not None:
            back = (k.shape[0], len(q), -1)
            out = result[0].view(*back, v.shape[2]).transpose(0, 1).flatten(1, 2)
            return out.to(wide), sums[0].view(*back).transpose(0, 1).flatten(1)
    distance = torch.arange(length, device=q.device) - asked.unsqueeze(1)
    mask = additive(distance > -scoring.window if scoring.window else distance <= 0, wide)
    queries = packed.permute(1, 2, 0, 3).unsqueeze(0)
    result, lse = explicit_attention(queries, k[None, :, None], v[None, :, None], mask, scoring, distance)
    return result[0].flatten(0, 1).transpose(0, 1).to(wide), lse[0].flatten(0, 1).transpose(0, 1)


def _gather_tokens(
    blocks: torch.Tensor,
    length: int,
    unseen: int,
    caches: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
    workspace: Workspace,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a table's first `length` tokens as `[kv_heads, length, dim]`, in the queries' dtype.

    The first `unseen` ones, which the window of every query has left, are 0: they may be NaN, and 0 x NaN is NaN.
    """
    found = []
    for name, cache in zip(("tokens_k", "tokens_v"), caches, strict=True):
        tokens = gather_blocks(cache, blocks, name, workspace).view(-1, *cache.shape[2:])
        tokens[: max(0, unseen)] = 0
        found.append(as_query_dtype(tokens[:length].transpose(0, 1), dtype, cache.dtype))
    return found[0], found[1]


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
    context = metadata.length - (metadata.stop - metadata.start)
    unseen = context + 1 - scoring.window if scoring.window else 0
    k, v = _gather_tokens(
        metadata.blocks, metadata.length, unseen, (key_cache, value_cache), q.dtype, workspace
    )
    attend = _fused_tile if scoring.plain and lse is None else _explicit_tile
    for first in range(metadata.start, metadata.stop, QUERY_TILE):
        rows = slice(first, min(first + QUERY_TILE, metadata.stop))
        keys = context + rows.stop - metadata.start
        result, part = attend(q[rows], k[:, :keys], v[:, :keys], metadata, scoring)
        out[rows].copy_(result)
        if lse is not None and part is not None:
            lse[rows] = part


def _fused_tile(
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


def _explicit_tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: PrefillMetadata, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = metadata.mask(q.shape[0], k.shape[1], scoring.window, torch.promote_types(q.dtype, torch.float32))
    distance = metadata.distance(q.shape[0], k.shape[1]) if scoring.alibi is not None else None
    grouped = q.reshape(q.shape[0], k.shape[0], -1, q.shape[2]).permute(1, 2, 0, 3).unsqueeze(0)
    result, lse = explicit_attention(grouped, k[None, :, None], v[None, :, None], mask, scoring, distance)
    return result[0].flatten(0, 1).transpose(0, 1), lse[0].flatten(0, 1).transpose(0, 1)


def store(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: float = 1.0) -> None:
    """Write `rows` `[tokens, heads, dim]` (any strides) to `slots` of a paged cache. No slot may be -1.

    An 8-bit cache stores rows / `scale`, clamped to the range of its dtype.
    """
    if cache.dtype.itemsize == 1:
        most = torch.finfo(cache.dtype).max
        rows = (rows.float() / scale).clamp(-most, most).to(cache.dtype).view(torch.uint8)
        cache = storable(cache)
    if cache.is_contiguous():
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)
    else:
        cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write new keys and values `[tokens, kv_heads, dim]` to their slots. A token with slot -1 is skipped."""
    wanted = slot_mapping >= 0
    slots = slot_mapping[wanted].long()
    store(key_cache, key[wanted], slots, k_scale)
    store(value_cache, value[wanted], slots, v_scale)


def copy_blocks(cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy whole blocks at once: every source is read before any destination is written.

    The block axis is the fourth from the end, so that a stack of layers `[layers, blocks, ...]` is copied in one call.
    Unwritten slots stay NaN in the copy.
    """
    cache = storable(cache)
    cache.index_copy_(cache.dim() - 4, destination, cache.index_select(cache.dim() - 4, source))


def swap_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy (source, destination) blocks between a cache on a device and one on the host.

    Pairs that are consecutive on both sides are copied together. With pinned memory the copies are asynchronous, in
    the order of the current stream.
    """
    read, write = as_layers(storable(source)), as_layers(storable(destination))
    for first, second, count in _consecutive(pairs):
        for layer in range(read.shape[0]):
            write[layer, second : second + count].copy_(read[layer, first : first + count], non_blocking=True)


def _consecutive(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first source, first destination, length) of pairs that are consecutive on both sides."""
    cuts = [0] + [
        index
        for index, (before, after) in enumerate(pairwise(pairs), 1)
        if after != (before[0] + 1, before[1] + 1)
    ]
    ends = [*cuts[1:], len(pairs)]
    return [(*pairs[cut], end - cut) for cut, end in zip(cuts, ends, strict=True) if end > cut]
