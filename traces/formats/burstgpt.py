"""BurstGPT CSV, versions 1 and 2: seconds from the start of the first day, and lengths. No sharing is recorded.

Columns are found by name. Version 2 adds `Session ID` and `Elapsed time`. A response of 0 tokens is a failed
request: it is dropped and counted.
"""

from traces.errors import RowError
from traces.formats.parsing import Columns, plain_integer, seconds_us
from traces.formats.rows import Row, SessionTurns, note
from traces.trace import CONTENT, Segment

_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
_VERSION_2 = ("Session ID", "Elapsed time")
_LOG_TYPES = ("Conversation log", "API log")
_MODELS = ("ChatGPT", "GPT-4")


class BurstGptReader:
    """Rows of BurstGPT. Requests with the same `Session ID` are turns of a session."""

    format = "burstgpt"
    key_kind = CONTENT
    source_block_tokens: int | None = None
    time_field = "Timestamp"
    has_header = True
    has_clock = True
    is_ordered = True

    def __init__(self) -> None:
        self.noted: dict[str, int] = {}
        self._turns = SessionTurns()
        self._has_fraction = False

    def read_header(self, text: str) -> None:
        """Find the columns by name, with those of version 2 if both are present."""
        names = Columns((), text).extra
        self._has_sessions = all(name in names for name in _VERSION_2)
        self._columns = Columns(_COLUMNS + (_VERSION_2 if self._has_sessions else ()), text)
        self._columns.note_extra(self.noted)

    def read_row(self, text: str, line: int) -> Row:
        """Time in nanoseconds since the first day began."""
        stamp, model, asked, answered, stated, log_type, *version_2 = self._columns.pick(text)
        prompt = plain_integer(asked, "Request tokens", 0)
        output = plain_integer(answered, "Response tokens", 0)
        total = plain_integer(stated, "Total tokens", 0)
        if total != prompt + output:
            raise RowError("Total tokens", f"{total} is not {prompt} + {output}")
        if log_type not in _LOG_TYPES:
            raise RowError(
                "Log Type", f'"{_LOG_TYPES[0]}" or "{_LOG_TYPES[1]}" expected, found "{log_type[:40]}"'
            )
        if model not in _MODELS:
            note(self.noted, "model not named in the documents")
        self._has_fraction |= "." in stamp
        time_us = seconds_us(stamp, "Timestamp", self.noted)
        session = _session(*version_2) if version_2 else None
        more = {"model": model, "kind": log_type, "session": session}
        return Row(time_us * 1_000, prompt, output, (Segment(None, prompt),), more)

    def accept(self, row: Row, line: int, request_id: int) -> Row:
        """Number the turns of a session in the order of the file."""
        assert row.more is not None  # set by read_row
        session = row.more["session"]
        if session is None:
            return row
        return row._replace(more={**row.more, **self._turns.add(session, request_id)})

    def clock_quantum_us(self) -> int:
        """One second, or a microsecond if a row has a fraction."""
        return 1 if self._has_fraction else 1_000_000


def _session(session: str, elapsed: str) -> str | None:
    """The session's name, None if it is empty (API rows). `elapsed` is checked but not used."""
    if elapsed.startswith("-"):
        raise RowError("Elapsed time", f"{elapsed[:40]} is below 0")
    try:
        finite = float(elapsed) - float(elapsed) == 0 if elapsed else True
    except ValueError:
        finite = False
    if not finite:
        raise RowError("Elapsed time", f'number of seconds expected, found "{elapsed[:40]}"')
    return session or None
