"""A case holds the arguments of one attention call over paged KV. A provider is an implementation that runs cases.

`contiguous_kv` and `without_poison` give the KV of a case in other forms, for implementations that need them.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paged_kernels.errors import KernelError
from paged_kernels.memory import storable, token_bytes
from paged_kernels.scoring import Scoring

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
        ...

    @property
    def capturable(self) -> bool:
        """Whether a prepared run may be captured in a CUDA graph (no host wait, no allocation that outlives it)."""
        ...

    def available(self, device: torch.device) -> str | None:
        """None if it can run on `device`, else the reason why it cannot."""
        ...

    def prepare(self, case: Case) -> Run:
        """Do all untimed work (metadata on the host, layout changes, buffers, compilation) and return the timed call.

        The call may return the same output tensor each time. Raises `UnsupportedCaseError` if the provider cannot
        serve the case.
        """
        ...


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
