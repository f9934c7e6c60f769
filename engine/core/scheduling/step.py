"""The step that is being scheduled: its rows, the memory they write to, and the finished plan.

A group adds a chunk of its prompt, or one token per branch. After a preemption its branches compute their tokens
again. Rows of steady decoders come from the calendar as arrays; all other rows are made one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import overload

import numpy as np

from engine.core.calendar import DecodeCalendar, SteadyRows
from engine.core.memory.manager import KVCacheManager
from engine.core.options import SpeculationMode
from engine.core.plan import ArrayRows, IntArray, Row, StepPlan
from engine.core.request import Request
from engine.core.sequence import Group, ScheduledRow, SequenceState


def written_table(table: Sequence[int], tokens: int) -> Sequence[int]:
    """The table for an executor: of a contiguous reservation only the first `tokens` slots, else the whole table."""
    return table[:tokens] if isinstance(table, range) else table


_NEW_ROW: Callable[[tuple[object, ...]], Row] = partial(tuple.__new__, Row)  # half of the time of `Row(...)`


class BatchRows(ArrayRows):
    """The rows of a step: steady rows first, then `others`. `now` is the calendar's clock at this step."""

    def __init__(self, steady: SteadyRows, now: int, others: list[Row]) -> None:
        self.others = others
        self._steady = steady
        self._now = now
        self._rows: list[Row] | None = None

    def __len__(self) -> int:
        return len(self._steady.sequences) + len(self.others)

    @property
    def query_len(self) -> IntArray:
        """Query tokens of each row, int64 `[rows]`."""
        ones = np.ones(len(self._steady.sequences), dtype=np.int64)
        return self._with_others(ones, [row.query_len for row in self.others])

    @property
    def context_len(self) -> IntArray:
        """Context tokens of each row before the step, int64 `[rows]`."""
        return self._with_others(self._steady.bases + self._now, [row.context_len for row in self.others])

    def _with_others(self, steady: IntArray, others: list[int]) -> IntArray:
        return np.concatenate([steady, np.array(others, dtype=np.int64)]) if others else steady

    def _laid_out(self) -> list[Row]:
        if self._rows is None:
            self._rows = [*self._steady_rows(), *self.others]
        return self._rows

    def _steady_rows(self) -> Iterator[Row]:
        if not self._steady.sequences:
            return iter(())
        ids, branches = self._steady.labels
        contexts, tables = (self._steady.bases + self._now).tolist(), self._steady.tables
        if isinstance(tables[0], range):  # one manager has one kind of table
            tables = [
                written_table(table, context + 1) for table, context in zip(tables, contexts, strict=True)
            ]
        fields = (ids, branches, contexts, repeat(1), repeat(True), tables, repeat(0))
        return map(_NEW_ROW, zip(*fields, strict=False))  # repeat() has no end

    def __iter__(self) -> Iterator[Row]:
        return iter(self._laid_out())

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self._laid_out()[index]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, ArrayRows | list | tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # like a list


@dataclass(slots=True)
class StepBuilder:
    """The step so far; `budget` is the number of query tokens that can still be added."""

    budget: int
    rows: list[Row] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    appended: dict[Group, int] = field(default_factory=dict)  # new blocks of steady groups
    new_blocks: int = 0  # of groups that are not steady
    hit_tokens: int = 0

    @property
    def only_steady(self) -> bool:
        """Whether the step has only steady rows, and no group is admitted, preempted or swapped in."""
        return not (self.rows or self.admitted or self.preempted or self.resumed)

    def plan(
        self,
        step: int,
        manager: KVCacheManager,
        calendar: DecodeCalendar,
        num_steps: int,
        running: int,
        waiting: int,
        head: Request | None,
    ) -> StepPlan:
        """The finished plan, with the copies, frees and swaps that the manager has collected since the last plan."""
        steady = calendar.view()
        swap_out, swap_in = manager.drain_swaps()
        return StepPlan(
            step=step,
            rows=BatchRows(steady, calendar.clock.now, self.rows),
            copies=manager.drain_copies(),
            frees=manager.drain_frees(),
            num_steps=num_steps,
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


def rows_of(group: Group, budget: int, prefill_cap: int | None = None) -> list[ScheduledRow]:
    """The group's rows with `budget` tokens left and chunks of at most `prefill_cap`; empty if the budget is small."""
    if not group.forked:
        return [_root_row(group, budget, prefill_cap)]
    tokens = group.tokens
    lacking = [tokens - sequence.computed for sequence in group.sequences]
    if max(lacking) == 1:  # branches sample together or not at all
        whole = len(lacking) <= budget
        return [ScheduledRow(sequence, 1, True) for sequence in group.sequences] if whole else []
    return _catch_up(group, lacking, budget if prefill_cap is None else min(budget, prefill_cap))


def _root_row(group: Group, budget: int, prefill_cap: int | None) -> ScheduledRow:
    """A chunk of the prompt (with one branch: of all known tokens), or a decode row with its draft tokens."""
    (root,) = group.sequences
    lacking = group.root_target - root.computed
    query = min(lacking, budget if prefill_cap is None else min(budget, prefill_cap))
    samples = query == lacking and (group.request.width == 1 or group.generated == 0)
    speculation = group.request.speculation
    if speculation is None or lacking > 1 or not group.generated:
        return ScheduledRow(root, query, samples)
    drafts = min(speculation.tokens, group.remaining - 1, budget - 1)
    return ScheduledRow(root, 1 + drafts, True, drafts)


def _catch_up(group: Group, lacking: list[int], budget: int) -> list[ScheduledRow]:
    """Rows after a preemption: each branch computes its generated tokens again, except the last one."""
    rows = []
    for sequence, lack in zip(group.sequences, lacking, strict=True):
        query = min(lack - 1, budget)
        if query > 0:
            rows.append(ScheduledRow(sequence, query, False))
            budget -= query
    return rows


class RowScheduler:
    """Makes the rows of groups that are not steady, and allocates the memory that the rows write to."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def rows(self, group: Group, budget: int, prefill_cap: int | None) -> list[ScheduledRow]:
        """The group's rows with `budget` tokens left. It forks the draft child if the request asks for one."""
        rows = rows_of(group, budget, prefill_cap)
        group.drafted = rows[0].drafts if rows else 0
        speculation = group.request.speculation
        if group.drafted and speculation and speculation.mode is SpeculationMode.fork:
            (root,), request = group.sequences, group.request
            group.draft = SequenceState(request, request.width, root.computed)
            self._manager.fork(root, [group.draft])
            rows = [rows[0]._replace(sequence=group.draft)]
        return rows

    def extend(self, group: Group, step: StepBuilder) -> None:
        """Allocate memory for the group's rows and add them to the step. `can_extend` must have been true."""
        request_id = group.request.request_id
        for row in group.rows:
            sequence, query_len, samples, drafts = row
            context = sequence.computed
            step.new_blocks += self._manager.extend(row)
            step.budget -= query_len
            table = written_table(sequence.table, context + query_len)
            step.rows.append(Row(request_id, sequence.branch, context, query_len, samples, table, drafts))

    def enter(self, group: Group, step: StepBuilder, prefill_cap: int | None) -> None:
        """Add the rows of a group that was just admitted or swapped in; no rows if too few blocks are free."""
        group.rows = self.rows(group, step.budget, prefill_cap)
        if group.rows and self._manager.can_extend(group.rows):
            self.extend(group, step)
            return
        group.rows = []
        if group.draft is not None:
            self._manager.release(group.draft)
            group.draft = None
