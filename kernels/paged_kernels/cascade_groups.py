"""Find which rows of a decode batch share blocks, and whether reading these blocks once pays for two more launches.

Shared blocks are found from the block tables alone, so prompts with a common prefix and the beams of one request are
the same case.

The cost rule compares the time saved on memory with the time of the launches. Published measurements show why a
rule is needed: with 128 beams, a cascade over a prefix of 128 tokens is slower (0.52x) and over 256 tokens faster
(2.2x; TensorRT-LLM #14396).
With a prefix of 512 tokens the cascade of one engine was slower at every batch size (vllm
#44397): a short prefix stays in the L2 cache, and the plain decode reads it at the speed of that cache.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from paged_kernels.arguments import IntArray


class RowGroup(NamedTuple):
    """A group of rows that share a prefix, as the cost rule sees it."""

    rows: int
    kv_bytes: int  # K and V of the shared tokens, in one layer
    tiles: int  # how often the cascade reads the prefix: once per program, which packs several rows


@dataclass(frozen=True, slots=True)
class CascadeCost:
    """Speed of memory and cost of launches on one device."""

    memory_bytes_per_s: float
    cache_bytes_per_s: float  # speed of repeated reads while the shared blocks stay in the last-level cache
    cache_bytes: int
    overhead_s: float  # all that a cascade does beyond a flat decode, per call

    def saved_s(self, group: RowGroup) -> float:
        """Seconds saved by reading `group.tiles` times instead of `group.rows` times. The overhead is not deducted.

        The shared blocks may use half of the cache. The rows' own blocks stream through the other half.
        """
        again = self.cache_bytes_per_s if group.kv_bytes <= self.cache_bytes / 2 else self.memory_bytes_per_s
        return (group.rows - group.tiles) * group.kv_bytes / again


# Copy bandwidth as measured on an H200 (4.3 TB/s, read + write). Not measured: the speed of its L2 (taken as twice the
# memory) and the overhead (the upper end of two launches of 5 to 10 us, so that a doubtful case stays flat).
H200 = CascadeCost(4.3e12, 8.6e12, 60 << 20, 20e-6)

# One thread of a shared x86 machine, torch path, 4 to 8 KV heads of 64 to 128: gathering and reading gives 2 to 6 GB/s.
# Interleaved with the flat decode, a cascade took 0.6 to 1.04 of its time over prefixes of 256 to 1024 tokens and 2 to
# 16 rows; the overhead is set so that the cases near 1 stay flat.
CPU = CascadeCost(4e9, 8e9, 4 << 20, 2e-3)


def cost_of(device: torch.device) -> CascadeCost:
    """The figures for a device. On a slower GPU, those of the H200 miss some gains but choose no slower cascade."""
    return H200 if device.type == "cuda" else CPU


class CascadeGroups(NamedTuple):
    """A decode batch, divided into what groups of rows share and what is each row's own."""

    shared_tables: IntArray  # [groups, blocks]
    prefix_lens: IntArray  # [groups], tokens, whole blocks
    suffix_tables: IntArray  # [rows, blocks]
    suffix_lens: IntArray  # [rows], at least one token of each non-empty row
    group_ids: IntArray  # [rows]; -1: in no group
    saved_s: float  # seconds per call that the cost rule expects to save over the flat decode


