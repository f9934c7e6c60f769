"""Attention metadata of one step: where its rows lie in the batch, and how torch, Triton or C computes them.

The metadata of a step is made once and used by every layer. `TorchMetadata`, `TritonMetadata` and `NativeMetadata`
(compiled C kernels on a CPU) have the same two methods, so the rest of the engine does not know which one runs.
`StaticMetadata` in `engine/runtime/graphs.py` is a fourth kind, for recorded graphs.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from engine.core.plan import IntArray
from engine.runtime.attention.native import c_function, has_matrix_units
from engine.runtime.group_pool import CacheTensors
from paged_kernels import Scoring, Workspace
from paged_kernels.cascade_groups import cost_of, find_cascade_groups, rows_per_tile
from paged_kernels.memory import PagedBatch
from paged_kernels.torch import cache as torch_cache
from paged_kernels.torch.decode import decode_metadata, run_decode
from paged_kernels.torch.prefill import prefill_metadata, run_prefill

if TYPE_CHECKING:
    from paged_kernels.triton.cascade import SharedPrefixes

_VECTOR, _TILE = 16, 16  # LANES and TILE of the C files
_DECODE_FUNCTIONS = {torch.float32: "decode_f32", torch.bfloat16: "decode_bf16"}
_PREFILL_FUNCTIONS = {torch.float32: "prefill_f32", torch.bfloat16: "prefill_bf16"}
_DEPTH = 32  # DEPTH of prefill_bf16.c: numbers that the matrix unit adds in one step
# ROWS and KEYS of the C files
_QUERIES, _KEYS = {torch.float32: 8, torch.bfloat16: 32}, {torch.float32: 64, torch.bfloat16: 128}


class PrefillRow(NamedTuple):
    """A row of several tokens. Its `queries` tokens start at `start` in the flat batch and end its `length` tokens."""

    table: IntArray  # block ids
    start: int
    queries: int
    length: int  # tokens of the sequence with these ones


def slots_of(table: IntArray, start: int, end: int, block_size: int) -> IntArray:
    """The KV slots of tokens `start` to `end - 1` of a sequence with these blocks."""
    position = np.arange(start, end)
    slots: IntArray = table[position // block_size] * block_size + position % block_size
    return slots


class StepLayout(NamedTuple):
    """Where the rows of a step lie: decode rows are tokens 0, 1, ... of the flat batch, and prefill rows follow.

    The decode tables are padded with block 0, the null block.
    """

    tables: IntArray  # [decode rows, widest]
    lengths: IntArray  # [decode rows], the row's own token included
    prefills: Sequence[PrefillRow]


class AttentionMetadata(Protocol):
    """Stores the new K and V of one step and computes its attention, for any layer."""

    def store(self, cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write new rows `[tokens, kv_heads, dim]` to their slots."""

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Fill `out` `[tokens, heads, dv]` from q `[tokens, heads, dk]` and the layer's caches."""


