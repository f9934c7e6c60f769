"""The state of a request while it is served: its sequences, their block tables, and how many tokens have K and V.

A `Group` is one request with its sequences. Steady decoders share one `StepClock`: when the clock advances, each of
them has one more token, but none of their objects is changed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engine.core.identity import BlockHash
from engine.core.options import Decoding
from engine.core.request import Request

PrivateBlocks = dict[int, dict[int, int]]
"""By table index: blocks that only their own request can use, with their private hashes, the oldest first."""


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
        "_base",
        "_clock",
        "block_hashes",
        "branch",
        "cached_blocks",
        "private_blocks",
        "request",
        "table",
    )

    def __init__(self, request: Request, branch: int = 0, computed: int = 0) -> None:
        self.request = request
        self.branch = branch
        self.table: Sequence[int] = ()
        self.block_hashes: Sequence[BlockHash] = ()  # of the leading full blocks that can be shared
        self.cached_blocks = 0  # leading blocks of the table that are in the prefix cache
        self.private_blocks: PrivateBlocks | None = None  # the group's, where forks copy and this is its root
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
    """What one sequence computes in the current step; the last `drafts` of its query tokens are draft tokens."""

    sequence: SequenceState
    query_len: int
    samples: bool
    drafts: int = 0


class Group:
    """A request and its sequences: first one sequence that computes the prompt, then the branches forked from it.

    vLLM's name for it is `SequenceGroup` (v0) or `Request` (v1). `generated` counts the known tokens per branch; all
    branches sample in the same step. After a preemption by recomputation the group has one sequence again, but
    `generated` stays: those tokens are computed again, not sampled again.
    """

    __slots__ = (
        "_base",
        "_clock",
        "block_hashes",
        "branches",
        "draft",
        "drafted",
        "forked",
        "key",
        "lost",
        "private_blocks",
        "request",
        "rows",
        "sequences",
    )

    def __init__(self, request: Request, key: tuple[object, ...] = ()) -> None:
        self.request = request
        self.key = key  # position in the queue: lower is served first
        self.sequences = [SequenceState(request)]
        self.branches = (
            list(range(request.width)) if request.width > 1 else [0]
        )  # indices that have not ended
        self.draft: SequenceState | None = None  # the forked child that has this step's draft tokens
        self.drafted = 0  # draft tokens in the current step
        self.block_hashes: Sequence[BlockHash] | None = (
            None  # of the prompt's full blocks; None until the first lookup
        )
        self.private_blocks: PrivateBlocks = {}  # that preemptions left in the cache
        self.forked = False
        self.lost = 0  # tokens whose KV a preemption dropped; set until the group is admitted again
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
        return ended

    def restart(self) -> None:
        """Start again after the caller has released all blocks; the generated tokens are kept."""
        self.lost = sum(sequence.computed for sequence in self.sequences)
        if self.forked:  # the prompt was computed once for all branches
            self.lost -= (len(self.sequences) - 1) * self.request.prompt_tokens
        self.sequences = [SequenceState(self.request)]
        self.draft = None
        self.forked = False
        self.rows = []
