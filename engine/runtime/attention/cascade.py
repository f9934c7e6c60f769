"""Cascade attention: KV blocks that several decode rows share are read once for all of these rows.

Rows share blocks when their prompts have a common prefix, or when they are beams of one request. The groups are found
on the host from the block tables and change from step to step. A recorded graph has fixed groups, so it never uses a
cascade. This file imports Triton, so `TritonMetadata` imports it only when a step needs it.
"""

from typing import NamedTuple

import numpy as np
import torch

from engine.core.plan import IntArray
from paged_kernels.cascade_groups import cost_of, find_cascade_groups, rows_per_tile
from paged_kernels.triton.cascade import SharedPrefixes, sort_groups
from paged_kernels.triton.parts import MAX_ROWS


class SharedStep(NamedTuple):
    """The decode rows of a step in two parts, on the device: shared prefixes of groups, and each row's own suffix."""

    prefixes: SharedPrefixes
    tables: torch.Tensor  # int32 [rows, blocks], of the suffixes
    lengths: torch.Tensor  # int32 [rows], of the suffixes


def share_step(
    tables: IntArray,
    lengths: IntArray,
    block_size: int,
    *,
    token_bytes: int,
    group: int,
    device: torch.device,
) -> SharedStep | None:
    """Split decode rows, tables `[rows, blocks]` and lengths `[rows]`, into shared prefixes and suffixes.

    `token_bytes` is the size of one token's K and V in a layer, `group` the number of query heads per KV head. None
    where nothing is shared, or where the cost rule says that a cascade is not faster.
    """
    rows = len(lengths)
    if not 2 <= rows <= MAX_ROWS or len(np.unique(tables[:, 0])) == rows:
        return None  # rows without a common first block share nothing; this check does not walk the tables
    groups = find_cascade_groups(
        tables,
        lengths,
        block_size,
        token_bytes=token_bytes,
        rows_per_tile=rows_per_tile(group, device),
        cost=cost_of(device),
    )
    if groups is None:
        return None
    shared, lens, own, rest, ids = (
        torch.from_numpy(values.astype(np.int32)).to(device)
        for values in (
            _widened(groups.shared_tables),
            groups.prefix_lens,
            _widened(groups.suffix_tables),
            groups.suffix_lens,
            groups.group_ids,
        )
    )
    return SharedStep(sort_groups(shared, lens, ids), own, rest)


def _widened(tables: IntArray) -> IntArray:
    """Tables padded to a multiple of 16 columns: few distinct row strides, and the compiler may rely on them."""
    return np.pad(tables, ((0, 0), (0, -tables.shape[1] % 16)))
