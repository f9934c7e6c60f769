"""The step under way, while the scheduler fills it."""

from dataclasses import dataclass, field

from engine.core.batch import BatchRows
from engine.core.calendar import DecodeCalendar
from engine.core.manager import KVCacheManager
from engine.core.plan import Row, StepPlan
from engine.core.request import Request
from engine.core.sequence import Group


@dataclass(slots=True)
class StepBuilder:
    """What the step holds so far; `budget` query tokens are left."""

    budget: int
    rows: list[Row] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    appended: dict[Group, int] = field(default_factory=dict)  # new blocks of steady groups
    new_blocks: int = 0  # of the others
    hit_tokens: int = 0

    @property
    def only_steady(self) -> bool:
        """Whether nothing but steady decoding happens in the step."""
        return not (self.rows or self.admitted or self.preempted or self.resumed)

    def plan(
        self,
        step: int,
        manager: KVCacheManager,
        calendar: DecodeCalendar,
        repeat: int,
        running: int,
        waiting: int,
        head: Request | None,
    ) -> StepPlan:
        """The finished plan; takes what the manager has gathered for the executor."""
        steady = calendar.view()
        swap_out, swap_in = manager.drain_swaps()
        return StepPlan(
            step=step,
            rows=BatchRows(steady, calendar.clock.now, self.rows),
            copies=manager.drain_copies(),
            frees=manager.drain_frees(),
            repeat=repeat,
            admitted=self.admitted,
            preempted=self.preempted,
            new_blocks=self.new_blocks + sum(self.appended.values()),
            hit_tokens=self.hit_tokens,
            running=running,
            waiting=waiting,
            usage=manager.usage(head),
            swap_out=swap_out,
            swap_in=swap_in,
            stale=manager.drain_stale(),
            resumed=self.resumed,
            steady=len(steady.sequences),
            steady_ids=steady.request_ids,
        )
