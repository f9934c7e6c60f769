"""flash-attn 2.8, if it is installed: its paged decode and its paged prefill of variable lengths."""

import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paged_kernels.providers.case import Case, Run, UnsupportedCaseError, needs_package, without_poison

PAGE_MULTIPLE = 256  # version 2 supports no smaller pages


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """The flash-attn kernels over the same cache."""

    name: str = "flash-attn"
    capturable: bool = True

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
            rows = case.q.unsqueeze(1)
            run = partial(
                flash_attn.flash_attn_with_kvcache, rows, *caches, cache_seqlens=case.seq_lens, **options
            )
            return lambda: run().squeeze(1)
        ends = torch.tensor([0, *case.lengths]).cumsum(0).int().to(case.device)
        spans = (case.cu_seqlens_q, ends, max(case.queries), max(case.lengths))
        return partial(flash_attn.flash_attn_varlen_func, case.q, *caches, *spans, **options)


def _refuse(case: Case) -> None:
    if case.block_size % PAGE_MULTIPLE:
        raise UnsupportedCaseError(
            f"{case.name}: flash-attn reads pages in multiples of {PAGE_MULTIPLE} tokens"
        )
    if case.q.dtype not in (torch.float16, torch.bfloat16) or case.key_cache.dtype != case.q.dtype:
        raise UnsupportedCaseError(
            f"{case.name}: flash-attn supports float16 and bfloat16, with one dtype for queries and cache"
        )
    if case.scoring.sinks is not None or 0 in case.lengths or not case.key_cache[0].is_contiguous():
        raise UnsupportedCaseError(
            f"{case.name}: flash-attn supports no sinks, empty sequences or HND caches"
        )
