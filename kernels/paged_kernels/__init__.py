"""Attention over a paged KV cache: decode, prefill, cascade, writes to the cache, and copies of blocks.

Each call takes a `backend`: `triton` (CUDA), `native` (C on a CPU), `torch` (any device) or `torch_ref` (the readable
reference); `auto` is the fastest that serves the call. Importing this package imports neither triton nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged_kernels.arguments import (
        BackendUnavailableError,
        DeviceError,
        DtypeError,
        KernelError,
        OptionError,
        Scoring,
        ShapeError,
        StrideError,
        TableError,
        Workspace,
        WorkspaceError,
    )
    from paged_kernels.backends import BACKENDS, BackendChoice, choose_backend, resolve_backend
    from paged_kernels.operations import (
        cascade_attention_decode,
        copy_blocks,
        merge_attn_states,
        paged_attention_decode,
        paged_attention_prefill,
        reshape_and_cache,
        swap_blocks,
    )

__all__ = [
    "BACKENDS", "BackendChoice", "BackendUnavailableError", "DeviceError", "DtypeError", "KernelError",
    "OptionError", "Scoring", "ShapeError", "StrideError", "TableError", "Workspace", "WorkspaceError",
    "cascade_attention_decode", "choose_backend", "copy_blocks", "merge_attn_states",
    "paged_attention_decode", "paged_attention_prefill", "reshape_and_cache", "resolve_backend",
    "swap_blocks",
]  # fmt: skip
_PLACES = ("arguments", "backends", "operations")


def __getattr__(name: str) -> Any:
    """A public name, from the module that defines it: what needs no torch (`native`, `launch_policy`) stays light."""
    if name in __all__:
        for place in _PLACES:
            module = import_module(f"paged_kernels.{place}")
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module 'paged_kernels' has no attribute {name!r}")
