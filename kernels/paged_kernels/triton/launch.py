"""How the Triton kernels are compiled and launched: tiles, warps, parts and constants, from the shape and the scoring.

The launchers and the resource gate both use these functions, so the gate sees what runs. There are fixed rules and no
autotuning, because a fair comparison of block sizes needs the same tile at every block size.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton

from paged_kernels.scoring import Scoring

LOG2E = math.log2(math.e)
SPLIT_TOKENS = 256  # keys that a part has at least; merging smaller parts costs more than it gains
MAX_SPLITS = 32
WAVES = 6  # parts per multiprocessor of a batch: three run at a time, and two rounds even out their lengths


class LaunchConfig(NamedTuple):
    """How a kernel is launched: keys per tile, query rows per tile, warps, pipeline stages."""

    tile: int
    rows: int
    warps: int
    stages: int


class AttentionShape(NamedTuple):
    """The dtypes and sizes that a kernel is compiled for."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    heads: int
    kv_heads: int
    dk: int
    dv: int
    block_size: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes that one staged key or value takes, whichever is wider."""
        return padded(max(self.dk, self.dv)) * self.kv_dtype.itemsize


def padded(dim: int) -> int:
    """The width of a tile that holds rows of `dim`: a power of two, at least 16 as matrix products need it."""
    return max(16, int(triton.next_power_of_2(dim)))


@functools.cache
def interpreted() -> bool:
    """Whether Triton runs its interpreter (TRITON_INTERPRET=1 when the kernels were imported)."""
    from paged_kernels.triton.scan import finished

    return not isinstance(finished, triton.JITFunction)


def decode_config(shape: AttentionShape) -> LaunchConfig:
    """The decode kernel's launch. The tile depends on the bytes of one key, not on the block size."""
    rows = triton.next_power_of_2(shape.group)
    tile = 16 if _scalar(shape) and rows >= 16 else _tile(shape.row_bytes)
    return LaunchConfig(tile, rows, 4, 3)


