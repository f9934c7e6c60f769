"""One attention call over paged KV as a value: what every provider is given, and what its output is judged by."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paged_kernels.scoring import Scoring


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
