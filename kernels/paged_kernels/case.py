"""A case holds the arguments of one attention call over paged KV. A provider is an implementation that runs cases.

`contiguous_kv` and `without_poison` give the KV of a case in other forms, for implementations that need them.
`build_case` makes a case from a few numbers: permuted blocks, NaN in all unwritten slots, garbage after the end of
every table. `verify` checks an output against float64: a provider with a wrong output is not timed.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paged_kernels.arguments import KernelError, OptionError, Scoring, storable, token_bytes
from paged_kernels.reference import paged_attention

Run = Callable[[], torch.Tensor]  # one call of the prepared attention; returns the output [tokens, heads, dv]


def needs_package(package: str, device: torch.device) -> str | None:
    """The reason why a CUDA package cannot run on `device`, or None if it can."""
    if device.type != "cuda":
        return f"needs a CUDA device, and this is {device.type!r}"
    if importlib.util.find_spec(package) is None:
        return f"the package {package!r} is not installed"
    return None


@dataclass(frozen=True, eq=False)
class Case:
    """Ragged queries over paged KV. Sequence i owns rows `cu_seqlens_q[i] : cu_seqlens_q[i + 1]` of q.

    The queries are the last positions of each sequence's `seq_lens` cached tokens and see causally. A decode has one
    query per sequence. Slots that no sequence owns are NaN, entries after a table's last block are garbage, and block
    0 is the null block (zeros). `lengths` and `queries` repeat `seq_lens` and the spans of `cu_seqlens_q` on the host,
    for providers that need them there.
    """

    name: str  # unique and stable: the key of timings, gates and reports
    q: torch.Tensor  # [tokens, heads, dk]
    key_cache: torch.Tensor  # [blocks, block_size, kv_heads, dk]; any strides but the last (NHD and HND)
    value_cache: torch.Tensor  # [blocks, block_size, kv_heads, dv]
    block_table: torch.Tensor  # int32 [sequences, width]
    seq_lens: torch.Tensor  # int32 [sequences]
    cu_seqlens_q: torch.Tensor  # int32 [sequences + 1]
    scoring: Scoring
    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    shared_tokens: int = 0  # leading tokens, whole blocks, whose blocks all sequences share

    @property
    def decode(self) -> bool:
        """Whether every sequence has exactly one query."""
        return set(self.queries) <= {1}

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return int(self.key_cache.shape[1])

    @property
    def heads(self) -> int:
        """Query heads."""
        return int(self.q.shape[1])

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return int(self.key_cache.shape[2])

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.q.device

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that must be read at least once per sequence (a shared prefix counts for each)."""
        return sum(self.lengths) * self.token_bytes

    @property
    def distinct_kv_bytes(self) -> int:
        """Bytes of K and V that must be read if a shared prefix is read once for all sequences."""
        repeated = self.shared_tokens * (len(self.lengths) - 1)
        return (sum(self.lengths) - repeated) * self.token_bytes

    @property
    def io_bytes(self) -> int:
        """Bytes of the queries read and the output written."""
        written = self.q.shape[0] * self.heads * self.value_cache.shape[3] * self.q.element_size()
        return int(self.q.numel() * self.q.element_size() + written)

    @property
    def flops(self) -> int:
        """Floating-point operations of both products (2 per multiply-add) over the visible (query, key) pairs."""
        width = int(self.key_cache.shape[3] + self.value_cache.shape[3])
        return 2 * self.heads * width * _visible_pairs(self.lengths, self.queries, self.scoring.window)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return token_bytes(self.key_cache, self.value_cache)


def _visible_pairs(lengths: Sequence[int], queries: Sequence[int], window: int) -> int:
    """Visible (query, key) pairs: a query at position p sees min(p + 1, window) keys."""
    pairs = 0
    for length, count in zip(lengths, queries, strict=True):
        seen = range(length - count + 1, length + 1)
        pairs += sum(min(keys, window) for keys in seen) if window else (seen[0] + seen[-1]) * count // 2
    return pairs


class UnsupportedCaseError(KernelError):
    """A case that a provider cannot serve (dtype, option, layout). Reports leave it out of the provider's column."""


class Provider(Protocol):
    """One attention implementation. It has no state, so one instance serves any number of cases."""

    @property
    def name(self) -> str:
        """The unique name, which heads its column in tables and reports."""

    @property
    def capturable(self) -> bool:
        """Whether a prepared run may be captured in a CUDA graph (no host wait, no allocation that outlives it)."""

    def available(self, device: torch.device) -> str | None:
        """None if it can run on `device`, else the reason why it cannot."""

    def prepare(self, case: Case) -> Run:
        """Do all untimed work (metadata on the host, layout changes, buffers, compilation) and return the timed call.

        The call may return the same output tensor each time. Raises `UnsupportedCaseError` if the provider cannot
        serve the case.
        """