def prefill_config(shape: AttentionShape, capability: int = 90) -> LaunchConfig:
    """The prefill kernel's launch. Its rows are (rows // group) whole tokens x group heads.

    `capability` is 10 x major + minor. None of these spills registers on sm_80 or sm_90. Without warp-group products
    (before sm_90) an accumulator of 128 x 128 leaves registers for 32 keys only.
    """
    width, whole_group = padded(max(shape.dk, shape.dv)), triton.next_power_of_2(shape.group)
    if interpreted():
        return LaunchConfig(_tile(shape.row_bytes), max(32, whole_group), 8, 3)
    if _scalar(shape):
        return LaunchConfig(16, max(16, min(32, 4096 // width), whole_group), 8, 3)
    if width > 128:
        return LaunchConfig(32, max(64, whole_group), 8, 3)
    return LaunchConfig(64 if capability >= 90 or width <= 64 else 32, max(128, whole_group), 8, 3)


def prefix_config(shape: AttentionShape, rows: int) -> LaunchConfig:
    """The prefix kernel's launch: as decode, with (sequence, head) rows, as many as the registers hold."""
    most = 16 if _scalar(shape) or interpreted() else 64
    wanted = triton.next_power_of_2(rows * triton.next_power_of_2(shape.group))
    packed = max(16, min(most, wanted), triton.next_power_of_2(shape.group))
    warps = 8 if padded(max(shape.dk, shape.dv)) > 128 else 4
    return LaunchConfig(16 if _scalar(shape) else _tile(shape.row_bytes), packed, warps, 3)


def _scalar(shape: AttentionShape) -> bool:
    """Whether products use no matrix instructions: float32 is multiplied in registers, where large tiles spill."""
    return shape.dtype == torch.float32


def _tile(row_bytes: int) -> int:
    """Keys per tile. More than three stages of 64 x 256 bytes of K and V do not fit in an A100's shared memory."""
    return 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16


def id_path(block_size: int, tile: int, wanted: str = "auto") -> str:
    """How a tile finds its blocks: "scalar" (one id per tile) if the tile divides the block, else "vector".

    A sweep over block sizes sets "vector" for all of them. Otherwise the code would change at block_size = tile.
    """
    if wanted != "auto":
        return wanted
    return "scalar" if block_size % tile == 0 else "vector"


def target_parts(kv_heads: int, device: torch.device) -> int:
    """The number of parts per KV head that fills the device, for `parts_of_rows`."""
    return max(1, -(-WAVES * multiprocessors(device) // kv_heads))


def min_tiles(tile: int) -> int:
    """The least number of tiles of a part."""
    return max(1, SPLIT_TOKENS // tile)


def pick_splits(lengths: tuple[int, ...], kv_heads: int, device: torch.device) -> int | None:
    """A fixed number of parts for lengths that are known on the host, or None if the device should balance them.

    Sequences of about equal length are cut into equal parts: the smallest number whose waves are nearly as full as the
    best number's (the rule of FlashAttention-3). One part saves the second launch.
    """
    if max(lengths) > 1.25 * sum(lengths) / len(lengths):
        return None
    programs, seats = len(lengths) * kv_heads, multiprocessors(device)
    most = max(1, min(MAX_SPLITS, max(lengths) // SPLIT_TOKENS))
    waves = [programs * splits / seats for splits in range(1, most + 1)]
    fill = [wave / math.ceil(wave) for wave in waves]
    return next(splits for splits, share in enumerate(fill, 1) if share >= 0.9 * max(fill))


@functools.cache
def capability_of(device: torch.device) -> int:
    """10 x major + minor of a CUDA device. The interpreter counts as the newest tuned capability."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Features(NamedTuple):
    """The options of a `Scoring` that change the compiled code."""

    window: bool = False
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    lse: bool = False

    @classmethod
    def of(cls, scoring: Scoring, *, lse: bool) -> "Features":
        """The features that `scoring` asks for."""
        return cls(
            scoring.window > 0, scoring.softcap > 0, scoring.sinks is not None, scoring.alibi is not None, lse
        )


def decode_constants(
    shape: AttentionShape,
    config: LaunchConfig,
    features: Features,
    *,
    splits: int,
    rows: int,
    direct: bool,
    path: str,
) -> dict[str, Any]:
    """Constants of `decode_kernel`. `splits` 0 balances the parts of at most `rows` rows on the device."""
    return _common(shape, config, features) | {
        "PATH": id_path(shape.block_size, config.tile, path),
        "SPLITS": splits,
        "ROWS_PAD": rows_pad(rows),
        "MIN_TILES": min_tiles(config.tile),
        "DIRECT": direct,
        "HAS_SINKS": features.sinks and direct,
        "HAS_LSE": features.lse,
    }


def combine_constants(
    shape: AttentionShape,
    config: LaunchConfig,
    features: Features,
    *,
    splits: int,
    rows: int,
    prefix_splits: int = 0,
) -> dict[str, Any]:
    """Constants of `combine_kernel`, which must fit those of the decode."""
    return {
        "HEADS": shape.heads,
        "DV": shape.dv,
        "DV_PAD": padded(shape.dv),
        "TILE": config.tile,
        "SPLITS": splits,
        "ROWS_PAD": rows_pad(rows),
        "MIN_TILES": min_tiles(config.tile),
        "PREFIX_SPLITS": prefix_splits,
        "CHUNK": 8,
        "HAS_WINDOW": features.window,
        "HAS_SINKS": features.sinks,
        "HAS_LSE": features.lse,
    }


def prefill_constants(
    shape: AttentionShape, config: LaunchConfig, features: Features, *, sequences: int, path: str
) -> dict[str, Any]:
    """Constants of `prefill_kernel`."""
    return _common(shape, config, features) | {
        "PATH": id_path(shape.block_size, config.tile, path),
        "ROWS_PAD": rows_pad(sequences),
        "HAS_SINKS": features.sinks,
        "HAS_LSE": features.lse,
    }


def prefix_constants(
    shape: AttentionShape, config: LaunchConfig, features: Features, *, groups: int, splits: int, path: str
) -> dict[str, Any]:
    """Constants of `prefix_kernel`, which computes the shared prefixes of a cascade."""
    return _common(shape, config, features) | {
        "PATH": id_path(shape.block_size, config.tile, path),
        "GROUPS_PAD": rows_pad(groups),
        "SPLITS": splits,
    }


def store_constants(shape: AttentionShape, *, values: bool = True) -> dict[str, Any]:
    """Constants of `store_kernel`. Without `values` it writes one cache only."""
    dv = shape.dv if values else 0
    return {
        "HEADS": shape.kv_heads,
        "DK": shape.dk,
        "K_PAD": triton.next_power_of_2(shape.kv_heads * shape.dk),
        "DV": dv,
        "V_PAD": triton.next_power_of_2(shape.kv_heads * max(dv, 1)),
        "BLOCK_SIZE": shape.block_size,
        "LIMIT": torch.finfo(shape.kv_dtype).max if shape.kv_dtype.itemsize == 1 else 0,
    }


def merge_constants(heads: int, dv: int) -> dict[str, Any]:
    """Constants of `merge_kernel`."""
    block = min(8, triton.next_power_of_2(heads))
    return {"HEADS": heads, "HEADS_PAD": block, "DV": dv, "DV_PAD": triton.next_power_of_2(dv)}


def rows_pad(rows: int) -> int:
    """`rows` rounded up to a power of two, at least 64, so that few values are compiled."""
    return max(64, int(triton.next_power_of_2(rows)))


def _common(shape: AttentionShape, config: LaunchConfig, features: Features) -> dict[str, Any]:
    return {
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "ROWS": config.rows,
        "DK": shape.dk,
        "DK_PAD": padded(shape.dk),
        "DV": shape.dv,
        "DV_PAD": padded(shape.dv),
        "BLOCK_SIZE": shape.block_size,
        "TILE": config.tile,
        "HAS_WINDOW": features.window,
        "HAS_SOFTCAP": features.softcap,
        "HAS_ALIBI": features.alibi,
        "DOT_F32": interpreted(),
        "LOG2E": LOG2E,
    }
