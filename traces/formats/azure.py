"""Azure LLM inference traces (CSV of 2023 and 2024): arrival time, prompt and output length, no sharing.

The files of 2023 have seven fractional digits and no time zone. Those of 2024 have a time zone and few or no fractional
digits. One rule reads both exactly.
"""

import re
from datetime import date

from traces.errors import RowError
from traces.formats.parsing import Columns, plain_integer
from traces.formats.rows import Row, note
from traces.trace import CONTENT, Segment

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:(Z)|([+-])(\d\d):(\d\d))?", re.ASCII
)
_LIMITS = (("hours", 23), ("minutes", 59), ("seconds", 59))


class AzureReader:
    """Rows of an Azure CSV. All rows of a file have a time zone, or none has."""

    format = "azure"
    key_kind = CONTENT
    source_block_tokens: int | None = None
    time_field = "TIMESTAMP"
    has_header = True
    has_clock = True
    is_ordered = True

    def __init__(self) -> None:
        self.noted: dict[str, int] = {}
        self._days: dict[str, int] = {}
        self._has_zone: bool | None = None
        self._has_fraction = False

    def read_header(self, text: str) -> None:
        """Find the three columns by name. The multimodal form of 2025 is refused."""
        self._columns = Columns(_COLUMNS, text)
        if "NumImages" in self._columns.extra:
            raise RowError(
                "NumImages", "not a text trace (column NumImages): remove the column to replay its text"
            )
        self._columns.note_extra(self.noted)

    def read_row(self, text: str, line: int) -> Row:
        """Time in nanoseconds since year 1, in UTC if the file has time zones."""
        stamp, context, generated = self._columns.pick(text)
        prompt = plain_integer(context, "ContextTokens", 1)
        output = plain_integer(generated, "GeneratedTokens", 0)
        return Row(self._time_ns(stamp), prompt, output, (Segment(None, prompt),))

    def accept(self, row: Row, line: int, request_id: int) -> Row:
        """Rows are independent of each other."""
        return row

    def clock_quantum_us(self) -> int:
        """One microsecond, or a second if no row has a fraction."""
        return 1 if self._has_fraction else 1_000_000

    def _time_ns(self, stamp: str) -> int:
        match = _TIME.fullmatch(stamp)
        if match is None:
            raise RowError("TIMESTAMP", f'YYYY-MM-DD HH:MM:SS expected, found "{stamp[:40]}"')
        day, hours, minutes, seconds, fraction, utc, sign, zone_hours, zone_minutes = match.groups()
        clock = [int(hours), int(minutes), int(seconds)]
        for value, (unit, highest) in zip(clock, _LIMITS, strict=True):
            if value > highest:
                raise RowError("TIMESTAMP", f"{unit} out of range in {stamp}")
        ahead = _zone_seconds(sign, zone_hours, zone_minutes, stamp)
        total = self._day(day) * 86_400 + clock[0] * 3_600 + clock[1] * 60 + clock[2] - ahead
        nanoseconds = total * 1_000_000_000 + _fraction_ns(fraction)
        self._check_zone(utc is not None or sign is not None)
        self._note_fraction(fraction)
        return nanoseconds

    def _day(self, text: str) -> int:
        if text not in self._days:
            try:
                self._days[text] = date.fromisoformat(text).toordinal()
            except ValueError as error:
                raise RowError("TIMESTAMP", f"no such date: {text}") from error
        return self._days[text]

    def _note_fraction(self, digits: str | None) -> None:
        if digits is not None:
            self._has_fraction = True
            if digits[6:].strip("0"):
                note(self.noted, "digits below 1 us cut")

    def _check_zone(self, has_zone: bool) -> None:
        if self._has_zone is None:
            self._has_zone = has_zone
        if has_zone != self._has_zone:
            words = ("with zone in a file without", "without zone in a file with zones")
            raise RowError("TIMESTAMP", words[not has_zone])


def _fraction_ns(digits: str | None) -> int:
    if digits is not None and len(digits) > 9:
        raise RowError("TIMESTAMP", f"more than 9 fractional digits: {digits[:20]}")
    return int((digits or "0").ljust(9, "0"))


def _zone_seconds(sign: str | None, hours: str | None, minutes: str | None, stamp: str) -> int:
    if sign is None or hours is None or minutes is None:
        return 0
    if int(hours) > 23 or int(minutes) > 59:
        raise RowError("TIMESTAMP", f"zone out of range in {stamp}")
    seconds = int(hours) * 3_600 + int(minutes) * 60
    return -seconds if sign == "-" else seconds
