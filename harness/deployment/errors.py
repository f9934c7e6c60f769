"""The error of this package. Its message says which file, line and field is wrong, and what was expected there."""

from harness.config.errors import UserError


class DeploymentError(UserError):
    """A log or a file of settings that cannot be used. Its text is `FILE:LINE: FIELD: REASON`, as far as it applies.

    `line` is the physical line, counted from 1; in a file that holds one JSON value `field` is the path inside it.
    """

    def __init__(self, file: str, line: int | None, field: str | None, reason: str) -> None:
        place = file if line is None else f"{file}:{line}"
        super().__init__(": ".join(part for part in (place, field, reason) if part))
        self.file = file
        self.line = line
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, int | None, str | None, str]]:
        return type(self), (self.file, self.line, self.field, self.reason)
