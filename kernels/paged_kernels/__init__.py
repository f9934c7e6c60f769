"""Attention over paged KV: cache writes, block copies, decode and prefill, each beside its readable reference."""

from paged_kernels.api import paged_attention_decode, paged_attention_prefill
from paged_kernels.backends import BACKENDS, Choice, choose_backend, resolve_backend
from paged_kernels.cascade import cascade_attention_decode
from paged_kernels.errors import (
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
from paged_kernels.merge import merge_attn_states
from paged_kernels.scoring import Scoring
from paged_kernels.workspace import Workspace
from paged_kernels.writes import copy_blocks, reshape_and_cache, swap_blocks

__all__ = [
    "BACKENDS",
    "BackendUnavailableError",
    "Choice",
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
