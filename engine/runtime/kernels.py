"""How a step's rows are attended to: the one place where the engine chooses between torch and Triton kernels.

Both take the same layout and give plans with the same two calls, so that the rest of the engine does not know which
one runs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from engine.core.plan import IntArray
from engine.runtime.kv_pool import KVPool
from paged_kernels import Scoring, Workspace
from paged_kernels.torch import cache as torch_cache
from paged_kernels.torch.decode import plan_decode, run_decode
from paged_kernels.torch.prefill import plan_prefill, run_prefill

if TYPE_CHECKING:
    from engine.runtime.cascading import SharedStep


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
            from engine.runtime.cascading import share_step

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


def plan_attention(layout: StepLayout, pool: KVPool, workspace: Workspace, backend: str) -> AttentionPlan:
    """The step's plan for a resolved backend name."""
    return (TritonPlan if backend == "triton" else TorchPlan)(layout, pool, workspace)


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
