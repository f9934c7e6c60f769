"""The decode calendar: which steady sequences need a block, or end, at which step.

In each step, a steady sequence writes one token into a block that it does not share. So the step at which its block
is full and the step at which it ends are known when it joins the calendar. A step then costs time only for the
sequences that need something in it, not for all that run.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Table
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from engine.core.plan import IntArray
from engine.core.sequence import Group, Sequence, StepClock


class SteadyRows(NamedTuple):
    """The calendar's rows, in running order: who they are, and their computed tokens less the clock."""

    request_ids: list[int]  # one entry a group
    sequences: list[Sequence]
    tables: list[Table[int]]  # the very lists, so that they outlive their sequences
    bases: IntArray


class DecodeCalendar:
    """Steady groups in running order. `block_size` None: nothing is ever due (reserved memory)."""

    def __init__(self, block_size: int | None) -> None:
        self.clock = StepClock()
        self.groups: dict[Group, None] = {}
        self.rows = 0
        self._block_size = block_size or 1
        self._grows = block_size is not None
        self._due: list[dict[Group, None]] = [{} for _ in range(self._block_size)]
        self._due_rows = [0] * self._block_size
        self._ends: dict[int, dict[Group, None]] = {}
        self._end_times: list[int] = []
        self._view: SteadyRows | None = None

    def join(self, group: Group) -> None:
        """`group` decodes from now on. Its sequences are equally long."""
        end = self.clock.now + group.remaining
        group.follow(self.clock)
        self.groups[group] = None
        width = len(group.sequences)
        self.rows += width
        self._view = None
        bucket = -group.sequences[0].base % self._block_size
        self._due[bucket][group] = None
        self._due_rows[bucket] += width
        if end not in self._ends:
            self._ends[end] = {}
            heappush(self._end_times, end)
        self._ends[end][group] = None

    def leave(self, group: Group) -> None:
        """`group` is no longer steady: it ended, was preempted, or lost a branch."""
        end = self.clock.now + group.remaining
        bucket = -group.sequences[0].base % self._block_size
        width = len(group.sequences)
        del self.groups[group], self._due[bucket][group]
        self._ends.get(end, {}).pop(group, None)
        self.rows -= width
        self._due_rows[bucket] -= width
        self._view = None
        group.follow(None)

    def drop(self, group: Group, branch: int) -> Sequence:
        """One branch of a steady group has ended; the others stay where they are."""
        ended = group.drop(branch)
        self.rows -= 1
        self._due_rows[-ended.base % self._block_size] -= 1
        self._view = None
        ended.follow(None)
        return ended

    def due(self, later: int = 0) -> list[Group]:
        """Groups whose sequences need a new block for the coming step, or the step `later` after it."""
        if not self._grows:
            return []
        return list(self._due[(self.clock.now + later) % self._block_size])

    def due_rows(self) -> Iterator[int]:
        """How many sequences need a new block in the step after the coming one, in the one after that, and so on."""
        step = self.clock.now
        while True:
            step += 1
            yield self._due_rows[step % self._block_size] if self._grows else 0

    def steps_to_end(self) -> int:
        """Decode steps until the first group has all its tokens."""
        times = self._end_times
        while not self._ends[times[0]]:
            del self._ends[heappop(times)]
        return times[0] - self.clock.now

    def tick(self, steps: int) -> list[Group]:
        """`steps` steps were taken; returns the groups that now have all their tokens, still on the calendar."""
        self.clock.now = now = self.clock.now + steps
        finished: list[Group] = []
        while self._end_times and self._end_times[0] <= now:
            finished += self._ends.pop(heappop(self._end_times))
        return finished

    def view(self) -> SteadyRows:
        """The rows as they are now; the lists are made anew when the membership changes, never changed."""
        if self._view is None:
            sequences = [sequence for group in self.groups for sequence in group.sequences]
            bases = np.array([sequence.base for sequence in sequences], dtype=np.int64)
            tables = [sequence.table for sequence in sequences]
            self._view = SteadyRows(
                [group.request.request_id for group in self.groups], sequences, tables, bases
            )
        return self._view
