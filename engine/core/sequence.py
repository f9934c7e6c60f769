"""A request while it is served, and the decode calendar: which steady sequences need a block, or end, at which step.

A `Group` is one request with its sequences: their block tables, and how many tokens have K and V. Steady decoders
share one `StepClock`: when the clock advances, each of them has one more token, but none of their objects is changed.

In each step, a steady sequence writes one token into a block that it does not share. So the step at which its block
is full and the step at which it ends are known when it joins the `DecodeCalendar`. A step then costs time only for the
sequences that need something in it, not for all that run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from engine.core.identity import BlockHash
from engine.core.options import Decoding
from engine.core.plan import IntArray
from engine.core.request import Request


class StepClock:
    """The number of steps taken so far. A counter stored as `base` is `base + now`, so it needs no update."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0


class SequenceState:
    """One sequence of tokens: its block table, and how many tokens have K and V in those blocks (`computed`).

    `table` lists block ids in order; a contiguous reservation is a `range` of slots. While a sequence is on the decode
    calendar, `computed` advances with the calendar's clock and a step does not change the object.
    """

    __slots__ = (
        "_base", "_clock", "block_hashes", "branch", "cached_blocks", "held", "private", "request", "table",
    )  # fmt: skip

    def __init__(self, request: Request, branch: int = 0, computed: int = 0) -> None:
        self.request = request
        self.branch = branch
        self.table: Sequence[int] = ()
        self.block_hashes: Sequence[BlockHash] = ()  # of the leading full blocks that can be shared
        self.cached_blocks = 0  # leading blocks of the table that are in the prefix cache
        self.private = 0  # the first of the numbers that name blocks which only its own request can use
        self.held = 0  # leading blocks of the table that its window has left
        self._base = computed
        self._clock: StepClock | None = None

    @property
    def computed(self) -> int:
        """Tokens with K and V in the pool; the step that is running is not counted."""
        return self._base if self._clock is None else self._base + self._clock.now

    @computed.setter
    def computed(self, tokens: int) -> None:
        self._base = tokens if self._clock is None else tokens - self._clock.now

    @property
    def base(self) -> int:
        """`computed` minus the clock; the same as `computed` when the sequence follows no clock."""
        return self._base

    def follow(self, clock: StepClock | None) -> None:
        """Let `computed` grow by one with every step of `clock` from now on; None stops this."""
        computed = self.computed
        self._clock = clock
        self.computed = computed

    def __repr__(self) -> str:
        return f"sequence {self.request.request_id}.{self.branch}"


class ScheduledRow(NamedTuple):
    """What one sequence computes in the current step; the last `drafts` of its query tokens are draft tokens.

    Slots for `ahead` more tokens are reserved. The last `unseen` tokens are not known yet when the step is scheduled.
    """

    sequence: SequenceState
    query_len: int
    samples: bool
    drafts: int = 0
    ahead: int = 0
    unseen: int = 0


