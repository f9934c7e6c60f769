"""The running batch, the queue of waiting requests, and the step that is being scheduled.

Steady decoders of the batch are on the decode calendar. The other groups follow in order of admission. A step has rows,
the memory that they write to, and becomes the finished plan. A group adds a chunk of its prompt, or one token per
branch. After a preemption its branches compute their tokens again. Rows of steady decoders come from the calendar as
arrays; all other rows are made one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import repeat
from typing import overload

import numpy as np

from engine.core.memory.manager import KVCacheManager
from engine.core.options import SchedulerLimits, SpeculationMode
from engine.core.plan import ArrayRows, IntArray, Row
from engine.core.request import Request
from engine.core.sequence import DecodeCalendar, Group, ScheduledRow, SequenceState, SteadyRows


def draft_slots(request: Request) -> int:
    """Tokens of a step's budget that are kept for the draft model, beside each row (vLLM's
    `max_num_new_slots_for_drafting`).
    """
    return int(request.most_kv_tokens > request.final_kv_tokens)


class RunningBatch:
    """The running groups in order of admission; in vLLM this is the list `running`.

    The leading steady groups are on the calendar; each step iterates only over the `others`. `limit` is the largest
    number of rows on the calendar: they all run in every step, so they must fit the token budget of a step. `ending`
    are groups that have all their tokens and their blocks still: they compute nothing.
    """

    def __init__(self, growth: int | None, limit: int) -> None:
        self.calendar = DecodeCalendar(growth)
        self.others: list[Group] = []
        self.ending: list[Group] = []
        self._entered = 0
        # branches of running groups; one that has not forked yet counts with its full width
        self.sequences = 0
        self._limit = limit

    def __len__(self) -> int:
        return len(self.calendar.groups) + len(self.others) + len(self.ending)

    def __contains__(self, group: Group) -> bool:
        return group in self.calendar.groups or group in self.others

    def groups(self, first: int = 0) -> list[Group]:
        """All groups in order of admission, without the first so many `others`."""
        found = [*self.calendar.groups, *self.others[first:]]
        return sorted([*found, *self.ending], key=lambda group: group.entered) if self.ending else found

    def add(self, group: Group) -> None:
        """Add `group`, which was just admitted."""
        self._entered += 1
        group.entered = self._entered
        self.others.append(group)
        self.sequences += group.width

    def hold(self, group: Group) -> None:
        """`group` has ended, and keeps its place and its blocks until it is removed."""
        self.remove(group)
        self.ending.append(group)
        self.sequences += group.width

    def remove(self, group: Group) -> None:
        """Remove `group`, which has ended or was aborted or preempted."""
        if group in self.calendar.groups:
            self.calendar.leave(group)
        elif group in self.ending:
            self.ending.remove(group)
        else:
            self.others.remove(group)
        self.sequences -= group.width

    def drop(self, group: Group, branch: int) -> SequenceState:
        """End a branch of `group`; returns its sequence. The caller must release its blocks."""
        self.sequences -= 1
        return self.calendar.drop(group, branch) if group in self.calendar.groups else group.drop(branch)

    def settle(self) -> None:
        """Move the leading groups of `others` to the calendar, as far as they only decode from now on."""
        steady = 0
        for group in self.others:
            if not _is_steady(group) or self.calendar.rows + group.width > self._limit:
                break
            self.calendar.join(group)
            steady += 1
        if steady:
            del self.others[:steady]


def _is_steady(group: Group) -> bool:
    """Whether each sequence computes one token per step from now on, and writes only into blocks of its own.

    Branches past the prompt have already copied a shared last block. Beams are never steady, because they get new
    parents in every step; nor are requests with draft tokens, because the number of accepted tokens changes.
    """
    request = group.request
    if group.is_beam or request.speculation is not None or not group.decodes:
        return False
    return request.width == 1 or (group.forked and group.tokens - 1 > request.prompt_tokens)


class WaitingQueue:
    """Waiting groups by key, lowest first. A preempted group gets its old position again. Operations are O(log n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[object, ...], Group]] = []
        self._members: set[Group] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, group: Group) -> bool:
        return group in self._members

    def push(self, group: Group) -> None:
        """Add `group`; its key must differ from all others."""
        heappush(self._heap, (group.key, group))
        self._members.add(group)

    @property
    def head(self) -> Group | None:
        """The group that is served next, or None."""
        while self._heap and self._heap[0][1] not in self._members:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Group:
        """Remove and return the head; the queue must not be empty."""
        group = self.head
        assert group is not None
        heappop(self._heap)
        self._members.remove(group)
        return group

    def remove(self, group: Group) -> None:
        """Remove a waiting group from any position."""
        self._members.remove(group)


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
            tables = list(map(written_table, tables, [context + 1 for context in contexts]))
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
    padded: list[int] = field(default_factory=list)
    appended: dict[Group, int] = field(default_factory=dict)  # new blocks of steady groups
    new_blocks: int = 0  # of groups that are not steady
    hit_tokens: int = 0
    ended: int = 0  # of `preempted`: those that the step under way ends

    @property
    def only_steady(self) -> bool:
        """Whether the step has only steady rows, and no group is admitted, preempted or swapped in."""
        return not (self.rows or self.admitted or self.preempted or self.resumed)


