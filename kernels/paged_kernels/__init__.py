"""Attention over paged KV: cache writes, block copies, decode and prefill, each beside its readable reference."""

from paged_kernels.api import copy_blocks, paged_attention_decode, paged_attention_prefill, reshape_and_cache
from paged_kernels.backends import BACKENDS, resolve_backend
from paged_kernels.errors import BackendUnavailableError, KernelError
from paged_kernels.merge import merge_attn_states
from paged_kernels.scoring import Scoring
from paged_kernels.workspace import Workspace

__all__ = [
    "BACKENDS",
    "BackendUnavailableError",
    "KernelError",
    "Scoring",
    "Workspace",
    "copy_blocks",
    "merge_attn_states",
    "paged_attention_decode",
    "paged_attention_prefill",
    "reshape_and_cache",
    "resolve_backend",
]
