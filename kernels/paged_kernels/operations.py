"""The operations on a paged KV cache: decode, prefill, cascade and merge; new tokens, block copies and swaps.

`backend` chooses the code that runs. Caches are `[blocks, block_size, kv_heads, dim]`; K and V may differ in `dim`.
Block 0 is the null block, all zeros.

These functions check their arguments and prepare the metadata at every call. An engine serves many layers with the same
tables. So it prepares the metadata once per step (`decode_metadata`, `prefill_metadata`) and calls `run_decode` and
`run_prefill` itself.

A cascade is a decode over shared prefixes: blocks that several sequences share are read once for all of them.
A merge combines two partial attentions of the same queries over different keys.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from paged_kernels import arguments, reference, torch_backend
from paged_kernels.arguments import DEFAULT_WORKSPACE, PagedBatch, Scoring, Workspace, token_bytes
from paged_kernels.backends import Demand, check_prefill_kernel, choose_backend, resolve_backend
from paged_kernels.cascade_groups import each_query
from paged_kernels.native import attention as native
from paged_kernels.torch_backend import (
    DecodeMetadata,
    cascade_metadata,
    decode_metadata,
    merge_reference,
    prefill_metadata,
    run_cascade,
    run_decode,
    run_prefill,
)

if TYPE_CHECKING:
    from paged_kernels.triton.decode import PartsOfStep

SHORT_QUERIES = 64  # of a sequence whose keys are read in parts; longer chunks fill a device by their queries
Run = Callable[[], None]


def run_triton(
    batch: PagedBatch,
    scoring: Scoring,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    num_splits: int | None,
    workspace: Workspace | None,
    parts: "PartsOfStep | None" = None,
    prefill_kernel: str | None = "auto",
) -> None:
    """Run the batch in one launch. A decode may need one before that lists the parts of its rows (unless `parts` has
    the list), and one after it that combines them. `prefill_kernel` is one of `backends.PREFILL_KERNELS`; with None
    row i of q is the one query of sequence i, which the host cannot see in bounds that are on the device.
    """
    if prefill_kernel is None or (prefill_kernel == "auto" and batch.max_seqlen_q <= SHORT_QUERIES):
        from paged_kernels.triton.decode import Queries
        from paged_kernels.triton.decode import run_decode as run_decode_kernel

        queries = Queries(batch.cu_seqlens_q, batch.max_seqlen_q) if prefill_kernel else None
        run_decode_kernel(
            *batch[:5], scoring, out, lse, num_splits, queries=queries, workspace=workspace, parts=parts
        )
    elif prefill_kernel == "hopper":
        from paged_kernels.triton.prefill_hopper import run_hopper_prefill

        run_hopper_prefill(batch, scoring, out, lse)
    else:
        from paged_kernels.triton.prefill import run_prefill as run_prefill_kernel

        run_prefill_kernel(batch, scoring, out, lse)


def prepare_torch(
    batch: PagedBatch, scoring: Scoring, out: torch.Tensor, lse: torch.Tensor | None, workspace: Workspace
) -> Run:
    """Sort the rows into decode, prefill and empty ones, and prepare each kind. The returned call runs them.

    Preparing and running are separate because an engine prepares once per step and runs once per layer.
    """
    table = batch.block_table.cpu().numpy().astype(np.int64)
    lengths, bounds = (value.cpu().numpy().astype(np.int64) for value in (batch.seq_lens, batch.cu_seqlens_q))
    queries = np.diff(bounds)
    decode = np.flatnonzero((queries == 1) & (lengths > 0))
    runs: list[Run] = []
    size, caches = batch.key_cache.shape[1], (batch.key_cache, batch.value_cache)
    if len(decode):
        width = token_bytes(*caches)
        metadata = decode_metadata(table[decode], lengths[decode], size, token_bytes=width, device=out.device)
        if len(decode) == len(out):
            runs.append(partial(run_decode, metadata, batch.q, *caches, scoring, out, workspace, lse))
        else:
            rows = torch.from_numpy(bounds[decode]).to(out.device)
            runs.append(partial(_run_some, metadata, rows, batch, scoring, out, workspace, lse))
    for row in np.flatnonzero((queries > 1) & (lengths > 0)):
        spans = (int(bounds[row]), int(queries[row]), int(lengths[row]))
        prefill = prefill_metadata(table[row], *spans, size, device=out.device)
        runs.append(partial(run_prefill, prefill, batch.q, *caches, scoring, out, workspace, lse))
    empty = [slice(bounds[row], bounds[row + 1]) for row in np.flatnonzero(lengths == 0)]

    def run_all() -> None:
        for run in runs:
            run()
        for span in empty:  # sequences without keys
            out[span] = 0.0
            if lse is not None:
                lse[span] = float("-inf")

    return run_all


def prepare_native(batch: PagedBatch, scoring: Scoring, out: torch.Tensor, workspace: Workspace) -> Run:
    """As `prepare_torch`, for the C kernels. Rows of one query run together, longer ones one by one."""
    lengths, bounds = (value.numpy().astype(np.int64) for value in (batch.seq_lens, batch.cu_seqlens_q))
    used = np.arange(batch.block_table.shape[1]) < -(-lengths // batch.key_cache.shape[1])[:, None]
    table = np.where(used, batch.block_table.numpy(), 0).astype(np.int64)
    queries, caches = np.diff(bounds), (batch.key_cache, batch.value_cache)
    single = np.flatnonzero((queries == 1) & (lengths > 0))
    rows, places = native.decode_rows(table[single], lengths[single]), torch.from_numpy(bounds[single])
    chunks = [
        (row, slice(bounds[row], bounds[row + 1])) for row in np.flatnonzero((queries > 1) & (lengths > 0))
    ]
    empty = [slice(bounds[row], bounds[row + 1]) for row in np.flatnonzero(lengths == 0)]
    whole = out if out.is_contiguous() else out.new_empty(out.shape)

    def run_all() -> None:
        if len(single):
            everything = len(single) == len(out)
            part = whole if everything else out.new_empty(len(single), *out.shape[1:])
            q = batch.q if everything else batch.q[places]
            native.run_decode(rows, q, *caches, scoring, part, workspace)
            if not everything:
                whole[places] = part
        for row, span in chunks:
            given = (table[row], int(lengths[row]), batch.q[span], *caches, scoring, whole[span], workspace)
            native.run_prefill(*given)
        for span in empty:
            whole[span] = 0.0
        if whole is not out:
            out.copy_(whole)

    return run_all


def _run_some(
    metadata: DecodeMetadata,
    rows: torch.Tensor,
    batch: PagedBatch,
    scoring: Scoring,
    out: torch.Tensor,
    workspace: Workspace,
    lse: torch.Tensor | None,
) -> None:
    """Decode some rows of a flat batch: they are copied out of it, and their results into it."""
    part = out.new_empty(len(rows), *out.shape[1:])
    sums = None if lse is None else lse.new_empty(len(rows), lse.shape[1])
    run_decode(metadata, batch.q[rows], batch.key_cache, batch.value_cache, scoring, part, workspace, sums)
    out[rows] = part
    if lse is not None and sums is not None:
        lse[rows] = sums


def paged_attention_decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    num_splits: int | None = None,
    backend: str = "auto",
    validate: bool = True,
) -> torch.Tensor:
    """One query per sequence: q `[rows, heads, dk]` over `seq_lens` cached tokens each, the query's own included.

    Returns `out` `[rows, heads, dv]`; fills `lse` `[rows, heads]` (natural log) if given. A row of length 0 gives
    zeros and -inf. Table entries after a sequence's last block may be anything. `num_splits` fixes in how many parts
    the Triton kernel reads each sequence; None balances them on the device. `validate` checks lengths and tables,
    which waits for the device (never during graph capture): without it, a wrong one on a GPU gives wrong numbers or
    reads other memory. On a CPU they are always checked. Raises a `KernelError` before anything is launched.
    """
    if num_splits is not None and num_splits not in range(1, 257):
        raise arguments.OptionError(f"num_splits {num_splits}; allowed are 1 to 256, or None")
    bounds = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    batch = PagedBatch(q, key_cache, value_cache, block_table, seq_lens, bounds, 1)
    scoring = Scoring(scale, window, softcap, sinks, alibi, k_scale, v_scale)
    return _dispatch(batch, scoring, out, lse, workspace, backend, num_splits, validate=validate)


def paged_attention_prefill(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    backend: str = "auto",
    validate: bool = True,
    prefill_kernel: str = "auto",
) -> torch.Tensor:
    """Ragged queries over paged KV, causal: sequence i owns rows `cu_seqlens_q[i] : cu_seqlens_q[i + 1]` of q.

    q `[tokens, heads, dk]` holds the last positions of each sequence's `seq_lens` cached tokens, so that a chunk of
    a prompt sees the whole prefix. `max_seqlen_q` is an upper bound of the queries of any sequence. None reads it from
    the device, which waits for it; during graph capture None takes the rows of q, which bound every sequence. Rows of q
    that no sequence owns are undefined. Returns, fills, checks and raises as `paged_attention_decode`.

    On the Triton backend the decode kernel computes sequences of up to 64 queries, unless `prefill_kernel` names
    another: "plain", or "hopper", the one for H100 and H200. No GPU has run that yet, so its results and its speed are
    not known; it refuses other devices, and what it does not serve, by name.
    """
    widest = max_seqlen_q or _most_queries(q, cu_seqlens_q)
    batch = PagedBatch(q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, widest)
    scoring = Scoring(scale, window, softcap, sinks, alibi, k_scale, v_scale)
    return _dispatch(batch, scoring, out, lse, workspace, backend, None, prefill_kernel, validate=validate)


def _most_queries(q: torch.Tensor, bounds: torch.Tensor) -> int:
    return max([1, *bounds.view(-1).diff().tolist()]) if arguments.can_read_values(bounds) else len(q)


def _dispatch(
    batch: PagedBatch,
    scoring: Scoring,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    workspace: Workspace | None,
    backend: str,
    num_splits: int | None,
    prefill_kernel: str | None = None,
    *,
    validate: bool,
) -> torch.Tensor:
    check_batch(batch, scoring, validate=validate)
    q, dv = batch.q, batch.value_cache.shape[-1]
    out = q.new_empty(*q.shape[:2], dv) if out is None else out
    arguments.check_outputs(q, dv, out, lse)
    demand = Demand.of(q, batch.key_cache, batch.value_cache, scoring)
    if lse is not None:
        demand = demand._replace(options=(*demand.options, "LSE"))
    chosen = choose_backend(backend, q.device, demand).backend
    named = "auto" if prefill_kernel is None else prefill_kernel
    check_prefill_kernel(named, chosen, q, batch.key_cache, batch.value_cache, scoring)
    if not len(batch.seq_lens):
        return out
    if chosen == "triton":
        run_triton(batch, scoring, out, lse, num_splits, workspace, prefill_kernel=prefill_kernel)
    elif chosen == "torch_ref":
        _copy_result(out, lse, *reference.paged_attention(*batch[:6], scoring))
    elif chosen == "native":
        prepare_native(batch, scoring, out, workspace or DEFAULT_WORKSPACE)()
    else:
        prepare_torch(batch, scoring, out, lse, workspace or DEFAULT_WORKSPACE)()
    return out


def _copy_result(
    out: torch.Tensor, lse: torch.Tensor | None, result: torch.Tensor, sums: torch.Tensor
) -> None:
    out.copy_(result)
    if lse is not None:
        lse.copy_(sums)


def check_batch(batch: PagedBatch, scoring: Scoring, *, validate: bool) -> None:
    """Check a batch before it runs, its values on a CPU or if `validate`. Raises a `KernelError`."""
    arguments.check_caches(batch.key_cache, batch.value_cache)
    arguments.check_queries(batch.q, batch.key_cache)
    arguments.check_tables(batch.block_table, batch.seq_lens, batch.cu_seqlens_q, batch.q.device)
    arguments.check_scoring(scoring, batch.q, batch.key_cache)
    if _checks_values(batch.seq_lens, validate=validate):
        given = (batch.block_table, batch.seq_lens, batch.cu_seqlens_q, batch.key_cache)
        arguments.check_values(*given, len(batch.q), batch.max_seqlen_q)


def _checks_values(values: torch.Tensor, *, validate: bool) -> bool:
    """Whether values are checked: always where the host has them, so that nothing waits for a device."""
    return validate or values.device.type == "cpu"


def cascade_attention_decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    shared_block_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    suffix_block_table: torch.Tensor,
    suffix_lens: torch.Tensor,
    group_ids: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    backend: str = "auto",
    validate: bool = True,
) -> torch.Tensor:
    """One query per row, q `[rows, heads, dk]`, or a few: row i sees its group's prefix and then its own suffix.

    `shared_block_table` `[groups, blocks]` and `prefix_lens` `[groups]` (tokens) hold what each group shares.
    `suffix_block_table` `[rows, blocks]` and `suffix_lens` `[rows]` hold each row's own keys, the query's token
    included. `group_ids` `[rows]` gives each row's group, -1 for none; None means one group of all rows. With
    `cu_seqlens_q` and `max_seqlen_q`, as in `paged_attention_prefill`, row i has several queries, the last tokens of
    its suffix; what belongs to no row is undefined. The result equals attention over prefix and suffix as one sequence.
    `find_cascade_groups` decides whether a cascade is faster. Fills, checks and raises as `paged_attention_decode`.
    """
    rows, bounds, most = len(suffix_lens), cu_seqlens_q, 1
    if group_ids is None:
        group_ids = torch.zeros(rows, dtype=torch.int32, device=q.device)
    if bounds is None:
        bounds = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    else:
        most = max_seqlen_q or _most_queries(q, bounds)
    scoring = Scoring(scale, window, softcap, sinks, alibi, k_scale, v_scale)
    batch = PagedBatch(q, key_cache, value_cache, suffix_block_table, suffix_lens, bounds, most)
    check_batch(batch, scoring, validate=validate)
    _check_groups(batch, shared_block_table, prefix_lens, group_ids, validate=validate)
    out = q.new_empty(*q.shape[:2], value_cache.shape[3]) if out is None else out
    arguments.check_outputs(q, value_cache.shape[3], out, lse)
    demand = Demand.of(q, key_cache, value_cache)._replace(options=("cascades",))
    chosen = choose_backend(backend, q.device, demand).backend
    if rows and chosen == "triton":
        from paged_kernels.triton import cascade
        from paged_kernels.triton.decode import Queries

        queries = None if cu_seqlens_q is None else Queries(bounds, most)
        groups = cascade.sort_groups(shared_block_table, prefix_lens, group_ids, suffix_lens, queries, len(q))
        given = (*batch[:3], groups, *batch[3:5], scoring, out, lse)
        cascade.run_cascade(*given, queries=queries, workspace=workspace)
    elif rows:  # each query is a row of its own
        row, own, ids = each_query(bounds, len(q), suffix_lens, group_ids)
        divided = (shared_block_table, prefix_lens, suffix_block_table[row], own, ids)
        if chosen == "torch_ref":
            _copy_result(out, lse, *reference.cascade_attention(*batch[:3], *divided, scoring))
        else:
            size, width = key_cache.shape[1], token_bytes(key_cache, value_cache)
            metadata = cascade_metadata(*divided, block_size=size, token_bytes=width)
            scratch = workspace or DEFAULT_WORKSPACE
            run_cascade(*batch[:3], metadata, scoring, out, lse, scratch)
    return out


def _check_groups(
    batch: PagedBatch, tables: torch.Tensor, lens: torch.Tensor, group_ids: torch.Tensor, *, validate: bool
) -> None:
    rows, groups = len(batch.seq_lens), len(tables)
    if tables.dim() != 2 or lens.shape != (groups,) or group_ids.shape != (rows,):
        raise arguments.ShapeError(
            f"shared_block_table {tuple(tables.shape)}, prefix_lens {tuple(lens.shape)} and group_ids "
            f"{tuple(group_ids.shape)} must be [groups, blocks], [groups] and [{rows}]"
        )
    for name, tensor in (("shared_block_table", tables), ("prefix_lens", lens), ("group_ids", group_ids)):
        if tensor.device != batch.q.device:
            raise arguments.DeviceError(f"{name} is on {tensor.device} and q on {batch.q.device}")
        arguments.check_whole(name, tensor)
    if not _checks_values(lens, validate=validate) or not arguments.can_read_values(lens):
        return
    bounds = torch.zeros(groups + 1, dtype=torch.int32, device=lens.device)
    prefixes = batch._replace(block_table=tables, seq_lens=lens, cu_seqlens_q=bounds)
    check_batch(prefixes, Scoring(1.0), validate=True)
    queries = batch.cu_seqlens_q.diff()
    if bool((queries > batch.seq_lens.clamp(min=1)).any()):
        raise arguments.TableError(
            f"suffixes of {batch.seq_lens.tolist()} tokens must hold the {queries.tolist()} queries of their rows"
        )
    if rows and not -1 <= int(group_ids.min()) <= int(group_ids.max()) < groups:
        raise arguments.TableError(
            f"group_ids from {int(group_ids.min())} to {int(group_ids.max())}; allowed are -1 (none) to {groups - 1}"
        )


def merge_attn_states(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two key sets: outputs `[tokens, heads, dv]`, natural-log LSE `[tokens, heads]`.

    Each output is weighted by exp(lse - max). A side that saw no key has LSE -inf and is ignored. If both sides
    are empty, the output is 0 and the LSE is -inf. Returns `out` and `lse`, filling those that are given.
    """
    arguments.check_states(o_a, lse_a, o_b, lse_b)
    out = o_a.new_empty(o_a.shape) if out is None else out
    lse = lse_a.new_empty(lse_a.shape) if lse is None else lse
    arguments.check_outputs(o_a, o_a.shape[-1], out, lse)
    if resolve_backend(backend, o_a.device) == "triton":
        from paged_kernels.triton import cache as triton_cache

        o_a, lse_a, o_b, lse_b = (one.contiguous() for one in (o_a, lse_a, o_b, lse_b))
        triton_cache.merge_attn_states(o_a, lse_a, o_b, lse_b, out, lse)
    else:
        _copy_result(out, lse, *merge_reference(o_a, lse_a, o_b, lse_b))
    return out, lse


