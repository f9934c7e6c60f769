"""The cascade on torch: attend to each row's own keys, gather each prefix once for all of its rows, then merge."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from paged_kernels.memory import Workspace
from paged_kernels.scoring import Scoring, additive
from paged_kernels.torch.decode import DecodeMetadata, decode_metadata, run_decode
from paged_kernels.torch.gathered import (
    as_query_dtype,
    explicit_attention,
    fused_attention,
    gather_blocks,
    gives_lse,
    merge_reference,
)


class _Group(NamedTuple):
    """A prefix and the rows that share it."""

    rows: torch.Tensor
    asked: torch.Tensor  # [rows], position of each row's query
    blocks: torch.Tensor  # block ids of the prefix
    length: int  # tokens of the prefix


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
    decode = (
        decode_metadata(tables, lengths, block_size, token_bytes=token_bytes, device=device)
        if len(own)
        else None
    )
    groups = []
    for group, length in enumerate(prefix_lens.tolist()):
        rows = torch.nonzero(group_ids == group).squeeze(1)
        if length and len(rows):
            blocks = shared_table[group][: -(-length // block_size)].long()
            groups.append(_Group(rows, length - 1 + suffix_lens[rows], blocks, length))
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
    for rows, asked, blocks, length in metadata.groups:
        state = _prefix(q[rows], asked, key_cache, value_cache, blocks, length, plain, workspace)
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
    asked: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    blocks: torch.Tensor,
    length: int,
    scoring: Scoring,
    workspace: Workspace,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[rows, heads, dv]` and LSE over the first `length` tokens of `blocks`; query i is at `asked[i]`."""
    k, v = (
        as_query_dtype(
            gather_blocks(cache, blocks, name, workspace).view(-1, *cache.shape[2:])[:length],
            q.dtype,
            cache.dtype,
        ).transpose(0, 1)
        for name, cache in (("prefix_k", key_cache), ("prefix_v", value_cache))
    )
    wide = torch.promote_types(q.dtype, torch.float32)
    packed = q.view(len(q), k.shape[0], -1, q.shape[2])
    if scoring.plain and not scoring.window and gives_lse(q.device):
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
