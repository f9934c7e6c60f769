"""Making room: who must leave the batch, and what becomes of its memory."""

from collections.abc import Sequence as Values

from engine.core.limits import Preemption
from engine.core.manager import KVCacheManager
from engine.core.outcome import RequestStats
from engine.core.policies import VictimChoice
from engine.core.running import RunningBatch
from engine.core.sequence import Group
from engine.core.step import StepBuilder
from engine.core.waiting import WaitingQueue


class Preemptor:
    """Takes a group out of the batch, whole, and into one of the two queues."""

    def __init__(
        self, manager: KVCacheManager, batch: RunningBatch, mode: Preemption, victim: VictimChoice
    ) -> None:
        self.waiting = WaitingQueue()
        self.swapped = WaitingQueue()
        self._manager = manager
        self._batch = batch
        self._mode = mode
        self._victim = victim

    def make_room(self, step: StepBuilder, candidates: Values[Group], stats: dict[int, RequestStats]) -> None:
        """Preempt one of `candidates`: save it in host memory, or drop it to be computed again."""
        victim = candidates[self._victim.choose(candidates)]
        request_id = victim.request.request_id
        stats[request_id].preemptions += 1
        step.preempted.append(request_id)
        step.appended.pop(victim, None)
        self._batch.remove(victim)
        if self._should_swap(victim):
            if self._manager.can_swap_out(victim):
                self._swap_out(victim, stats[request_id])
                return
            stats[request_id].swap_fallbacks += 1
        self._manager.preempt(victim)
        victim.restart()
        self.waiting.push(victim)

    def _should_swap(self, victim: Group) -> bool:
        """What has generated nothing yet is cheaper to compute again; drafts under way are not worth saving."""
        if self._mode is Preemption.RECOMPUTE or not victim.generated or victim.draft is not None:
            return False
        return self._mode is Preemption.SWAP or len(victim.sequences) > 1

    def _swap_out(self, victim: Group, stats: RequestStats) -> None:
        stats.swaps += 1
        victim.rows = []
        self._manager.swap_out(victim)
        self.swapped.push(victim)
