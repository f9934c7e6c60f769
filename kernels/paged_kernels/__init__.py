"""Attention over a paged KV cache: decode, prefill, cascade, writes to the cache, and copies of blocks.

Each call takes a `backend`: `triton` (CUDA), `torch` (any device) or `torch_ref` (the readable reference). Importing
this package does not import triton.
"""

from paged_kernels.attention import (
    cascade_attention_decode,
    merge_attn_states,
    paged_attention_decode,
    paged_attention_prefill,
)
from paged_kernels.backends import BACKENDS, BackendChoice, choose_backend, resolve_backend
from paged_kernels.cache_ops import copy_blocks, reshape_and_cache, swap_blocks
from paged_kernels.checks import (
    BackendUnavailableError,
    DeviceError,
    DtypeError,
    KernelError,
    OptionError,
    ShapeError,
    StrideError,
    TableError,
    WorkspaceError,
)
from paged_kernels.memory import Workspace
from paged_kernels.scoring import Scoring

__all__ = [
    "BACKENDS",
    "BackendChoice",
    "BackendUnavailableError",
    "DeviceError",
    "DtypeError",
    "KernelError",
    "OptionError",
    "Scoring",
    "ShapeError",
    "StrideError",
    "TableError",
    "Workspace",
    "WorkspaceError",
    "cascade_attention_decode",
    "choose_backend",
    "copy_blocks",
    "merge_attn_states",
    "paged_attention_decode",
    "paged_attention_prefill",
    "reshape_and_cache",
    "resolve_backend",
    "swap_blocks",
]
