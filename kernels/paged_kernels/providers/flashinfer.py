"""FlashInfer, if it is installed. Its `plan()` on the host is not timed: an engine calls it once per step.

Written for version 0.6: `BatchDecodeWithPagedKVCacheWrapper` and `BatchPrefillWithPagedKVCacheWrapper`.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paged_kernels.providers.case import Case, Run, UnsupportedCaseError, needs_package, without_poison

WORKSPACE_BYTES = 256 << 20
TENSOR_CORES_FROM_GROUP = 4  # from this many query heads per KV head its tensor-core kernel is faster


@dataclass(frozen=True, slots=True)
class FlashInfer:
    """Decode and prefill over the same cache: its NHD and HND layouts are the same as ours."""

    name: str = "flashinfer"
    capturable: bool = True

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
        if case.decode:
            group = case.heads // case.kv_heads
            cores = group >= TENSOR_CORES_FROM_GROUP
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(scratch, layout, use_tensor_cores=cores)
            wrapper.plan(
                *_pages(case), case.heads, case.kv_heads, case.q.shape[2], case.block_size, **_options(case)
            )
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, layout)
            shape = (case.heads, case.kv_heads, case.q.shape[2], case.block_size)
            wrapper.plan(case.cu_seqlens_q, *_pages(case), *shape, causal=True, **_options(case))
        scales = (
            {"k_scale": scoring.k_scale, "v_scale": scoring.v_scale} if caches[0].dtype.itemsize == 1 else {}
        )
        return partial(wrapper.run, case.q, pool, **scales)


def _options(case: Case) -> dict[str, Any]:
    return {
        "window_left": case.scoring.window - 1 if case.scoring.window else -1,
        "logits_soft_cap": case.scoring.softcap or None,
        "sm_scale": case.scoring.scale,
        "q_data_type": case.q.dtype,
        "kv_data_type": case.key_cache.dtype,
    }


def _pages(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashInfer's form of the block table: (indptr, page ids, tokens on each last page), int32."""
    counts = [-(-length // case.block_size) for length in case.lengths]
    indptr = torch.tensor([0, *counts]).cumsum(0).int().to(case.device)
    ids = torch.cat([case.block_table[row, :count] for row, count in enumerate(counts)])
    last = torch.tensor([(length - 1) % case.block_size + 1 for length in case.lengths], dtype=torch.int32)
    return indptr, ids.int(), last.to(case.device)