def rows_of(group: Group, budget: int, prefill_cap: int | None = None) -> list[ScheduledRow]:
    """The group's rows with `budget` tokens left and chunks of at most `prefill_cap`; empty if the budget is small."""
    if not group.forked:
        return [_root_row(group, budget, prefill_cap)]
    lacking = [group.tokens - sequence.computed for sequence in group.sequences]
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
    if speculation is None or speculation.whole or lacking > 1 or not group.generated:
        return ScheduledRow(root, query, samples)
    drafts = min(speculation.tokens, group.remaining - 1, budget - 1)
    return ScheduledRow(root, 1 + drafts, True, drafts)


def _whole_row(
    group: Group, budget: int, prefill_cap: int | None, drafts: int, longest: int | None
) -> ScheduledRow:
    """The row of a request whose drafts go on past its end: up to `drafts`, and as many slots for the next ones.

    Only the longest sequence that is served, `longest`, ends them (vLLM's `Scheduler.schedule` and `allocate_slots`).
    """
    (root,) = group.sequences
    lacking, ahead = (
        group.root_target - root.computed,
        group.request.most_kv_tokens - group.request.final_kv_tokens,
    )
    query = min(lacking + drafts, budget if prefill_cap is None else min(budget, prefill_cap))
    if longest is not None:
        query = min(query, longest - root.computed - 1)
        ahead = min(ahead, longest - root.computed - query)
    return ScheduledRow(root, query, query >= lacking, max(0, query - lacking), ahead)


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

    def __init__(self, manager: KVCacheManager, limits: SchedulerLimits) -> None:
        self._manager = manager
        self._limits = limits

    def rows(
        self, group: Group, budget: int, prefill_cap: int | None, padded: bool = False
    ) -> list[ScheduledRow]:
        """The group's rows with `budget` tokens left; none if that is too few. It forks the draft child if the request
        asks for one.

        A `padded` group has draft tokens although nothing was proposed.
        """
        speculation = group.request.speculation
        if speculation is not None and speculation.whole:
            rows, left = [], budget - draft_slots(group.request)
            if left > 0:
                drafts = speculation.tokens if group.proposes or padded else 0
                rows = [_whole_row(group, left, prefill_cap, drafts, self._limits.max_model_len)]
        else:
            rows = rows_of(group, budget, prefill_cap)
        if len(rows) == 1 and not rows[0].drafts:
            rows = self._cut(group, rows[0])
        if self._limits.ahead and group.proposes:
            rows = [row._replace(unseen=1) for row in rows]
        group.drafted = rows[0].drafts if rows else 0
        if group.drafted and speculation and speculation.mode is SpeculationMode.fork:
            (root,), request = group.sequences, group.request
            group.draft = SequenceState(request, request.width, root.computed)
            self._manager.fork(root, [group.draft])
            rows = [rows[0]._replace(sequence=group.draft)]
        return rows

    def _cut(self, group: Group, row: ScheduledRow) -> list[ScheduledRow]:
        """The row up to where the manager lets a chunk end; none where that is its begin."""
        start = row.sequence.computed
        query = self._manager.chunk_end(group, start, start + row.query_len, self._limits.most_chunk) - start
        if query == row.query_len:
            return [row]
        return [row._replace(query_len=query, samples=False)] if query else []

    def extend(self, group: Group, step: StepBuilder) -> None:
        """Allocate memory for the group's rows and add them to the step. `can_extend` must have been true."""
        request = group.request
        slots = draft_slots(request) if request.speculation is not None else 0
        for row in group.rows:
            sequence, query_len, samples, drafts, *_ = row
            context = sequence.computed
            step.new_blocks += self._manager.extend(row)
            step.budget -= query_len + slots
            table = written_table(sequence.table, context + query_len)
            step.rows.append(
                Row(request.request_id, sequence.branch, context, query_len, samples, table, drafts)
            )

    def enter(self, group: Group, step: StepBuilder, prefill_cap: int | None, padded: bool = False) -> None:
        """Add the rows of a group that was just admitted or swapped in; no rows if too few blocks are free."""
        group.rows = self.rows(group, step.budget, prefill_cap, padded)
        if group.rows and self._manager.can_extend(group.rows):
            self.extend(group, step)
            return
        group.rows = []
        if group.draft is not None:
            self._manager.release(group.draft)
            group.draft = None
