"""Vidur's CSV of arrivals and lengths: seconds from the start, no sharing.

Its `splitwise_*` files contain the Azure rows in another form. They are not new traces.
"""

from traces.formats.parsing import Columns, plain_integer, seconds_us
from traces.formats.rows import Row
from traces.trace import CONTENT, Segment

_COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")


class VidurReader:
    """Rows of `arrived_at,num_prefill_tokens,num_decode_tokens`."""

    format = "vidur"
    key_kind = CONTENT
    source_block_tokens: int | None = None
    time_field = "arrived_at"
    has_header = True
    has_clock = True
    is_ordered = True

    def __init__(self) -> None:
        self.noted: dict[str, int] = {}

    def read_header(self, text: str) -> None:
        """Find the three columns by name."""
        self._columns = Columns(_COLUMNS, text)
        self._columns.note_extra(self.noted)

    def read_row(self, text: str, line: int) -> Row:
        """Time in nanoseconds from the start of the recording."""
        arrived, prefill, decode = self._columns.pick(text)
        prompt = plain_integer(prefill, "num_prefill_tokens", 1)
        output = plain_integer(decode, "num_decode_tokens", 0)
        time_us = seconds_us(arrived, "arrived_at", self.noted)
        return Row(time_us * 1_000, prompt, output, (Segment(None, prompt),))

    def accept(self, row: Row, line: int, request_id: int) -> Row:
        """Rows are independent of each other."""
        return row

    def clock_quantum_us(self) -> int:
        """One microsecond: finer digits are refused."""
        return 1
