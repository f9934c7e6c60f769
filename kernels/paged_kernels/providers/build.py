"""Build cases from a few numbers: permuted blocks, NaN in all unwritten slots, garbage after the end of every table."""

from dataclasses import dataclass

import torch

from paged_kernels.errors import OptionError
from paged_kernels.memory import storable
from paged_kernels.providers.case import Case
from paged_kernels.scoring import Scoring

GARBAGE = 2**30  # a block id that no cache has
SHORT = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


@dataclass(frozen=True, slots=True)
class CaseSpec:
    """The parameters of a case. If `queries` is empty, each sequence has one."""

    lengths: tuple[int, ...]
    queries: tuple[int, ...] = ()
    heads: int = 32
    kv_heads: int = 8
    dk: int = 128
    dv: int = 0  # 0: as dk
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None  # None: as dtype
    layout: str = "NHD"  # or "HND": heads before slots in memory, the same shape through strides
    shared_tokens: int = 0
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def name(self) -> str:
        """A stable and readable name: the parameters in a fixed order, without those that have a default."""
        least, most = min(self.lengths), max(self.lengths)
        parts = [
            "decode" if set(self.queries) <= {1} else f"prefill{max(self.queries)}",
            f"b{len(self.lengths)}",
            f"l{most}" if least == most else f"l{least}-{most}",
            f"h{self.heads}-{self.kv_heads}",
            f"d{self.dk}" + (f"-{self.dv}" if self.dv not in (0, self.dk) else ""),
            f"bs{self.block_size}",
            _short(self.dtype) + (f"-{_short(self.kv_dtype)}" if self.kv_dtype else ""),
            self.layout.lower() if self.layout != "NHD" else "",
            f"shared{self.shared_tokens}" if self.shared_tokens else "",
            f"window{self.window}" if self.window else "",
            f"softcap{self.softcap:g}" if self.softcap else "",
            "sinks" if self.sinks else "",
            "alibi" if self.alibi else "",
        ]
        return "/".join(part for part in parts if part)


def build_case(spec: CaseSpec, *, device: torch.device | str = "cpu", seed: int = 0) -> Case:
    """A case on `device` with random content. The seed decides the content and the placement of blocks."""
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    if spec.shared_tokens % spec.block_size or spec.shared_tokens > min(spec.lengths):
        raise OptionError(
            f"shared_tokens {spec.shared_tokens} must be whole blocks of {spec.block_size} and within the shortest of "
            f"{min(spec.lengths)} tokens"
        )
    queries = spec.queries or (1,) * len(spec.lengths)
    table, blocks = _tables(spec, seed)
    slots = _owned_slots(spec, table)
    caches = [_cache(spec, blocks, dim, slots, generator, device) for dim in (spec.dk, spec.dv or spec.dk)]
    bounds = torch.tensor([0, *queries]).cumsum(0)
    q = torch.randn(sum(queries), spec.heads, spec.dk, generator=generator, device=device)
    scoring = Scoring(
        spec.dk**-0.5,
        spec.window,
        spec.softcap,
        torch.linspace(-1, 2, spec.heads, device=device) if spec.sinks else None,
        torch.logspace(-1, -8, spec.heads, base=2, device=device) if spec.alibi else None,
        spec.k_scale,
        spec.v_scale,
    )
    return Case(
        name=spec.name,
        q=q.to(spec.dtype),
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=table.int().to(device),
        seq_lens=torch.tensor(spec.lengths, dtype=torch.int32, device=device),
        cu_seqlens_q=bounds.int().to(device),
        scoring=scoring,
        lengths=spec.lengths,
        queries=queries,
        shared_tokens=spec.shared_tokens,
    )


def _tables(spec: CaseSpec, seed: int) -> tuple[torch.Tensor, int]:
    """Block tables on the host, int64, and the number of blocks in the cache: a few more than are used."""
    needed = [-(-length // spec.block_size) for length in spec.lengths]
    shared = spec.shared_tokens // spec.block_size
    used = shared + sum(count - shared for count in needed)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(used + 2, generator=generator) + 1  # block 0 is the null block
    table = torch.full((len(needed), -(-(max(needed) + 1) // 16) * 16), GARBAGE)
    table[:, :shared] = order[:shared]
    start = shared
    for row, count in enumerate(needed):
        table[row, shared:count] = order[start : start + count - shared]
        start += count - shared
    return table, used + 3


def _owned_slots(spec: CaseSpec, table: torch.Tensor) -> torch.Tensor:
    """Slots (block x block_size + offset) that some sequence wrote."""
    parts = []
    for row, length in enumerate(spec.lengths):
        position = torch.arange(length)
        parts.append(table[row, position // spec.block_size] * spec.block_size + position % spec.block_size)
    return torch.cat(parts)


def _cache(
    spec: CaseSpec,
    blocks: int,
    dim: int,
    slots: torch.Tensor,
    generator: torch.Generator,
    device: torch.device,
) -> torch.Tensor:
    """`[blocks, block_size, kv_heads, dim]`: NaN, zeros in block 0, random numbers in the owned slots."""
    dtype = spec.kv_dtype or spec.dtype
    shape = (blocks, spec.block_size, spec.kv_heads, dim)
    if spec.layout == "HND":
        unwritten = torch.full((blocks, spec.kv_heads, spec.block_size, dim), float("nan"), device=device)
        cache = unwritten.to(dtype).transpose(1, 2)
    else:
        cache = torch.full(shape, float("nan"), device=device).to(dtype)
    held = storable(cache)
    held[0] = 0
    slots = slots.to(device)
    scale = spec.k_scale if dim == spec.dk else spec.v_scale
    # In pieces: a float32 copy of the whole cache would not fit in memory in the largest cases.
    for some in torch.split(slots, 1 << 20):
        values = torch.randn(len(some), spec.kv_heads, dim, generator=generator, device=device) / scale
        held[some // spec.block_size, some % spec.block_size] = storable(values.to(dtype))
    return cache


def _short(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return SHORT.get(name, name)
