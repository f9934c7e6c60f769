"""CSV tables of lengths, with or without arrivals: Azure, Vidur, BurstGPT, etalon, and our own simple format.

Columns are found by name. All but `simple` record no sharing.

* `azure` (2023 and 2024): the files of 2023 have seven fractional digits and no time zone. Those of 2024 have a time
  zone and few or no fractional digits. One rule reads both exactly.
* `vidur`: seconds from the start. Its `splitwise_*` files contain the Azure rows in another form, no new traces.
* `burstgpt`, versions 1 and 2: seconds from the start of the first day. Version 2 adds `Session ID` and `Elapsed time`.
  A response of 0 tokens is a failed request: it is dropped and counted.
* `lengths` (etalon, Vidur) has no arrivals and needs an arrival process. Read as `lengths_chat`, a heuristic finds
  conversations: a row continues the row before it if its prompt is at least as long as that row's prompt and output.
  (ShareGPT-8k keeps the rows of a conversation together, and its prompts contain the history.)
* `simple`: for traces written by hand or made from logs, as CSV with a header, or JSONL with the same names. Required
  are `arrival_s,prompt_tokens,output_tokens`. Optional are `session`, `prefix` with `prefix_tokens` (the prompt begins
  with that many tokens of the text with that name), `salt`, `n`, `best_of`, `beam_width`, `priority`, `model`, `kind`.
  An empty field means no value. The rows of a session are its turns, in order.
"""

import hashlib
import re
from datetime import date
from functools import cache
from math import isclose

from traces.errors import RowError
from traces.formats.files import SourceFile
from traces.formats.parsing import (
    Columns,
    check_best_of,
    kind,
    note_unknown,
    plain_integer,
    read_object,
    require_keys,
    seconds_us,
)
from traces.formats.rows import LineSource, TraceRow, note
from traces.trace import AFTER, CONTENT, Segment

_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:(Z)|([+-])(\d\d):(\d\d))?", re.ASCII
)
_LIMITS = (("hours", 23), ("minutes", 59), ("seconds", 59))


class TableSource(LineSource):
    """Rows of a CSV with a header, of which `names` are read. They are independent of each other."""

    key_kind = CONTENT
    has_header = True
    names: tuple[str, ...]

    def read_header(self, text: str) -> None:
        """Find the columns by name."""
        self.columns = Columns(self.names, text)
        self.noted |= {f"unknown column {name}": 1 for name in self.columns.extra}


class AzureSource(TableSource):
    """Rows of an Azure CSV. All rows of a file have a time zone, or none has."""

    format = "azure"
    time_field = "TIMESTAMP"
    names = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    _has_zone: bool | None = None
    _has_fraction = False

    def read_header(self, text: str) -> None:
        """Find the three columns by name. The multimodal form of 2025 is refused."""
        super().read_header(text)
        if "NumImages" in self.columns.extra:
            reason = "not a text trace (column NumImages): remove the column to replay its text"
            raise RowError("NumImages", reason)

    def read_row(self, text: str, line: int) -> TraceRow:
        """Time in nanoseconds since year 1, in UTC if the file has time zones."""
        stamp, context, generated = self.columns.pick(text)
        prompt = plain_integer(context, "ContextTokens", 1)
        output = plain_integer(generated, "GeneratedTokens", 0)
        return TraceRow(self._time_ns(stamp), prompt, output, (Segment(None, prompt),))

    def clock_quantum_us(self) -> int:
        """One microsecond, or a second if no row has a fraction."""
        return 1 if self._has_fraction else 1_000_000

    def _time_ns(self, stamp: str) -> int:
        match = _STAMP.fullmatch(stamp)
        if match is None:
            raise RowError("TIMESTAMP", f'YYYY-MM-DD HH:MM:SS expected, found "{stamp[:40]}"')
        day, *clock, fraction, utc, sign, zone_hours, zone_minutes = match.groups()
        hours, minutes, seconds = times = [int(number) for number in clock]
        for value, (unit, highest) in zip(times, _LIMITS, strict=True):
            if value > highest:
                raise RowError("TIMESTAMP", f"{unit} out of range in {stamp}")
        if sign is not None:
            if int(zone_hours) > 23 or int(zone_minutes) > 59:
                raise RowError("TIMESTAMP", f"zone out of range in {stamp}")
            ahead = -1 if sign == "-" else 1
            hours, minutes = hours - ahead * int(zone_hours), minutes - ahead * int(zone_minutes)
        total = _day(day) * 86_400 + hours * 3_600 + minutes * 60 + seconds
        if fraction is not None and len(fraction) > 9:
            raise RowError("TIMESTAMP", f"more than 9 fractional digits: {fraction[:20]}")
        has_zone = utc is not None or sign is not None
        if self._has_zone is None:
            self._has_zone = has_zone
        if has_zone != self._has_zone:
            words = ("with zone in a file without", "without zone in a file with zones")
            raise RowError("TIMESTAMP", words[not has_zone])
        if fraction is not None:
            self._has_fraction = True
            if fraction[6:].strip("0"):
                note(self.noted, "digits below 1 us cut")
        return total * 1_000_000_000 + int((fraction or "0").ljust(9, "0"))