class TorchMetadata:
    """Attention by torch: gathers K and V of the decode rows for a few large calls, runs prefill rows one by one."""

    def __init__(self, layout: StepLayout, pool: CacheTensors, workspace: Workspace) -> None:
        size, device, (tables, lengths, prefills) = pool.block_size, pool.device, layout
        self._workspace = workspace
        self._decode_rows = slice(0, len(lengths))
        self._decode = None
        if len(lengths):
            self._decode = decode_metadata(tables, lengths, size, token_bytes=pool.token_bytes, device=device)
        self._prefills = [prefill_metadata(*row, size, device=device) for row in prefills]

    store = staticmethod(torch_cache.store)

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Run the decode rows, then each prefill row."""
        if self._decode is not None:
            rows = self._decode_rows
            run_decode(self._decode, q[rows], keys, values, scoring, out[rows], self._workspace)
        for prefill in self._prefills:
            run_prefill(prefill, q, keys, values, scoring, out, self._workspace)


class SharedStep(NamedTuple):
    """The decode rows of a step in two parts, on the device: shared prefixes of groups, and each row's own suffix."""

    prefixes: "SharedPrefixes"
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

    Rows share blocks when their prompts have a common prefix, or when they are beams of one request. The groups are
    found on the host and change from step to step: a recorded graph has fixed groups, so it never uses a cascade.
    `token_bytes` is the size of one token's K and V in a layer, `group` the number of query heads per KV head. None
    where nothing is shared, or where the cost rule says that a cascade is not faster.
    """
    from paged_kernels.triton.cascade import sort_groups
    from paged_kernels.triton.decode import MAX_ROWS

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
    shared, own = (_int32(_widened(each), device) for each in (groups.shared_tables, groups.suffix_tables))
    lens, rest, ids = (
        _int32(each, device) for each in (groups.prefix_lens, groups.suffix_lens, groups.group_ids)
    )
    return SharedStep(sort_groups(shared, lens, ids), own, rest)


class TritonMetadata:
    """Attention by Triton: all decode rows in one launch (a cascade takes a few), all prefill rows in another.

    Tables and lengths are copied to the device once per step. The host knows the lengths, so it decides where one part
    per row is enough. Otherwise the device chooses the number of parts, because every fixed number would be one more
    kernel to compile. It lists them once for all layers of one kind.
    """

    def __init__(self, layout: StepLayout, pool: CacheTensors, workspace: Workspace) -> None:
        from paged_kernels.triton import cache as triton_cache
        from paged_kernels.triton import cascade as triton_cascade
        from paged_kernels.triton import decode as triton_decode
        from paged_kernels.triton import prefill as triton_prefill
        from paged_kernels.triton.decode import PartsOfStep

        self.store = triton_cache.store
        self._run_decode, self._run_prefill = triton_decode.run_decode, triton_prefill.run_prefill
        self._run_cascade = triton_cascade.run_cascade
        self._layout, self._pool, self._workspace = layout, pool, workspace
        self._shared: dict[tuple[int, int, int], SharedStep | None] = {}
        self._splits: dict[tuple[int, ...], int | None] = {}
        self._parts = PartsOfStep()
        self._tables = _int32(_widened(layout.tables), pool.device)
        self._lengths = _int32(layout.lengths, pool.device)
        prefills = layout.prefills
        self._queries = max((row.queries for row in prefills), default=0)
        self._prefill_tables = _int32(_stacked([row.table for row in prefills]), pool.device)
        self._prefill_lengths = _int32(np.array([row.length for row in prefills]), pool.device)
        ends = [row.start + row.queries for row in prefills]
        self._bounds = _int32(np.array([len(layout.lengths), *ends]), pool.device)

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Run the decode rows, then the prefill rows."""
        rows = slice(0, len(self._layout.lengths))
        if rows.stop:
            self._decode(q[rows], keys, values, scoring, out[rows])
        if self._queries:
            spans = (self._prefill_tables, self._prefill_lengths, self._bounds, self._queries)
            self._run_prefill(PagedBatch(q, keys, values, *spans), scoring, out)

    def _is_cut(self, window: int) -> bool:
        """Whether a window hides keys of a row: then little of a shared prefix is read, and no cascade is worth it."""
        return 0 < window < int(self._layout.lengths.max())

    def _decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        shared = None if self._is_cut(scoring.window) else self._shared_step(q, keys, values)
        if shared is not None:
            arguments = (q, keys, values, *shared, scoring, out)
            self._run_cascade(*arguments, workspace=self._workspace, parts=self._parts)
            return
        splits = self._one_part(q, keys, values, scoring.window)
        flat = (q, keys, values, self._tables, self._lengths, scoring, out, None, splits)
        self._run_decode(*flat, workspace=self._workspace, parts=self._parts)

    def _shared_step(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> SharedStep | None:
        """The groups of rows that share blocks, found once for all layers of one shape."""
        token_bytes = keys[0, 0].nbytes + values[0, 0].nbytes
        shape = (q.shape[1], keys.shape[2], token_bytes)
        if shape not in self._shared:
            rows, size = self._layout[:2], self._pool.block_size
            group, device = q.shape[1] // keys.shape[2], self._pool.device
            self._shared[shape] = share_step(*rows, size, token_bytes=token_bytes, group=group, device=device)
        return self._shared[shape]

    def _one_part(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> int | None:
        """The parts of each row, found once for all layers of one kind; None: the device lists them."""
        kind = (q.shape[1], *keys.shape[1:], values.shape[3], window)
        if kind not in self._splits:
            from paged_kernels.triton.decode import pick_splits

            self._splits[kind] = pick_splits(self._layout.lengths, q, keys, values, window)
        return self._splits[kind]


def _int32(values: IntArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)


def _stacked(tables: Sequence[IntArray]) -> IntArray:
    """Tables of different lengths as one array, padded with the null block."""
    widest = max((len(table) for table in tables), default=0)
    stacked = np.zeros((len(tables), widest), dtype=np.int64)
    for row, table in zip(stacked, tables, strict=True):
        row[: len(table)] = table
    return _widened(stacked)


def _widened(tables: IntArray) -> IntArray:
    """Tables padded to a multiple of 16 columns: few distinct row strides, and the compiler may rely on them."""
    return np.pad(tables, ((0, 0), (0, -tables.shape[1] % 16)))


def native_supports(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> bool:
    """Whether the C kernel can compute this layer: no softcap or sinks, float32 or bfloat16, heads of whole vectors."""
    whole = keys.shape[3] % _VECTOR == 0 == values.shape[3] % _VECTOR
    typed = q.dtype in _DECODE_FUNCTIONS and q.dtype is keys.dtype
    return scoring.plain and typed and whole and keys.is_contiguous() and values.is_contiguous()


def native_prefills(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> bool:
    """Whether C computes the prefill rows of this layer; in bfloat16 it needs the CPU's matrix units (AMX)."""
    if not native_supports(q, keys, values, scoring):
        return False
    if q.dtype is torch.float32:
        return True
    return keys.shape[3] % _DEPTH == 0 and values.shape[3] % _DEPTH == 0 and has_matrix_units()


class NativeMetadata:
    """Attention by C in supported layers: decode rows (`native_supports`) and prefill rows (`native_prefills`).

    `TorchMetadata` computes everything else.
    """

    def __init__(self, layout: StepLayout, pool: CacheTensors, workspace: Workspace) -> None:
        self._layout, self._pool, self._workspace = layout, pool, workspace
        prefills = StepLayout(layout.tables[:0], layout.lengths[:0], layout.prefills)
        self._prefills = TorchMetadata(prefills, pool, workspace)
        self._torch: TorchMetadata | None = None  # for layers that the C kernel does not support
        self._tables = torch.from_numpy(np.ascontiguousarray(layout.tables))
        self._lengths = torch.from_numpy(layout.lengths)
        self._blocks = (int(layout.tables.min(initial=0)), int(layout.tables.max(initial=0)))
        self._longest = int(layout.lengths.max(initial=0))
        self._parts = _even_parts(layout.lengths, torch.get_num_threads())

    store = staticmethod(torch_cache.store)

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Run the decode rows, then each prefill row."""
        rows = len(self._layout.lengths)
        if not native_supports(q, keys, values, scoring):
            self._torch = self._torch or TorchMetadata(self._layout, self._pool, self._workspace)
            self._torch.attend(q, keys, values, scoring, out)
            return
        if rows:
            self._decode(q[:rows].contiguous(), keys, values, scoring, out[:rows])
        if native_prefills(q, keys, values, scoring):
            for row in self._layout.prefills:
                self._prefill(row, q, keys, values, scoring, out)
        else:
            self._prefills.attend(q, keys, values, scoring, out)

    def _decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Each thread computes rows with about the same number of tokens, and has its own scratch memory."""
        run, heads = c_function(_DECODE_FUNCTIONS[q.dtype], "pppppiiiiiiiiifpp"), q.shape[1]
        (_, block, kv_heads, dk), dv = keys.shape, values.shape[3]
        floats = heads * (dk + dv + _TILE + 2)
        check_bounds(*self._blocks, self._longest, self._tables.shape[1], keys)
        scratch = self._workspace.take("native", floats * len(self._parts), q, torch.float32)
        pointers = [tensor.data_ptr() for tensor in (q, keys, values, self._tables, self._lengths)]
        shape = (self._tables.shape[1], block, heads, kv_heads, dk, dv, scoring.window)
        scale = scoring.scale * scoring.k_scale

        def part(number: int) -> None:
            own = scratch.data_ptr() + 4 * floats * number
            run(*pointers, *self._parts[number], *shape, scale, out.data_ptr(), own)

        _run_parts(part, len(self._parts))

    def _prefill(
        self,
        row: PrefillRow,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """Each thread computes some of the query heads, and has its own copy of their keys and values."""
        (_, block, kv_heads, dk), dv, heads = keys.shape, values.shape[3], q.shape[1]
        check_bounds(int(row.table.min()), int(row.table.max()), row.length, len(row.table), keys)
        rows = slice(row.start, row.start + row.queries)
        query, result = q[rows].contiguous(), out[rows]
        table = torch.from_numpy(np.ascontiguousarray(row.table, dtype=np.int64))
        threads = min(torch.get_num_threads(), heads)
        cuts = [heads * number // threads for number in range(threads + 1)]
        floats = prefill_scratch(q.dtype, dk, dv, row.length)
        scratch = self._workspace.take("native_prefill", floats * threads, q, torch.float32)
        run = c_function(_PREFILL_FUNCTIONS[q.dtype], "ppppiiiiiiiiiifpp")
        pointers = [tensor.data_ptr() for tensor in (query, keys, values, table)]
        shape = (block, heads, kv_heads, dk, dv, scoring.window)
        scale = scoring.scale * scoring.k_scale

        def part(number: int) -> None:
            own = scratch.data_ptr() + 4 * floats * number
            some = (row.queries, row.length, cuts[number], cuts[number + 1])
            run(*pointers, *some, *shape, scale, result.data_ptr(), own)

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


def _even_parts(lengths: np.ndarray, parts: int) -> list[tuple[int, int]]:
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
