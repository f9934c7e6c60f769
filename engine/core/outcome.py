"""What the policy did: to a request over its life, and in the step just committed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.core.manager import LeapColumns


@dataclass(slots=True)
class RequestStats:
    """What the policy did to one request, in tokens. Hits after a preemption are kept apart from fresh ones."""

    hit_tokens: int = 0
    resumed_hit_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0  # preemptions that saved the blocks in host memory
    swap_fallbacks: int = 0  # preemptions that should have, but found no room there
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class CommitReport:
    """What a step led to: the requests whose branches each got a token, and those that ended.

    The first `len(plan.steady_ids)` of `emitted` are the plan's steady requests.
    """

    emitted: Sequence[int] = ()
    finished: list[int] = field(default_factory=list)
    leap: LeapColumns | None = None  # how the pool changed in the further steps of a fast-forward
    tokens: Mapping[int, int] = field(
        default_factory=dict
    )  # of requests that got more than one token at once
