"""Our attention and that of other libraries: every provider runs the same cases, and is checked before it is timed.

Ours runs as an engine calls it, over contiguous KV, and with shared prefixes read once. torch's SDPA runs on contiguous
KV (no paging at all), and after a gather (paging without a paged kernel). FlashInfer (0.6) and flash-attn (2.8) run if
they are installed. FlashInfer's `plan()` on the host is not timed: an engine calls it once per step.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom

from paged_kernels import torch_backend
from paged_kernels.arguments import OptionError, PagedBatch, Workspace, additive, causal_window
from paged_kernels.backends import (
    Demand,
    check_prefill_kernel,
    choose_backend,
    no_hopper,
    unavailable,
    unserved_by_native,
)
from paged_kernels.cascade_groups import (
    CascadeCost,
    CascadeGroups,
    cost_of,
    find_cascade_groups,
    rows_per_tile,
)
from paged_kernels.case import (
    Case,
    Everywhere,
    Provider,
    Run,
    UnsupportedCaseError,
    contiguous_kv,
    needs_package,
    without_poison,
)
from paged_kernels.operations import prepare_native, prepare_torch, run_triton
from paged_kernels.private import why_no_cpp_compiler

__all__ = ["Case", "Provider", "Run", "UnsupportedCaseError", "find_providers"]
# With this cost every shared block is read once. It measures the crossover that the cost rule is compared with.
ALWAYS = CascadeCost(memory_bytes_per_s=1.0, cache_bytes_per_s=1.0, cache_bytes=0, overhead_s=0.0)


@dataclass(frozen=True, slots=True)
class Paged(Everywhere):
    """Our paged attention: Triton on a CUDA device, torch elsewhere."""

    name: str = "paged"

    def prepare(self, case: Case) -> Run:
        """Prepare as an engine does, once per step for all layers."""
        batch, out, workspace = batch_of(case), output_of(case), Workspace()
        if backend_of(case) == "triton":
            from paged_kernels.triton.decode import PartsOfStep

            splits = splits_of(case) if case.decode else None
            arguments = (batch, case.scoring, out, None, splits, workspace, PartsOfStep())
            return returning(out, partial(run_triton, *arguments, None if case.decode else "auto"))
        return returning(out, prepare_torch(batch, case.scoring, out, None, workspace))


@dataclass(frozen=True, slots=True)
class HopperPrefill(Everywhere):
    """Our prefill with the kernel for H100 and H200, which no GPU has run yet."""

    name: str = "paged-hopper"

    def available(self, device: torch.device) -> str | None:
        """It runs on compute capability 9.0 alone."""
        return no_hopper(device) or None

    def prepare(self, case: Case) -> Run:
        """The same preparation as `Paged`, with the other kernel."""
        if case.decode:
            raise UnsupportedCaseError(f"{case.name} is a decode; this kernel computes prefills")
        try:
            inputs = (case.q, case.key_cache, case.value_cache)
            check_prefill_kernel("hopper", backend_of(case), *inputs, case.scoring)
        except OptionError as error:
            raise UnsupportedCaseError(f"{case.name}: {error}") from error
        out = output_of(case)
        arguments = (batch_of(case), case.scoring, out, None, None, None)
        return returning(out, partial(run_triton, *arguments, prefill_kernel="hopper"))


@dataclass(frozen=True, slots=True)
class ContiguousDecode(Everywhere):
    """The Triton decode over contiguous KV: the same code with plain addressing, so the difference is paging."""

    name: str = "contiguous"

    def available(self, device: torch.device) -> str | None:
        """It is a Triton kernel."""
        reason = unavailable("triton", device) or ("" if device.type == "cuda" else "needs a CUDA device")
        return f"is the Triton decode without a block table, which {reason}" if reason else None

    def prepare(self, case: Case) -> Run:
        """Copy each sequence's KV into contiguous memory."""
        if not case.decode:
            why = "is no decode; only the decode kernel has a contiguous form"
            raise UnsupportedCaseError(f"{case.name} {why}")
        if backend_of(case) != "triton":
            raise UnsupportedCaseError(f"{case.name} is served by torch, whose decode has no contiguous form")
        from paged_kernels.triton.decode import PartsOfStep, run_contiguous_decode

        keys, values = contiguous_kv(case)
        out, splits = output_of(case), splits_of(case)
        arguments = (case.q, keys, values, case.seq_lens, case.scoring, out, None, splits)
        return returning(
            out, partial(run_contiguous_decode, *arguments, workspace=Workspace(), parts=PartsOfStep())
        )


