"""An attention function of a user, for the provider `module:function` of the kernel benchmark."""

from typing import Any


def sometimes_right(case: Any) -> Any:
    """The readable reference for blocks of 16; half a per cent too large for others."""
    from paged_kernels.reference import paged_attention

    tables = (case.block_table, case.seq_lens, case.cu_seqlens_q)
    out = paged_attention(case.q, case.key_cache, case.value_cache, *tables, case.scoring)[0]
    return out if case.block_size == 16 else out * 1.005
