"""The analytic column: metrics that follow from the trace alone, without simulator and engine.

Each closed form over prompt and output lengths is one function. `ideal_hit_tokens` gives the largest number of prompt
tokens that a prefix cache can find.
"""

from dataclasses import dataclass

import numpy as np

from harness.metrics.log import IntArray
from traces.analysis.reuse import prompt_paths
from traces.trace import SegmentColumns


def ideal_hit_tokens(lengths: "Lengths", block_size: int) -> int:
    """Tokens that an infinite prefix cache finds if every prompt is cached before the next one asks.

    Of a common prefix of c tokens a prompt of L tokens finds min(floor(c / B), floor((L − 1) / B)) · B: blocks are
    found whole, and at least one token is always computed, for its logits.
    """
    if lengths.segments is None:
        return 0
    seen = np.minimum(prompt_paths(lengths.segments, lengths.tenants)[0], lengths.prompt_tokens - 1)
    return int((seen // block_size).sum()) * block_size


@dataclass(frozen=True, eq=False)
class Lengths:
    """The requests of a trace in order of arrival, lengths in tokens, int64 `[requests]`.

    `width` sequences are forked from each prompt; with `beam` they are re-parented after every step, so that
    what they share depends on the tokens and has no closed form. `segments` are those of the prompts; None: they share
    nothing. Prompts share within one of `tenants` alone; None: there is one.
    """

    prompt_tokens: IntArray
    output_tokens: IntArray
    segments: SegmentColumns | None = None
    tenants: IntArray | None = None
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


def blocks_allocated(lengths: Lengths, block_size: int) -> int:
    """Blocks allocated without cache hits, preemption and re-parenting.

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


@dataclass(frozen=True)
class CacheShape:
    """The KV memory: blocks of `block_size` tokens, or, where `reserve_tokens` is given, so many slots a
    sequence.

    Without `prefix_caching` there are no cache hits; a contiguous allocator has no prefix cache.
    """

    block_size: int
    reserve_tokens: int | None = None
    prefix_caching: bool = True
    uneven: bool = False  # reservations differ in length: what they waste has no closed form here


def analytic_metrics(lengths: Lengths, cache: CacheShape) -> dict[str, float]:
    """The metrics of `METRICS` that have a closed form for this workload and cache; the others are absent.

    They assume that every request finishes, that nothing is preempted or evicted, and that a prompt is cached
    before the next request asks for it. The docstring of each closed form names its own assumptions.
    """
    if len(lengths.prompt_tokens) == 0:
        return {}
    cached = cache.reserve_tokens is None and cache.prefix_caching
    hits = ideal_hit_tokens(lengths, cache.block_size) if cached else 0
    work = lengths.prompt_tokens + lengths.width * lengths.decode_steps  # without hits and preemption
    found = {
        "finished": float(len(lengths.prompt_tokens)),
        "hit_tokens": float(hits),
        "hit_ratio": hits / float(lengths.prompt_tokens.sum()),
        "computed_tokens": float(work.sum() - hits),
    }
    if cache.reserve_tokens is not None:
        return found if cache.uneven else found | _contiguous(lengths, cache.reserve_tokens)
    return found | _paged(lengths, cache.block_size, hits)


def _contiguous(lengths: Lengths, reserve_tokens: int) -> dict[str, float]:
    if lengths.width > 1 or not lengths.decode_steps.any():
        return {}
    found = reserved_split(lengths, reserve_tokens)
    found["tail_waste"] = (1 - found["utilisation"]) * reserve_tokens
    return found | {"sharing_saving": 0.0, "copies_per_token": 0.0}


def _paged(lengths: Lengths, block_size: int, hits: int) -> dict[str, float]:
    found: dict[str, float] = {}
    decodes = bool(lengths.decode_steps.any())
    if decodes:
        found["tail_waste"] = tail_waste(lengths, block_size)
    if lengths.beam and lengths.width > 1:
        return found
    found["blocks_allocated"] = float(blocks_allocated(lengths, block_size) - hits // block_size)
    generated = float(lengths.output_tokens.sum()) * lengths.width
    found["copies_per_token"] = forked_copies(lengths, block_size) / generated
    if decodes and hits == 0:
        found |= paged_split(lengths, block_size)
        found["sharing_saving"] = forked_saving(lengths, block_size)
    return found