@dataclass(frozen=True, slots=True)
class Cascade(Everywhere):
    """Our decode with shared prefixes read once, if the cost rule says so (`always`: whenever blocks are shared)."""

    name: str = "cascade"
    always: bool = False

    def prepare(self, case: Case) -> Run:
        """Divide the batch into groups. If no group saves time, run the flat decode."""
        if not case.decode or not case.shared_tokens:
            raise UnsupportedCaseError(f"{case.name} shares no prefix between decode rows")
        groups = self._groups(case)
        if groups is None:
            return Paged().prepare(case)
        out = output_of(case)
        shared, lens, table, lengths, ids = (
            torch.from_numpy(values.astype(np.int32)).to(case.device) for values in groups[:5]
        )
        caches, workspace = (case.q, case.key_cache, case.value_cache), Workspace()
        if backend_of(case) == "triton":
            from paged_kernels.triton.cascade import run_cascade, sort_groups

            prefixes = sort_groups(shared, lens, ids, lengths)
            arguments = (*caches, prefixes, table, lengths, case.scoring, out)
            return returning(out, partial(run_cascade, *arguments, workspace=workspace))
        sizes = {"block_size": case.block_size, "token_bytes": case.token_bytes}
        metadata = torch_backend.cascade_metadata(shared, lens, table, lengths, ids, **sizes)
        torch_arguments = (*caches, metadata, case.scoring, out, None, workspace)
        return returning(out, partial(torch_backend.run_cascade, *torch_arguments))

    def _groups(self, case: Case) -> CascadeGroups | None:
        return find_cascade_groups(
            case.block_table.cpu().numpy().astype(np.int64),
            np.array(case.lengths),
            case.block_size,
            token_bytes=case.token_bytes,
            rows_per_tile=rows_per_tile(case.heads // case.kv_heads, case.device),
            cost=ALWAYS if self.always else cost_of(case.device),
        )


@dataclass(frozen=True, slots=True)
class Native:
    """Our C kernels, which the engine runs on a CPU."""

    name: str = "native"
    capturable: bool = False

    def available(self, device: torch.device) -> str | None:
        """It needs a CPU and a C compiler."""
        return unavailable("native", device) or None

    def prepare(self, case: Case) -> Run:
        """Prepare as an engine does, once per step. Chunks in 16 bits may be left to torch, as there."""
        demand = Demand.of(case.q, case.key_cache, case.value_cache, case.scoring)
        if reason := unserved_by_native(demand):
            raise UnsupportedCaseError(
                f"{case.name} is left to torch ('paged'): the compiled kernel {reason}"
            )
        out = output_of(case)
        return returning(out, prepare_native(batch_of(case), case.scoring, out, Workspace()))


def batch_of(case: Case) -> PagedBatch:
    """The case in the form that the kernels take."""
    tables = (case.block_table, case.seq_lens, case.cu_seqlens_q)
    return PagedBatch(case.q, case.key_cache, case.value_cache, *tables, max(case.queries))


def output_of(case: Case) -> torch.Tensor:
    """A buffer for the case's output."""
    return case.q.new_empty(*case.q.shape[:2], case.value_cache.shape[3])


def splits_of(case: Case) -> int | None:
    """The parts of each row that the Triton decode is launched with; None: the device lists them."""
    from paged_kernels.triton.decode import pick_splits

    return pick_splits(case.lengths, case.q, case.key_cache, case.value_cache, case.scoring.window)


def backend_of(case: Case) -> str:
    """The backend of ours that serves the case on its device. The C kernels are a provider of their own."""
    name = "auto" if case.device.type == "cuda" else "torch"
    return choose_backend(name, case.device, Demand.of(case.q, case.key_cache, case.value_cache)).backend


def returning(out: torch.Tensor, run: Callable[[], None]) -> Run:
    """A call that runs `run` and returns the buffer that it fills."""

    def call() -> torch.Tensor:
        run()
        return out

    return call


@dataclass(frozen=True, slots=True)
class ContiguousSdpa(Everywhere):
    """SDPA on contiguous KV. Sequences of equal length run in one call, ragged prefills one by one."""

    name: str = "sdpa"

    def prepare(self, case: Case) -> Run:
        """Copy KV into contiguous memory, and choose the call for which torch has its fastest kernel."""
        keys, values = (cache.to(case.q.dtype).transpose(1, 2) for cache in _laid_out(case))
        if case.decode:
            mask = _tail_mask(case, keys.shape[2])
            return partial(_decode, _packed(case), keys, values, mask, case.scoring.scale)
        return partial(_prefill, case, keys, values)


@dataclass(frozen=True, slots=True)
class GatherSdpa(Everywhere):
    """Gather each sequence's blocks into contiguous memory, then SDPA: the cost of paging without a paged kernel."""

    name: str = "gather-sdpa"

    def prepare(self, case: Case) -> Run:
        """Make the index and the buffers; the gather itself is timed."""
        _refuse_options(case)
        if not case.decode or case.key_cache.dtype.itemsize == 1:
            serves = "gather + SDPA serves decodes of caches in the queries' dtype"
            raise UnsupportedCaseError(f"{case.name}: {serves}")
        width = -(-max(case.lengths) // case.block_size)
        needed = torch.tensor([-(-length // case.block_size) for length in case.lengths], device=case.device)
        used = torch.arange(width, device=case.device) < needed.unsqueeze(1)
        blocks = torch.where(used, case.block_table[:, :width], 0).long().flatten()
        slots = torch.arange(width * case.block_size, device=case.device)
        void = (slots >= case.seq_lens.unsqueeze(1)).flatten().nonzero().squeeze(1)
        mask = _tail_mask(case, width * case.block_size)
        return partial(_gathered, case, blocks, void, mask, _packed(case))


def _laid_out(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    _refuse_options(case)
    keys, values = contiguous_kv(case)
    if keys.dtype.itemsize > 1:
        return keys, values
    return keys.float() * case.scoring.k_scale, values.float() * case.scoring.v_scale


def _refuse_options(case: Case) -> None:
    if not case.scoring.plain or 0 in case.lengths:
        raise UnsupportedCaseError(f"{case.name}: SDPA supports no softcap, sinks, ALiBi or empty sequences")


def _packed(case: Case) -> torch.Tensor:
    """Queries of a decode `[sequences, kv_heads, group, dk]`: the heads of a group share keys, so they become rows."""
    return case.q.view(len(case.q), case.kv_heads, -1, case.q.shape[2])


def _tail_mask(case: Case, width: int) -> torch.Tensor | None:
    """Additive mask `[sequences, 1, 1, width]`. None if every sequence is `width` long and sees all keys."""
    window = case.scoring.window
    if set(case.lengths) == {width} and not 0 < window < width:
        return None
    position, lengths = torch.arange(width, device=case.device), case.seq_lens.unsqueeze(1)
    visible = (position < lengths) & (position >= lengths - (window or width))
    return additive(visible, case.q.dtype)[:, None, None, :]


def _decode(
    packed: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    result = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    return result.flatten(1, 2)


def _gathered(
    case: Case, blocks: torch.Tensor, void: torch.Tensor, mask: torch.Tensor | None, packed: torch.Tensor
) -> torch.Tensor:
    pair = []
    for cache in (case.key_cache, case.value_cache):
        found = cache.index_select(0, blocks).view(-1, *cache.shape[2:])
        found.index_fill_(0, void, 0.0)
        pair.append(found.view(len(case.lengths), -1, *cache.shape[2:]).transpose(1, 2))
    return _decode(packed, pair[0], pair[1], mask, case.scoring.scale)


def _prefill(case: Case, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if len(set(case.lengths)) == len(set(case.queries)) == 1:
        queries = case.q.view(len(case.lengths), case.queries[0], *case.q.shape[1:]).transpose(1, 2)
        result = _causal(case, queries, keys, values)
        return result.transpose(1, 2).reshape(len(case.q), case.heads, -1)
    parts, start = [], 0
    for row, (length, count) in enumerate(zip(case.lengths, case.queries, strict=True)):
        queries = case.q[start : start + count].transpose(0, 1).unsqueeze(0)
        one = _causal(case, queries, keys[row : row + 1, :, :length], values[row : row + 1, :, :length])
        parts.append(one[0].transpose(0, 1))
        start += count
    return torch.cat(parts)


def _causal(case: Case, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`[n, heads, queries, dv]`. On CUDA a whole prompt has a fused kernel, and so has a chunk without a window."""
    count, length, window = queries.shape[2], keys.shape[2], case.scoring.window
    mask: torch.Tensor | None = None
    if window or count < length:
        if not window and case.device.type == "cuda":
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(count, length)
        else:
            mask = additive(causal_window(count, length, window, device=case.device), case.q.dtype)
    gqa, scale = case.heads != case.kv_heads, case.scoring.scale
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )


LEAST_PAGE = 16  # a block of the mask is a page, and the kernel's tile must fit into it


@dataclass(frozen=True, slots=True)
class FlexAttention(Everywhere):
    """Decode by `flex_attention`, whose blocks are those of the cache. The first use compiles it for some seconds."""

    name: str = "flex"
    compiled: bool = True

    def available(self, device: torch.device) -> str | None:
        """It is part of torch since 2.5; on the CPU it compiles with the machine's C++ compiler."""
        return None if device.type == "cuda" or not self.compiled else why_no_cpp_compiler()

    def prepare(self, case: Case) -> Run:
        """Turn tables into a block mask over a copy of the cache without NaN, and compile."""
        narrow = case.key_cache.dtype.itemsize == 1
        if not case.decode or not case.scoring.plain or narrow or 0 in case.lengths:
            raise UnsupportedCaseError(
                f"{case.name}: flex serves decodes without softcap, sinks or ALiBi, of caches in the queries' dtype"
            )
        if case.block_size < LEAST_PAGE:
            raise UnsupportedCaseError(f"{case.name}: flex needs blocks of {LEAST_PAGE} tokens or more")
        from torch.nn.attention.flex_attention import flex_attention

        attend: Any = torch.compile(flex_attention, dynamic=False) if self.compiled else flex_attention
        keys, values = (
            without_poison(cache).flatten(0, 1).transpose(0, 1).unsqueeze(0)
            for cache in (case.key_cache, case.value_cache)
        )
        mask, scale, gqa = _block_mask(case), case.scoring.scale, case.heads != case.kv_heads
        query = case.q.unsqueeze(2)
        run = partial(attend, query, keys, values, block_mask=mask, scale=scale, enable_gqa=gqa)
        return lambda: run().squeeze(2)


def _block_mask(case: Case) -> Any:
    """The mask: sequence b sees its own blocks of the cache, and in them the positions before its end."""
    from torch.nn.attention.flex_attention import BlockMask

    size, device = case.block_size, case.device
    counts = [-(-length // size) for length in case.lengths]
    # full blocks, which need no mask inside
    whole = [0 if case.scoring.window else length // size for length in case.lengths]
    widest, blocks = max(counts), case.key_cache.shape[0]
    place = torch.arange(widest, dtype=torch.int32, device=device).expand(len(counts), -1)
    used = place < torch.tensor(counts, device=device).unsqueeze(1)
    physical = torch.where(used, case.block_table[:, :widest], 0).int()
    logical = torch.full((len(counts), blocks), -1, dtype=torch.int32, device=device)
    rows = torch.arange(len(counts), device=device).unsqueeze(1).expand(-1, widest)
    logical[rows[used], physical[used].long()] = place[used]
    lengths, window = case.seq_lens, case.scoring.window or 2**30

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        block = logical[b, kv // size]
        position = block * size + kv % size
        return (block >= 0) & (position < lengths[b]) & (position >= lengths[b] - window)

    rest = [count - first for count, first in zip(counts, whole, strict=True)]
    return BlockMask.from_kv_blocks(
        *_listed(physical, whole, rest, blocks),
        *_listed(physical, [0] * len(whole), whole, blocks),
        BLOCK_SIZE=(128, size),
        mask_mod=visible,
        seq_lengths=(1, blocks * size),
    )


def _listed(
    physical: torch.Tensor, skipped: list[int], counts: list[int], blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(number, ids) of each sequence's blocks from `skipped` on. Each list is as long as the cache has blocks."""
    first = torch.tensor(skipped, device=physical.device).unsqueeze(1)
    place = torch.arange(blocks, device=physical.device) + first
    ids = physical.gather(1, place.clamp_max(physical.shape[1] - 1)).view(len(counts), 1, 1, blocks)
    return torch.tensor(counts, dtype=torch.int32, device=physical.device).view(-1, 1, 1), ids


WORKSPACE_BYTES = 256 << 20
TENSOR_CORES_FROM_GROUP = 4  # from this many query heads per KV head its tensor-core kernel is faster


@dataclass(frozen=True, slots=True)
class FlashInfer(Everywhere):
    """Decode and prefill over the same cache: its NHD and HND layouts are the same as ours."""

    name: str = "flashinfer"

    def available(self, device: torch.device) -> str | None:
        """It needs its package and a CUDA device."""
        return needs_package("flashinfer", device)

    def prepare(self, case: Case) -> Run:
        """Call the wrapper's `plan()` for the case's lengths."""
        scoring = case.scoring
        other = case.value_cache.shape[3] != case.q.shape[2]
        if scoring.sinks is not None or scoring.alibi is not None or 0 in case.lengths or other:
            lacks = "without sinks, ALiBi, empty sequences and values of another width"
            raise UnsupportedCaseError(f"{case.name}: FlashInfer is called {lacks}")
        flashinfer = importlib.import_module("flashinfer")

        strided = case.key_cache.stride(2) > case.key_cache.stride(1)
        layout = "HND" if strided else "NHD"
        caches = [without_poison(cache) for cache in (case.key_cache, case.value_cache)]
        pool = tuple(cache.transpose(1, 2) if strided else cache for cache in caches)
        scratch = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=case.device)
        shape = (case.heads, case.kv_heads, case.q.shape[2], case.block_size)
        options: dict[str, Any] = {
            "window_left": scoring.window - 1 if scoring.window else -1,
            "logits_soft_cap": scoring.softcap or None,
            "sm_scale": scoring.scale,
            "q_data_type": case.q.dtype,
            "kv_data_type": case.key_cache.dtype,
        }
        if case.decode:
            cores = case.heads // case.kv_heads >= TENSOR_CORES_FROM_GROUP
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(scratch, layout, use_tensor_cores=cores)
            wrapper.plan(*_pages(case), *shape, **options)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, layout)
            wrapper.plan(case.cu_seqlens_q, *_pages(case), *shape, causal=True, **options)
        narrow = caches[0].dtype.itemsize == 1
        scales = {"k_scale": scoring.k_scale, "v_scale": scoring.v_scale} if narrow else {}
        return partial(wrapper.run, case.q, pool, **scales)


def _pages(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashInfer's form of the block table: (indptr, page ids, tokens on each last page), int32."""
    counts = [-(-length // case.block_size) for length in case.lengths]
    indptr = torch.tensor([0, *counts]).cumsum(0).int().to(case.device)
    ids = torch.cat([case.block_table[row, :count] for row, count in enumerate(counts)])
    last = torch.tensor([(length - 1) % case.block_size + 1 for length in case.lengths], dtype=torch.int32)
    return indptr, ids.int(), last.to(case.device)


PAGE_MULTIPLE = 256  # version 2 supports no smaller pages


@dataclass(frozen=True, slots=True)
class FlashAttention(Everywhere):
    """The flash-attn kernels over the same cache."""

    name: str = "flash-attn"

    def available(self, device: torch.device) -> str | None:
        """It needs its package and a CUDA device."""
        return needs_package("flash_attn", device)

    def prepare(self, case: Case) -> Run:
        """Pass the cache unchanged, except that NaN becomes zero."""
        _refuse(case)
        flash_attn = importlib.import_module("flash_attn")

        caches = [without_poison(cache) for cache in (case.key_cache, case.value_cache)]
        table = torch.where(case.block_table < len(caches[0]), case.block_table, 0)
        window = (case.scoring.window - 1, 0) if case.scoring.window else (-1, -1)
        options: dict[str, Any] = {
            "softmax_scale": case.scoring.scale,
            "causal": True,
            "window_size": window,
            "softcap": case.scoring.softcap,
            "alibi_slopes": None if case.scoring.alibi is None else case.scoring.alibi.float(),
            "block_table": table,
        }
        if case.decode:
            options["cache_seqlens"] = case.seq_lens
            run = partial(flash_attn.flash_attn_with_kvcache, case.q.unsqueeze(1), *caches, **options)
            return lambda: run().squeeze(1)
        ends = torch.tensor([0, *case.lengths]).cumsum(0).int().to(case.device)
        spans = (case.cu_seqlens_q, ends, max(case.queries), max(case.lengths))
        return partial(flash_attn.flash_attn_varlen_func, case.q, *caches, *spans, **options)


def _refuse(case: Case) -> None:
    reason = ""
    if case.block_size % PAGE_MULTIPLE:
        reason = f"reads pages in multiples of {PAGE_MULTIPLE} tokens"
    elif case.q.dtype not in (torch.float16, torch.bfloat16) or case.key_cache.dtype != case.q.dtype:
        reason = "supports float16 and bfloat16, with one dtype for queries and cache"
    elif case.scoring.sinks is not None or 0 in case.lengths or not case.key_cache[0].is_contiguous():
        reason = "supports no sinks, empty sequences or HND caches"
    elif case.value_cache.shape[3] != case.q.shape[2]:
        reason = "has keys and values of one width"
    if reason:
        raise UnsupportedCaseError(f"{case.name}: flash-attn {reason}")


@dataclass(frozen=True, slots=True)
class UserFunction:
    """`function(case)` returns the output `[tokens, heads, dv]`. The whole call is timed.

    If the function has an attribute `prepare`, `function.prepare(case)` is called instead, untimed, and returns the
    timed call. An attribute `capturable = True` allows capture in a CUDA graph.
    """

    name: str
    function: Callable[[Case], Any]

    @property
    def capturable(self) -> bool:
        """The function's attribute `capturable`, False without one."""
        return bool(getattr(self.function, "capturable", False))

    def available(self, device: torch.device) -> str | None:
        """It was imported, so it can run."""
        return None

    def prepare(self, case: Case) -> Run:
        """The user's own preparation, or none."""
        prepare = getattr(self.function, "prepare", None)
        run: Run = prepare(case) if prepare is not None else partial(self.function, case)
        return run


def load_function(spec: str) -> UserFunction:
    """The provider for `module:function`. Raises `OptionError` if the module or the function is not found."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise OptionError(f"{spec!r} names no function; write module:function, e.g. my_kernels:paged_decode")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise OptionError(f"{spec!r}: module {module_name!r} cannot be imported: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = ", ".join(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
        raise OptionError(
            f"{spec!r}: module {module_name!r} has no function {name!r}; it has {known or 'none'}"
        )
    return UserFunction(spec, function)


def find_providers(function: str | None = None) -> dict[str, Provider]:
    """Every provider by name, ours first, whether or not it can run here. `function` adds the user's `module:function`.

    Raises `OptionError` if that function is not found.
    """
    others = (ContiguousSdpa(), GatherSdpa(), FlexAttention(), FlashInfer(), FlashAttention(), Native())
    users = (load_function(function),) if function else ()
    own = (Paged(), HopperPrefill(), ContiguousDecode(), Cascade(), Cascade("cascade-always", always=True))
    providers: tuple[Provider, ...] = (*own, *others, *users)
    return {provider.name: provider for provider in providers}
