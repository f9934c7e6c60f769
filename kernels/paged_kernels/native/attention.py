"""Attention by the C kernels, on CPU tensors: a plan of the rows once per step, then calls for every layer.

`paged_kernels.backends` says what they serve. C does not notice an id outside of the pool, so each plan and call is
checked.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from paged_kernels.launch_policy import IntArray
from paged_kernels.memory import Workspace
from paged_kernels.native import c_function
from paged_kernels.scoring import Scoring

_TILE = 16  # TILE of the C files
_DECODE_FUNCTIONS = {torch.float32: "decode_f32", torch.bfloat16: "decode_bf16"}
_PREFILL_FUNCTIONS = {torch.float32: "prefill_f32", torch.bfloat16: "prefill_bf16"}
# ROWS and KEYS of the C files
_QUERIES, _KEYS = {torch.float32: 8, torch.bfloat16: 32}, {torch.float32: 64, torch.bfloat16: 128}


class DecodeRows(NamedTuple):
    """Rows of one query each, and how threads share them."""

    tables: torch.Tensor  # int64 [rows, blocks]
    lengths: torch.Tensor  # int64 [rows]
    lowest: int  # block ids
    highest: int
    longest: int  # tokens
    parts: list[tuple[int, int]]  # rows of each thread


def decode_rows(tables: IntArray, lengths: IntArray) -> DecodeRows:
    """Plan rows with tables `[rows, blocks]`, whose unused entries are any block of the pool, and lengths `[rows]`."""
    return DecodeRows(
        torch.from_numpy(np.ascontiguousarray(tables)),
        torch.from_numpy(lengths),
        int(tables.min(initial=0)),
        int(tables.max(initial=0)),
        int(lengths.max(initial=0)),
        _even_parts(lengths, torch.get_num_threads()),
    )


def run_decode(
    rows: DecodeRows,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    out: torch.Tensor,
    workspace: Workspace,
) -> None:
    """Attention of q `[rows, heads, dk]` into `out` `[rows, heads, dv]`, contiguous as the caches.

    Each thread computes rows with about the same number of tokens, and has its own scratch memory. Raises IndexError
    for block ids outside of the pool.
    """
    q, heads = q.contiguous(), q.shape[1]
    run = c_function(_DECODE_FUNCTIONS[q.dtype], "pppppiiiiiiiiifpp")
    (_, block, kv_heads, dk), dv = keys.shape, values.shape[3]
    floats = heads * (dk + dv + _TILE + 2)
    check_bounds(rows.lowest, rows.highest, rows.longest, rows.tables.shape[1], keys)
    scratch = workspace.take("native", floats * len(rows.parts), q, torch.float32)
    pointers = [tensor.data_ptr() for tensor in (q, keys, values, rows.tables, rows.lengths)]
    shape = (rows.tables.shape[1], block, heads, kv_heads, dk, dv, scoring.window)
    scale = scoring.scale * scoring.k_scale

    def part(number: int) -> None:
        own = scratch.data_ptr() + 4 * floats * number
        run(*pointers, *rows.parts[number], *shape, scale, out.data_ptr(), own)

    _run_parts(part, len(rows.parts))


def run_prefill(
    table: IntArray,
    length: int,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    out: torch.Tensor,
    workspace: Workspace,
) -> None:
    """Causal attention of q `[queries, heads, dk]`, the last of a row's `length` tokens, into `out`.

    Each thread computes some of the query heads, and has its own copy of their keys and values. Raises IndexError for
    block ids outside of the pool.
    """
    (_, block, kv_heads, dk), dv, (queries, heads) = keys.shape, values.shape[3], q.shape[:2]
    check_bounds(int(table.min()), int(table.max()), length, len(table), keys)
    q, blocks = q.contiguous(), torch.from_numpy(np.ascontiguousarray(table, dtype=np.int64))
    threads = min(torch.get_num_threads(), heads)
    cuts = [heads * number // threads for number in range(threads + 1)]
    floats = prefill_scratch(q.dtype, dk, dv, length)
    scratch = workspace.take("native_prefill", floats * threads, q, torch.float32)
    run = c_function(_PREFILL_FUNCTIONS[q.dtype], "ppppiiiiiiiiiifpp")
    pointers = [tensor.data_ptr() for tensor in (q, keys, values, blocks)]
    shape = (block, heads, kv_heads, dk, dv, scoring.window)
    scale = scoring.scale * scoring.k_scale

    def part(number: int) -> None:
        own = scratch.data_ptr() + 4 * floats * number
        some = (queries, length, cuts[number], cuts[number + 1])
        run(*pointers, *some, *shape, scale, out.data_ptr(), own)

    _run_parts(part, threads)


def check_bounds(lowest: int, highest: int, longest: int, width: int, keys: torch.Tensor) -> None:
    """Raise IndexError for block ids outside of the pool, or more tokens than a table of `width` blocks holds.

    So does torch's gather; C would not notice it.
    """
    if lowest < 0 or highest >= keys.shape[0] or longest > width * keys.shape[1]:
        raise IndexError(
            f"block ids {lowest} to {highest}, {longest} tokens in {width} blocks of {keys.shape[1]}: "
            f"outside of the pool's {keys.shape[0]} blocks, or of a block table"
        )


def _even_parts(lengths: IntArray, parts: int) -> list[tuple[int, int]]:
    """At most `parts` ranges of rows with about the same number of tokens each. No range is empty."""
    ends = np.cumsum(lengths)
    wanted = ends[-1] * np.arange(1, parts) / parts if len(ends) else []
    cuts = [0, *np.unique(np.searchsorted(ends, wanted, side="left") + 1).tolist(), len(lengths)]
    return [(a, b) for a, b in pairwise(cuts) if b > a]


def prefill_scratch(dtype: torch.dtype, dk: int, dv: int, length: int) -> int:
    """Floats of scratch memory that a thread needs for a prefill row of `length` tokens; see the C files."""
    rows, keys = _QUERIES[dtype], _KEYS[dtype]
    padded = -(-length // keys) * keys
    if dtype is torch.float32:
        return rows * (dk + dv + keys) + padded * (dk + dv)
    return rows * (dk // 2 + dv + keys + keys // 2) + padded * (dk + dv) // 2


def _run_parts(part: Callable[[int], None], count: int) -> None:
    if count == 1:
        part(0)
    else:
        list(_threads(count).map(part, range(count)))


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="pagetwin-decode")