class Group:
    """A request and its sequences: first one sequence that computes the prompt, then the branches forked from it.

    vLLM's name for it is `SequenceGroup` (v0) or `Request` (v1). `generated` counts the known tokens per branch; all
    branches sample in the same step. After a preemption by recomputation the group has one sequence again, but
    `generated` stays: those tokens are computed again, not sampled again.
    """

    __slots__ = (
        "_base", "_clock", "block_hashes", "branches", "decoded", "draft", "drafted", "entered", "forked",
        "key", "known", "lost", "private", "proposes", "request", "rows", "sequences",
    )  # fmt: skip

    def __init__(self, request: Request, key: tuple[object, ...] = ()) -> None:
        self.request = request
        self.key = key  # position in the queue: lower is served first
        self.sequences = [SequenceState(request)]
        self.branches = list(range(request.width)) if request.width > 1 else [0]  # that have not ended
        self.draft: SequenceState | None = None  # the forked child that has this step's draft tokens
        self.drafted = 0  # draft tokens in the current step
        self.proposes = False  # its last row chose a token, so that a draft model has proposed the next ones
        # by group of layers: of the prompt's full blocks, once looked up
        self.block_hashes: dict[int | None, Sequence[BlockHash]] = {}
        self.private: list[int] = []  # numbers of private blocks that preemptions left in the cache
        self.decoded = -1  # the last step that computed a token which the step before had chosen
        self.known = 0  # if steady: the last time of the calendar's clock without such a token
        self.entered = 0  # its place in the order of admission
        self.forked = False
        self.lost = 0  # tokens that were computed before a preemption dropped them
        self.rows: list[ScheduledRow] = []  # what its sequences compute in the current step
        self._base = 0
        self._clock: StepClock | None = None

    @property
    def generated(self) -> int:
        """Tokens known per branch beyond the prompt."""
        return self._base if self._clock is None else self._base + self._clock.now

    @generated.setter
    def generated(self, tokens: int) -> None:
        self._base = tokens if self._clock is None else tokens - self._clock.now

    def follow(self, clock: StepClock | None) -> None:
        """Let `generated` and `computed` grow by one with every step of `clock`; None stops this."""
        generated = self.generated
        self._clock = clock
        self.generated = generated
        for sequence in self.sequences:
            sequence.follow(clock)

    @property
    def width(self) -> int:
        """The number of branches that have not ended."""
        return len(self.branches)

    @property
    def tokens(self) -> int:
        """Known tokens of each branch: prompt and generated."""
        return self.request.prompt_tokens + self.generated

    @property
    def root_target(self) -> int:
        """How many tokens the single sequence must compute before it samples or forks."""
        return self.tokens if self.request.width == 1 else self.request.prompt_tokens

    @property
    def decodes(self) -> bool:
        """Whether each sequence has all its known tokens but the last one."""
        return self.generated > 0 and all(self.tokens - one.computed <= 1 for one in self.sequences)

    @property
    def remaining(self) -> int:
        """Tokens that each branch must still generate."""
        return self.request.output_tokens - self.generated

    @property
    def shares_outputs(self) -> bool:
        """Whether other requests may find generated blocks in the prefix cache."""
        identity = self.request.identity
        return identity is not None and identity.shares_outputs

    @property
    def is_beam(self) -> bool:
        """Whether the branches are beams, which get new parents after every step."""
        return self.request.decoding is Decoding.beam

    @property
    def holders(self) -> list[SequenceState]:
        """Every sequence that may hold blocks, a draft child included."""
        return self.sequences if self.draft is None else [*self.sequences, self.draft]

    def fork(self) -> list[SequenceState]:
        """Make the root the first branch; returns the other branches, which have no blocks yet."""
        root = self.sequences[0]
        root.branch = self.branches[0]
        others = [SequenceState(self.request, branch, root.computed) for branch in self.branches[1:]]
        self.sequences = [root, *others]
        self.forked = True
        return others

    def drop(self, branch: int) -> SequenceState:
        """End a branch; returns its sequence. The caller must release its blocks."""
        ended = next(sequence for sequence in self.sequences if sequence.branch == branch)
        self.sequences = [sequence for sequence in self.sequences if sequence is not ended]
        self.branches.remove(branch)
        self.lost = 0  # a branch ends with a new token: all that was lost has been computed again
        return ended

    def restart(self) -> int:
        """Start again after the caller has released all blocks; the generated tokens are kept.

        Returns how many tokens that an earlier preemption dropped have not been computed again.
        """
        computed = sum(sequence.computed for sequence in self.sequences)
        if self.forked:  # the prompt was computed once for all branches
            computed -= (len(self.sequences) - 1) * self.request.prompt_tokens
        left = max(0, self.lost - computed)
        self.lost = computed + left
        self.sequences = [SequenceState(self.request)]
        self.draft = None
        self.forked = self.proposes = False
        self.rows = []
        return left


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
        end, group.known = self.clock.now + group.remaining, self.clock.now + (not group.proposes)
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
            bases = np.array([sequence._base for sequence in sequences], dtype=np.int64)
            tables = [sequence.table for sequence in sequences]
            self._view = SteadyRows(
                [group.request.request_id for group in self.groups], sequences, tables, bases
            )
        return self._view
