"""Cascade attention: KV blocks that several decode rows share are read once for all of these rows.

Rows share blocks when their prompts have a common prefix, or when they are beams of one request. The groups are found
on the host from the block tables and change from step to step. A recorded graph has fixed groups, so it never uses a
cascade. This file imports Triton, so `TritonPlan` imports it only when it needs it.
"""

from typing import NamedTuple

import numpy as np
import torch

from engine.core.plan import IntArray
from paged_kernels.cascade_plan import cost_of, plan_cascade, rows_per_tile
from paged_kernels.triton.cascade import SharedPrefixes, sort_groups
from paged_kernels.triton.decode import MAX_ROWS


class SharedStep(NamedTuple):
    """A step's decode rows in two halves, on the device: what groups of rows share, and what is each row's own."""

    prefixes: SharedPrefixes
    tables: torch.Tensor  # int32 [rows, blocks], each row's own
    lengths: torch.Tensor  # int32 [rows]


def share_step(
    tables: IntArray,
    lengths: IntArray,
    block_size: int,
    *,
    token_bytes: int,
    group: int,
    device: torch.device,
) -> SharedStep | None:
    """The halves of tables `[rows, blocks]` and lengths `[rows]`; None where the cost rule says that flat is as fast.

    `token_bytes` is what one token's K and V take in a layer, `group` the query heads of a KV head.
    """
    rows = len(lengths)
    if not 2 <= rows <= MAX_ROWS or len(np.unique(tables[:, 0])) == rows:
        return None  # without a first block in common nothing is shared: said without walking the tables
    plan = plan_cascade(
        tables,
        lengths,
        block_size,
        token_bytes=token_bytes,
        rows_per_tile=rows_per_tile(group, device),
        cost=cost_of(device),
    )
    if plan is None:
        return None
    shared, lens, own, rest, ids = (
        torch.from_numpy(values.astype(np.int32)).to(device)
        for values in (
            widened(plan.shared_tables),
            plan.prefix_lens,
            widened(plan.suffix_tables),
            plan.suffix_lens,
            plan.group_ids,
        )
    )
    return SharedStep(sort_groups(shared, lens, ids), own, rest)


def widened(tables: IntArray) -> IntArray:
    """Tables whose width is a multiple of 16: a row stride that the compiler may rely on, and few distinct ones."""
    return np.pad(tables, ((0, 0), (0, -tables.shape[1] % 16)))
