"""Making room: what becomes of the memory of a group that must leave the batch."""

from engine.core.limits import Preemption
from engine.core.manager import KVCacheManager
from engine.core.outcome import RequestStats
from engine.core.running import RunningBatch
from engine.core.sequence import Group
from engine.core.step import StepBuilder
from engine.core.waiting import WaitingQueue


class Preemptor:
    """Takes a group out of the batch, whole, and into one of the scheduler's two queues."""

    def __init__(
        self,
        manager: KVCacheManager,
        batch: RunningBatch,
        waiting: WaitingQueue,
        swapped: WaitingQueue,
        stats: dict[int, RequestStats],
    ) -> None:
        self._manager = manager
        self._batch = batch
        self._waiting = waiting
        self._swapped = swapped
        self._stats = stats

    def preempt(self, victim: Group, mode: Preemption, step: StepBuilder) -> None:
        """Save the victim in host memory, or drop it to be computed again."""
        stats = self._stats[victim.request.request_id]
        stats.preemptions += 1
        step.preempted.append(victim.request.request_id)
        step.appended.pop(victim, None)
        self._batch.remove(victim)
        if _should_swap(victim, mode):
            if self._manager.can_swap_out(victim):
                self._swap_out(victim, stats)
                return
            stats.swap_fallbacks += 1
        self._manager.preempt(victim)
        victim.restart()
        self._waiting.push(victim)

    def _swap_out(self, victim: Group, stats: RequestStats) -> None:
        stats.swaps += 1
        victim.rows = []
        self._manager.swap_out(victim)
        self._swapped.push(victim)


def _should_swap(victim: Group, mode: Preemption) -> bool:
    """What has generated nothing yet is cheaper to compute again; drafts under way are not worth saving."""
    if mode is Preemption.RECOMPUTE or not victim.generated or victim.draft is not None:
        return False
    return mode is Preemption.SWAP or len(victim.sequences) > 1