def find_cascade_groups(
    block_table: IntArray,
    seq_lens: IntArray,
    block_size: int,
    *,
    token_bytes: int,
    rows_per_tile: int,
    cost: CascadeCost,
    queries: IntArray | None = None,
) -> CascadeGroups | None:
    """The groups of rows that save most time by `cost`, or None if a flat decode is as fast.

    `block_table` is `[rows, blocks]`, `seq_lens` `[rows]`. `token_bytes` are the bytes of one token's K and V in one
    layer, `rows_per_tile` the queries that one program packs. A row's last `queries` tokens (None: one each) are never
    shared: they are what it computes.
    """
    asking = np.ones_like(seq_lens) if queries is None else queries
    shareable = np.maximum(seq_lens - asking, 0) // block_size
    finder = _Finder(block_table, shareable, asking, block_size, token_bytes, rows_per_tile, cost)
    saved, groups = finder.best(np.arange(len(seq_lens)), 0)
    saved -= cost.overhead_s
    if not groups or saved <= 0:
        return None
    shared = np.zeros(len(seq_lens), dtype=np.int64)
    group_ids = np.full(len(seq_lens), -1, dtype=np.int64)
    tables = np.zeros((len(groups), max(blocks for _, blocks in groups)), dtype=np.int64)
    for group, (rows, blocks) in enumerate(groups):
        group_ids[rows], shared[rows] = group, blocks
        tables[group, :blocks] = block_table[rows[0], :blocks]
    lens = np.array([blocks * block_size for _, blocks in groups], dtype=np.int64)
    # each row's blocks after the shared ones, padded with the null block
    needed = -(-seq_lens // block_size)
    column = np.arange(max(1, int((needed - shared).max(initial=0)))) + shared[:, None]
    inside = column < needed[:, None]
    suffixes = np.where(inside, np.take_along_axis(block_table, np.where(inside, column, 0), axis=1), 0)
    return CascadeGroups(tables, lens, suffixes, seq_lens - shared * block_size, group_ids, saved)


def rows_per_tile(group: int, device: torch.device) -> int:
    """How many queries read a shared block together: the rows of a program on CUDA, all rows on the torch path."""
    return max(1, 64 // group) if device.type == "cuda" else 2**30


def each_query(
    bounds: torch.Tensor, count: int, suffix_lens: torch.Tensor, group_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each of `count` queries its row, the keys of its own that it sees, and its group: without waiting for a GPU.

    Row i owns the queries `bounds[i] : bounds[i + 1]`, of which the last sees all `suffix_lens[i]` keys. A query of no
    row sees none and has group -1.
    """
    number = torch.arange(count, dtype=bounds.dtype, device=bounds.device)
    row = (torch.searchsorted(bounds, number, right=True) - 1).clamp(0, len(suffix_lens) - 1)
    inside = (number >= bounds[row]) & (number < bounds[row + 1])
    own = torch.where(inside, suffix_lens[row] - (bounds[row + 1] - 1 - number), 0)
    return row, own, torch.where(inside, group_ids[row], -1)


@dataclass(frozen=True, slots=True)
class _Finder:
    """Walks the tree that the tables form. Its branches are blocks; rows share blocks as far as their tables agree."""

    table: IntArray
    shareable: IntArray  # [rows], full blocks
    queries: IntArray  # [rows]
    block_size: int
    token_bytes: int
    rows_per_tile: int
    cost: CascadeCost

    def best(self, rows: IntArray, depth: int, levels: int = 200) -> tuple[float, list[tuple[IntArray, int]]]:
        """(seconds saved, [(rows, shared blocks)]) of the best division of `rows`, which agree on `depth` blocks.

        Rows that are divided more than `levels` times stay apart.
        """
        if len(rows) < 2 or not levels:
            return 0.0, []
        agreed = self._agreed(rows, depth)
        whole = self._saved(rows, agreed)
        longer = rows[self.shareable[rows] > agreed]
        apart = 0.0
        groups: list[tuple[IntArray, int]] = []
        for block in np.unique(self.table[longer, agreed]) if len(longer) else ():
            saved, found = self.best(longer[self.table[longer, agreed] == block], agreed + 1, levels - 1)
            apart, groups = apart + saved, groups + found
        return (whole, [(rows, agreed)]) if whole > 0 and whole >= apart else (apart, groups)

    def _agreed(self, rows: IntArray, depth: int) -> int:
        """Leading blocks that all rows have in common."""
        most = int(self.shareable[rows].min())
        same = (self.table[rows, depth:most] == self.table[rows[0], depth:most]).all(axis=0)
        if most <= depth:
            return min(depth, most)
        return depth + (len(same) if same.all() else int(same.argmin()))

    def _saved(self, rows: IntArray, blocks: int) -> float:
        tiles = -(-int(self.queries[rows].sum()) // self.rows_per_tile)
        group = RowGroup(len(rows), blocks * self.block_size * self.token_bytes, tiles)
        return self.cost.saved_s(group) if blocks else 0.0
