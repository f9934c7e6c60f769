"""All kernel configurations that the resource gate checks, built by the functions that the launchers use.

A `KernelConfiguration` is a kernel with every constant fixed. The gate compiles it. Its key names it in a baseline.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from paged_kernels.triton import cache as triton_cache_kernel
from paged_kernels.triton import cascade as triton_prefix_kernel
from paged_kernels.triton import decode as triton_decode_kernel
from paged_kernels.triton import prefill as triton_prefill_kernel
from paged_kernels.triton import prefill_hopper as triton_hopper_prefill
from paged_kernels.triton.cache import CHUNK
from paged_kernels.triton.decode import ROOM
from paged_kernels.triton.launch import (
    AttentionShape,
    Features,
    LaunchConfig,
    combine_constants,
    decode_config,
    decode_constants,
    merge_constants,
    plan_constants,
    prefill_config,
    prefill_constants,
    prefix_config,
    prefix_constants,
    room_of,
    store_constants,
    tokens_of,
)

ARCHITECTURES = (80, 86, 89, 90, 100, 120)  # compute capabilities
# where every configuration is compiled; elsewhere those that need most registers or shared memory
TUNED = (80, 90)
ELEMENTS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
PLAIN = Features()
# Instructions of a warp per byte of K and V that the loop of decode may take, by bytes per element. An H200 delivers
# about 20 bytes per clock to each multiprocessor, which issues 4 instructions: above 0.2 instructions limit the speed.
MOST_PER_BYTE = {2: 0.060, 1: 0.085}
SMALL = LaunchConfig(0, 0, 4, 3)  # Triton's defaults
FULL = Features(window=True, softcap=True, sinks=True, alibi=True, lse=True)
# Types of the arguments that point neither to queries nor to a cache, by name.
_NAMED = {
    "*i32": "table lengths bounds order suffix_lens prefix_lens group_ids entries spans",
    "*fp32": "sinks alibi lse part part_lse prefix prefix_lse lse_a lse_b",
    "*i64": "slots source_block destination_block",
}
POINTERS = {name: kind for kind, names in _NAMED.items() for name in names.split()}
QUERIES = ("q", "out", "key", "value", "o_a", "o_b")
_CACHES = "key_cache value_cache first_source second_source first_destination second_destination"
FLOATS = frozenset({"scale", "softcap", "v_scale", "k_inverse", "v_inverse"})
# Numbers without known divisibility. Every other number is a stride that the launcher has checked.
FREE = frozenset({"window", "rows", "extra", *ROOM, "sequences", "groups", "table_row", "limit"})


@dataclass(frozen=True, slots=True)
class KernelConfiguration:
    """A kernel with every constant fixed, as the launcher would launch it for one shape.

    `triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)` compiles it without a GPU.
    """

    key: str  # unique and stable, e.g. "decode/bf16/d128/g4/bs16/vector"
    kernel: Any  # triton.JITFunction
    signature: Mapping[str, str]  # every argument in order; constants as "constexpr"
    constants: Mapping[str, Any]
    aligned: frozenset[str]  # arguments divisible by 16: the launcher checks or guarantees each
    num_warps: int
    num_stages: int
    # [keys, width] of a staged K tile; its buffers show the pipeline depth
    kv_tile: tuple[int, int] | None = None
    matrix: bool = False  # whether its products must use warp-group instructions (HGMMA) on sm_90
    kv_bytes: int = 0  # K and V of one tile, of a decode kernel
    most_per_byte: float = 0.0  # instructions of a warp per byte of K and V that are promised; 0: no promise
    capabilities: tuple[int, ...] = field(default=TUNED)  # architectures that the gate compiles it for

    @property
    def source(self) -> Any:
        """The kernel with its types, constants and facts, as Triton's compiler takes it."""
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        return kind(self.kernel, dict(self.signature), constexprs=self.fixed, attrs=self.facts)

    @property
    def fixed(self) -> dict[tuple[int], Any]:
        """The constants by argument position, in the form of Triton's compiler."""
        names = list(self.signature)
        return {(names.index(name),): value for name, value in self.constants.items()}

    @property
    def facts(self) -> dict[tuple[int], list[list[Any]]]:
        """The divisibility by argument position, in the form of Triton's compiler."""
        return {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(self.signature)
            if name in self.aligned
        }

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def kernel_configurations() -> tuple[KernelConfiguration, ...]:
    """All configurations, each with a unique key."""
    return (*_decodes(), *_short_rows(), *_prefills(), *_hopper_prefills(), *_cascades(), *_writes())


