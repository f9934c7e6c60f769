"""Attention metadata of one step: where its rows lie in the batch, and how torch, Triton or C computes them.

The metadata of a step is made once and used by every layer. `TorchMetadata`, `TritonMetadata` and `NativeMetadata`
(compiled C kernels on a CPU) have the same two methods, so the rest of the engine does not know which one runs.
`StaticMetadata` in `engine/runtime/graphs.py` is a fourth kind, for recorded graphs.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from engine.core.plan import IntArray
from engine.runtime.group_pool import CacheTensors, GroupView
from paged_kernels import Scoring, Workspace
from paged_kernels.attention import SHORT_QUERIES
from paged_kernels.backends import Demand, unserved_by_native
from paged_kernels.cascade_groups import cost_of, find_cascade_groups, rows_per_tile
from paged_kernels.memory import PagedBatch
from paged_kernels.native import attention as native
from paged_kernels.torch import cache as torch_cache
from paged_kernels.torch.decode import decode_metadata, run_decode
from paged_kernels.torch.prefill import prefill_metadata, run_prefill

if TYPE_CHECKING:
    from paged_kernels.triton.cascade import SharedPrefixes


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


class _Chunks(NamedTuple):
    """Prefill rows on the device: tables, lengths, bounds of their queries, and the most queries of a row."""

    tables: torch.Tensor
    lengths: torch.Tensor
    bounds: torch.Tensor
    queries: int


LATENT_WIDTH = 512  # of a latent vector, at most, that the Triton kernel reads


def serves_latents(pool: GroupView) -> bool:
    """Whether the Triton kernel reads the latent vectors of a pool; torch reads those of other widths and of 8 bits."""
    caches = (pool.keys[pool.layers[0]], pool.values[pool.layers[0]])
    whole = pool.device.type != "cuda" or all(cache.shape[3] % 16 == 0 for cache in caches)
    return whole and caches[0].shape[3] <= LATENT_WIDTH and caches[0].dtype.itemsize > 1


class LatentRows:
    """Rows that read latent vectors as they are, by Triton. Their queries are the first of the batch."""

    def __init__(self, rows: Sequence[PrefillRow], pool: CacheTensors, workspace: Workspace) -> None:
        from paged_kernels.triton.decode import PartsOfStep, Queries

        device, bounds = pool.device, np.cumsum([0, *(row.queries for row in rows)])
        self._parts, self._workspace = PartsOfStep(), workspace
        self._tables = _int32(_stacked([row.table for row in rows]), device)
        self._lengths = _int32(np.array([row.length for row in rows]), device)
        most = max((row.queries for row in rows), default=0)
        self._queries = Queries(_int32(bounds, device), most) if most > 1 else None

    def attend(
        self, q: torch.Tensor, latents: torch.Tensor, rotary: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """What q `[queries, heads, rank + rope_dim]` reads, `[heads, queries, rank]`."""
        from paged_kernels.triton.decode import run_decode

        out = q.new_empty(*q.shape[:2], latents.shape[3])
        run_decode(
            *(q, latents, rotary, self._tables, self._lengths), scoring, out,
            queries=self._queries, workspace=self._workspace, parts=self._parts, latent=True,
        )  # fmt: skip
        return out.transpose(0, 1)


class TritonMetadata:
    """Attention by Triton: all decode rows in one launch (a cascade takes a few), all prefill rows in another.

    Prefill rows of a few queries each (drafts that are verified, ends of chunks) run as decode rows do: their keys are
    read in parts.

    Tables and lengths are copied to the device once per step. The host knows the lengths, so it decides where one part
    per row is enough. Otherwise the device chooses the number of parts, because every fixed number would be one more
    kernel to compile. It lists them once for all layers of one kind.
    """

    def __init__(self, layout: StepLayout, pool: CacheTensors, workspace: Workspace) -> None:
        from paged_kernels.triton import cache as triton_cache
        from paged_kernels.triton import cascade as triton_cascade
        from paged_kernels.triton import decode as triton_decode
        from paged_kernels.triton import prefill as triton_prefill
        from paged_kernels.triton.decode import PartsOfStep, Queries

        self._queries_type = Queries
        self.store = triton_cache.store
        self._run_decode, self._run_prefill = triton_decode.run_decode, triton_prefill.run_prefill
        self._run_cascade = triton_cascade.run_cascade
        self._layout, self._pool, self._workspace = layout, pool, workspace
        self._shared: dict[tuple[int, int, int], SharedStep | None] = {}
        self._splits: dict[tuple[int, ...], int | None] = {}
        self._parts = PartsOfStep()
        self._tables = _int32(_widened(layout.tables), pool.device)
        self._lengths = _int32(layout.lengths, pool.device)
        self._chunks = self._chunks_of(layout.prefills)
        queries = [row.queries for row in layout.prefills]
        self._queries = queries if max(queries, default=0) <= SHORT_QUERIES else []

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Run the decode rows, then the prefill rows."""
        rows = slice(0, len(self._layout.lengths))
        if rows.stop:
            self._decode(q[rows], keys, values, scoring, out[rows])
        if not self._chunks.queries:
            return
        if self._queries:  # beside a longer chunk the device is full
            splits = self._one_part(q, keys, values, scoring.window, chunks=True)
            given = (q, keys, values, *self._chunks[:2], scoring, out, None, splits)
            queries = self._queries_type(self._chunks.bounds, self._chunks.queries)
            self._run_decode(*given, queries=queries, workspace=self._workspace, parts=self._parts)
        else:
            self._run_prefill(PagedBatch(q, keys, values, *self._chunks), scoring, out)

    def _chunks_of(self, prefills: Sequence[PrefillRow]) -> _Chunks:
        device = self._pool.device
        ends = [row.start + row.queries for row in prefills]
        return _Chunks(
            _int32(_stacked([row.table for row in prefills]), device),
            _int32(np.array([row.length for row in prefills]), device),
            _int32(np.array([len(self._layout.lengths), *ends]), device),
            max((row.queries for row in prefills), default=0),
        )

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

    def _one_part(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int, *, chunks: bool = False
    ) -> int | None:
        """The parts of each row, found once for all layers of one kind; None: the device lists them."""
        kind = (q.shape[1], *keys.shape[1:], values.shape[3], window, chunks)
        if kind not in self._splits:
            from paged_kernels.triton.decode import pick_splits

            lengths, queries = self._layout.lengths, self._queries if chunks else []
            if chunks:
                lengths = np.array([row.length for row in self._layout.prefills])
            self._splits[kind] = pick_splits(lengths, q, keys, values, window, queries)
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
    """Attention by C in the layers and rows that it serves (`paged_kernels.backends`); torch computes all others."""

    def __init__(self, layout: StepLayout, pool: CacheTensors, workspace: Workspace) -> None:
        self._layout, self._workspace = layout, workspace
        self._rows = native.decode_rows(layout.tables, layout.lengths)
        self._torch = partial(TorchMetadata, pool=pool, workspace=workspace)
        self._made: dict[bool, TorchMetadata] = {}

    store = staticmethod(torch_cache.store)

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Run the decode rows, then each prefill row."""
        layer = Demand.of(q, keys, values, scoring)
        if unserved_by_native(layer):
            self._on_torch(False).attend(q, keys, values, scoring, out)
            return
        rows = len(self._layout.lengths)
        if rows:
            native.run_decode(self._rows, q[:rows], keys, values, scoring, out[:rows], self._workspace)
        if unserved_by_native(layer._replace(chunk=True)):
            self._on_torch(True).attend(q, keys, values, scoring, out)
            return
        for table, start, queries, length in self._layout.prefills:
            span = slice(start, start + queries)
            native.run_prefill(table, length, q[span], keys, values, scoring, out[span], self._workspace)

    def _on_torch(self, chunks: bool) -> TorchMetadata:
        """The rows of the step by torch, or its chunks alone, prepared once."""
        if chunks not in self._made:
            layout = self._layout
            none = layout._replace(tables=layout.tables[:0], lengths=layout.lengths[:0])
            self._made[chunks] = self._torch(none if chunks else layout)
        return self._made[chunks]


def attention_metadata(
    layout: StepLayout, pool: CacheTensors, workspace: Workspace, backend: str
) -> AttentionMetadata:
    """The attention metadata of a step, for a backend that `paged_kernels.backends.choose_for_layers` returned."""
    if backend == "native":
        return NativeMetadata(layout, pool, workspace)
    return (TritonMetadata if backend == "triton" else TorchMetadata)(layout, pool, workspace)
