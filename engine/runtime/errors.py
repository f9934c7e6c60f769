"""Errors of the real engine. Each says what was wrong, where, and what to do about it."""


class ModelError(ValueError):
    """A model that cannot be built, found, or run on paged KV; names the model and the reason."""


class RunError(RuntimeError):
    """Base of what can go wrong while steps run: never the user's input, always a bug or a broken model."""


class NaNLogitsError(RunError):
    """A sequence read a slot that nobody wrote, or the model itself produces NaN; names step and sequence."""


class AuditError(RunError):
    """The tensors and the books disagree about how many slots are written; names step and both numbers."""
