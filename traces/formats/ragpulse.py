"""RAGPulse: a prompt is a list of segments (system, passages, history, web, user). Five other files hold their lengths.

The clock restarts with each recorded week. The segments of a prompt are in the order of the keys in RAGPulse's README.
The rest of a prompt (6 to 12 tokens of template) is at its end and is unique.
"""

from pathlib import Path

from traces.errors import RowError, TraceError
from traces.formats.files import decode, open_source
from traces.formats.parsing import count, integers, kind, plain_integer, read_object, require_keys, text
from traces.formats.rows import Row, SessionTurns, note
from traces.trace import CONTENT, Segment

TRACE_FILE = "0_trace.jsonl"
GROUPS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
_TABLES = {  # group -> file, name of its id
    "sys_prompt": ("1_sys_prompt.jsonl", "sys_prompt_id"),
    "passages_ids": ("2_passages.jsonl", "passage_id"),
    "history": ("3_history.jsonl", "history_id"),
    "web_search": ("5_web_search.jsonl", "web_search_id"),
    "user_input": ("4_user_input.jsonl", "user_input_id"),
}
_KEYS = ("timestamp", "input_length", "output_length", "hash_ids", "session_id")
_DAY_S, _WEEK_S = 86_400, 604_800


class RagPulseReader:
    """Rows of `0_trace.jsonl`."""

    format = "ragpulse"
    key_kind = CONTENT
    source_block_tokens: int | None = None
    time_field = "timestamp"
    has_header = False
    has_clock = True
    is_ordered = True

    def __init__(self, trace_file: Path) -> None:
        self.noted: dict[str, int] = {}
        self._lengths = read_tables(trace_file)
        self._turns = SessionTurns()
        self._offset_s = 0
        self._last_s = 0

    def read_header(self, text: str) -> None:
        """Never called: JSONL has no header."""

    def read_row(self, line_text: str, line: int) -> Row:
        """Time in nanoseconds from the start of the first week. Segments in the order of `GROUPS`, then template."""
        record = read_object(line_text)
        require_keys(record, _KEYS)
        time_s = _whole_seconds(record["timestamp"])
        prompt, output = count(record, "input_length", 1), count(record, "output_length")
        segments = self._segments(record["hash_ids"])
        rest = prompt - sum(tokens for _, tokens in segments)
        if rest < 0:
            raise RowError("input_length", f"segments sum to {prompt - rest}, input_length {prompt}")
        if rest:
            segments.append(Segment(None, rest))
        session = text(record, "session_id")
        more = {"session": session, "turn": time_s}  # until `accept`, `turn` holds the recorded time
        return Row(self._week_time_s(time_s) * 1_000_000_000, prompt, output, tuple(segments), more)

    def accept(self, row: Row, line: int, request_id: int) -> Row:
        """Detect a restart of the clock, and number the turns of a session."""
        assert row.more is not None  # set by read_row
        session, time_s = row.more["session"], row.more["turn"]
        if time_s < self._last_s:
            self._offset_s += _WEEK_S
            note(self.noted, "clock_restarts")
        self._last_s = time_s
        return row._replace(more=self._turns.add(session, request_id))

    def clock_quantum_us(self) -> int:
        """Whole seconds."""
        return 1_000_000

    def _week_time_s(self, time_s: int) -> int:
        """Seconds from the start of the first week. Raises RowError if time goes back without a restart."""
        if time_s >= self._last_s:
            return self._offset_s + time_s
        if time_s >= _DAY_S:
            reason = "does not restart (a restart begins within the first day)"
            raise RowError("timestamp", f"goes back from {self._last_s} to {time_s} s but {reason}")
        return self._offset_s + _WEEK_S + time_s

    def _segments(self, value: object) -> list[Segment]:
        if not isinstance(value, dict):
            raise RowError("hash_ids", f"object of {len(GROUPS)} lists expected, found {kind(value)}")
        if value.keys() != set(GROUPS):
            raise RowError("hash_ids", f"groups {', '.join(GROUPS)} expected, found {', '.join(value)[:200]}")
        segments = []
        for group in GROUPS:
            for index, key in enumerate(integers(value[group], f"hash_ids.{group}")):
                tokens = self._lengths[group].get(key)
                if tokens is None:
                    raise RowError(
                        f"hash_ids.{group}[{index}]", f"{key}: no token_length in {_TABLES[group][0]}"
                    )
                segments.append(Segment(key, tokens))
        return segments


def read_tables(trace_file: Path) -> dict[str, dict[int, int]]:
    """Token lengths by group and id, from the tables beside the trace or in the folder above. Raises TraceError."""
    return {group: _read_table(_table_path(trace_file, name), key) for group, (name, key) in _TABLES.items()}


def _table_path(trace_file: Path, name: str) -> Path:
    for folder in (trace_file.parent, trace_file.parent.parent):
        if (folder / name).is_file():
            return folder / name
    wanted = ", ".join(file for file, _ in _TABLES.values())
    raise TraceError(
        str(trace_file), None, None, f"the table {name} is not beside it; a RAGPulse trace needs {wanted}"
    )


def _read_table(path: Path, key: str) -> dict[int, int]:
    lengths: dict[int, int] = {}
    lines: dict[int, int] = {}
    for line, raw in open_source(path).lines():
        if not raw.strip():
            continue
        try:
            record = read_object(decode(raw))
            require_keys(record, (key, "token_length"))
            name, tokens = count(record, key), count(record, "token_length", 1)
            if lengths.get(name, tokens) != tokens:
                reason = f"id {name} has length {tokens}, had {lengths[name]} at line {lines[name]}"
                raise RowError("token_length", reason)
        except RowError as error:
            raise TraceError(str(path), line, error.field, error.reason) from error
        lengths[name] = tokens
        lines.setdefault(name, line)
    return lengths


def _whole_seconds(value: object) -> int:
    if not isinstance(value, str):
        raise RowError("timestamp", f"string of digits expected, found {kind(value)}")
    if not (value.isascii() and value.isdigit()):
        raise RowError("timestamp", f'string of digits expected, found "{value[:40]}"')
    return plain_integer(value, "timestamp", 0)
