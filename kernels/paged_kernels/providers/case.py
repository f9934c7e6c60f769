"""A case: one attention call over paged KV as a value. A provider: an implementation that can run cases.

`contiguous_kv` and `without_poison` give the KV of a case in other forms, for implementations that need them.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paged_kernels.errors import KernelError
from paged_kernels.memory import storable
from paged_kernels.scoring import Scoring


def needs_package(package: str, device: torch.device) -> str | None:
    """Why a CUDA package cannot run on `device`, or None."""
    if device.type != "cuda":
        return f"needs a CUDA device, and this is {device.type!r}"
    if importlib.util.find_spec(package) is None:
        return f"the package {package!r} is not installed"
    return None


@dataclass(frozen=True, eq=False)
class Case:
    """Ragged queries over paged KV. Sequence i owns rows `cu_seqlens_q[i] : cu_seqlens_q[i + 1]` of q.

    The queries are the last positions of each sequence's `seq_lens` cached tokens and see causally. A decode has one
    query per sequence. Slots that no sequence owns are NaN, entries behind a table's last block garbage, and block 0
    is the null block (zeros). `lengths` and `queries` repeat on the host what the device tensors say, for providers
    that plan there.
    """

    name: str  # unique and stable: timings, gates and reports are keyed by it
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
        return sum(self.lengths) * self._token_bytes

    @property
    def distinct_kv_bytes(self) -> int:
        """Bytes of K and V when a shared prefix is read once for all."""
        repeated = self.shared_tokens * (len(self.lengths) - 1)
        return (sum(self.lengths) - repeated) * self._token_bytes

    @property
    def io_bytes(self) -> int:
        """Bytes of the queries read and the output written."""
        written = self.q.shape[0] * self.heads * self.value_cache.shape[3] * self.q.element_size()
        return int(self.q.numel() * self.q.element_size() + written)

    @property
    def flops(self) -> int:
        """Multiply-adds of both products, counted as two each, over the (query, key) pairs that may see each other."""
        width = int(self.key_cache.shape[3] + self.value_cache.shape[3])
        return 2 * self.heads * width * _visible_pairs(self.lengths, self.queries, self.scoring.window)

    @property
    def _token_bytes(self) -> int:
        width = self.key_cache.shape[3] + self.value_cache.shape[3]
        return int(self.kv_heads * width * self.key_cache.element_size())


def _visible_pairs(lengths: Sequence[int], queries: Sequence[int], window: int) -> int:
    """Query at position p sees min(p + 1, window) keys."""
    pairs = 0
    for length, count in zip(lengths, queries, strict=True):
        seen = range(length - count + 1, length + 1)
        pairs += sum(min(keys, window) for keys in seen) if window else (seen[0] + seen[-1]) * count // 2
    return pairs


Run = Callable[[], torch.Tensor]  # one call of the prepared attention; gives the output [tokens, heads, dv]


class UnsupportedCaseError(KernelError):
    """A case that a provider cannot serve (a dtype, an option, a layout): reported, and left out of its column."""


class Provider(Protocol):
    """One attention implementation. It has no state: one instance serves any number of cases."""

    @property
    def name(self) -> str:
        """Unique among the providers; the column of tables and reports."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether a prepared run may be captured in a CUDA graph (no host wait, no allocation that outlives it)."""
        ...

    def available(self, device: torch.device) -> str | None:
        """None where it can run on `device`, else the reason why not."""
        ...

    def prepare(self, case: Case) -> Run:
        """Do all that is not timed (host planning, layout changes, buffers, compilation) and give the timed call.

        The call may return the same output tensor each time. Raises `UnsupportedCaseError` where the case cannot be
        served.
        """
        ...


def contiguous_kv(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[sequences, longest, kv_heads, dim]`, zeros behind each sequence's end, in the cache's dtype."""
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
    """A copy with the same strides in which unwritten slots are zeros: others multiply what they mask out."""
    clean = torch.empty_like(storable(cache))  # keeps the strides of NHD and HND
    clean.copy_(storable(cache))
    clean = clean.view(cache.dtype)
    for some in clean.split(1024):  # type: ignore[no-untyped-call]
        storable(some)[torch.isnan(some.float() if cache.dtype.itemsize == 1 else some)] = 0
    return clean
