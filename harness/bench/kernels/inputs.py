"""Tensors for a case: random contents, permuted blocks, poison wherever no sequence may read."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.bench.kernels.grid import CaseSpec

if TYPE_CHECKING:
    import torch

    from paged_kernels.providers import Case

GARBAGE = 2**30  # table entries behind a sequence's last block; reading such a block leaves any pool
TABLE_MULTIPLE = 16  # kernels load table entries in groups
GUARDS = 2  # blocks that nobody owns
KEY_SCALE = VALUE_SCALE = 0.5  # of fp8 caches

IntArray = npt.NDArray[np.int64]


def build(spec: CaseSpec, device: "torch.device", seed: int) -> "Case":
    """A case with contents drawn from `seed`; equal arguments give equal tensors on the same kind of device."""
    import torch

    from paged_kernels.providers import Case
    from paged_kernels.scoring import Scoring

    generator = torch.Generator(device).manual_seed(seed)
    table, used = block_tables(spec, np.random.default_rng(seed))
    owned = _owned(spec, table, used)
    keys, values = (_cache(spec, owned, device, generator, scale) for scale in (KEY_SCALE, VALUE_SCALE))
    tokens = spec.batch * spec.queries
    q = torch.randn(
        tokens, spec.heads, spec.head_dim, generator=generator, device=device, dtype=torch.float32
    )
    scales = (KEY_SCALE, VALUE_SCALE) if spec.dtype.startswith("fp8") else (1.0, 1.0)
    bounds = np.arange(spec.batch + 1) * spec.queries
    return Case(
        name=spec.name,
        q=q.to(_query_dtype(spec)),
        key_cache=keys,
        value_cache=values,
        block_table=_int32(table, device),
        seq_lens=_int32(np.array(spec.lengths), device),
        cu_seqlens_q=_int32(bounds, device),
        scoring=Scoring(spec.head_dim**-0.5, k_scale=scales[0], v_scale=scales[1]),
        lengths=spec.lengths,
        queries=(spec.queries,) * spec.batch,
        shared_tokens=spec.shared_prefix,
    )


def block_tables(spec: CaseSpec, rng: np.random.Generator) -> tuple[IntArray, int]:
    """(table [batch, width], blocks of the pool) with blocks in random order; block 0 is the null block."""
    shared = spec.shared_prefix // spec.block_size
    counts = [-(-length // spec.block_size) for length in spec.lengths]
    blocks = shared + sum(count - shared for count in counts)
    ids = iter(rng.permutation(blocks) + 1)
    prefix = [next(ids) for _ in range(shared)]
    width = -(-max(counts) // TABLE_MULTIPLE) * TABLE_MULTIPLE
    table = np.full((spec.batch, width), GARBAGE, dtype=np.int64)
    for row, count in enumerate(counts):
        table[row, :count] = prefix + [next(ids) for _ in range(count - shared)]
    return table, blocks + 1 + GUARDS


def _owned(spec: CaseSpec, table: IntArray, blocks: int) -> npt.NDArray[np.bool_]:
    """Which slots [blocks, block_size] hold a token of some sequence."""
    owned = np.zeros(blocks * spec.block_size, dtype=bool)
    for row, length in enumerate(spec.lengths):
        position = np.arange(length)
        owned[table[row, position // spec.block_size] * spec.block_size + position % spec.block_size] = True
    return owned.reshape(blocks, spec.block_size)


def _cache(
    spec: CaseSpec,
    owned: npt.NDArray[np.bool_],
    device: "torch.device",
    generator: "torch.Generator",
    scale: float,
) -> "torch.Tensor":
    """`[blocks, block_size, kv_heads, head_dim]`, NaN in slots without a token, zeros in the null block."""
    import torch

    blocks, block_size = owned.shape
    wide = torch.float32 if spec.dtype == "fp32" else _query_dtype(spec)
    shape = (blocks, block_size, spec.kv_heads, spec.head_dim)
    cache = torch.randn(shape, generator=generator, device=device, dtype=wide)
    if spec.dtype.startswith("fp8"):
        cache /= scale
    cache[~torch.from_numpy(owned).to(device)] = float("nan")
    cache[0] = 0.0
    cache = cache.to(_dtypes()[spec.dtype])
    if spec.layout == "HND":  # the same shape through other strides: a head's slots of a block lie together
        return cache.transpose(1, 2).contiguous().transpose(1, 2)
    return cache


def _query_dtype(spec: CaseSpec) -> "torch.dtype":
    found: torch.dtype = _dtypes()["bf16" if spec.dtype.startswith("fp8") else spec.dtype]
    return found


def _dtypes() -> dict[str, Any]:
    import torch

    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    names |= {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    return {name: getattr(torch, torch_name) for name, torch_name in names.items()}


def _int32(values: IntArray, device: "torch.device") -> "torch.Tensor":
    import torch

    return torch.from_numpy(values.astype(np.int32)).to(device)
