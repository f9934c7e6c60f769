"""A simple format for traces written by hand or made from logs: CSV with a header, or JSONL with the same names.

Required are `arrival_s,prompt_tokens,output_tokens`. Optional are `session`, `prefix` with `prefix_tokens` (the prompt
begins with that many tokens of the text with that name), `salt`, `n`, `best_of`, `beam_width`, `priority`, `model`,
`kind`. An empty field means no value. The rows of a session are its turns, in order.
"""

import hashlib

from traces.errors import RowError
from traces.formats.parsing import (
    Columns,
    check_best_of,
    kind,
    plain_integer,
    read_object,
    require_keys,
    seconds_us,
)
from traces.formats.rows import Row, SessionTurns, note
from traces.trace import CONTENT, Segment

REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
_COUNTS = ("n", "best_of", "beam_width")
_WORDS = ("session", "salt", "model", "kind")
OPTIONAL = ("prefix", "prefix_tokens", "priority", *_COUNTS, *_WORDS)


class SimpleReader:
    """Rows of a simple CSV or JSONL."""

    format = "simple"
    key_kind = CONTENT
    source_block_tokens: int | None = None
    time_field = "arrival_s"
    has_clock = True
    is_ordered = True

    def __init__(self, first_line: str) -> None:
        self.has_header = not first_line.lstrip().startswith("{")
        self.noted: dict[str, int] = {}
        self._names: dict[int, str] = {}  # key -> name of the prefix
        self._turns = SessionTurns()

    def read_header(self, text: str) -> None:
        """Find the columns by name."""
        present = [name for name in OPTIONAL if name in Columns(REQUIRED, text).extra]
        self._wanted = (*REQUIRED, *present)
        self._columns = Columns(self._wanted, text)
        self._columns.note_extra(self.noted)

    def read_row(self, text: str, line: int) -> Row:
        """Time in nanoseconds from the start."""
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
        return Row(time_us * 1000, prompt, output, segments, more or None)

    def accept(self, row: Row, line: int, request_id: int) -> Row:
        """Number the turns of a session."""
        session = (row.more or {}).get("session")
        if session is None:
            return row
        return row._replace(more={**(row.more or {}), **self._turns.add(session, request_id)})

    def clock_quantum_us(self) -> int:
        """One microsecond: finer digits are refused."""
        return 1

    def _fields(self, text: str) -> dict[str, str]:
        """The fields of the row as text, without empty ones."""
        if self.has_header:
            values = dict(zip(self._wanted, self._columns.pick(text), strict=True))
            return {name: value for name, value in values.items() if value or name in REQUIRED}
        record = read_object(text)
        require_keys(record, REQUIRED)
        for name in record.keys() - REQUIRED - set(OPTIONAL):
            note(self.noted, f"unknown key {name}")
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
            raise RowError(
                "prefix", f'"{name[:40]}" has the key of "{self._names[key][:40]}": rename one of them'
            )
        return key


def _text(name: str, value: object) -> str:
    if isinstance(value, (bool, list, dict, float)):
        raise RowError(name, f"number or string expected, found {kind(value)}")
    if name not in (*_WORDS, "prefix") and isinstance(value, str):
        raise RowError(name, "number expected, found string")
    return str(value)