Pairs = torch.Tensor | Sequence[tuple[int, int]]


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    backend: str = "auto",
    validate: bool = True,
) -> None:
    """Write keys and values `[tokens, kv_heads, dim]` to slots (block x block_size + offset); slot -1 skips a token.

    An fp8 cache stores key / `k_scale` and value / `v_scale`, clamped to its range. `validate` checks the slots, as in
    `paged_attention_decode`. Raises a `KernelError` before anything is written.
    """
    arguments.check_caches(key_cache, value_cache)
    _check_rows("key", key, key_cache, key.shape[:1])
    _check_rows("value", value, value_cache, key.shape[:1])
    arguments.check_scales(k_scale, v_scale, key_cache)
    if _checks_values(slot_mapping, validate=validate):
        arguments.check_slots(slot_mapping, key.shape[0], key_cache)
    given = (key, value, key_cache, value_cache, slot_mapping.contiguous(), k_scale, v_scale)
    demand = Demand.of(key, key_cache, value_cache)
    if choose_backend(backend, key_cache.device, demand).backend == "triton":
        from paged_kernels.triton import cache as triton_cache

        triton_cache.reshape_and_cache(*given)
    else:
        torch_backend.reshape_and_cache(*given)


def copy_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, block_mapping: Pairs, *, backend: str = "auto"
) -> None:
    """Copy blocks `[n, 2]` (source, destination) of both caches; all sources are read before any write.

    A cache may be a stack of layers `[layers, blocks, block_size, kv_heads, dim]`: all layers are copied in one launch.
    A mapping on the host is checked, and needs no staging buffer if no destination is a source.
    """
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        arguments.check_blocks(name, cache)
    arguments.check_same("key_cache", key_cache, "value_cache", value_cache)
    blocks = min(key_cache.shape[-4], value_cache.shape[-4])
    pairs = _pairs(block_mapping, blocks, blocks)
    if not len(pairs):
        return
    disjoint = pairs.device.type == "cpu" and not set(pairs[:, 0].tolist()) & set(pairs[:, 1].tolist())
    source, destination = pairs.to(key_cache.device).long().unbind(1)
    if resolve_backend(backend, key_cache.device) == "triton":
        from paged_kernels.triton import cache as triton_cache

        if key_cache.shape == value_cache.shape and key_cache.stride() == value_cache.stride():
            triton_cache.copy_blocks(key_cache, source, destination, value_cache, disjoint=disjoint)
            return
        for cache in (key_cache, value_cache):
            triton_cache.copy_blocks(cache, source, destination, disjoint=disjoint)
    else:
        torch_backend.copy_blocks(key_cache, source, destination)
        torch_backend.copy_blocks(value_cache, source, destination)


