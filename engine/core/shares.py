"""A group's share of the step under way: which rows it gets, and the memory that they write to."""

from engine.core.batch import written
from engine.core.manager import KVCacheManager
from engine.core.plan import Row
from engine.core.request import SpeculationMode
from engine.core.rows import rows_of
from engine.core.sequence import Group, ScheduledRow, Sequence
from engine.core.step import StepBuilder


class Shares:
    """Rows for groups that are not steady."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def rows(self, group: Group, budget: int, prefill_cap: int | None) -> list[ScheduledRow]:
        """The group's rows with `budget` tokens left; drafts are written where the request says."""
        rows = rows_of(group, budget, prefill_cap)
        group.drafted = rows[0].drafts if rows else 0
        speculation = group.request.speculation
        if group.drafted and speculation and speculation.mode is SpeculationMode.FORK:
            (root,), request = group.sequences, group.request
            group.draft = Sequence(request, request.width, root.computed)
            self._manager.fork(root, [group.draft])
            rows = [rows[0]._replace(sequence=group.draft)]
        return rows

    def extend(self, group: Group, step: StepBuilder) -> None:
        """Take the memory of the group's rows, which must be free, and put them into the step."""
        request_id = group.request.request_id
        for row in group.rows:
            sequence, query_len, samples, drafts = row
            context = sequence.computed
            step.new_blocks += self._manager.extend(row)
            step.budget -= query_len
            table = written(sequence.table, context + query_len)
            step.rows.append(Row(request_id, sequence.branch, context, query_len, samples, table, drafts))

    def enter(self, group: Group, step: StepBuilder, prefill_cap: int | None) -> None:
        """The share of a group that has just come in: nothing, where its memory is not free yet."""
        group.rows = self.rows(group, step.budget, prefill_cap)
        if group.rows and self._manager.can_extend(group.rows):
            self.extend(group, step)
            return
        group.rows = []
        if group.draft is not None:
            self._manager.release(group.draft)
            group.draft = None
