"""The scheduling choices that a user can replace: queue order, which group to preempt, and admission.

A user's own class, given as `module:Class`, has the methods of the protocol. It runs in the simulator and on the
engine. The eviction order can be replaced too: see `engine.core.memory.eviction`.
"""

from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from typing import Protocol

from engine.core.options import Scheduling
from engine.core.request import Request
from engine.core.sequence import Group


class QueueOrder(Protocol):
    """Who is served first."""

    def key(self, request: Request, rank: int) -> tuple[int | float, ...]:
        """The request's place: lower is admitted first and preempted last. `rank` counts submissions."""
        ...


class VictimChoice(Protocol):
    """Who makes room when blocks run out."""

    def choose(self, candidates: Values[Group]) -> int:
        """Index of the group to preempt; `candidates` are in running order and never empty."""
        ...


class Admission(Protocol):
    """Who may enter, beyond what fits."""

    def allows(self, request: Request, free_blocks: int, running: int) -> bool:
        """Whether `request` may enter now, beside `running` requests."""
        ...


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
    """The last one admitted."""

    def choose(self, candidates: Values[Group]) -> int:
        """The last."""
        return len(candidates) - 1


class WorstPlace:
    """The one that is last in the order of the queue."""

    def choose(self, candidates: Values[Group]) -> int:
        """The one with the highest key."""
        return max(range(len(candidates)), key=lambda index: candidates[index].key)


class AdmitWhatFits:
    """Everybody who fits."""

    def allows(self, request: Request, free_blocks: int, running: int) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class Policies:
    """One choice of each kind."""

    order: QueueOrder = field(default_factory=FirstComeFirstServed)
    victim: VictimChoice = field(default_factory=Youngest)
    admission: Admission = field(default_factory=AdmitWhatFits)

    @classmethod
    def of(cls, scheduling: Scheduling) -> "Policies":
        """What the built-in scheduling policies stand for."""
        if scheduling is Scheduling.priority:
            return cls(ByPriority(), WorstPlace())
        return cls()
