"""The root-mean-square norm of a layer as one pass in C, where torch takes six."""

import ctypes
from functools import cache
from typing import Any

import torch

from engine.runtime.native.compiling import library, why_unavailable
from engine.runtime.packing import Forward

_NAMES = {torch.float32: "rms_norm_f32", torch.bfloat16: "rms_norm_bf16"}
_LANES = 16  # as in the C files


def norm_forward(module: torch.nn.Module) -> tuple[int, Forward] | None:
    """The width of a norm's rows and a forward for it, if it looks like one and there are compiled kernels."""
    weight, eps = getattr(module, "weight", None), _epsilon(module)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or eps is None:
        return None
    if weight.dtype not in _NAMES or len(weight) % _LANES or len(list(module.parameters())) > 1:
        return None
    if why_unavailable():
        return None
    run, width, own = _kernel(_NAMES[weight.dtype]), len(weight), type(module).forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not weight.dtype:
            return own(module, x)  # type: ignore[no-any-return]
        rows = x.contiguous()
        out = torch.empty_like(rows)
        run(rows.data_ptr(), weight.data_ptr(), rows.numel() // width, width, eps, out.data_ptr())
        return out

    return width, forward


def _epsilon(module: torch.nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


@cache
def _kernel(name: str) -> Any:
    function = getattr(library(), name)
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, whole, whole, ctypes.c_float, pointer]
    function.restype = None
    return function
