"""The scheduling choices that a user can replace: queue order, which group to preempt, and admission.

A user's own class, given as `module:Class`, has the methods of the protocol. It runs in the simulator and on the
engine. The eviction order can be replaced too: see `engine.core.memory.eviction`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.core.options import Scheduling
from engine.core.request import Request
from engine.core.sequence import Group


class QueueOrder(Protocol):
    """Which request is served first."""

    def key(self, request: Request, rank: int) -> tuple[int | float, ...]:
        """A sort key: lower is admitted first and preempted last. `rank` is the number of earlier submissions."""


class VictimChoice(Protocol):
    """Which group is preempted when blocks run out."""

    def choose(self, candidates: Sequence[Group]) -> int:
        """The index of the group to preempt. `candidates` are in running order and never empty."""


class Admission(Protocol):
    """Which requests may be admitted. It is asked only for requests that fit."""

    def allows(self, request: Request, free_blocks: int, running: int) -> bool:
        """Whether `request` may be admitted now, with `running` requests in the batch."""


class FirstComeFirstServed:
    """In order of submission."""

    def key(self, request: Request, rank: int) -> tuple[int, ...]:
        """The rank."""
        return (rank,)


class ByPriority:
    """Lower `Request.priority` first, then in order of submission."""

    def key(self, request: Request, rank: int) -> tuple[int, ...]:
        """Priority, then rank."""
        return (request.priority, rank)


class Youngest:
    """Preempts the group that was admitted last."""

    def choose(self, candidates: Sequence[Group]) -> int:
        """The last."""
        return len(candidates) - 1


class LastInQueue:
    """Preempts the group that is last in queue order."""

    def choose(self, candidates: Sequence[Group]) -> int:
        """The group with the highest key."""
        return max(range(len(candidates)), key=lambda index: candidates[index].key)


class AdmitWhatFits:
    """Admits every request that fits."""

    def allows(self, request: Request, free_blocks: int, running: int) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class Policies:
    """One policy of each kind: queue order, choice of the group to preempt, and admission."""

    order: QueueOrder = field(default_factory=FirstComeFirstServed)
    victim: VictimChoice = field(default_factory=Youngest)
    admission: Admission = field(default_factory=AdmitWhatFits)

    @classmethod
    def of(cls, scheduling: Scheduling) -> "Policies":
        """The policies that a built-in `Scheduling` option means."""
        return cls(ByPriority(), LastInQueue()) if scheduling is Scheduling.priority else cls()
