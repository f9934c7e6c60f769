"""How the Triton kernels are compiled and launched: tiles, warps, parts and constants, from the shape and the scoring.

The launchers and the resource gate both use these functions, so the gate sees what runs. There are fixed rules and no
autotuning, because a fair comparison of block sizes needs the same tile at every block size.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton

from paged_kernels import launch_policy as policy
from paged_kernels.arguments import Scoring
from paged_kernels.launch_policy import Room

LOG2E = math.log2(math.e)
# Shared memory that one program may use, by compute capability. Source: CUDA C++ Programming Guide, Technical
# Specifications per Compute Capability. The compiler does not check it.
SHARED_BYTES = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448}
SHARED_BYTES |= {120: 101_376, 121: 101_376}
ENTRY = 8  # numbers (int32) of one part in the list: row, first tile, last tile + 1, length, parts of the row
PAIRS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
RESERVED = 1024  # bytes of shared memory that the system takes for each program, beside its own


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
    strides: tuple[int, int, int, int] = (0, 0, 0, 0)  # elements: K's block and slot, V's block and slot
    rotary: int = (
        0  # width of a second part of the keys, which lies where V would; the first part is also the values
    )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes that one staged key or value takes, whichever is wider."""
        return padded(max(self.dk, self.dv)) * self.kv_dtype.itemsize

    @property
    def pairs(self) -> str:
        """How 8-bit numbers are read in pairs ("e4m3", "e5m2"), or "" where numbers are read one by one.

        They need even widths and strides. float32 products take no operands of 16 bits.
        """
        return PAIRS.get(self.kv_dtype, "") if self.dtype != torch.float32 else ""

    def as_read(self, cache: torch.Tensor) -> torch.Tensor:
        """The cache as the kernels take it: in elements of 16 bits where they read `pairs`."""
        return cache.view(torch.int16) if self.pairs else cache


def padded(dim: int) -> int:
    """The width of a tile that holds rows of `dim`: a power of two, at least 16 as matrix products need it."""
    return max(16, int(triton.next_power_of_2(dim)))


@functools.cache
def interpreted() -> bool:
    """Whether Triton runs its interpreter (TRITON_INTERPRET=1 when the kernels were imported)."""
    from paged_kernels.triton.scan import finished

    return not isinstance(finished, triton.JITFunction)


def shared_bytes(capability: int) -> int:
    """Bytes of shared memory that one program may use; the least of all for an architecture that is not listed."""
    return SHARED_BYTES.get(capability, min(SHARED_BYTES.values()))


def decode_config(shape: AttentionShape, queries: int = 1, capability: int = 90) -> LaunchConfig:
    """The decode kernel's launch. The tile depends on the bytes of one key, not on the block size.

    A group of more than 32 heads (float32: 16) takes several programs: more rows spill registers. Several `queries` of
    a sequence are rows of the same tile; as many as fill a tile of the prefill kernel are launched as that is.
    """
    if shape.rotary:
        return _latent_config(shape, queries, capability)
    rows = triton.next_power_of_2(triton.next_power_of_2(shape.group) * queries)
    if _scalar(shape):
        return LaunchConfig(16 if rows >= 16 else _tile(shape), min(rows, 16), 4, 3)
    if queries > 1 and rows >= 128:
        config = prefill_config(shape, capability)
        # 128 keys spill in this kernel on sm_100; with 64 four warps take fewer instructions than eight
        return LaunchConfig(64, 128, 4, 3) if config.tile == 128 and capability >= 100 else config
    wide = queries > 1 and warp_groups(capability) and shape.kv_dtype.itemsize == 2 and shape.row_bytes <= 256
    rows = 64 if wide and rows >= 32 else max(16, min(rows, 32))  # products of a warp group take 64
    return LaunchConfig(_tile(shape), rows, 4, 3)


def _latent_config(shape: AttentionShape, queries: int, capability: int) -> LaunchConfig:
    """The decode kernel's launch over latent vectors, whose sums take four times the registers of a head of 128.

    tcgen05 (sm_100) would need more shared memory than there is for 64 rows; fewer use the instructions of sm_80.
    """
    rows = max(16, triton.next_power_of_2(shape.group * queries))
    stages = 3 if shared_bytes(capability) > 120_000 else 2
    if _scalar(shape):
        return LaunchConfig(16, 16, 4, stages)
    if 90 <= capability < 100 and rows >= 64 and not interpreted():
        return LaunchConfig(64, 64, 8, 2)
    if rows == 16 and not _fits_blocks(shape, 64):
        # an sm_80 holds two programs of two stages, but one of three
        return LaunchConfig(32, 16, 4, 2 if capability in (80, 87) else 3)
    if rows == 16:
        return LaunchConfig(64, 16, 4, 2)
    return LaunchConfig(32, 32, 4, stages if _fits_blocks(shape, 32) else 2)


