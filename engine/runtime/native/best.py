"""The best token of every row of logits: one pass in C where there are compiled kernels, else torch's maximum."""

import ctypes
from functools import cache
from typing import Any

import torch

from engine.runtime.native.compiling import library, why_unavailable

_NAMES = {torch.float32: "best_f32", torch.bfloat16: "best_bf16"}


def best_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit and its first place, each `[rows]`, of logits `[rows, vocab]`; NaN where a row has a NaN."""
    if logits.device.type != "cpu" or logits.dtype not in _NAMES or why_unavailable():
        best, place = logits.max(dim=-1)
        return best, place
    logits = logits.contiguous()
    best = torch.empty(len(logits), dtype=torch.float32)
    place = torch.empty(len(logits), dtype=torch.int64)
    run = _kernel(_NAMES[logits.dtype])
    run(logits.data_ptr(), *logits.shape, best.data_ptr(), place.data_ptr())
    return best, place


@cache
def _kernel(name: str) -> Any:
    function = getattr(library(), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = None
    return function
