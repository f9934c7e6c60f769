"""Errors of the engine. Each message says what is wrong, where, and what to do about it."""

from typing import Any


class ModelError(ValueError):
    """A model cannot be built, found, or run on paged KV; names the model and the reason."""


class EngineOptionError(ValueError):
    """An option of an engine does not exist, or has a value that it must not have; names the option."""


class RequestError(ValueError):
    """Base class of errors of one request; the engine continues with the other requests."""


class ParamsError(RequestError):
    """A sampling parameter is invalid; `field` names it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """As another process makes it."""
        return type(self), (self.field, self.reason)


class PromptError(RequestError):
    """A prompt is empty, too long, or holds ids outside of the vocabulary."""


class TokenizerError(RequestError):
    """The tokenizer failed on a request's prompt or output, or the request needs a tokenizer and there is none."""


class RunError(RuntimeError):
    """Base class of errors while steps run: caused by a bug or a broken model, never by the user's input."""


class NaNLogitsError(RunError):
    """A sequence read a slot that was never written, or the model itself produces NaN; names step and sequence."""


class AuditError(RunError):
    """The number of written slots in the tensors differs from the scheduler's counters; names step and both numbers."""


class StepError(RunError):
    """A whole step failed, for example because device memory ran out: its requests end, the engine continues."""


class EngineDeadError(RunError):
    """The engine's thread has ended, so no request can run."""


def not_offered(value: object, only: tuple[Any, ...]) -> str | None:
    """Why an argument of vLLM's is refused whose value is none of `only`, which ask for nothing; else None."""
    allowed = " or ".join(map(repr, only[:4]))
    return None if value in only else f"{value!r} is not offered here, only {allowed}"
