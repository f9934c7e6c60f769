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

from paged_kernels.arguments import Scoring, Workspace
from paged_kernels.launch_policy import IntArray
from paged_kernels.native import bf16_unit, c_function

_TILE = 16  # TILE of the C files
_DECODE_FUNCTIONS = {torch.float32: "decode_f32", torch.bfloat16: "decode_bf16"}
_PREFILL_BF16 = {"amx": "prefill_bf16_amx", "avx512_bf16": "prefill_bf16", "": "prefill_bf16_wide"}
_DEPTH = 32  # of prefill_bf16.c: it serves widths that are multiples of it
_LEAST = 512  # tokens of a part of a row: a smaller one is not worth the merge


class Share(NamedTuple):
    """What a thread reads: whole rows, and parts of rows, each with the number of its partial result."""

    rows: tuple[int, int]
    parts: list[tuple[int, int, int, int]]  # row, first token, last token + 1, number


class Plan(NamedTuple):
    """How threads share the rows of a step in layers with one window."""

    shares: list[Share]
    merged: list[tuple[int, int, int]]  # row, number of its first partial result, how many


class DecodeRows(NamedTuple):
    """Rows of one query each, and how threads share them."""

    tables: torch.Tensor  # int64 [rows, blocks]
    lengths: torch.Tensor  # int64 [rows]
    lowest: int  # block ids
    highest: int
    longest: int  # tokens
    plans: dict[int, Plan]  # by window

    def plan(self, window: int) -> Plan:
        """The plan of layers with this window, made once."""
        if window not in self.plans:
            self.plans[window] = plan_of(self.lengths.numpy(), window, torch.get_num_threads())
        return self.plans[window]


def decode_rows(tables: IntArray, lengths: IntArray) -> DecodeRows:
    """Plan rows with tables `[rows, blocks]`, whose unused entries are any block of the pool, and lengths `[rows]`."""
    return DecodeRows(
        torch.from_numpy(np.ascontiguousarray(tables)),
        torch.from_numpy(lengths),
        int(tables.min(initial=0)),
        int(tables.max(initial=0)),
        int(lengths.max(initial=0)),
        {},
    )


def plan_of(lengths: IntArray, window: int, threads: int) -> Plan:
    """Let each thread read about as many tokens. A row is cut where both sides have `_LEAST` tokens or more."""
    first = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
    ends = np.cumsum(lengths - first)  # in the tokens that are read, row behind row
    starts = ends - lengths + first
    total = int(ends[-1]) if len(ends) else 0
    cuts, inside = {0, total}, set()
    for number in range(1, threads if total else 1):
        wanted = total * number // threads
        row = int(np.searchsorted(ends, wanted, side="left"))
        cut = starts[row] + (wanted - starts[row]) // _TILE * _TILE
        if cut - starts[row] >= _LEAST <= ends[row] - cut:
            inside.add(row)
        else:
            cut = starts[row] if 2 * wanted < starts[row] + ends[row] else ends[row]
        cuts.add(int(cut))
    shares: list[Share] = []
    merged: dict[int, list[int]] = {}
    for begin, end in pairwise(sorted(cuts)):
        parts = []
        for row in sorted(inside):
            span = np.clip((begin, end), starts[row], ends[row])
            if span[0] < span[1]:
                numbers = merged.setdefault(row, [])
                numbers.append(sum(map(len, merged.values())))
                parts.append((row, *(span - starts[row] + first[row]).tolist(), numbers[-1]))
        whole = int(np.searchsorted(starts, begin)), int(np.searchsorted(ends, end, side="right"))
        shares.append(Share(whole, parts))
    return Plan(shares, [(row, numbers[0], len(numbers)) for row, numbers in merged.items()])


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

    Each thread reads about as many tokens, and has its own scratch memory. Raises IndexError for block ids outside of
    the pool.
    """
    q, heads, plan = q.contiguous(), q.shape[1], rows.plan(scoring.window)
    name, width = _DECODE_FUNCTIONS[q.dtype], rows.tables.shape[1]
    run, run_part = c_function(name, "pppppiiiiiiiiifpp"), c_function(f"{name}_part", "ppppiiiiiiifpp")
    (_, block, kv_heads, dk), dv = keys.shape, values.shape[3]
    floats, piece = heads * (dk + dv + _TILE + 2), heads * (dv + 2)
    check_bounds(rows.lowest, rows.highest, rows.longest, width, keys)
    scratch = workspace.take("native", floats * len(plan.shares), q, torch.float32)
    count = sum(parts for _, _, parts in plan.merged)
    partial = workspace.take("native_parts", piece * count, q, torch.float32).data_ptr() if count else 0
    query, *caches, tables, lengths = (
        tensor.data_ptr() for tensor in (q, keys, values, rows.tables, rows.lengths)
    )
    shape, scale = (block, heads, kv_heads, dk, dv), scoring.scale * scoring.k_scale

    def share(number: int) -> None:
        own, mine = scratch.data_ptr() + 4 * floats * number, plan.shares[number]
        if mine.rows[0] < mine.rows[1]:
            whole = (width, *shape, scoring.window, scale, out.data_ptr(), own)
            run(query, *caches, tables, lengths, *mine.rows, *whole)
        for row, begin, end, place in mine.parts:
            asked, table = query + row * heads * dk * q.itemsize, tables + row * width * 8
            run_part(asked, *caches, table, begin, end, *shape, scale, partial + 4 * piece * place, own)

    _run_parts(share, len(plan.shares))
    for row, place, parts in plan.merged:
        result, own = out.data_ptr() + row * heads * dv * out.itemsize, scratch.data_ptr()
        c_function(f"{name}_merge", "piiipp")(partial + 4 * piece * place, parts, heads, dv, result, own)


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
    name = prefill_name(q.dtype, dk, dv)
    floats = prefill_scratch(name, dk, dv, length)
    scratch = workspace.take("native_prefill", floats * threads, q, torch.float32)
    run = c_function(name, "ppppiiiiiiiiiifpp")
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


def prefill_name(dtype: torch.dtype, dk: int, dv: int) -> str:
    """The C function that computes chunks: in bfloat16 by what multiplies it here, or else in float32."""
    if dtype is torch.float32:
        return "prefill_f32"
    return _PREFILL_BF16["" if dk % _DEPTH or dv % _DEPTH else bf16_unit()]


def prefill_scratch(name: str, dk: int, dv: int, length: int) -> int:
    """Floats of scratch memory that a thread of a C function needs for a chunk at the end of `length` tokens."""
    if name in ("prefill_f32", _PREFILL_BF16[""]):
        rows, keys = 16, 64  # ROWS, at most, and KEYS of attention.c
        return rows * (dk + dv + keys) + -(-length // keys) * keys * (dk + dv)
    rows, keys = 32, 128  # of prefill_bf16.c
    return rows * (dk // 2 + dv + keys + keys // 2) + -(-length // keys) * keys * (dk + dv) // 2


def in_threads(part: Callable[[int, int], None], count: int, unit: int) -> None:
    """Call `part` for the ranges that torch's threads take of `count` numbers, cut at multiples of `unit`."""
    threads = torch.get_num_threads()
    cuts = [count // unit * number // threads * unit for number in range(threads)] + [count]
    _run_parts(lambda number: part(cuts[number], cuts[number + 1]), threads)


def _run_parts(part: Callable[[int], None], count: int) -> None:
    """Call `part` for 0 to `count - 1`, in threads."""
    if count == 1:
        part(0)
    else:
        list(_threads(count).map(part, range(count)))


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="pagetwin-decode")
