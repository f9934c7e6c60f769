"""What a format's reader gives for one row, and the strict number rules that all formats share."""

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, Protocol, runtime_checkable

from traces.errors import RowError
from traces.trace import Segment

MAX_INTEGER = 2**53 - 1  # milliseconds up to it still fit 63 bits as microseconds
_FLOAT_NOISE_US = Decimal("0.001")  # writers of shortest doubles stray by less than 1e-9 s
_SECONDS = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?", re.ASCII)


class Row(NamedTuple):
    """One row of a source: time in nanoseconds since the format's own origin, lengths in tokens.

    `time_ns` is None where the source has no clock. `more` holds further fields of `TraceRequest`, by name.
    """

    time_ns: int | None
    prompt_tokens: int
    output_tokens: int
    segments: Sequence[Segment]
    more: Mapping[str, Any] | None = None


class RowReader(Protocol):
    """Reads one line format, row by row: `read_row`, then `accept` once the order of times is known to be right."""

    format: str
    source_block_tokens: int | None
    time_field: str
    has_header: bool
    has_clock: bool
    is_ordered: bool  # rows must come in order of time; otherwise they are sorted, stably, after reading
    noted: dict[str, int]

    @property
    def key_kind(self) -> str:
        """What equal keys mean, as far as the rows read so far say."""
        ...

    def read_header(self, text: str) -> None:
        """Learn the columns from line 1 of a format that has a header; raises RowError."""
        ...

    def read_row(self, text: str, line: int) -> Row:
        """The row on physical line `line`; raises RowError."""
        ...

    def accept(self, row: Row, line: int, request_id: int) -> Row:
        """Check what spans rows, remember the row and complete it; raises RowError, and then remembers nothing."""
        ...

    def clock_quantum_us(self) -> int:
        """Resolution of the arrivals read so far, in microseconds."""
        ...


Rows = tuple[int, Iterator[Row]]


@runtime_checkable
class BlockReader(Protocol):
    """A line reader that can also take many lines at once."""

    def read_block(self, lines: list[bytes], first_line: int, last_ns: int | None) -> Rows | None:
        """The last time in ns and the rows of `lines`; None, and nothing remembered, where one is not plainly right."""
        ...


Numbered = Iterator[tuple[int, Row]]  # a row with its request_id


def note(noted: dict[str, int], name: str, count: int = 1) -> None:
    """Count a quirk that was handled by rule."""
    noted[name] = noted.get(name, 0) + count


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


def in_range(value: int, field: str, lowest: int, highest: int = MAX_INTEGER) -> int:
    """The value itself, if it lies between `lowest` and `highest` (2^53 - 1); raises RowError."""
    if value < lowest:
        raise RowError(field, f"{value} is below {lowest}")
    if value > highest:
        raise RowError(field, f"integer too large, at most {highest} is allowed")
    return value


def seconds_us(text: str, field: str, noted: dict[str, int]) -> int:
    """Seconds in decimal digits as whole microseconds, exactly; raises RowError.

    What a writer's binary floats added below a nanosecond (5.8926549999999995) is rounded away, and noted.
    """
    if not _SECONDS.fullmatch(text):
        raise RowError(field, f'finite, not negative number expected, found "{text[:40]}"')
    exact = Decimal(text) * 1_000_000
    if exact > MAX_INTEGER:
        raise RowError(field, f"too large: {text[:40]} s")
    nearest = exact.to_integral_value()
    if abs(exact - nearest) > _FLOAT_NOISE_US:
        raise RowError(field, f"more than 6 decimals (finer than 1 us): {text[:40]}")
    if exact != nearest:
        note(noted, "binary float noise rounded")
    return int(nearest)
