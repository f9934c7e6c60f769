"""Errors of this package. Each message says where the input is wrong and what was expected there."""

from collections.abc import Iterator
from contextlib import contextmanager


class RowError(ValueError):
    """A wrong value in one row. `traces.reading` adds file and line, or skips and counts the row."""

    def __init__(self, field: str | None, reason: str, text_line: int = 1) -> None:
        super().__init__(reason if field is None else f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.text_line = text_line  # within the text that was read, which is one line or a whole document


class TraceError(ValueError):
    """A trace that cannot be read. Its text is `FILE:LINE: FIELD: REASON`, without a line or field that does not apply.

    `line` is the physical line, counted from 1 (a CSV header is line 1).
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


@contextmanager
def placed(file: str, line: int | None = None) -> Iterator[None]:
    """Raise every RowError as a TraceError of a file, at `line`, or at its own line of the document."""
    try:
        yield
    except RowError as error:
        raise TraceError(file, line or error.text_line, error.field, error.reason) from error


class ParameterError(ValueError):
    """A parameter out of range, or a change that the trace does not allow. Names the parameter and what is allowed."""

    def __init__(self, parameter: str, reason: str) -> None:
        super().__init__(parameter, reason)
        self.parameter = parameter
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.parameter}: {self.reason}"