def swap_blocks(source: torch.Tensor, destination: torch.Tensor, block_mapping: Pairs) -> None:
    """Copy blocks `[n, 2]` (block of `source`, block of `destination`) between caches on different devices.

    Both have the same shape except for the number of blocks; stacks of layers are allowed. The mapping is on the host.
    With pinned host memory the copies are asynchronous: wait for the stream before the host reads what was swapped out.
    """
    for name, cache in (("source", source), ("destination", destination)):
        arguments.check_blocks(name, cache)
    if source.shape[:-4] != destination.shape[:-4] or source.shape[-3:] != destination.shape[-3:]:
        raise arguments.ShapeError(
            f"source {tuple(source.shape)} and destination {tuple(destination.shape)} must agree in all but the "
            "number of blocks"
        )
    if source.dtype != destination.dtype:
        raise arguments.DtypeError(
            f"source is {source.dtype} and destination {destination.dtype}; blocks are copied without conversion"
        )
    if isinstance(block_mapping, torch.Tensor) and block_mapping.device.type != "cpu":
        raise arguments.DeviceError(
            f"block_mapping is on {block_mapping.device}; the host starts the copies: pass it on the CPU"
        )
    pairs = _pairs(block_mapping, source.shape[-4], destination.shape[-4])
    moved = [(int(read), int(write)) for read, write in pairs.tolist()]
    torch_backend.swap_blocks(source, destination, moved)


