"""What a format's reader gives for one row, and the strict number rules that all formats share."""

from typing import NamedTuple, Protocol

from traces.errors import RowError
from traces.trace import Segment

MAX_INTEGER = 2**53 - 1  # milliseconds up to it still fit 63 bits as microseconds


class Row(NamedTuple):
    """One row of a source: time in nanoseconds since the format's own origin, lengths in tokens."""

    time_ns: int
    prompt_tokens: int
    output_tokens: int
    segments: tuple[Segment, ...]


class RowReader(Protocol):
    """Reads one format, row by row: `read_row`, then `accept` once the order of times is known to be right."""

    format: str
    key_kind: str
    source_block_tokens: int | None
    time_field: str
    has_header: bool
    noted: dict[str, int]

    def read_header(self, text: str) -> None:
        """Learn the columns from line 1 of a format that has a header; raises RowError."""
        ...

    def read_row(self, text: str, line: int) -> Row:
        """The row on physical line `line`; raises RowError."""
        ...

    def accept(self, row: Row, line: int) -> None:
        """Check what spans rows, and remember the row; raises RowError, and then remembers nothing."""
        ...

    def clock_quantum_us(self, times_ns: list[int]) -> int:
        """Resolution of the recorded arrivals, in microseconds."""
        ...


def note(noted: dict[str, int], name: str) -> None:
    """Count a quirk that was handled by rule."""
    noted[name] = noted.get(name, 0) + 1


def plain_integer(text: str, field: str, lowest: int) -> int:
    """An integer written in ASCII digits alone, as CSV fields must be; raises RowError."""
    if not text:
        raise RowError(field, "is empty")
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        hint = "ASCII digits expected, " if digits.isdigit() else ""
        raise RowError(field, f'{hint}"{text[:40]}" is not a plain integer')
    if len(digits) > 16:
        raise RowError(field, f"integer too large, at most {MAX_INTEGER} is allowed")
    return in_range(int(text), field, lowest)


def in_range(value: int, field: str, lowest: int) -> int:
    """The value itself, if it lies between `lowest` and 2^53 - 1; raises RowError."""
    if value < lowest:
        raise RowError(field, f"{value} is below {lowest}")
    if value > MAX_INTEGER:
        raise RowError(field, f"integer too large, at most {MAX_INTEGER} is allowed")
    return value
