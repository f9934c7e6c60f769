"""Vidur's CSV of arrivals and lengths: seconds from the start, no sharing.

Its `splitwise_*` files hold the Azure rows again, in another spelling: they are no further traces.
"""

import re
from decimal import Decimal

from traces.csvrow import Columns
from traces.errors import RowError
from traces.rows import MAX_INTEGER, Row, note, plain_integer
from traces.trace import CONTENT, Segment

_COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
_FLOAT_NOISE_US = Decimal("0.001")  # upstream writes shortest doubles, which stray by less than 1e-9 s
_SECONDS = re.compile(r"\d+(?:\.\d+)?", re.ASCII)


class VidurReader:
    """Rows of `arrived_at,num_prefill_tokens,num_decode_tokens`."""

    format = "vidur"
    key_kind = CONTENT
    source_block_tokens: int | None = None
    time_field = "arrived_at"
    has_header = True

    def __init__(self) -> None:
        self.noted: dict[str, int] = {}

    def read_header(self, text: str) -> None:
        """Find the three columns by name."""
        self._columns = Columns(_COLUMNS, text)
        for name in self._columns.extra:
            self.noted[f"unknown column {name}"] = 1

    def read_row(self, text: str, line: int) -> Row:
        """Time in nanoseconds from the start of the recording."""
        arrived, prefill, decode = self._columns.pick(text)
        prompt = plain_integer(prefill, "num_prefill_tokens", 1)
        output = plain_integer(decode, "num_decode_tokens", 0)
        time_us, is_rounded = _microseconds(arrived)
        if is_rounded:
            note(self.noted, "binary float noise rounded")
        return Row(time_us * 1_000, prompt, output, (Segment(None, prompt),))

    def accept(self, row: Row, line: int) -> None:
        """Rows are independent of each other."""

    def clock_quantum_us(self, times_ns: list[int]) -> int:
        """One microsecond: finer digits are refused."""
        return 1


def _microseconds(text: str) -> tuple[int, bool]:
    """Whole microseconds, and whether the writer's binary floats had to be rounded away (5.8926549999999995)."""
    if not _SECONDS.fullmatch(text):
        raise RowError("arrived_at", f'finite, not negative number expected, found "{text[:40]}"')
    exact = Decimal(text) * 1_000_000
    if exact > MAX_INTEGER:
        raise RowError("arrived_at", f"too large: {text[:40]} s")
    nearest = exact.to_integral_value()
    if abs(exact - nearest) > _FLOAT_NOISE_US:
        raise RowError("arrived_at", f"more than 6 decimals (finer than 1 us): {text[:40]}")
    return int(nearest), exact != nearest
