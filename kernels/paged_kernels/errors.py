"""Errors of the kernel package. Each names the operation, what was given and what is allowed."""


class KernelError(ValueError):
    """Arguments that an operation cannot serve: a wrong shape, dtype, or option."""


class BackendUnavailableError(KernelError):
    """A backend that was asked for by name and cannot run here; nothing falls back silently."""
