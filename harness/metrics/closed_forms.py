"""Closed forms over a trace's lengths, one quantity a function.

One picture underlies the sums over time: a prompt of p tokens is computed in no time, and then each of the g
− 1 later steps takes equal time and adds one token to each of the request's k sequences. After j of these
steps a sequence holds m = p + j tokens, at the end N = p + g − 1: the last generated token is never fed back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.metrics.hits import Segment

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lengths:
    """The requests of a trace in order of arrival, lengths in tokens, int64 `[requests]`.

    `width` sequences are forked from each prompt; with `beam` they are re-parented after every step, so that
    what they share depends on the tokens and has no closed form. `segments` are the prefix segments of each
    request.
    """

    prompt_tokens: IntArray
    output_tokens: IntArray
    segments: Sequence[Sequence[Segment]] = ()
    width: int = 1
    beam: bool = False

    @property
    def final_tokens(self) -> IntArray:
        """N: KV slots that one finished sequence has written."""
        return self.prompt_tokens + self.output_tokens - 1

    @property
    def decode_steps(self) -> IntArray:
        """Steps after the one that computes the prompt's end: g − 1."""
        return self.output_tokens - 1


def total_work_tokens(lengths: Lengths) -> int:
    """Tokens computed with neither cache hits nor preemption: Σ p + k · (g − 1)."""
    return int((lengths.prompt_tokens + lengths.width * lengths.decode_steps).sum())


def blocks_allocated(lengths: Lengths, block_size: int) -> int:
    """Blocks taken with neither cache hits, preemption nor re-parenting.

    Σ F + k · (⌈N / B⌉ − F), F = ⌊p / B⌋ being the prompt's full blocks, which forks share; a request of one
    output token never forks. Worked example (published semantics): 64 prompt tokens, 4 branches of 10 tokens,
    B = 16: 8.
    """
    own, full = _ceil(lengths.final_tokens, block_size), lengths.prompt_tokens // block_size
    branches = np.where(lengths.decode_steps > 0, lengths.width, 1)
    return int((full + branches * (own - full)).sum())


def forked_copies(lengths: Lengths, block_size: int) -> int:
    """Copies on write of forks: k − 1 where the prompt ends inside a block, since the last owner writes in place."""
    forks = (lengths.prompt_tokens % block_size > 0) & (lengths.decode_steps > 0)
    return int(forks.sum()) * (lengths.width - 1)


def expected_tail_waste(block_size: int) -> float:
    """Unfilled slots of a sequence whose length is uniform modulo the block size: (B − 1) / 2."""
    return (block_size - 1) / 2


def tail_waste(lengths: Lengths, block_size: int) -> float:
    """Unfilled slots per sequence, averaged over all decode steps: mean of ⌈m / B⌉ · B − m."""
    unfilled = block_size * _ceil_sum(lengths, block_size) - _token_sum(lengths)
    return float(unfilled.sum() / lengths.decode_steps.sum())


def final_internal_slots(lengths: Lengths, block_size: int) -> IntArray:
    """Slots of a sequence's last block that are never filled: (−N) mod B, int64 `[requests]`."""
    return -lengths.final_tokens % block_size


def parallel_saving(prompt_share: float, width: int) -> float:
    """Sharing saving of `width` parallel samples, p · (k − 1) / k, p being the prompt's share of a sequence's
    KV.

    It reproduces Fig. 15a of the SOSP'23 paper on paged attention with that paper's p = 12 %.
    """
    return prompt_share * (width - 1) / width


def forked_saving(lengths: Lengths, block_size: int) -> float:
    """1 − physical / logical blocks over all decode steps, the prompt's full blocks being shared by k forks."""
    own = _ceil_sum(lengths, block_size).sum()
    full = (lengths.prompt_tokens // block_size * lengths.decode_steps).sum()
    return parallel_saving(float(full / own), lengths.width)


def paged_split(lengths: Lengths, block_size: int) -> dict[str, float]:
    """Shares (token, reserved, internal) of the allocated slots over all decode steps, forks sharing full blocks."""
    shared = (lengths.width - 1) * (lengths.prompt_tokens // block_size * block_size) * lengths.decode_steps
    token = lengths.width * _token_sum(lengths) - shared
    allocated = lengths.width * block_size * _ceil_sum(lengths, block_size) - shared
    last_block = (_ceil(lengths.final_tokens, block_size) - 1) * block_size
    steps_in_last = lengths.final_tokens - np.maximum(lengths.prompt_tokens, last_block)
    internal = lengths.width * final_internal_slots(lengths, block_size) * steps_in_last
    return _split(float(token.sum()), float(internal.sum()), float(allocated.sum()))


def reserved_split(lengths: Lengths, reserve_tokens: int) -> dict[str, float]:
    """Shares (token, reserved, internal) of the allocated slots where every sequence reserves `reserve_tokens`.

    The token share is the utilisation of a reserve-to-the-maximum allocator.
    """
    internal = ((reserve_tokens - lengths.final_tokens) * lengths.decode_steps).sum()
    allocated = reserve_tokens * lengths.decode_steps.sum()
    return _split(float(_token_sum(lengths).sum()), float(internal), float(allocated))


def _split(token: float, internal: float, allocated: float) -> dict[str, float]:
    reserved = allocated - token - internal
    return {
        "utilisation": token / allocated,
        "reserved_of_allocated": reserved / allocated,
        "internal_of_allocated": internal / allocated,
    }


def _ceil(tokens: IntArray, block_size: int) -> IntArray:
    return -(-tokens // block_size)


def _token_sum(lengths: Lengths) -> IntArray:
    """Σ m over the decode steps of each request."""
    first, last = lengths.prompt_tokens, lengths.final_tokens
    return (last * (last + 1) - first * (first + 1)) // 2


def _ceil_sum(lengths: Lengths, block_size: int) -> IntArray:
    """Σ ⌈m / B⌉ over the decode steps of each request."""
    return _ceil_prefix(lengths.final_tokens, block_size) - _ceil_prefix(lengths.prompt_tokens, block_size)


def _ceil_prefix(tokens: IntArray, block_size: int) -> IntArray:
    """Σ ⌈m / B⌉ for m = 1 … tokens."""
    full, rest = tokens // block_size, tokens % block_size
    return block_size * full * (full + 1) // 2 + rest * (full + 1)
