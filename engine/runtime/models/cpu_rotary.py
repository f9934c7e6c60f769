"""Rotary position embedding in one pass of C, for attention modules of transformers on a CPU.

transformers rotates q and k with a function of the model's file, in about ten passes over memory. An attention module
gets its own `forward` with another function in that place. The code of transformers is not edited, and everything else
keeps its function. The function is replaced only if both give the same numbers for random input.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from inspect import signature
from types import FunctionType, MethodType
from typing import Any

import torch

from engine.runtime.attention.native.compile import library, why_unavailable

Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_NAME = "apply_rotary_pos_emb"  # what the files of transformers call it
_PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]
_FUNCTIONS = {torch.float32: "rotate_f32", torch.bfloat16: "rotate_bf16"}
_WIDTH = 32  # heads have a multiple of this width: two halves of LANES, see the C files
_TOLERANCE = {
    torch.float32: 1e-6,
    torch.bfloat16: 0.0,
}  # C may round once where torch rounds twice in float32


def rotary_forward(module: torch.nn.Module) -> Callable[..., Any] | None:
    """A forward of an attention module that rotates in C; None if it does not rotate, or not by this rule."""
    own = type(module).forward
    if not isinstance(own, FunctionType) or _NAME not in own.__code__.co_names or why_unavailable():
        return None
    theirs = own.__globals__.get(_NAME)
    if not isinstance(theirs, FunctionType):
        return None
    dtypes = _equal_dtypes(theirs)
    if not dtypes or next(module.parameters()).dtype not in dtypes:
        return None
    names = {**own.__globals__, _NAME: _rotation(theirs)}
    copy = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    copy.__kwdefaults__ = own.__kwdefaults__
    return MethodType(copy, module)


def _rotation(theirs: FunctionType) -> Rotation:
    """The function in C. What it does not compute goes to `theirs`."""
    dtypes = _equal_dtypes(theirs)

    def rotation(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if rest or more or q.dtype not in dtypes or not (_fits(q, cos, sin) and _fits(k, cos, sin)):
            return theirs(q, k, cos, sin, *rest, **more)  # type: ignore[no-any-return]
        cos, sin = cos.contiguous(), sin.contiguous()
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    return rotation


def _fits(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether C can rotate heads `[1, heads, tokens, width]` by cos and sin `[1, tokens, width]`."""
    return (
        x.dim() == 4
        and cos.shape == sin.shape == (1, *x.shape[2:])
        and x.shape[0] == 1
        and x.dtype is cos.dtype is sin.dtype
        and x.shape[3] % _WIDTH == 0
        and x.stride(3) == 1
    )


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads `[1, heads, tokens, width]`; they lie in memory token by token, as attention stores and reads them."""
    _, heads, tokens, width = x.shape
    out = x.new_empty(1, tokens, heads, width)
    sizes = (tokens, heads, width // 2, x.stride(2), x.stride(1))
    _function(_FUNCTIONS[x.dtype])(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), *sizes, out.data_ptr())
    return out.transpose(1, 2)


@cache
def _function(name: str) -> Any:
    function = getattr(library(), name)
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer] * 3 + [integer] * 5 + [pointer]
    function.restype = None
    return function


@cache
def _equal_dtypes(theirs: FunctionType) -> frozenset[torch.dtype]:
    """The data types in which a function of transformers gives the numbers of ours."""
    if list(signature(theirs).parameters) != _PARAMETERS:
        return frozenset()
    return frozenset(dtype for dtype in _FUNCTIONS if _is_equal(theirs, dtype))


def _is_equal(theirs: Rotation, dtype: torch.dtype) -> bool:
    """cos and sin are random too, so that their halves differ and no other rule gives the same."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 3, 5, 64), (1, 2, 5, 64), (1, 5, 64), (1, 5, 64))
    q, k, cos, sin = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    with torch.inference_mode():
        try:
            wanted = theirs(q, k, cos, sin)
        except RuntimeError:  # it takes cos and sin of another width
            return False
        found = (_rotated(q, cos, sin), _rotated(k, cos, sin))
    return all(
        one.shape == other.shape
        and one.dtype is other.dtype
        and torch.allclose(one, other, rtol=0, atol=_TOLERANCE[dtype])
        for one, other in zip(found, wanted, strict=True)
    )