def _decodes() -> Iterator[KernelConfiguration]:
    narrow = [_shape(128, kv_dtype=kv_dtype) for kv_dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    widest = [_shape(256, torch.float32), _shape(256, torch.float32, group=128), _shape(256, group=128)]
    yield from (
        everywhere(decode(shape))
        for shape in (_shape(64), _shape(128), _shape(256), _shape(128, group=128), *widest, *narrow)
    )
    yield everywhere(decode(_shape(256, kv_dtype=torch.float8_e4m3fn, group=64)))
    yield from (everywhere(decode(_shape(dim), FULL)) for dim in (128, 256))
    for block_size in (1, 8, 32, 64, 128):  # what `conf/block_sizes.csv` is made of
        yield everywhere(decode(_shape(128, block_size=block_size)))
        yield everywhere(decode(_shape(128, kv_dtype=torch.float8_e4m3fn, block_size=block_size)))
    for shape in (
        *(_shape(dim) for dim in (80, 96)),
        *(_shape(128, block_size=block_size) for block_size in (48, 256)),
        *(_shape(128, dtype) for dtype in (torch.float16, torch.float32)),
        *(_shape(128, group=group) for group in (1, 3, 8, 16, 32, 64)),
    ):
        yield decode(shape)
    yield decode(_shape(128), path="contiguous")
    yield decode(_shape(128), splits=1)
    shape = _shape(128)
    constants = plan_constants(room_of(shape, torch.device("cpu")), rows=64, window=False)
    yield configuration("plan/rows64", triton_decode_kernel.plan_kernel, shape, constants, SMALL)
    constants = combine_constants(shape, PLAIN, splits=0)
    yield configuration("combine/bf16/d128", triton_decode_kernel.combine_kernel, shape, constants, SMALL)


def _short_rows() -> Iterator[KernelConfiguration]:
    """Decodes of several queries a row, and of latent vectors (DeepSeek-V2-Lite's 16 heads, DeepSeek-V3's 128)."""
    wide = _shape(256, kv_dtype=torch.float8_e4m3fn)
    narrow = _shape(128, kv_dtype=torch.float8_e4m3fn)
    for shape, queries, features in (
        *((_shape(dim), 64, PLAIN) for dim in (64, 128, 256)),
        *((_shape(128), queries, PLAIN) for queries in (2, 5, 16)),
        *((_shape(dim), 64, FULL) for dim in (128, 256)),
        *((shape, 64, PLAIN) for shape in (_shape(256, torch.float32), narrow, wide)),
        *((_latent(heads), 1, PLAIN) for heads in (16, 128)),
        *((_latent(heads, block_size=size), 1, PLAIN) for heads in (16, 128) for size in (1, 48)),
        (_latent(16), 8, PLAIN),
        (_latent(16, torch.float32), 1, PLAIN),
    ):
        yield from short(shape, queries, features)
    shape = _shape(128)
    constants = combine_constants(shape, PLAIN, splits=0, tokens=16)
    yield configuration(
        "combine/bf16/d128/tokens16", triton_decode_kernel.combine_kernel, shape, constants, SMALL
    )
    shape = _latent(128)
    constants = combine_constants(shape, PLAIN, splits=0)
    yield configuration("combine/bf16/d512", triton_decode_kernel.combine_kernel, shape, constants, SMALL)


def _prefills() -> Iterator[KernelConfiguration]:
    for shape, features in (
        *((_shape(dim), PLAIN) for dim in (64, 128, 256)),
        *((_shape(dim), FULL) for dim in (64, 128, 256)),
        *((_shape(256, torch.float32, group=group), PLAIN) for group in (4, 128)),
        *((_shape(dim, kv_dtype=torch.float8_e4m3fn), PLAIN) for dim in (128, 256)),
        *((_shape(dim, group=128), PLAIN) for dim in (128, 256)),
    ):
        yield from prefill(shape, features, capabilities=ARCHITECTURES)
    for shape in (
        *(_shape(dim) for dim in (80, 96)),
        *(_shape(128, dtype) for dtype in (torch.float16, torch.float32)),
        *(_shape(128, group=group) for group in (1, 3)),
        *(_shape(128, block_size=block_size) for block_size in (48, 128)),
    ):
        yield from prefill(shape)


def _hopper_prefills() -> Iterator[KernelConfiguration]:
    kernel = triton_hopper_prefill.hopper_prefill_kernel
    shapes = (_shape(64), _shape(128), _shape(128, group=3, block_size=48), _shape(128, block_size=1))
    for shape, lse in (*((shape, False) for shape in shapes), (_shape(128, torch.float16), True)):
        constants = triton_hopper_prefill.hopper_constants(shape, sequences=64, lse=lse)
        config = LaunchConfig(constants["TILE"], 2 * constants["ROWS"], triton_hopper_prefill.WARPS, 1)
        key = f"prefill-hopper/{_name(shape, Features(lse=lse))}"
        made = configuration(key, kernel, shape, constants, config, matrix=True)
        yield replace(made, kv_tile=(constants["TILE"], shape.dk), capabilities=(90,))


def _cascades() -> Iterator[KernelConfiguration]:
    narrow = _shape(256, kv_dtype=torch.float8_e4m3fn)
    for shape in (_shape(128), _shape(256), _shape(256, torch.float32), _shape(256, group=128), narrow):
        yield from prefix(shape, ARCHITECTURES)
    for shape in (_shape(64), _shape(128, torch.float32), _shape(128, group=1)):
        yield from prefix(shape)
    shape = _shape(128)
    kernel = triton_decode_kernel.combine_kernel
    for tokens, more in ((0, ""), (16, "/tokens16")):
        constants = combine_constants(shape, PLAIN, splits=0, prefix_splits=4, tokens=tokens)
        yield configuration(f"combine/bf16/d128/prefix4{more}", kernel, shape, constants, SMALL)


def _writes() -> Iterator[KernelConfiguration]:
    shape = _shape(128)
    store, move = triton_cache_kernel.store_kernel, triton_cache_kernel.move_kernel
    for stored in (shape, _shape(128, kv_dtype=torch.float8_e4m3fn)):
        constants = store_constants(stored)
        yield configuration(f"store/{_name(stored, PLAIN)}", store, stored, constants, SMALL)
    yield configuration("copy/bf16", move, shape, {"CHUNK": CHUNK, "PAIR": True}, SMALL)
    constants = merge_constants(shape.heads, shape.dv)
    yield configuration("merge/bf16/d128", triton_cache_kernel.merge_kernel, shape, constants, SMALL)


def decode(
    shape: AttentionShape, features: Features = PLAIN, *, splits: int = 0, path: str = "auto"
) -> KernelConfiguration:
    """The decode kernel for one shape."""
    config = decode_config(shape)
    constants = decode_constants(shape, config, features, splits=splits, direct=True, path=path)
    key = f"decode/{_name(shape, features)}/{constants['PATH']}" + (f"/splits{splits}" if splits else "")
    made = configuration(key, triton_decode_kernel.decode_kernel, shape, constants, config)
    kv_bytes = config.tile * (shape.dk + shape.dv) * shape.kv_dtype.itemsize
    promised = features == PLAIN and shape.dtype != torch.float32 and shape.dk == 128 and shape.group <= 16
    most = MOST_PER_BYTE[shape.kv_dtype.itemsize] if promised and shape.block_size % 16 == 0 else 0.0
    return replace(made, kv_bytes=kv_bytes, most_per_byte=most)


def short(shape: AttentionShape, queries: int, features: Features = PLAIN) -> Iterator[KernelConfiguration]:
    """The decode kernel for several queries a row, or for latent vectors, as `prefill`."""
    for config, alike in _alike(lambda capability: decode_config(shape, queries, capability), ARCHITECTURES):
        tokens = tokens_of(shape, config) if queries > 1 else 0
        constants = decode_constants(
            shape, config, features, splits=0, direct=True, path="auto", tokens=tokens
        )
        kind = f"latent{shape.rotary}/" if shape.rotary else ""
        key = f"decode/{kind}{_name(shape, features)}/{constants['PATH']}/q{queries}/sm_{alike[0]}"
        made = configuration(key, triton_decode_kernel.decode_kernel, shape, constants, config)
        kv_bytes = config.tile * (shape.dk + (shape.rotary or shape.dv)) * shape.kv_dtype.itemsize
        most = MOST_PER_BYTE[2] if shape == _shape(128) and 1 < queries < 8 else 0.0
        made = replace(made, kv_bytes=kv_bytes, most_per_byte=most)
        yield from _on(made, alike)


def prefill(
    shape: AttentionShape, features: Features = PLAIN, *, capabilities: tuple[int, ...] = TUNED
) -> Iterator[KernelConfiguration]:
    """The prefill kernel for one shape: one configuration for all architectures that are launched alike."""
    for config, alike in _alike(lambda capability: prefill_config(shape, capability), capabilities):
        constants = prefill_constants(shape, config, features, sequences=64)
        key = f"prefill/{_name(shape, features)}/{constants['PATH']}/sm_{alike[0]}"
        kernel = triton_prefill_kernel.prefill_kernel
        yield from _on(configuration(key, kernel, shape, constants, config, matrix=config.rows >= 64), alike)


def prefix(shape: AttentionShape, capabilities: tuple[int, ...] = TUNED) -> Iterator[KernelConfiguration]:
    """The prefix kernel for one shape, as `prefill`."""
    for config, alike in _alike(lambda capability: prefix_config(shape, 64, capability), capabilities):
        constants = prefix_constants(shape, config, PLAIN, groups=1, splits=4)
        key = f"prefix/{_name(shape, PLAIN)}/{constants['PATH']}/sm_{alike[0]}"
        kernel = triton_prefix_kernel.prefix_kernel
        yield from _on(configuration(key, kernel, shape, constants, config, matrix=config.rows >= 64), alike)


def everywhere(made: KernelConfiguration) -> KernelConfiguration:
    """The configuration for all architectures that can run it."""
    (one,) = _on(made, ARCHITECTURES)
    return one


def _alike(
    config_of: Callable[[int], LaunchConfig], capabilities: tuple[int, ...]
) -> Iterator[tuple[LaunchConfig, tuple[int, ...]]]:
    """The launches of the architectures, each with the architectures that have it."""
    launches = {capability: config_of(capability) for capability in capabilities}
    for config in dict.fromkeys(launches.values()):
        yield config, tuple(capability for capability in capabilities if launches[capability] == config)


def _on(made: KernelConfiguration, capabilities: tuple[int, ...]) -> Iterator[KernelConfiguration]:
    """The configuration for those of the architectures that can run it: 8-bit floats need sm_89."""
    least = 89 if "fp8" in made.key else 80
    able = tuple(capability for capability in capabilities if capability >= least)
    if able:
        yield replace(made, capabilities=able)


def configuration(
    key: str,
    kernel: Any,
    shape: AttentionShape,
    constants: dict[str, Any],
    config: LaunchConfig,
    *,
    matrix: bool = False,
) -> KernelConfiguration:
    """A kernel with its constants fixed; types and known facts follow from the arguments' names."""
    element, cached = (f"*{ELEMENTS[dtype]}" for dtype in (shape.dtype, shape.kv_dtype))
    if constants.get("PAIRS"):
        cached = "*i16"
    kinds = POINTERS | dict.fromkeys(QUERIES, element) | dict.fromkeys(_CACHES.split(), cached)
    kinds |= dict.fromkeys(FLOATS, "fp32") | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = frozenset(signature) - frozenset(constants) - FLOATS - FREE
    narrow = shape.kv_dtype.itemsize == 1  # sm_80 has no instructions to convert 8-bit floats
    kv_tile = None
    if "DK_PAD" in constants:
        kv_tile = constants["TILE"], constants["DK_PAD"] // (2 if constants["PAIRS"] else 1)
    launch = (config.warps, config.stages, kv_tile, matrix)
    made = KernelConfiguration(key, kernel, signature, constants, aligned, *launch)
    return replace(made, capabilities=(90,)) if narrow else made


def _shape(
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    kv_dtype: torch.dtype | None = None,
    group: int = 4,
    block_size: int = 16,
) -> AttentionShape:
    strides = (block_size * 8 * dim, 8 * dim) * 2
    return AttentionShape(dtype, kv_dtype or dtype, 8 * group, 8, dim, dim, block_size, strides)


def _latent(heads: int, dtype: torch.dtype = torch.bfloat16, block_size: int = 64) -> AttentionShape:
    """Latent vectors of 512 and rotary keys of 64, in caches of their own."""
    strides = (block_size * 512, 512, block_size * 64, 64)
    return AttentionShape(dtype, dtype, heads, 1, 512, 512, block_size, strides, rotary=64)


def _name(shape: AttentionShape, features: Features) -> str:
    kept = "" if shape.kv_dtype == shape.dtype else f"-kv-{ELEMENTS[shape.kv_dtype]}"
    options = "/" + "+".join(name for name, on in features._asdict().items() if on) if any(features) else ""
    return f"{ELEMENTS[shape.dtype]}{kept}/d{shape.dk}/g{shape.group}/bs{shape.block_size}{options}"
