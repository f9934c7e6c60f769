"""Attention metadata of one step: where its rows lie in the batch, and how torch, Triton or C computes them.

The metadata of a step is made once and used by every layer. `TorchMetadata`, `TritonMetadata` and `NativeMetadata`
(compiled C kernels on a CPU) have the same two methods, so the rest of the engine does not know which one runs.
`StaticMetadata` in `engine/runtime/graphs.py` is a fourth kind, for recorded graphs.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from engine.core.plan import IntArray
from engine.runtime.group_pool import CacheTensors, GroupView
from paged_kernels import Scoring, Workspace, torch_backend
from paged_kernels.arguments import PagedBatch
from paged_kernels.backends import Demand, unserved_by_native
from paged_kernels.cascade_groups import cost_of, find_cascade_groups, rows_per_tile
from paged_kernels.native import attention as native
from paged_kernels.operations import SHORT_QUERIES
from paged_kernels.torch_backend import decode_metadata, prefill_metadata, run_decode, run_prefill

if TYPE_CHECKING:
    from paged_kernels.triton.cascade import SharedPrefixes
    from paged_kernels.triton.decode import Queries


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

    store = staticmethod(torch_backend.store)

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


class KernelRows(NamedTuple):
    """Rows that a Triton kernel reads, on the host and on the device; of one query each, or of a few."""

    tables: IntArray  # [rows, blocks]
    lengths: IntArray  # [rows]
    on_device: tuple[torch.Tensor, torch.Tensor]  # int32, of both
    counts: IntArray | None = None  # [rows], queries; None: one each, and query i is row i's
    queries: "Queries | None" = None  # where they lie in the batch


def _chunks_on(device: torch.device, rows: Sequence[PrefillRow]) -> KernelRows:
    """Rows of several queries, which lie one behind the other in the batch."""
    from paged_kernels.triton.decode import Queries

    lengths = np.array([row.length for row in rows], dtype=np.int64)
    counts = np.array([row.queries for row in rows], dtype=np.int64)
    tables = _stacked([row.table for row in rows])
    queries = Queries(_int32(np.cumsum([0, *counts]), device), int(counts.max(initial=0)))
    return KernelRows(tables, lengths, (_int32(tables, device), _int32(lengths, device)), counts, queries)


def share_step(rows: KernelRows, block_size: int, *, token_bytes: int, group: int) -> SharedStep | None:
    """Split rows into shared prefixes and suffixes.

    Rows share blocks when their prompts have a common prefix, or when they are beams of one request. The groups are
    found on the host and change from step to step: a recorded graph has fixed groups, so it never uses a cascade.
    `token_bytes` is the size of one token's K and V in a layer, `group` the number of query heads per KV head. None
    where nothing is shared, or where the cost rule says that a cascade is not faster.
    """
    from paged_kernels.triton.cascade import sort_groups
    from paged_kernels.triton.decode import MAX_ROWS

    (tables, lengths, (table, _), counts, queries), count = rows, len(rows.lengths)
    most, device = queries.most if queries else 1, table.device
    asked = count if counts is None else int(counts.sum())
    if not 2 <= count <= MAX_ROWS // most or len(np.unique(tables[:, 0])) == count:
        return None  # rows without a common first block share nothing; this check does not walk the tables
    groups = find_cascade_groups(
        tables,
        lengths,
        block_size,
        token_bytes=token_bytes,
        rows_per_tile=rows_per_tile(group, device),
        cost=cost_of(device),
        queries=counts,
    )
    if groups is None:
        return None
    shared, lens, own, rest, ids = (
        _int32(_widened(each) if each.ndim == 2 else each, device) for each in groups[:5]
    )
    return SharedStep(sort_groups(shared, lens, ids, rest, queries, asked), own, rest)


LATENT_WIDTH = 512  # of a latent vector, at most, that the Triton kernel reads


def serves_latents(pool: GroupView) -> bool:
    """Whether the Triton kernel reads the latent vectors of a pool; torch reads those of other widths and of 8 bits."""
    caches = (pool.keys[pool.layers[0]], pool.values[pool.layers[0]])
    whole = pool.device.type != "cuda" or all(cache.shape[3] % 16 == 0 for cache in caches)
    return whole and caches[0].shape[3] <= LATENT_WIDTH and caches[0].dtype.itemsize > 1


class LatentRows:
    """Rows that read latent vectors as they are, by Triton. Their queries are the first of the batch."""

    def __init__(self, rows: Sequence[PrefillRow], pool: CacheTensors, workspace: Workspace) -> None:
        from paged_kernels.triton.decode import PartsOfStep

        self._parts, self._workspace = PartsOfStep(), workspace
        self._rows = _chunks_on(pool.device, rows)

    def attend(
        self, q: torch.Tensor, latents: torch.Tensor, rotary: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """What q `[queries, heads, rank + rope_dim]` reads, `[heads, queries, rank]`."""
        from paged_kernels.triton.decode import run_decode

        out, queries = q.new_empty(*q.shape[:2], latents.shape[3]), self._rows.queries
        run_decode(
            q, latents, rotary, *self._rows.on_device, scoring, out,
            queries=queries if queries and queries.most > 1 else None,
            workspace=self._workspace, parts=self._parts, latent=True,
        )  # fmt: skip
        return out.transpose(0, 1)


class TritonMetadata:
    """Attention by Triton: all decode rows in one launch (a cascade takes a few), all prefill rows in another.

    Prefill rows of a few queries each (drafts that are verified, ends of chunks) run as decode rows do: their keys are
    read in parts, and those that several of them share are read once.

    Tables and lengths are copied to the device once per step. The host knows the lengths, so it decides where one part
    per row is enough. Otherwise the device chooses the number of parts, because every fixed number would be one more
    kernel to compile. It lists them once for all layers of one kind.
    """

    def __init__(self, layout: StepLayout, pool: CacheTensors, workspace: Workspace) -> None:
        from paged_kernels.triton import cache, cascade, decode, prefill

        self.store, self._decode, self._cascade, self._prefill = cache.store, decode, cascade, prefill
        self._block_size, self._workspace = pool.block_size, workspace
        self._shared: dict[tuple[int, ...], SharedStep | None] = {}
        self._splits: dict[tuple[int, ...], int | None] = {}
        self._parts = decode.PartsOfStep()
        tables, lengths = _widened(layout.tables), layout.lengths
        on_device = _int32(tables, pool.device), _int32(lengths, pool.device)
        self._singles = KernelRows(tables, lengths, on_device)
        self._chunks = _chunks_on(pool.device, layout.prefills)

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Run the decode rows, then the prefill rows."""
        singles, chunks, queries = len(self._singles.lengths), self._chunks, self._chunks.queries
        if singles:
            self._read(self._singles, q[:singles], keys, values, scoring, out[:singles])
        q, out = q[singles:], out[singles:]
        if queries and queries.most > SHORT_QUERIES:  # beside a longer chunk the device is full
            batch = PagedBatch(q, keys, values, *chunks.on_device, *queries)
            self._prefill.run_prefill(batch, scoring, out)
        elif len(q):
            self._read(chunks, q, keys, values, scoring, out)

    def _read(
        self,
        rows: KernelRows,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """Run the decode kernel, with a cascade where it pays.

        Where a window hides keys of a row, little of a shared prefix is read, and no cascade is worth it.
        """
        hidden = 0 < scoring.window < int(rows.lengths.max())
        shared = None if hidden else self._shared_step(rows, q, keys, values)
        common: dict[str, Any] = {"queries": rows.queries, "workspace": self._workspace, "parts": self._parts}
        if shared is not None:
            self._cascade.run_cascade(q, keys, values, *shared, scoring, out, **common)
            return
        splits = self._one_part(rows, q, keys, values, scoring.window)
        self._decode.run_decode(q, keys, values, *rows.on_device, scoring, out, None, splits, **common)

    def _shared_step(
        self, rows: KernelRows, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> SharedStep | None:
        """What rows share, found once for all layers of one shape."""
        token_bytes, kv_heads = keys[0, 0].nbytes + values[0, 0].nbytes, keys.shape[2]
        kind = (q.shape[1], kv_heads, token_bytes, rows is self._chunks)
        if kind not in self._shared:
            sizes = {"token_bytes": token_bytes, "group": q.shape[1] // kv_heads}
            self._shared[kind] = share_step(rows, self._block_size, **sizes)
        return self._shared[kind]

    def _one_part(
        self, rows: KernelRows, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int
    ) -> int | None:
        """The parts of each row, found once for all layers of one kind; None: the device lists them."""
        kind = (q.shape[1], *keys.shape[1:], values.shape[3], window, rows is self._chunks)
        if kind not in self._splits:
            counts = () if rows.counts is None else rows.counts.tolist()
            self._splits[kind] = self._decode.pick_splits(rows.lengths, q, keys, values, window, counts)
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


class NativeMetadata:
    """Attention by C in the layers that it serves (`paged_kernels.backends`); torch computes all others."""

    def __init__(self, layout: StepLayout, pool: CacheTensors, workspace: Workspace) -> None:
        self._layout, self._pool, self._workspace = layout, pool, workspace
        self._rows = native.decode_rows(layout.tables, layout.lengths)

    store = staticmethod(torch_backend.store)

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Run the decode rows, then each prefill row."""
        if unserved_by_native(Demand.of(q, keys, values, scoring)):
            self._torch_step.attend(q, keys, values, scoring, out)
            return
        rows = len(self._layout.lengths)
        if rows:
            native.run_decode(self._rows, q[:rows], keys, values, scoring, out[:rows], self._workspace)
        for table, start, queries, length in self._layout.prefills:
            span = slice(start, start + queries)
            native.run_prefill(table, length, q[span], keys, values, scoring, out[span], self._workspace)

    @cached_property
    def _torch_step(self) -> TorchMetadata:
        """The rows of the step by torch, prepared once."""
        return TorchMetadata(self._layout, self._pool, self._workspace)


def attention_metadata(
    layout: StepLayout, pool: CacheTensors, workspace: Workspace, backend: str
) -> AttentionMetadata:
    """The attention metadata of a step, for a backend that `paged_kernels.backends.choose_for_layers` returned."""
    if backend == "native":
        return NativeMetadata(layout, pool, workspace)
    return (TritonMetadata if backend == "triton" else TorchMetadata)(layout, pool, workspace)
