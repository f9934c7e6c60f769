"""How much a prefix cache of each size would hit, exactly, from one pass over the trace's keys.

The cache holds full blocks in least-recently-used order. A hit is the leading run of blocks that are resident when
the request arrives; then all its blocks are touched, last to first, so that a prefix outlives its continuation.
Insertion is instant and generation is left out: this is the trace's own curve, before any engine's effects.

Blocks that always stand together form an extent, so the work does not grow with smaller blocks. For the blocks of an
extent the stack distance (Mattson et al. 1970) is the number of blocks touched since, which gives every size at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from traces.paths import PrefixPaths
from traces.trace import Trace

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ReuseProfile:
    """Accesses to blocks that were seen before: arrays of equal length, one entry for each extent and request.

    `distance` blocks of others were touched since; the extent has `blocks` blocks; `gap_us` passed. `prompt_tokens`
    counts all prompts, `blocks_in_all` every block of every prompt.
    """

    block_size: int
    prompt_tokens: int
    blocks_in_all: int
    distinct_blocks: int
    distance: Ints
    blocks: Ints
    gap_us: Ints

    def hit_tokens(self, capacity_blocks: float) -> int:
        """Tokens hit by a cache of so many blocks; infinity for an unlimited one."""
        room = np.clip(capacity_blocks - self.distance.astype(np.float64), 0, self.blocks)
        return int(room.sum()) * self.block_size

    def hit_ratio(self, capacity_blocks: float) -> float:
        """The same as a share of all prompt tokens."""
        return self.hit_tokens(capacity_blocks) / max(self.prompt_tokens, 1)

    def curve(self, capacity_tokens: Iterable[float]) -> list[float]:
        """Hit ratios at capacities given in tokens; only whole blocks count."""
        return [self.hit_ratio(tokens // self.block_size) for tokens in capacity_tokens]

    def distances(self, shares: Sequence[float]) -> list[float]:
        """Quantiles of the stack distance in blocks over all blocks seen before; empty where there is none."""
        return _weighted_quantiles(self.distance + (self.blocks + 1) / 2, self.blocks, shares)

    def gaps_s(self, shares: Sequence[float]) -> list[float]:
        """Quantiles of the time since the block was last touched, in seconds."""
        return _weighted_quantiles(self.gap_us / 1e6, self.blocks, shares)


def reuse_profile(
    trace: Trace | PrefixPaths,
    block_size: int,
    *,
    spare_last_token: bool = False,
    partial_blocks: bool = False,
) -> ReuseProfile:
    """The profile at one block size, in tokens; give `PrefixPaths(trace)` where several sizes are wanted.

    `spare_last_token` caps hits as an engine does, which computes at least the last token. `partial_blocks` lets a
    partial last block occupy a block of the cache too, as published tables do; it never hits.
    """
    paths = trace if isinstance(trace, PrefixPaths) else PrefixPaths(trace)
    requests = paths.trace.requests
    rows = [paths.extents(index, block_size, partial_blocks) for index in range(len(requests))]
    stack = _Stack(sum(map(len, rows)))
    found: list[tuple[int, int, int]] = []
    distinct = 0
    last_us: dict[int, int] = {}
    for request, extents in zip(requests, rows, strict=True):
        room = (request.prompt_tokens - spare_last_token) // block_size
        for name, blocks in extents:
            place = stack.place(name)
            if place is None:
                break
            if room > 0:
                found.append((stack.above(place), min(blocks, room), request.arrival_us - last_us[name]))
            room -= blocks
        distinct += sum(blocks for name, blocks in extents if stack.place(name) is None)
        for name, blocks in reversed(extents):
            stack.touch(name, blocks)
            last_us[name] = request.arrival_us
    columns = np.array(found, dtype=np.int64).reshape(-1, 3)
    return ReuseProfile(
        block_size=block_size,
        prompt_tokens=sum(request.prompt_tokens for request in requests),
        blocks_in_all=sum(blocks for extents in rows for _, blocks in extents),
        distinct_blocks=distinct,
        distance=columns[:, 0],
        blocks=columns[:, 1],
        gap_us=columns[:, 2],
    )


class _Stack:
    """Extents in the order of their last touch, with a Fenwick tree over the blocks touched."""

    def __init__(self, touches: int) -> None:
        self._size = touches
        self._sums = [0] * (touches + 1)
        self._places: dict[int, tuple[int, int]] = {}  # extent -> place (later is more recent), blocks
        self._next = 1
        self._total = 0

    def place(self, name: int) -> int | None:
        known = self._places.get(name)
        return None if known is None else known[0]

    def above(self, place: int) -> int:
        """Blocks touched after the extent at this place."""
        below, sums = 0, self._sums
        while place:
            below += sums[place]
            place &= place - 1
        return self._total - below

    def touch(self, name: int, blocks: int) -> None:
        known = self._places.get(name)
        if known is not None:
            self._add(known[0], -known[1])
        self._add(self._next, blocks)
        self._places[name] = (self._next, blocks)
        self._next += 1

    def _add(self, place: int, blocks: int) -> None:
        self._total += blocks
        sums, size = self._sums, self._size
        while place <= size:
            sums[place] += blocks
            place += place & -place


def _weighted_quantiles(
    values: npt.NDArray[np.float64], weights: Ints, shares: Sequence[float]
) -> list[float]:
    if not values.size:
        return []
    order = np.argsort(values, kind="stable")
    places = np.cumsum(weights[order])
    picks = np.searchsorted(places, np.asarray(shares) * places[-1], "left")
    return [float(values[order][min(int(pick), values.size - 1)]) for pick in picks]
