"""Shapes that every operation demands, checked once on the host with a message that says which and what."""

import torch

from paged_kernels.errors import KernelError


def check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Both caches are `[blocks, block_size, kv_heads, dim]` and agree in all but `dim`."""
    if key_cache.dim() != 4 or key_cache.shape[:3] != value_cache.shape[:3]:
        raise KernelError(
            f"key_cache {tuple(key_cache.shape)} and value_cache {tuple(value_cache.shape)} must both be "
            "[blocks, block_size, kv_heads, dim] and agree in the first three"
        )


def check_queries(q: torch.Tensor, key_cache: torch.Tensor) -> None:
    """q is `[tokens, heads, dk]`, with heads a multiple of the cache's kv_heads and its dk."""
    if q.dim() != 3 or q.shape[1] % key_cache.shape[2] or q.shape[2] != key_cache.shape[3]:
        raise KernelError(
            f"q {tuple(q.shape)} must be [tokens, heads, dk] with heads a multiple of {key_cache.shape[2]} "
            f"and dk {key_cache.shape[3]}, as key_cache {tuple(key_cache.shape)} says"
        )


def check_tables(block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor) -> None:
    """One table row, one length and one span of queries per sequence."""
    rows = seq_lens.shape[0]
    if block_table.shape[0] != rows or cu_seqlens_q.shape[0] != rows + 1:
        raise KernelError(
            f"{rows} seq_lens need as many rows in block_table {tuple(block_table.shape)} and one more in "
            f"cu_seqlens_q {tuple(cu_seqlens_q.shape)}"
        )


def check_lengths(block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> None:
    """Every length fits its table. Looks at the values, so a GPU backend that must not wait leaves it out."""
    room = block_table.shape[1] * block_size
    if seq_lens.numel() and int(seq_lens.max()) > room:
        raise KernelError(f"a sequence of {int(seq_lens.max())} tokens does not fit a table of {room} slots")
