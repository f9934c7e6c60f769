"""Errors of the policy core. Each message gives the request or sequence and the numbers.

An operation that raises one of them changes nothing.
"""


class CoreError(ValueError):
    """Base of every error that the policy core raises on wrong input or wrong use."""


class NeverFitsError(CoreError):
    """A request that no schedule can serve: it needs more than the whole pool, or more than the model length."""


class OutOfBlocksError(CoreError):
    """An allocation that the pool cannot serve now. Callers are expected to ask `can_*` first."""


class UnknownSequenceError(CoreError):
    """An operation on a sequence that holds nothing in this manager (never admitted, or released already)."""


class InvariantError(CoreError):
    """The books contradict themselves: found by `check()`, always a bug in the policy core."""