class Everywhere:
    """A provider that runs wherever torch does, and whose runs can be captured."""

    capturable: bool = True

    def available(self, device: torch.device) -> str | None:
        """It runs everywhere."""
        return None


def contiguous_kv(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[sequences, longest, kv_heads, dim]`, zeros after each sequence's end, in the cache's dtype."""
    pair = []
    for cache in (case.key_cache, case.value_cache):
        held = storable(cache)
        laid = held.new_zeros(len(case.lengths), max(case.lengths), *held.shape[2:])
        for row, length in enumerate(case.lengths):
            position = torch.arange(length, device=held.device)
            blocks = case.block_table[row, position // case.block_size].long()
            laid[row, :length] = held[blocks, position % case.block_size]
        pair.append(laid.view(cache.dtype))
    return pair[0], pair[1]


def without_poison(cache: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and zeros in unwritten slots. Other libraries multiply masked NaN by 0."""
    clean = torch.empty_like(storable(cache))  # keeps the strides of NHD and HND
    clean.copy_(storable(cache))
    clean = clean.view(cache.dtype)
    for some in clean.split(1024):  # type: ignore[no-untyped-call]
        storable(some)[torch.isnan(some.float() if cache.dtype.itemsize == 1 else some)] = 0
    return clean


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
    positions = [torch.arange(length) for length in spec.lengths]  # slots that some sequence wrote
    size = spec.block_size
    slots = torch.cat(
        [table[row, each // size] * size + each % size for row, each in enumerate(positions)]
    ).to(device)
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
    rows = (spec.kv_heads, spec.block_size) if spec.layout == "HND" else (spec.block_size, spec.kv_heads)
    cache = torch.full((blocks, *rows, dim), float("nan"), device=device).to(dtype)
    cache = cache.transpose(1, 2) if spec.layout == "HND" else cache
    held = storable(cache)
    held[0] = 0
    scale = spec.k_scale if dim == spec.dk else spec.v_scale
    # In pieces: a float32 copy of the whole cache would not fit in memory in the largest cases.
    for some in torch.split(slots, 1 << 20):
        values = torch.randn(len(some), spec.kv_heads, dim, generator=generator, device=device) / scale
        held[some // spec.block_size, some % spec.block_size] = storable(values.to(dtype))
    return cache


def _short(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return SHORT.get(name, name)


# ||found - exact|| / ||exact|| against float64 over the same rounded inputs; measured errors are several times smaller.
# Values of an fp8 cache convert exactly, so the queries' dtype decides. Triton's interpreter truncates to bfloat16, a
# GPU rounds. A GPU sums float32 over thousands of keys in another order.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
TOLERANCE_ON_GPU = TOLERANCE | {torch.float32: 2e-5}
ROW_FACTOR = 5


class DisagreementError(KernelError):
    """A wrong output: NaN, a wrong shape, or an error larger than rounding explains."""


def exact_attention(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The case in float64 over the same rounded inputs: output `[tokens, heads, dv]` and LSE `[tokens, heads]`."""
    tables = (case.block_table, case.seq_lens, case.cu_seqlens_q)
    return paged_attention(case.q.double(), case.key_cache, case.value_cache, *tables, case.scoring)


def exact_output(case: Case) -> torch.Tensor:
    """The output of `exact_attention`."""
    return exact_attention(case)[0]


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """||found - exact|| / ||exact||; NaN, which exceeds every tolerance, if `found` has one."""
    return float((found.double() - exact).norm() / exact.norm())


def tolerance(case: Case) -> float:
    """The relative error that rounding explains."""
    return (TOLERANCE if case.device.type == "cpu" else TOLERANCE_ON_GPU)[case.q.dtype]


def verify(found: torch.Tensor, exact: torch.Tensor, who: str, case: Case) -> float:
    """The relative error of `found`. Raises `DisagreementError` if rounding does not explain it."""
    if found.shape != exact.shape:
        raise DisagreementError(
            f"{who} on {case.name}: output has shape {tuple(found.shape)}, expected {tuple(exact.shape)}"
        )
    error, allowed = relative_error(found, exact), tolerance(case)
    apart, sizes = ((found.double() - exact).flatten(1).norm(dim=1), exact.flatten(1).norm(dim=1))
    # one wrong row of thousands is small beside them all; a row has the rounding of fewer numbers
    wrong = (~(apart <= ROW_FACTOR * allowed * sizes)).nonzero().flatten().tolist()
    if not error <= allowed or wrong:
        where = f", {len(wrong)} rows are wrong, from row {wrong[0]} on" if wrong else ""
        raise DisagreementError(
            f"{who} on {case.name}: relative error {error:.2g} against float64; rounding of {case.q.dtype} explains "
            f"{allowed:g}{where}"
        )
    return error
