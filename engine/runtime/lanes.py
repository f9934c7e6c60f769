"""KV pools that share one set of block ids: the model's, and a draft model's beside it.

Whatever the plan does to a block it does to that block in every lane, so that one table serves all of them.
"""

from collections.abc import Sequence

from engine.core.plan import StepPlan
from engine.runtime.kv_pool import KVPool


class Lanes:
    """Moves blocks as a plan says, in its order: void stale slots, save, void free blocks, bring back, copy."""

    def __init__(self, pools: Sequence[KVPool]) -> None:
        self.pools = pools

    def void_stale(self, plan: StepPlan) -> None:
        """Poison what is void in blocks that are in use, before a swap saves it with its block."""
        if plan.stale:
            for pool in self.pools:
                pool.poison_slots(plan.stale)

    def save(self, plan: StepPlan) -> None:
        """Swap out, before the blocks are anyone else's."""
        if plan.swap_out:
            for pool in self.pools:
                pool.swap_out(plan.swap_out)

    def void(self, plan: StepPlan) -> None:
        """Poison what nobody may read any more."""
        for pool in self.pools:
            if plan.frees:
                pool.poison(plan.frees)

    def fill(self, plan: StepPlan) -> None:
        """Swap in, then copy."""
        for pool in self.pools:
            if plan.swap_in:
                pool.swap_in(plan.swap_in)
            if plan.copies:
                pool.copy(plan.copies)
