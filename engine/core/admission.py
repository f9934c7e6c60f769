"""Who may enter the batch now."""

from collections.abc import Sequence as Values

from engine.core.errors import CoreError
from engine.core.limits import SchedulerLimits
from engine.core.manager import KVCacheManager
from engine.core.policies import Admission, AdmitWhatFits
from engine.core.request import Request
from engine.core.running import RunningBatch
from engine.core.sequence import Group


class EntryRules:
    """The rules for waiting and for swapped groups. Every one is a pure query."""

    def __init__(
        self, manager: KVCacheManager, batch: RunningBatch, limits: SchedulerLimits, policy: Admission
    ) -> None:
        self._manager = manager
        self._batch = batch
        self._limits = limits
        self._policy = policy
        self._watermark = int(limits.watermark * manager.num_blocks)

    @property
    def only_built_in(self) -> bool:
        """Whether a group that was refused stays refused as long as nothing is released."""
        return isinstance(self._policy, AdmitWhatFits)

    def _spare_blocks(self) -> int:
        return self._watermark if len(self._batch) else 0

    def _has_place(self, group: Group) -> bool:
        return self._batch.sequences + group.width <= self._limits.max_running

    def may_return(self, group: Group) -> bool:
        """Whether the batch has places for every branch of a swapped group, and the pool room for it."""
        return self._has_place(group) and self._manager.can_swap_in(group, self._spare_blocks())

    def may_enter(self, group: Group, hits: Values[int], cached: int, budget: int) -> bool:
        """Whether the batch has places for every branch, the budget for the prompt, and the pool room for it."""
        limits = self._limits
        if not self._has_place(group):
            return False
        if not limits.chunked_prefill and group.root_target - cached > budget:
            return False
        chunk = None if limits.admit_whole_prompt else min(group.root_target, cached + budget)
        if not self._manager.can_admit(group, hits, self._spare_blocks(), chunk):
            return False
        return self.only_built_in or self._is_allowed(group.request)

    def _is_allowed(self, request: Request) -> bool:
        """Whether the user's policy lets `request` in; it cannot keep everybody out of an empty batch."""
        usage, running = self._manager.usage(None), len(self._batch)
        if self._policy.allows(request, (usage.free + usage.cached) // self._manager.block_size, running):
            return True
        if not running:
            raise CoreError(
                f"request {request.request_id}: the admission policy {type(self._policy).__name__} refuses it "
                f"although nothing is running, so it would wait for ever"
            )
        return False