@cache
def _day(text: str) -> int:
    try:
        return date.fromisoformat(text).toordinal()
    except ValueError as error:
        raise RowError("TIMESTAMP", f"no such date: {text}") from error


class VidurSource(TableSource):
    """Rows of `arrived_at,num_prefill_tokens,num_decode_tokens`."""

    format = "vidur"
    time_field = "arrived_at"
    names = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")

    def read_row(self, text: str, line: int) -> TraceRow:
        """Time in nanoseconds from the start of the recording; finer digits than microseconds are refused."""
        arrived, prefill, decode = self.columns.pick(text)
        prompt = plain_integer(prefill, "num_prefill_tokens", 1)
        output = plain_integer(decode, "num_decode_tokens", 0)
        time_us = seconds_us(arrived, "arrived_at", self.noted)
        return TraceRow(time_us * 1_000, prompt, output, (Segment(None, prompt),))


_BURSTGPT = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
_VERSION_2 = ("Session ID", "Elapsed time")
_LOG_TYPES = ("Conversation log", "API log")
_MODELS = ("ChatGPT", "GPT-4")


class BurstGptSource(TableSource):
    """Rows of BurstGPT. Requests with the same `Session ID` are turns of a session."""

    format = "burstgpt"
    time_field = "Timestamp"
    _has_fraction = False

    def read_header(self, text: str) -> None:
        """Find the columns by name, with those of version 2 if both are present."""
        present = Columns((), text).extra
        self.names = _BURSTGPT + (_VERSION_2 if all(name in present for name in _VERSION_2) else ())
        super().read_header(text)

    def read_row(self, text: str, line: int) -> TraceRow:
        """Time in nanoseconds since the first day began."""
        stamp, model, asked, answered, stated, log_type, *version_2 = self.columns.pick(text)
        prompt = plain_integer(asked, "Request tokens", 0)
        output = plain_integer(answered, "Response tokens", 0)
        total = plain_integer(stated, "Total tokens", 0)
        if total != prompt + output:
            raise RowError("Total tokens", f"{total} is not {prompt} + {output}")
        if log_type not in _LOG_TYPES:
            reason = f'"{_LOG_TYPES[0]}" or "{_LOG_TYPES[1]}" expected, found "{log_type[:40]}"'
            raise RowError("Log Type", reason)
        if model not in _MODELS:
            note(self.noted, "model not named in the documents")
        self._has_fraction |= "." in stamp
        time_us = seconds_us(stamp, "Timestamp", self.noted)
        session = _session(*version_2) if version_2 else None
        more = {"model": model, "kind": log_type, "session": session}
        return TraceRow(time_us * 1_000, prompt, output, (Segment(None, prompt),), more)

    def accept(self, row: TraceRow, line: int, request_id: int) -> TraceRow:
        """Number the turns of a session in the order of the file."""
        return self.turns.number(row, request_id)

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


class LengthsSource(TableSource):
    """Rows of a table of lengths. Each is an independent request."""

    format = "lengths"
    time_field = "line"
    has_clock = False
    names = ("num_prefill_tokens", "num_decode_tokens", "num_total_tokens", "pd_ratio")

    def read_row(self, text: str, line: int) -> TraceRow:
        """The lengths of a row, whose stated sum and ratio are checked."""
        fields, names = self.columns.pick(text), self.names
        prompt, output = plain_integer(fields[0], names[0], 1), plain_integer(fields[1], names[1], 0)
        total = plain_integer(fields[2], names[2], 1)
        if total != prompt + output:
            raise RowError(names[2], f"{total} is not {prompt} + {output}")
        try:
            ratio = float(fields[3]) if fields[3].isascii() else float("nan")
        except ValueError:
            ratio = float("nan")
        # A row without output is dropped later; it has no ratio.
        if output and not isclose(ratio, prompt / output, abs_tol=1e-6, rel_tol=0):
            raise RowError(names[3], f"{fields[3][:40]} does not equal {prompt}/{output}")
        return TraceRow(None, prompt, output, (Segment(None, prompt),))


