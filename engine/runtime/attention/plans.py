"""Attention of one step: where its rows lie in the batch, and how torch, Triton or C computes them.

A plan is made once per step and used by every layer. `TorchPlan`, `TritonPlan` and `NativePlan` (compiled C kernels on
a CPU) have the same two methods, so the rest of the engine does not know which one runs. `StaticPlan` in
`engine/runtime/graphs.py` is a fourth one, for recorded graphs.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from engine.core.plan import IntArray
from engine.runtime.attention.native.compile import library
from engine.runtime.kv_pool import KVPool
from paged_kernels import Scoring, Workspace
from paged_kernels.torch import cache as torch_cache
from paged_kernels.torch.decode import plan_decode, run_decode
from paged_kernels.torch.prefill import plan_prefill, run_prefill

if TYPE_CHECKING:
    from engine.runtime.attention.cascade import SharedStep


class PrefillRow(NamedTuple):
    """A row of several tokens: `queries` of them from `start` in the flat batch, the last of `length` cached ones."""

    table: IntArray
    start: int
    queries: int
    length: int


class StepLayout(NamedTuple):
    """Decode rows are tokens 0, 1, ... of the flat batch; prefill rows follow. Block 0 pads the decode tables."""

    tables: IntArray  # [decode rows, widest]
    lengths: IntArray  # [decode rows], the row's own token included
    prefills: Sequence[PrefillRow]


class AttentionPlan(Protocol):
    """One step's attention, for any layer."""

    def store(self, cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write new rows `[tokens, kv_heads, dim]` to their slots."""
        ...

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Fill `out` `[tokens, heads, dv]` from q `[tokens, heads, dk]` and the layer's caches."""
        ...


class TorchPlan:
    """Gathered decode rows in a few calls, prefill rows one by one."""

    def __init__(self, layout: StepLayout, pool: KVPool, workspace: Workspace) -> None:
        size, device = pool.block_size, pool.device
        self._workspace = workspace
        self._decode_rows = slice(0, len(layout.lengths))
        self._decode = (
            plan_decode(layout.tables, layout.lengths, size, token_bytes=pool.token_bytes, device=device)
            if len(layout.lengths)
            else None
        )
        self._prefills = [plan_prefill(*row, size, device=device) for row in layout.prefills]

    store = staticmethod(torch_cache.store)

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Run the decode rows, then each prefill row."""
        if self._decode is not None:
            rows = self._decode_rows
            run_decode(self._decode, q[rows], keys, values, scoring, out[rows], self._workspace)
        for plan in self._prefills:
            run_prefill(plan, q, keys, values, scoring, out, self._workspace)


class TritonPlan:
    """All decode rows in one launch (or in the few of a cascade), all prefill rows in another.

    Tables and lengths cross to the device once a step; lengths are known here, so the host says where one part a row is
    enough. Any other number of parts is left to the device: each is a kernel of its own to compile.
    """

    def __init__(self, layout: StepLayout, pool: KVPool, workspace: Workspace) -> None:
        from paged_kernels.triton import cache as triton_cache
        from paged_kernels.triton import cascade as triton_cascade
        from paged_kernels.triton import decode as triton_decode
        from paged_kernels.triton import prefill as triton_prefill

        self.store = triton_cache.store
        self._run_decode, self._run_prefill = triton_decode.run_decode, triton_prefill.run_prefill
        self._run_cascade = triton_cascade.run_cascade
        self._layout, self._pool, self._workspace = layout, pool, workspace
        self._shared: dict[tuple[int, int, int], SharedStep | None] = {}
        self._splits: dict[int, int | None] = {}
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
            self._run_prefill(q, keys, values, *spans, scoring, out)

    def _decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        shared = None if self._is_cut(scoring.window) else self._halves(q, keys, values)
        if shared is not None:
            prefixes, tables, lengths = shared
            arguments = (q, keys, values, prefixes, tables, lengths, scoring, out)
            self._run_cascade(*arguments, workspace=self._workspace)
            return
        splits = self._one_part(keys.shape[2])
        flat = (q, keys, values, self._tables, self._lengths, scoring, out, None, splits)
        self._run_decode(*flat, workspace=self._workspace)

    def _is_cut(self, window: int) -> bool:
        """Whether a window hides keys of a row: of a shared prefix then little is read, and nothing is gained."""
        return 0 < window < int(self._layout.lengths.max())

    def _halves(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> "SharedStep | None":
        """The division of the rows, made once for all layers of one shape."""
        token_bytes = keys[0, 0].nbytes + values[0, 0].nbytes
        shape = (q.shape[1], keys.shape[2], token_bytes)
        if shape not in self._shared:
            from engine.runtime.attention.cascade import share_step

            self._shared[shape] = share_step(
                self._layout.tables,
                self._layout.lengths,
                self._pool.block_size,
                token_bytes=token_bytes,
                group=q.shape[1] // keys.shape[2],
                device=self._pool.device,
            )
        return self._shared[shape]

    def _one_part(self, kv_heads: int) -> int | None:
        """1 where a row in one part fills the device, which saves the second launch; None: balanced there."""
        if kv_heads not in self._splits:
            from paged_kernels.triton.launch import pick_splits

            splits = pick_splits(tuple(self._layout.lengths.tolist()), kv_heads, self._pool.device)
            self._splits[kv_heads] = 1 if splits == 1 else None
        return self._splits[kv_heads]


def _int32(values: IntArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)


def _stacked(tables: Sequence[IntArray]) -> IntArray:
    """Ragged tables as one array, padded with the null block."""
    widest = max((len(table) for table in tables), default=0)
    stacked = np.zeros((len(tables), widest), dtype=np.int64)
    for row, table in zip(stacked, tables, strict=True):
        row[: len(table)] = table
    return _widened(stacked)


def _widened(tables: IntArray) -> IntArray:
    """Tables whose width is a multiple of 16: a row stride that the compiler may rely on, and few distinct ones."""
    return np.pad(tables, ((0, 0), (0, -tables.shape[1] % 16)))


_LANES, _TILE = 16, 16  # as in the C files
_NAMES = {torch.float32: "decode_f32", torch.bfloat16: "decode_bf16"}
_Kernel = Callable[..., None]


def serves(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> bool:
    """Whether the kernel computes this: plain scores, float32 or bfloat16 all through, heads of whole vectors."""
    return (
        scoring.plain
        and q.dtype in _NAMES
        and q.dtype is keys.dtype
        and keys.is_contiguous()
        and values.is_contiguous()
        and keys.shape[3] % _LANES == 0
        and values.shape[3] % _LANES == 0
    )


class NativePlan:
    """Decode rows by the compiled kernel where it serves a layer; the rest as `TorchPlan` does it."""

    def __init__(self, layout: StepLayout, pool: KVPool, workspace: Workspace) -> None:
        self._layout, self._pool, self._workspace = layout, pool, workspace
        prefills = StepLayout(layout.tables[:0], layout.lengths[:0], layout.prefills)
        self._prefills = TorchPlan(prefills, pool, workspace)
        self._gathering: TorchPlan | None = None  # for layers that the kernel does not serve
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
        if rows and not serves(q, keys, values, scoring):
            self._gathered().attend(q, keys, values, scoring, out)
            return
        if rows:
            self._decode(q[:rows].contiguous(), keys, values, scoring, out[:rows])
        self._prefills.attend(q, keys, values, scoring, out)

    def _gathered(self) -> TorchPlan:
        if self._gathering is None:
            self._gathering = TorchPlan(self._layout, self._pool, self._workspace)
        return self._gathering

    def _decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Every thread takes rows of about as many tokens, and scratch of its own."""
        run, heads = _kernel(_NAMES[q.dtype]), q.shape[1]
        (_, block, kv_heads, dk), dv = keys.shape, values.shape[3]
        floats = heads * (dk + dv + _TILE + 2)
        self._check_reach(keys)
        scratch = self._workspace.take("native", floats * len(self._parts), q, torch.float32)
        places = [tensor.data_ptr() for tensor in (q, keys, values, self._tables, self._lengths)]
        shape = (self._tables.shape[1], block, heads, kv_heads, dk, dv, scoring.window)
        scale = scoring.scale * scoring.k_scale

        def part(number: int) -> None:
            own = scratch.data_ptr() + 4 * floats * number
            run(*places, *self._parts[number], *shape, scale, out.data_ptr(), own)

        if len(self._parts) == 1:
            part(0)
        else:
            list(_threads(len(self._parts)).map(part, range(len(self._parts))))

    def _check_reach(self, keys: torch.Tensor) -> None:
        """C would read whatever lies there. Raises IndexError, as torch's gather does."""
        (lowest, highest), width = self._blocks, self._tables.shape[1]
        if lowest < 0 or highest >= keys.shape[0] or self._longest > width * keys.shape[1]:
            raise IndexError(
                f"block ids {lowest} to {highest}, {self._longest} tokens in {width} blocks of {keys.shape[1]}: "
                f"outside of the pool's {keys.shape[0]} blocks, or of a block table"
            )


def _even_parts(lengths: np.ndarray, parts: int) -> list[tuple[int, int]]:
    """Ranges of rows with about the same number of tokens each; none is empty."""
    ends = np.cumsum(lengths)
    wanted = ends[-1] * np.arange(1, parts) / parts if len(ends) else []
    cuts = [0, *np.unique(np.searchsorted(ends, wanted, side="left") + 1).tolist(), len(lengths)]
    return [(a, b) for a, b in pairwise(cuts) if b > a]


@cache
def _kernel(name: str) -> _Kernel:
    function = getattr(library(), name)
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer] * 5 + [whole] * 9 + [ctypes.c_float, pointer, pointer]
    function.restype = None
    kernel: _Kernel = function
    return kernel


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="pagetwin-decode")
