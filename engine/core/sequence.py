"""The mutable state of a request under way: its sequences, and how far each has come."""

from collections.abc import Sequence as Table
from dataclasses import dataclass, field

from engine.core.identity import BlockName
from engine.core.request import Decoding, Request


@dataclass(slots=True, eq=False)
class Sequence:
    """One row of tokens. `computed` of its tokens have K and V in the blocks of `table`."""

    request: Request
    branch: int = 0
    computed: int = 0
    table: Table[int] = ()
    names: Table[BlockName] = ()  # of the prompt's full blocks, where the prefix cache is on

    def __repr__(self) -> str:
        return f"sequence {self.request.request_id}.{self.branch}"


@dataclass(slots=True, eq=False)
class Group:
    """A request and its sequences: one that computes the prompt, then `width` branches forked from it.

    `generated` counts the tokens known per branch; branches always sample in the same step. After a preemption the
    group starts again with one sequence while `generated` stays: those tokens are recomputed, not chosen anew.
    """

    request: Request
    sequences: list[Sequence]
    names: list[BlockName] | None = None  # of the prompt's full blocks; None until the first lookup
    generated: int = 0
    forked: bool = False
    lost: int = 0  # tokens whose KV a preemption threw away, until the group is admitted again
    rows: list["ScheduledRow"] = field(default_factory=list)  # its share of the step under way

    @classmethod
    def of(cls, request: Request) -> "Group":
        """A group that has computed nothing."""
        return cls(request, [Sequence(request)])

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
        return self.request.decoding is Decoding.BEAM

    def fork(self) -> list[Sequence]:
        """Turn the root into branch 0 and return the other branches, which hold no blocks yet."""
        root = self.sequences[0]
        others = [Sequence(self.request, branch, root.computed) for branch in range(1, self.request.width)]
        self.sequences = [root, *others]
        self.forked = True
        return others

    def restart(self) -> None:
        """Forget all KV (the caller has released the blocks) and keep the generated tokens."""
        self.lost = sum(sequence.computed for sequence in self.sequences)
        if self.forked:  # the prompt was computed once for all branches
            self.lost -= (self.request.width - 1) * self.request.prompt_tokens
        self.sequences = [Sequence(self.request)]
        self.forked = False
        self.rows = []


@dataclass(slots=True, frozen=True)
class ScheduledRow:
    """A sequence's share of the step under way."""

    sequence: Sequence
    query_len: int
    samples: bool