def _fits_blocks(shape: AttentionShape, tile: int) -> bool:
    """Whether a tile is whole blocks or lies within one; else it reads a table entry a key, which takes registers."""
    block = shape.block_size
    return block % tile == 0 or (block > 1 and tile % block == 0)


def prefill_config(shape: AttentionShape, capability: int = 90) -> LaunchConfig:
    """The prefill kernel's launch. Its rows are (rows // group) whole tokens x group heads.

    `capability` is 10 x major + minor. Tiles are the largest that spill in no configuration of the resource gate.
    """
    width, whole_group = padded(max(shape.dk, shape.dv)), triton.next_power_of_2(shape.group)
    if interpreted():
        return LaunchConfig(_tile(shape), min(64, max(32, whole_group)), 8, 3)
    if _scalar(shape):
        return LaunchConfig(16, max(16, min(32, 4096 // width)), 8, 3)
    if width > 128:
        # wgmma takes 8-bit keys, widened, from shared memory: with 64 rows, for which it is used, they spill
        narrow = shape.kv_dtype.itemsize == 1 and 90 <= capability < 100
        return LaunchConfig(32, 32 if narrow else 64, 8, _stages(width, capability))
    if not warp_groups(capability):  # the sums of 128 x 128 are in the registers and leave room for 32 keys
        return LaunchConfig(64 if width <= 64 else 32, 128, 8, 3)
    return LaunchConfig(128, 128, 8, 2) if width <= 64 else LaunchConfig(64, 128, 8, 3)


def prefix_config(shape: AttentionShape, rows: int, capability: int = 90) -> LaunchConfig:
    """The prefix kernel's launch: as decode, with (sequence, head) rows, as many as the registers hold."""
    most = 16 if _scalar(shape) or interpreted() else 64
    wanted = triton.next_power_of_2(rows * triton.next_power_of_2(shape.group))
    packed, width = max(16, min(most, wanted)), padded(max(shape.dk, shape.dv))
    if _scalar(shape):
        return LaunchConfig(16, packed, 4, 3)
    return LaunchConfig(_tile(shape), packed, 4 if width <= 128 else 8, _stages(width, capability))


def _stages(width: int, capability: int) -> int:
    """Stages of a tile of 64 rows. At a width of 256, three stages take 102,400 bytes of shared memory, two 69,632."""
    return 2 if width > 128 and shared_bytes(capability) < 102_400 else 3


def warp_groups(capability: int) -> bool:
    """Whether the matrix instructions of an architecture take operands from shared memory, for 64 rows at a time.

    sm_90 has wgmma and sm_100 tcgen05. sm_120 has neither, but the instructions of sm_80.
    """
    return 90 <= capability < 120


def tokens_of(shape: AttentionShape, config: LaunchConfig) -> int:
    """Tokens (of prefill) or sequences (of a prefix) in one tile of rows."""
    return max(1, config.rows // shape.group)


def chunks_of(shape: AttentionShape, config: LaunchConfig) -> int:
    """Programs that the query heads of one KV head take."""
    return int(triton.cdiv(shape.group, config.rows))


def _scalar(shape: AttentionShape) -> bool:
    """Whether products use no matrix instructions: float32 is multiplied in registers, where large tiles spill."""
    return shape.dtype == torch.float32


def _tile(shape: AttentionShape) -> int:
    """Keys per tile. More than three stages of 64 x 256 bytes of K and V do not fit in an A100's shared memory."""
    return min(128 if shape.pairs else 64, max(16, 16_384 // shape.row_bytes))


def id_path(block_size: int, tile: int, wanted: str = "auto") -> str:
    """How a tile finds its blocks: "scalar" (one id per tile) if the tile divides the block, else "vector".

    A sweep over block sizes sets "vector" for all of them. Otherwise the code would change at block_size = tile.
    """
    if wanted != "auto":
        return wanted
    return "scalar" if block_size % tile == 0 else "vector"


def resident(shape: AttentionShape, config: LaunchConfig, capability: int) -> int:
    """Programs of the decode kernel that a multiprocessor holds: shared memory is what limits them.

    They stage tiles of K and V, all but one of the `stages` (products of a warp group hold theirs longer: all), and
    queries, weights and a sum of their rows. This is what the resource gate reads from the compiled kernels
    (`tests/paged_kernels/test_launch_policy.py`).
    """
    numbers = padded(shape.dk) + padded(shape.rotary or shape.dv)
    held = config.stages if config.rows >= 64 and warp_groups(capability) else config.stages - 1
    staged = held * config.tile * numbers * shape.kv_dtype.itemsize
    rows = config.rows * ((padded(shape.dk) + config.tile) * shape.dtype.itemsize + 4)
    return max(1, (shared_bytes(capability) + RESERVED) // (staged + rows + RESERVED))


def room_of(shape: AttentionShape, device: torch.device, queries: int = 1) -> Room:
    """What the launch policy is told of a decode on a device, of rows with at most so many queries."""
    capability = capability_of(device)
    config = decode_config(shape, queries, capability)
    return Room(
        multiprocessors=multiprocessors(device),
        resident=resident(shape, config, capability),
        latency=policy.latency_bytes(device_name(device), capability),
        programs=shape.kv_heads * chunks_of(shape, config),
        tile=config.tile,
        tile_bytes=config.tile * (shape.dk + (shape.rotary or shape.dv)) * shape.kv_dtype.itemsize,
        partial_bytes=4 * min(shape.group * queries, config.rows) * (shape.dv + 1),
    )


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


@functools.cache
def device_name(device: torch.device) -> str:
    """The name of a CUDA device; "" for the interpreter."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else ""


class Features(NamedTuple):
    """The options of a `Scoring` that change the compiled code."""

    window: bool = False
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    lse: bool = False
    any_scale: bool = False  # the scale is not above 0

    @classmethod
    def of(cls, scoring: Scoring, *, lse: bool) -> "Features":
        """The features that `scoring` asks for."""
        sinks, alibi = scoring.sinks is not None, scoring.alibi is not None
        return cls(scoring.window > 0, scoring.softcap > 0, sinks, alibi, lse, not scoring.scale > 0)


def decode_constants(
    shape: AttentionShape,
    config: LaunchConfig,
    features: Features,
    *,
    splits: int,
    direct: bool,
    path: str,
    tokens: int = 0,
) -> dict[str, Any]:
    """Constants of `decode_kernel`. `splits` 0 reads the list of parts; `tokens` as in `decode.Rows`."""
    made = _common(shape, config, features, path)
    made |= {"LATENT": shape.rotary > 0, "WIDE": shape.dv, "WIDE_PAD": made["DV_PAD"], "TOKENS": tokens}
    if shape.rotary:
        made |= {"DV": shape.rotary, "DV_PAD": padded(shape.rotary)}
    made |= {"SPLITS": splits, "ENTRY": ENTRY, "DIRECT": direct}
    return made | {"HAS_SINKS": features.sinks and direct, "HAS_LSE": features.lse}


def plan_constants(room: Room, *, rows: int, window: bool) -> dict[str, Any]:
    """Constants of `plan_kernel`, which lists the parts of at most `rows` rows."""
    return {
        "ROWS_PAD": rows_pad(rows),
        "TILE": room.tile,
        "MIN_TILES": room.least,  # of a part
        "HAS_WINDOW": window,
        "ENTRY": ENTRY,
        "CHUNK": 128,
        "MOST_PARTS": policy.MOST_PARTS,
        "WAVES": policy.WAVES,
        "START": policy.START,
        "MERGE": policy.MERGE,
    }


def combine_constants(
    shape: AttentionShape, features: Features, *, splits: int, prefix_splits: int = 0, tokens: int = 0
) -> dict[str, Any]:
    """Constants of `combine_kernel`, which must fit those of the decode."""
    return {
        "HEADS": shape.heads,
        "DV": shape.dv,
        "DV_PAD": padded(shape.dv),
        "TOKENS": tokens,
        "SPLITS": splits,
        "PREFIX_SPLITS": prefix_splits,
        "CHUNK": 8,
        "HAS_SINKS": features.sinks,
        "HAS_LSE": features.lse,
    }


def prefill_constants(
    shape: AttentionShape, config: LaunchConfig, features: Features, *, sequences: int
) -> dict[str, Any]:
    """Constants of `prefill_kernel`."""
    options = {"HAS_SINKS": features.sinks, "HAS_LSE": features.lse}
    return _common(shape, config, features) | {"ROWS_PAD": rows_pad(sequences)} | options


def prefix_constants(
    shape: AttentionShape, config: LaunchConfig, features: Features, *, groups: int, splits: int
) -> dict[str, Any]:
    """Constants of `prefix_kernel`, which computes the shared prefixes of a cascade."""
    return _common(shape, config, features) | {"GROUPS_PAD": rows_pad(groups), "SPLITS": splits}


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


def _common(
    shape: AttentionShape, config: LaunchConfig, features: Features, path: str = "auto"
) -> dict[str, Any]:
    each, narrowest = (2, 32) if shape.pairs else (1, 16)
    strides = (stride // each for stride in shape.strides)
    return {
        **dict(zip(("K_BLOCK", "K_SLOT", "V_BLOCK", "V_SLOT"), strides, strict=True)),
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "ROWS": config.rows,
        "DK": shape.dk,
        "DK_PAD": max(narrowest, padded(shape.dk)),
        "DV": shape.dv,
        "DV_PAD": max(narrowest, padded(shape.dv)),
        "BLOCK_SIZE": shape.block_size,
        "TILE": config.tile,
        "PATH": id_path(shape.block_size, config.tile, path),
        "HAS_WINDOW": features.window,
        "HAS_SOFTCAP": features.softcap,
        "HAS_ALIBI": features.alibi,
        "FOLD": not (features.softcap or features.alibi or features.any_scale),
        "PAIRS": shape.pairs,
        "DOT_F32": interpreted(),
        "LOG2E": LOG2E,
    }