def _pairs(mapping: Pairs, sources: int, destinations: int) -> torch.Tensor:
    """The mapping as `[n, 2]`. Its values are checked if it is on the host, where reading them costs no wait."""
    pairs = mapping
    if not isinstance(pairs, torch.Tensor):
        try:
            pairs = torch.tensor(pairs if len(pairs) else np.empty((0, 2), dtype=np.int64))
        except (TypeError, ValueError) as error:
            raise arguments.ShapeError(f"block_mapping {mapping!r}: no list of pairs ({error})") from error
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise arguments.ShapeError(
            f"block_mapping {tuple(pairs.shape)} must be [n, 2]: pairs of source and destination"
        )
    arguments.check_whole("block_mapping", pairs)
    if pairs.device.type == "cpu" and len(pairs):
        low, high = pairs.min(0).values.tolist(), pairs.max(0).values.tolist()
        if min(low) < 0 or high[0] >= sources or high[1] >= destinations:
            raise arguments.TableError(
                f"block_mapping reads blocks {low[0]} to {high[0]} of {sources} and writes {low[1]} to {high[1]} of "
                f"{destinations}"
            )
        if len(set(pairs[:, 1].tolist())) < len(pairs):
            raise arguments.TableError(
                "block_mapping writes a destination twice; its content would be undefined"
            )
    return pairs


def _check_rows(name: str, rows: torch.Tensor, cache: torch.Tensor, tokens: torch.Size) -> None:
    if rows.shape != (*tokens, *cache.shape[2:]):
        expected = f"[tokens, {cache.shape[2]}, {cache.shape[3]}], with as many tokens in key and value"
        raise arguments.ShapeError(f"{name} {tuple(rows.shape)} must be {expected}")
    if cache.dtype.itemsize > 1:
        arguments.check_same(name, rows, f"{name}_cache", cache)
    elif rows.device != cache.device:
        raise arguments.DeviceError(f"{name} is on {rows.device} and its cache on {cache.device}")
