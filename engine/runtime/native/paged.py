"""Decode attention by the compiled kernel: a step's plan whose one-token rows are read where they lie in the pool."""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch

from engine.runtime.kernels import StepLayout, TorchPlan
from engine.runtime.kv_pool import KVPool
from engine.runtime.native.compiling import library
from paged_kernels import Scoring, Workspace
from paged_kernels.torch import cache as torch_cache

_LANES, _TILE = 16, 16  # as in the C files
_NAMES = {torch.float32: "decode_f32", torch.bfloat16: "decode_bf16"}
_Kernel = Callable[..., None]


def serves(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> bool:
    """Whether the kernel computes this: plain scores, float32 or bfloat16 all through, heads of whole vectors."""
    return (
        scoring.plain
        and q.dtype in _NAMES
        and q.dtype is keys.dtype
        and keys.is_contiguous()
        and values.is_contiguous()
        and keys.shape[3] % _LANES == 0
        and values.shape[3] % _LANES == 0
    )


class NativePlan:
    """Decode rows by the compiled kernel where it serves a layer; the rest as `TorchPlan` does it."""

    def __init__(self, layout: StepLayout, pool: KVPool, workspace: Workspace) -> None:
        self._layout, self._pool, self._workspace = layout, pool, workspace
        prefills = StepLayout(layout.tables[:0], layout.lengths[:0], layout.prefills)
        self._prefills = TorchPlan(prefills, pool, workspace)
        self._gathering: TorchPlan | None = None  # for layers that the kernel does not serve
        self._tables = torch.from_numpy(np.ascontiguousarray(layout.tables))
        self._lengths = torch.from_numpy(layout.lengths)
        self._blocks = (int(layout.tables.min(initial=0)), int(layout.tables.max(initial=0)))
        self._longest = int(layout.lengths.max(initial=0))
        self._parts = _even_parts(layout.lengths, torch.get_num_threads())

    store = staticmethod(torch_cache.store)

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Run the decode rows, then each prefill row."""
        rows = len(self._layout.lengths)
        if rows and not serves(q, keys, values, scoring):
            self._gathered().attend(q, keys, values, scoring, out)
            return
        if rows:
            self._decode(q[:rows].contiguous(), keys, values, scoring, out[:rows])
        self._prefills.attend(q, keys, values, scoring, out)

    def _gathered(self) -> TorchPlan:
        if self._gathering is None:
            self._gathering = TorchPlan(self._layout, self._pool, self._workspace)
        return self._gathering

    def _decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Every thread takes rows of about as many tokens, and scratch of its own."""
        run, heads = _kernel(_NAMES[q.dtype]), q.shape[1]
        (_, block, kv_heads, dk), dv = keys.shape, values.shape[3]
        floats = heads * (dk + dv + _TILE + 2)
        self._check_reach(keys)
        scratch = self._workspace.take("native", floats * len(self._parts), q, torch.float32)
        places = [tensor.data_ptr() for tensor in (q, keys, values, self._tables, self._lengths)]
        shape = (self._tables.shape[1], block, heads, kv_heads, dk, dv, scoring.window)
        scale = scoring.scale * scoring.k_scale

        def part(number: int) -> None:
            own = scratch.data_ptr() + 4 * floats * number
            run(*places, *self._parts[number], *shape, scale, out.data_ptr(), own)

        if len(self._parts) == 1:
            part(0)
        else:
            list(_threads(len(self._parts)).map(part, range(len(self._parts))))

    def _check_reach(self, keys: torch.Tensor) -> None:
        """C would read whatever lies there. Raises IndexError, as torch's gather does."""
        (lowest, highest), width = self._blocks, self._tables.shape[1]
        if lowest < 0 or highest >= keys.shape[0] or self._longest > width * keys.shape[1]:
            raise IndexError(
                f"block ids {lowest} to {highest}, {self._longest} tokens in {width} blocks of {keys.shape[1]}: "
                f"outside of the pool's {keys.shape[0]} blocks, or of a block table"
            )


def _even_parts(lengths: np.ndarray, parts: int) -> list[tuple[int, int]]:
    """Ranges of rows with about the same number of tokens each; none is empty."""
    ends = np.cumsum(lengths)
    wanted = ends[-1] * np.arange(1, parts) / parts if len(ends) else []
    cuts = [0, *np.unique(np.searchsorted(ends, wanted, side="left") + 1).tolist(), len(lengths)]
    return [(a, b) for a, b in pairwise(cuts) if b > a]


@cache
def _kernel(name: str) -> _Kernel:
    function = getattr(library(), name)
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer] * 5 + [whole] * 9 + [ctypes.c_float, pointer, pointer]
    function.restype = None
    kernel: _Kernel = function
    return kernel


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="pagetwin-decode")
