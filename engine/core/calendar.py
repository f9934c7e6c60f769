"""The decode calendar: which steady sequences need a block, or end, at which step.

In each step, a steady sequence writes one token into a block that it does not share. So the step at which its block
is full and the step at which it ends are known when it joins the calendar. A step then costs time only for the
sequences that need something in it, not for all that run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from engine.core.plan import IntArray
from engine.core.sequence import Group, SequenceState, StepClock


@dataclass
class SteadyRows:
    """The rows of the calendar in running order. `bases` are their computed tokens minus the clock, int64 `[rows]`."""

    request_ids: list[int]  # one entry per group
    sequences: list[SequenceState]
    tables: list[Sequence[int]]  # references to the tables, so that they outlive their sequences
    bases: IntArray

    @cached_property
    def labels(self) -> tuple[list[int], list[int]]:
        """Requests and branches of the sequences; made when rows are laid out, and kept for the next steps."""
        found = self.sequences
        return [sequence.request.request_id for sequence in found], [sequence.branch for sequence in found]


class DecodeCalendar:
    """Steady groups in running order, sorted by the step in which they need a block and by the step in which they end.

    `join` adds a group and `leave` removes it. In each step, `due` gives the groups that need a block, `view` gives the
    rows, and `tick` advances the clock and gives the groups that have ended. `block_size` None: no group ever needs a
    block, because its memory was reserved.
    """

    def __init__(self, block_size: int | None) -> None:
        self.clock = StepClock()
        self.groups: dict[Group, None] = {}
        self.rows = 0
        self.sharing = 0  # groups whose outputs other requests may find in the prefix cache
        self._block_size = block_size or 1
        self._grows = block_size is not None
        self._due: list[dict[Group, None]] = [{} for _ in range(self._block_size)]
        self._due_rows = [0] * self._block_size
        self._ends: dict[int, dict[Group, None]] = {}
        self._end_times: list[int] = []
        self._view: SteadyRows | None = None

    def join(self, group: Group) -> None:
        """Add `group`, which only decodes from now on. Its sequences must be equally long."""
        end = self.clock.now + group.remaining
        group.follow(self.clock)
        self.groups[group] = None
        width = len(group.sequences)
        self.rows += width
        self.sharing += group.shares_outputs
        self._view = None
        bucket = -group.sequences[0].base % self._block_size
        self._due[bucket][group] = None
        self._due_rows[bucket] += width
        if end not in self._ends:
            self._ends[end] = {}
            heappush(self._end_times, end)
        self._ends[end][group] = None

    def leave(self, group: Group) -> None:
        """Remove `group`, which is no longer steady: it ended or was preempted."""
        end = self.clock.now + group.remaining
        bucket = -group.sequences[0].base % self._block_size
        width = len(group.sequences)
        del self.groups[group], self._due[bucket][group]
        self._ends.get(end, {}).pop(group, None)
        self.rows -= width
        self.sharing -= group.shares_outputs
        self._due_rows[bucket] -= width
        self._view = None
        group.follow(None)

    def drop(self, group: Group, branch: int) -> SequenceState:
        """End one branch of a steady group and return its sequence; the other branches stay on the calendar."""
        ended = group.drop(branch)
        self.rows -= 1
        self._due_rows[-ended.base % self._block_size] -= 1
        self._view = None
        ended.follow(None)
        return ended

    def due(self, later: int = 0) -> list[Group]:
        """Groups whose sequences need a new block for the next step, or for the step `later` steps after it."""
        if not self._grows:
            return []
        return list(self._due[(self.clock.now + later) % self._block_size])

    def due_rows(self) -> Iterator[int]:
        """How many sequences need a new block, for each step after the next one, without end."""
        step = self.clock.now
        while True:
            step += 1
            yield self._due_rows[step % self._block_size] if self._grows else 0

    def steps_to_end(self) -> int:
        """The number of decode steps until the first group has all its tokens."""
        times = self._end_times
        while not self._ends[times[0]]:
            del self._ends[heappop(times)]
        return times[0] - self.clock.now

    def tick(self, steps: int) -> list[Group]:
        """Advance the clock by `steps`; returns the groups that now have all their tokens and stay on the calendar."""
        self.clock.now = now = self.clock.now + steps
        finished: list[Group] = []
        while self._end_times and self._end_times[0] <= now:
            finished += self._ends.pop(heappop(self._end_times))
        return finished

    def view(self) -> SteadyRows:
        """The current rows. When the members change, new lists are made; lists that were returned are never changed."""
        if self._view is None:
            sequences = [sequence for group in self.groups for sequence in group.sequences]
            bases = np.array([sequence.base for sequence in sequences], dtype=np.int64)
            tables = [sequence.table for sequence in sequences]
            self._view = SteadyRows(
                [group.request.request_id for group in self.groups], sequences, tables, bases
            )
        return self._view
