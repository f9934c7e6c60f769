"""The policy core: it decides which tokens each step computes and which KV blocks they use.

It is pure Python and NumPy: no torch, no simpy, no clock. The simulator and the real engine run the same code.
So both must give the same counts, and any difference is a bug.

Everything that a user of the core needs is here; a scheduler runs with one import:

>>> from engine.core import PagedManager, Request, Scheduler, SchedulerLimits, StepResult, TokenIdentity
>>> scheduler = Scheduler(PagedManager(num_blocks=100, block_size=16), SchedulerLimits(max_batched_tokens=64))
>>> for number in range(2):
...     scheduler.submit(Request(number, prompt_tokens=40, output_tokens=3, identity=TokenIdentity(number, range(40))))
>>> while scheduler.has_work:
...     plan = scheduler.schedule()
...     print([(row.request_id, row.context_len, row.query_len, list(row.table)) for row in plan.rows])
...     report = scheduler.commit(plan, StepResult())  # an executor would run the plan here
[(0, 0, 40, [1, 2, 3]), (1, 32, 8, [1, 2, 4])]
[(0, 40, 1, [1, 2, 3]), (1, 40, 1, [1, 2, 4])]
[(0, 41, 1, [1, 2, 3]), (1, 41, 1, [1, 2, 4])]
>>> report.stats[1].hit_tokens  # the second prompt shares two blocks with the first
32

Inside, each file imports only files named before it: errors, options, identity, request, plan, sequence,
policies. Then come `memory` (block pool, KV cache managers) and `scheduling` (the scheduler). Read first:
`scheduling/scheduler.py`, `memory/paged.py`, `memory/block_pool.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core.errors import (
        CoreError,
        InvariantError,
        NeverFitsError,
        OutOfBlocksError,
        UnknownSequenceError,
    )
    from engine.core.identity import BlockIdentity, KeyIdentity, MultimodalItem, TokenIdentity
    from engine.core.memory.block_manager import BlockManager
    from engine.core.memory.block_pool import BlockPool, Residency, ResidencySampler
    from engine.core.memory.contiguous import ContiguousManager
    from engine.core.memory.manager import KVCacheManager
    from engine.core.memory.paged import PagedManager
    from engine.core.options import (
        Decoding,
        HashAlgorithm,
        Placement,
        Preemption,
        Reservation,
        Retention,
        SchedulerLimits,
        Scheduling,
        SpeculationMode,
    )
    from engine.core.plan import Row, SlotUsage, StepPlan, StepResult
    from engine.core.policies import Policies
    from engine.core.request import Request, Speculation
    from engine.core.scheduling.commit import CommitReport, RequestStats
    from engine.core.scheduling.scheduler import Scheduler

__all__ = [
    "BlockIdentity", "BlockManager", "BlockPool", "CommitReport", "ContiguousManager", "CoreError",
    "Decoding", "HashAlgorithm", "InvariantError", "KVCacheManager", "KeyIdentity", "MultimodalItem",
    "NeverFitsError", "OutOfBlocksError", "PagedManager", "Placement", "Policies", "Preemption", "Request",
    "RequestStats", "Reservation", "Residency", "ResidencySampler", "Retention", "Row", "Scheduler",
    "SchedulerLimits", "Scheduling", "SlotUsage", "Speculation", "SpeculationMode", "StepPlan", "StepResult",
    "TokenIdentity", "UnknownSequenceError",
]  # fmt: skip
_HOMES = (
    *("errors", "options", "identity", "request", "plan", "policies", "memory.manager", "memory.block_pool"),
    *("memory.contiguous", "memory.paged", "memory.block_manager"),
    *("scheduling.commit", "scheduling.scheduler"),
)


def __getattr__(name: str) -> object:
    """Import a name when it is asked for, so that a command that needs `engine.core.options` alone starts quickly."""
    for home in _HOMES if name in __all__ else ():
        module = import_module(f"engine.core.{home}")
        if name in vars(module) and getattr(module, name).__module__ == module.__name__:
            return getattr(module, name)
    raise AttributeError(f"module 'engine.core' has no name {name!r}; it has {', '.join(__all__)}")
