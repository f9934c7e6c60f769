"""Replace the rule of eviction: what stands far behind in its prompt goes first, so beginnings of all prompts stay.

Run it with `python examples/own_eviction.py`. The same class works from the command line, on both sides:

    PYTHONPATH=examples python -m harness sweep cache.eviction=lru,own_eviction:DeepestFirst

A rule with one key for each block derives from `KeyedQueue` as here, one with ranks from `RankedQueue`; any other from
`EvictionPolicy` (`engine/core/memory/eviction.py`), which says what a policy is told.
"""

from collections.abc import Sequence

from engine.core.memory.eviction import Released
from engine.core.memory.eviction_rules import KeyedQueue
from harness.config.schema import CostKind, RunConfig
from harness.point import run_point


class DeepestFirst(KeyedQueue):
    """Evict the block with the highest place in its prompt; `table.request` has session, tenant, priority, arrival."""

    def keys(self, blocks: Sequence[int], table: Released) -> Sequence[float]:
        """The lowest key is evicted first; `self.facts` has the time and the seconds to compute a prefix again."""
        return [-place for place in table.places(blocks)]


def hit_ratio(rule: str) -> float:
    """The simulated hit ratio of 300 requests with shared prefixes, in a pool that is too small for them."""
    config = RunConfig(measure=False)
    config.workload.num_requests, config.workload.length_scale, config.workload.prefix_share = 300, 0.2, 0.6
    config.cache.pool_tokens, config.cache.max_model_len, config.cost.kind = 3072, 2048, CostKind.roofline
    config.cache.eviction = rule
    return float(run_point(config).record.simulated["hit_ratio"])


if __name__ == "__main__":
    for rule in ("lru", "own_eviction:DeepestFirst"):
        print(f"{rule:26} {100 * hit_ratio(rule):5.1f} % of the prompt tokens are found")
