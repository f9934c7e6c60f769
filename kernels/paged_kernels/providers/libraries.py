"""Attention of other libraries over the same cases: torch's SDPA and flex attention, FlashInfer, flash-attn.

SDPA runs on contiguous KV (no paging at all), and after a gather (paging without a paged kernel). FlashInfer (0.6) and
flash-attn (2.8) run if they are installed. FlashInfer's `plan()` on the host is not timed: an engine calls it once per
step.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom

from paged_kernels.private import why_no_cpp_compiler
from paged_kernels.providers.case import (
    Case,
    Everywhere,
    Run,
    UnsupportedCaseError,
    contiguous_kv,
    needs_package,
    without_poison,
)
from paged_kernels.scoring import additive, causal_window


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
        if device.type == "cuda" or not self.compiled:
            return None
        return why_no_cpp_compiler()

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
        if scoring.sinks is not None or scoring.alibi is not None or 0 in case.lengths:
            raise UnsupportedCaseError(
                f"{case.name}: FlashInfer is called without sinks, ALiBi and empty sequences"
            )
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
    if reason:
        raise UnsupportedCaseError(f"{case.name}: flash-attn {reason}")
