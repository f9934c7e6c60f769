"""Errors of the engine. Each message says what is wrong, where, and what to do about it."""


class ModelError(ValueError):
    """A model that cannot be built, found, or run on paged KV; names the model and the reason."""


class RequestError(ValueError):
    """Base of what is wrong with one request; the engine goes on serving the others."""


class ParamsError(RequestError):
    """A sampling parameter that means nothing; `field` names it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class PromptError(RequestError):
    """A prompt that is empty, too long, or holds ids that the model does not know."""


class TokenizerError(RequestError):
    """The tokenizer failed on a request's prompt or output, or there is none and the request needs one."""


class RunError(RuntimeError):
    """Base of what can go wrong while steps run: never the user's input, always a bug or a broken model."""


class NaNLogitsError(RunError):
    """A sequence read a slot that nobody wrote, or the model itself produces NaN; names step and sequence."""


class AuditError(RunError):
    """The tensors and the books disagree about how many slots are written; names step and both numbers."""


class StepError(RunError):
    """A step failed as a whole (out of device memory, say): its requests are lost, the engine goes on."""


class EngineDeadError(RunError):
    """The engine's thread has ended; nothing is served any more."""