class ChatLengthsSource(LengthsSource):
    """The same table, with rows joined to conversations by the turn rule. An output returns in the next prompt.

    The key of what a request asks is twice its number, that of its answer is one more.
    """

    format = "lengths_chat"
    _before: TraceRow | None = None
    _id = _turn = _session = 0

    def accept(self, row: TraceRow, line: int, request_id: int) -> TraceRow:
        """The row as a turn: the segments of the turn before, then its output, then new tokens."""
        before, linked = self._before, dict[str, object]()
        new = row.prompt_tokens - (before.prompt_tokens + before.output_tokens if before else 0)
        if before is not None and new >= 0:
            self._turn += 1
            pieces = Segment(self._id * 2 + 1, before.output_tokens), Segment(request_id * 2, new)
            segments = (*before.segments, *(piece for piece in pieces if piece.tokens))
            linked = {"parent": self._id, "after": (self._id,), "release": AFTER, "think_us": 0}
        else:
            self._turn, self._session = 1, request_id
            note(self.noted, "conversations by the turn rule (a heuristic)")
            segments = (Segment(request_id * 2, row.prompt_tokens),)
        turn = {"session": str(self._session), "turn": self._turn, "output_key": request_id * 2 + 1}
        self._before, self._id = row._replace(segments=segments, more={**turn, **linked}), request_id
        return self._before


REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
_COUNTS = ("n", "best_of", "beam_width")
_WORDS = ("session", "salt", "model", "kind")
OPTIONAL = ("prefix", "prefix_tokens", "priority", *_COUNTS, *_WORDS)


class SimpleSource(TableSource):
    """Rows of a simple CSV or JSONL."""

    format = "simple"
    time_field = "arrival_s"

    def __init__(self, file: SourceFile) -> None:
        self.has_header = not file.first_line.lstrip().startswith("{")
        self._names: dict[int, str] = {}  # key -> name of the prefix
        super().__init__(file)

    def read_header(self, text: str) -> None:
        """Find the columns by name."""
        extra = Columns(REQUIRED, text).extra
        self.names = (*REQUIRED, *(name for name in OPTIONAL if name in extra))
        super().read_header(text)

    def read_row(self, text: str, line: int) -> TraceRow:
        """Time in nanoseconds from the start; finer digits than microseconds are refused."""
        fields = self._fields(text)
        time_us = seconds_us(fields.pop("arrival_s"), "arrival_s", self.noted)
        prompt = plain_integer(fields.pop("prompt_tokens"), "prompt_tokens", 1)
        output = plain_integer(fields.pop("output_tokens"), "output_tokens", 0)
        segments = self._segments(fields, prompt)
        more: dict[str, object] = {name: fields[name] for name in _WORDS if name in fields}
        more |= {name: plain_integer(fields[name], name, 1) for name in _COUNTS if name in fields}
        if "priority" in fields:
            more["priority"] = plain_integer(fields["priority"], "priority", -(10**6))
        check_best_of(more)
        return TraceRow(time_us * 1000, prompt, output, segments, more or None)

    def accept(self, row: TraceRow, line: int, request_id: int) -> TraceRow:
        """Number the turns of a session."""
        return self.turns.number(row, request_id)

    def _fields(self, text: str) -> dict[str, str]:
        """The fields of the row as text, without empty ones."""
        if self.has_header:
            values = dict(zip(self.names, self.columns.pick(text), strict=True))
            return {name: value for name, value in values.items() if value or name in REQUIRED}
        record = read_object(text)
        require_keys(record, REQUIRED)
        note_unknown(self.noted, record, (*REQUIRED, *OPTIONAL))
        known = {name: record[name] for name in (*REQUIRED, *OPTIONAL) if name in record}
        return {name: _text(name, value) for name, value in known.items() if value is not None}

    def _segments(self, fields: dict[str, str], prompt: int) -> tuple[Segment, ...]:
        if ("prefix" in fields) != ("prefix_tokens" in fields):
            absent = "prefix_tokens" if "prefix" in fields else "prefix"
            raise RowError(absent, "is empty; prefix and prefix_tokens go together")
        if "prefix" not in fields:
            return (Segment(None, prompt),)
        shared = plain_integer(fields["prefix_tokens"], "prefix_tokens", 1)
        if shared > prompt:
            raise RowError("prefix_tokens", f"{shared} is more than prompt_tokens {prompt}")
        pieces = (Segment(self._key(fields["prefix"]), shared), Segment(None, prompt - shared))
        return tuple(piece for piece in pieces if piece.tokens)

    def _key(self, name: str) -> int:
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
        if self._names.setdefault(key, name) != name:
            reason = f'"{name[:40]}" has the key of "{self._names[key][:40]}": rename one of them'
            raise RowError("prefix", reason)
        return key


def _text(name: str, value: object) -> str:
    if isinstance(value, (bool, list, dict, float)):
        raise RowError(name, f"number or string expected, found {kind(value)}")
    if name not in (*_WORDS, "prefix") and isinstance(value, str):
        raise RowError(name, "number expected, found string")
    return str(value)
