"""The state of a request while it is served: its sequences, their block tables, and how many tokens have K and V.

A `Group` is one request with its sequences. Steady decoders share one step clock: when the clock advances, all of
them have one more token, and none of them is touched.
"""

from collections.abc import Sequence as Table
from typing import NamedTuple

from engine.core.identity import BlockName
from engine.core.options import Decoding
from engine.core.request import Request


class StepClock:
    """Steps taken so far. Whoever reads `base + now` advances without being touched."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0


class Sequence:
    """One row of tokens. `computed` of its tokens have K and V in the blocks of `table`.

    A sequence on the decode calendar advances with the calendar's clock and is not touched by a step.
    """

    __slots__ = ("_base", "_clock", "branch", "named", "names", "request", "table")

    def __init__(self, request: Request, branch: int = 0, computed: int = 0) -> None:
        self.request = request
        self.branch = branch
        self.table: Table[int] = ()
        self.names: Table[BlockName] = ()  # of the leading full blocks that others may have too
        self.named = 0  # leading blocks of the table that are in the prefix cache
        self._base = computed
        self._clock: StepClock | None = None

    @property
    def computed(self) -> int:
        """Tokens with K and V in the pool, the step under way not counted."""
        return self._base if self._clock is None else self._base + self._clock.now

    @computed.setter
    def computed(self, tokens: int) -> None:
        self._base = tokens if self._clock is None else tokens - self._clock.now

    @property
    def base(self) -> int:
        """What `computed` is ahead of the clock by."""
        return self._base

    def follow(self, clock: StepClock | None) -> None:
        """Advance by one with every step of `clock` from now on; None stops that."""
        computed = self.computed
        self._clock = clock
        self.computed = computed

    def __repr__(self) -> str:
        return f"sequence {self.request.request_id}.{self.branch}"


class ScheduledRow(NamedTuple):
    """A sequence's share of the step under way; the last `drafts` of its query tokens are speculative."""

    sequence: Sequence
    query_len: int
    samples: bool
    drafts: int = 0


class Group:
    """A request and its sequences: one that computes the prompt, then its branches forked from it.

    `generated` counts the tokens known per branch; branches always sample in the same step. After a preemption the
    group starts again with one sequence while `generated` stays: those tokens are recomputed, not chosen anew.
    """

    __slots__ = (
        "_base",
        "_clock",
        "branches",
        "draft",
        "drafted",
        "forked",
        "key",
        "lost",
        "names",
        "request",
        "rows",
        "sequences",
        "trail",
    )

    def __init__(self, request: Request, key: tuple[object, ...] = ()) -> None:
        self.request = request
        self.key = key  # place in the queue: lower is served first
        self.sequences = [Sequence(request)]
        self.branches = list(range(request.width)) if request.width > 1 else [0]  # that have not ended
        self.draft: Sequence | None = None  # the child that holds this step's draft tokens
        self.drafted = 0  # draft tokens of the step under way
        self.names: Table[BlockName] | None = None  # of the prompt's full blocks; None until the first lookup
        self.trail: dict[int, list[int]] = {}  # private blocks that preemptions left cached, by position
        self.forked = False
        self.lost = 0  # tokens whose KV a preemption threw away, until the group is admitted again
        self.rows: list[ScheduledRow] = []  # its share of the step under way
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
        """Generate a token with every step of `clock` from now on; None stops that."""
        generated = self.generated
        self._clock = clock
        self.generated = generated
        for sequence in self.sequences:
            sequence.follow(clock)

    @property
    def width(self) -> int:
        """Branches that have not ended."""
        return len(self.branches)

    @property
    def tokens(self) -> int:
        """Known tokens of a branch: prompt and generated."""
        return self.request.prompt_tokens + self.generated

    @property
    def root_target(self) -> int:
        """How far the single sequence must come before it samples or forks."""
        return self.tokens if self.request.width == 1 else self.request.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens that each branch has still to generate."""
        return self.request.output_tokens - self.generated

    @property
    def is_beam(self) -> bool:
        """Whether its branches are re-parented after every step."""
        return self.request.decoding is Decoding.beam

    @property
    def holders(self) -> list[Sequence]:
        """Every sequence that may hold blocks, a draft child included."""
        return self.sequences if self.draft is None else [*self.sequences, self.draft]

    def fork(self) -> list[Sequence]:
        """Turn the root into the first branch and return the others, which hold no blocks yet."""
        root = self.sequences[0]
        root.branch = self.branches[0]
        others = [Sequence(self.request, branch, root.computed) for branch in self.branches[1:]]
        self.sequences = [root, *others]
        self.forked = True
        return others

    def drop(self, branch: int) -> Sequence:
        """A branch has ended; returns its sequence, whose blocks the caller releases."""
        ended = next(sequence for sequence in self.sequences if sequence.branch == branch)
        self.sequences = [sequence for sequence in self.sequences if sequence is not ended]
        self.branches.remove(branch)
        return ended

    def restart(self) -> None:
        """Forget all KV (the caller has released the blocks) and keep the generated tokens."""
        self.lost = sum(sequence.computed for sequence in self.sequences)
        if self.forked:  # the prompt was computed once for all branches
            self.lost -= (len(self.sequences) - 1) * self.request.prompt_tokens
        self.sequences = [Sequence(self.request)]
        self.draft = None
        self.forked = False
        self.rows = []
