"""Which rows of a decode batch share blocks, and whether reading those once is worth two more launches.

Found from the block tables alone, so that prompts with a common prefix and the beams of one request are the same case.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paged_kernels.cascade_cost import CascadeCost, SharedRun

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """A decode batch in two halves: what groups of rows share, and what is each row's own."""

    shared_tables: IntArray  # [groups, blocks]
    prefix_lens: IntArray  # [groups], tokens, whole blocks
    suffix_tables: IntArray  # [rows, blocks]
    suffix_lens: IntArray  # [rows], at least one token of each non-empty row
    group_ids: IntArray  # [rows]; -1: shares nothing that pays
    saved_s: float  # what the cost rule expects over the flat decode


def plan_cascade(
    block_table: IntArray,
    seq_lens: IntArray,
    block_size: int,
    *,
    token_bytes: int,
    rows_per_tile: int,
    cost: CascadeCost,
) -> CascadePlan | None:
    """The division of a batch that saves most by `cost`, or None where the flat decode is as fast.

    `token_bytes` is what one token's K and V take in one layer; `rows_per_tile` how many sequences a program packs.
    """
    finder = _Finder(
        block_table, np.maximum(seq_lens - 1, 0) // block_size, block_size, token_bytes, rows_per_tile, cost
    )
    saved, runs = finder.best(np.arange(len(seq_lens)), 0)
    saved -= cost.overhead_s
    if not runs or saved <= 0:
        return None
    shared = np.zeros(len(seq_lens), dtype=np.int64)
    group_ids = np.full(len(seq_lens), -1, dtype=np.int64)
    tables = np.zeros((len(runs), max(blocks for _, blocks in runs)), dtype=np.int64)
    for group, (rows, blocks) in enumerate(runs):
        group_ids[rows], shared[rows] = group, blocks
        tables[group, :blocks] = block_table[rows[0], :blocks]
    lens = np.array([blocks * block_size for _, blocks in runs], dtype=np.int64)
    suffixes = _suffixes(block_table, shared, -(-seq_lens // block_size))
    return CascadePlan(tables, lens, suffixes, seq_lens - shared * block_size, group_ids, saved)


def _suffixes(table: IntArray, shared: IntArray, needed: IntArray) -> IntArray:
    """Each row's blocks behind the shared ones, padded with the null block."""
    column = np.arange(max(1, int((needed - shared).max(initial=0)))) + shared[:, None]
    inside = column < needed[:, None]
    return np.where(inside, np.take_along_axis(table, np.where(inside, column, 0), axis=1), 0)


def rows_per_tile(group: int, device: torch.device) -> int:
    """How many sequences read a shared block together: a program's rows on CUDA, all of them on torch's path."""
    return max(1, 64 // group) if device.type == "cuda" else 2**30


@dataclass(frozen=True, slots=True)
class _Finder:
    """Walks the tree that the tables form: its branches are blocks, and rows are shared as far as they agree."""

    table: IntArray
    shareable: IntArray  # [rows], full blocks: the row's last token stays its own
    block_size: int
    token_bytes: int
    rows_per_tile: int
    cost: CascadeCost

    def best(self, rows: IntArray, depth: int) -> tuple[float, list[tuple[IntArray, int]]]:
        """(seconds saved, [(rows, shared blocks)]) of the best division of rows that agree on `depth` blocks."""
        if len(rows) < 2:
            return 0.0, []
        agreed = self._agreed(rows, depth)
        whole = self._saved(len(rows), agreed)
        longer = rows[self.shareable[rows] > agreed]
        apart = 0.0
        runs: list[tuple[IntArray, int]] = []
        for block in np.unique(self.table[longer, agreed]) if len(longer) else ():
            saved, found = self.best(longer[self.table[longer, agreed] == block], agreed + 1)
            apart, runs = apart + saved, runs + found
        return (whole, [(rows, agreed)]) if whole > 0 and whole >= apart else (apart, runs)

    def _agreed(self, rows: IntArray, depth: int) -> int:
        """Leading blocks that all rows have in common."""
        most = int(self.shareable[rows].min())
        same = (self.table[rows, depth:most] == self.table[rows[0], depth:most]).all(axis=0)
        return (
            depth + (int(same.argmin()) if not same.all() else len(same))
            if most > depth
            else min(depth, most)
        )

    def _saved(self, rows: int, blocks: int) -> float:
        run = SharedRun(rows, blocks * self.block_size * self.token_bytes, -(-rows // self.rows_per_tile))
        return self.cost.saved_s(run) if blocks else 0.0
