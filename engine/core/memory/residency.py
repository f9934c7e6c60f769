"""Sampled residency of blocks: how long one lives, how long it lies idle, and how soon it is used again.

The figures and the rules are those of vLLM's `KVCacheMetricsCollector` (vllm/v1/core/kv_cache_metrics.py): a block is
sampled when it is allocated, each further reference to it (a hit, a fork) is a use, and its residency ends when the
pool gives the block out again.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

from engine.core.errors import CoreError
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.eviction import EvictionQueue
from engine.core.options import Retention

_USES = 4  # of a block that are kept, the last ones; so there are at most three gaps
_NS = 1e9


class Residency(NamedTuple):
    """One sampled block, from its allocation until the pool gave it out again.

    `idle_s` is the time since its last use, or since its allocation where it was not used again. `reuse_gaps_s` are the
    times between its last four uses.
    """

    lifetime_s: float
    idle_s: float
    reuse_gaps_s: tuple[float, ...]


class _Sampled(NamedTuple):
    born_ns: int
    uses_ns: deque[int]


class ResidencySampler:
    """Follows a share `rate` of the blocks that a pool gives out; `drain` returns those whose residency has ended.

    The core reads no clock: `clock` gives the time in ns, and whoever runs the scheduler sets it. Which blocks are
    sampled depends on `seed` and on the order of allocations alone, so both sides of a point sample the same blocks.

    >>> now = [0]
    >>> sampler = ResidencySampler(rate=1.0, clock=lambda: now[0])
    >>> pool = SampledPool(1, sampler)
    >>> block = pool.take_one()
    >>> now[0] = 3_000_000_000
    >>> pool.release([block])
    [1]
    >>> pool.take(1), sampler.drain()
    ([1], [Residency(lifetime_s=3.0, idle_s=3.0, reuse_gaps_s=())])
    """

    def __init__(self, rate: float = 0.01, *, clock: Callable[[], int] | None = None, seed: int = 0) -> None:
        if not 0 < rate <= 1:
            raise CoreError(f"the share of sampled blocks is {rate}, must be above 0 and at most 1")
        self.rate = rate
        self.clock = clock
        self._random = Random(seed)
        self._sampled: dict[int, _Sampled] = {}
        self._ended: list[Residency] = []

    def _now_ns(self) -> int:
        if self.clock is None:
            raise CoreError(
                "residency is sampled without a clock: set ResidencySampler.clock, which gives ns"
            )
        return self.clock()

    def allocated(self, blocks: Sequence[int]) -> None:
        """The pool gives out `blocks`: their last residency ends, and a new one begins."""
        now, rate, draw, sampled = self._now_ns(), self.rate, self._random.random, self._sampled
        for block in blocks:
            if block in sampled:
                self._end(sampled.pop(block), now)
            if draw() < rate:
                sampled[block] = _Sampled(now, deque(maxlen=_USES))

    def used(self, blocks: Sequence[int]) -> None:
        """Each of `blocks` got one more reference."""
        now, sampled = self._now_ns(), self._sampled
        for block in blocks:
            if block in sampled:
                sampled[block].uses_ns.append(now)

    def _end(self, found: _Sampled, now: int) -> None:
        uses = found.uses_ns
        last = uses[-1] if uses else found.born_ns
        gaps = tuple((later - earlier) / _NS for earlier, later in pairwise(uses))
        self._ended.append(Residency((now - found.born_ns) / _NS, (now - last) / _NS, gaps))

    def forget(self) -> None:
        """The pool was emptied: no residency goes on, and those that ended are dropped."""
        self._sampled.clear()
        self._ended.clear()

    def drain(self) -> list[Residency]:
        """The residencies that have ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended


class SampledPool(BlockPool):
    """A block pool whose blocks are sampled. A class of its own, so that other pools pay nothing."""

    def __init__(
        self,
        num_blocks: int,
        sampler: ResidencySampler,
        *,
        retention: Retention = Retention.lru,
        eviction: EvictionQueue | None = None,
        keep_events: bool = False,
    ) -> None:
        super().__init__(num_blocks, retention=retention, eviction=eviction, keep_events=keep_events)
        self.sampler = sampler

    def take(self, count: int) -> list[int]:
        """As `BlockPool.take`."""
        blocks = super().take(count)
        self.sampler.allocated(blocks)
        return blocks

    def take_one(self) -> int:
        """As `BlockPool.take_one`."""
        return self.take(1)[0]

    def share(self, blocks: Sequence[int]) -> int:
        """As `BlockPool.share`."""
        revived = super().share(blocks)
        self.sampler.used(blocks)
        return revived

    def reset(self) -> None:
        """As `BlockPool.reset`."""
        super().reset()
        self.sampler.forget()
