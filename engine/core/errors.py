"""Errors of the policy core. Each message names the request or sequence and gives the numbers.

An operation that raises one of them changes nothing.
"""


class CoreError(ValueError):
    """Base class of all errors that the policy core raises on wrong input or wrong use."""


class NeverFitsError(CoreError):
    """A request that no schedule can serve: it needs more than the whole pool, or more than the model length."""


class OutOfBlocksError(CoreError):
    """An allocation for which too few blocks are free now. Callers must ask the matching `can_*` method first."""


class UnknownSequenceError(CoreError):
    """An operation on a sequence that has no memory in this manager (never admitted, or released already)."""


class InvariantError(CoreError):
    """Counters contradict each other. `check()` raises it; the cause is always a bug in the policy core."""
