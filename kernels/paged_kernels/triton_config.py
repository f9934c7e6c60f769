"""How the Triton kernels are launched: tiles, warps and splits by shape, and what the interpreter needs.

Explicit tables instead of autotuning: an honest comparison of block sizes needs the same tile at every block size.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton

LOG2E = math.log2(math.e)
SPLIT_TOKENS = (
    256  # a split of a sequence has at least about so many keys, or the second pass costs more than it gains
)
MAX_SPLITS = 32


class LaunchConfig(NamedTuple):
    """One kernel's launch: keys per tile, query rows per tile, warps, pipeline stages."""

    tile: int
    rows: int
    warps: int
    stages: int


@functools.cache
def interpreted() -> bool:
    """Whether Triton runs its interpreter (TRITON_INTERPRET=1 when the kernels were imported)."""
    from paged_kernels.triton_decode import combine_kernel

    return not isinstance(combine_kernel, triton.JITFunction)


def decode_config(group: int, row_bytes: int) -> LaunchConfig:
    """Tile by the bytes of one key or value, whichever is wider; it does not depend on the block size."""
    return LaunchConfig(_tile(row_bytes), triton.next_power_of_2(group), 4, 3)


def prefill_config(group: int, row_bytes: int) -> LaunchConfig:
    """Query rows hold whole tokens: (rows // group) tokens x group heads."""
    rows = 32 if interpreted() else 128 if row_bytes <= 256 else 64
    return LaunchConfig(_tile(row_bytes), max(rows, triton.next_power_of_2(group)), 8, 3)


def _tile(row_bytes: int) -> int:
    """Keys per tile: more than three stages of 64 x 256 bytes of K and V do not fit an A100's shared memory."""
    return 64 if row_bytes <= 256 else 32


def pick_splits(programs: int, longest: int, device: torch.device) -> int:
    """Parts to cut each sequence into so that `programs` (rows x kv heads) fill the device.

    The smallest number whose last wave is nearly as full as the best one's (the rule of FlashAttention-3).
    """
    slots = 3 * _multiprocessors(device)
    most = min(MAX_SPLITS, -(-longest // SPLIT_TOKENS))
    if programs >= 0.8 * slots or most <= 1:
        return 1
    fill = [programs * splits / slots / math.ceil(programs * splits / slots) for splits in range(1, most + 1)]
    return next(splits for splits, share in enumerate(fill, 1) if share >= 0.85 * max(fill))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
