"""JSONL with `hash_ids` for pieces of prompt: Mooncake, Qwen-Bailian and RAGPulse.

* `mooncake`: arrivals in ms, lengths, and chained ids of 512-token blocks. Other tools read this format too. The
  partial last block has its own id, so reuse is understated by up to one block per turn. The arrivals of the
  conversation trace are on ticks of 3 s with a few ms of jitter. `write_mooncake` writes this format: a block id then
  identifies the prompt from its start to the end of that block, so only the sharing of whole blocks is kept.
* `bailian`: seconds from the start, ids of 16-token blocks, and the chat that a chat continues. In some files the
  partial last block has an id, in others it has none. The first row that shows the rule decides, and all rows of the
  file must follow it. Ids are read as hashes of content. If each id has one parent and one position in the whole file,
  they are chained, and the header says so.
* `ragpulse`: a prompt is a list of segments (system, passages, history, web, user). Five other files hold their
  lengths. The clock restarts with each recorded week. The segments of a prompt are in the order of the keys in
  RAGPulse's README. The rest of a prompt (6 to 12 tokens of template) is at its end and is unique.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import gcd
from pathlib import Path

import numpy as np
import numpy.typing as npt

from traces.errors import RowError, TraceError, placed
from traces.formats.files import SourceFile, decode, open_source
from traces.formats.parsing import (
    count,
    in_range,
    integer,
    integers,
    kind,
    microseconds,
    note_unknown,
    plain_integer,
    read_object,
    require_keys,
    text,
)
from traces.formats.rows import Line, LineSource, Numbered, RowCounts, TraceRow, note
from traces.formats.segments import BlockSegments, ChainCheck
from traces.trace import CHAINED, CONTENT, Segment, Trace, TraceRequest

BLOCK_TOKENS = 512
_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_NS_PER_MS = 1_000_000
_JITTER_MS = 10  # times are rounded to it before ticks are looked for; the published jitter is 3 ms
_SHORTEST_TICK_MS = 1_000
_BLOCK_LINES = 2048
_FEWEST_TICKS = 4  # chance at most (10 ms / 1 s)^4, so that a few round times are not taken for ticks
Ints = npt.NDArray[np.int64]
Piece = tuple[int | None, int, int]  # key, where in the segment, tokens


class MooncakeSource(LineSource):
    """Rows of a Mooncake trace, parsed in blocks of lines. The reader checks that ids are chained."""

    format = "mooncake"
    source_block_tokens = BLOCK_TOKENS
    time_field = "timestamp"

    def __init__(self, file: SourceFile) -> None:
        super().__init__(file)
        self._chain = ChainCheck()
        self._ticks = _TickFinder()

    def read_row(self, text: str, line: int) -> TraceRow:
        """Time in nanoseconds from the start of the recording; segments of 512 tokens and the rest."""
        record = read_object(text)
        require_keys(record, _KEYS)
        time_ms = in_range(integer(record, "timestamp", "milliseconds"), "timestamp", 0)
        prompt = in_range(integer(record, "input_length"), "input_length", 1)
        output = in_range(integer(record, "output_length"), "output_length", 0)
        ids = block_ids(record["hash_ids"], prompt)
        if len(record) > len(_KEYS):
            note_unknown(self.noted, record, _KEYS)
        segments = BlockSegments(np.array(ids, np.int64), BLOCK_TOKENS, prompt)
        return TraceRow(time_ms * _NS_PER_MS, prompt, output, segments)

    def accept(self, row: TraceRow, line: int, request_id: int) -> TraceRow:
        """Check that every id has one parent and one position in the whole file."""
        self._chain.check_row([key for key, _ in row.segments if key is not None], line)
        assert row.time_ns is not None  # every row of this format has a time
        self._ticks.add(np.array([row.time_ns // _NS_PER_MS]))
        return row

    def rows(self, counts: RowCounts, sort: bool) -> Numbered:
        """Accepted rows. A block of lines is read as columns; if any of them is doubtful, row by row."""
        lines = self.data_lines(counts)
        if sort or (counts.limit is not None and counts.limit < _BLOCK_LINES):
            yield from self.one_by_one(lines, counts, sort)
            return
        while block := list(islice(lines, _BLOCK_LINES)):
            rows = self._block_rows(block)
            if rows is None:
                yield from self.one_by_one(block, counts, sort)
                continue
            for row in rows:
                if counts.limit_reached():
                    return
                counts.read += 1
                yield counts.read - 1, row

    def _block_rows(self, block: list[Line]) -> Iterator[TraceRow] | None:
        """The rows of many lines, parsed and checked as columns. None, with nothing remembered, if one is doubtful."""
        first_line, last_line = block[0][0], block[-1][0]
        if last_line - first_line + 1 != len(block):  # a blank line was skipped
            return None
        columns = _arrow_columns([raw for _, raw in block])
        if columns is None or not _valid_columns(columns, 0 if self.last is None else self.last[1]):
            return None
        times, prompts, outputs, ids, starts = columns
        if not self._chain.check_block(ids, starts, first_line):
            return None
        self._ticks.add(times)
        self.last = last_line, int(times[-1]) * _NS_PER_MS
        ends = starts.tolist()
        numbers = zip(times.tolist(), prompts.tolist(), outputs.tolist(), ends, ends[1:], strict=False)
        return (
            TraceRow(time * _NS_PER_MS, prompt, output, BlockSegments(ids[start:end], BLOCK_TOKENS, prompt))
            for time, prompt, output, start, end in numbers
        )

    def clock_quantum_us(self) -> int:
        """The tick that all arrivals share, apart from jitter, or one millisecond if there is none."""
        return self._ticks.quantum_us()


class _TickFinder:
    """The greatest common divisor of all times, rounded to the jitter."""

    def __init__(self) -> None:
        self._divisor = 0
        self._some: set[int] = set()

    def add(self, times_ms: npt.NDArray[np.int64]) -> None:
        rounded = np.unique((times_ms + _JITTER_MS // 2) // _JITTER_MS)
        self._divisor = gcd(self._divisor, int(np.gcd.reduce(rounded)))
        if len(self._some) < _FEWEST_TICKS:
            self._some.update(rounded[rounded > 0][:_FEWEST_TICKS].tolist())

    def quantum_us(self) -> int:
        tick_ms = self._divisor * _JITTER_MS
        is_tick = len(self._some) >= _FEWEST_TICKS and tick_ms >= _SHORTEST_TICK_MS
        return tick_ms * 1_000 if is_tick else 1_000


def _arrow_columns(lines: list[bytes]) -> tuple[Ints, Ints, Ints, Ints, Ints] | None:
    """timestamp, input_length, output_length [rows], concatenated hash_ids, and the start of each row's ids.

    None unless every line is one object with exactly these keys, all of them integers.
    """
    import pyarrow as pa
    from pyarrow import json as arrow_json

    block = b"\n".join(lines)
    if block.count(b"{") != len(lines) or not all(line.startswith(b"{") for line in lines):
        return None
    fields = [(name, pa.int64()) for name in _KEYS[:3]] + [(_KEYS[3], pa.list_(pa.int64()))]
    parse = arrow_json.ParseOptions(explicit_schema=pa.schema(fields), unexpected_field_behavior="error")
    read = arrow_json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    try:
        table = arrow_json.read_json(pa.BufferReader(block), read_options=read, parse_options=parse)
    except pa.ArrowException:
        return None
    arrays = [column.combine_chunks() for column in table.columns]
    if table.num_rows != len(lines) or any(array.null_count for array in (*arrays, arrays[3].values)):
        return None
    ids, starts = arrays[3].values.to_numpy(), arrays[3].offsets.to_numpy().astype(np.int64)
    times, prompts, outputs = (array.to_numpy() for array in arrays[:3])
    return times, prompts, outputs, ids, starts


def _valid_columns(columns: tuple[Ints, Ints, Ints, Ints, Ints], last_ns: int) -> bool:
    """Whether all rows pass the checks of a single row. Reading row by row then names the wrong one."""
    times, prompts, outputs, _, starts = columns
    return bool(
        times[0] >= last_ns // _NS_PER_MS
        and np.all(np.diff(times) >= 0)
        and prompts.min() >= 1
        and outputs.min() >= 0
        and max(times.max(), prompts.max(), outputs.max()) < 2**53
        and np.all(-(-prompts // BLOCK_TOKENS) == np.diff(starts))
    )


def block_ids(value: object, prompt_tokens: int) -> list[int]:
    """The ids of one row, one per full or partial block. Raises RowError."""
    ids = integers(value, "hash_ids")
    expected = -(-prompt_tokens // BLOCK_TOKENS)
    if len(ids) != expected:
        reason = f"ceil({prompt_tokens}/{BLOCK_TOKENS}) = {expected} ids expected, found {len(ids)}"
        raise RowError("hash_ids", reason)
    if len(set(ids)) != len(ids):
        twice = next(item for index, item in enumerate(ids) if item in ids[:index])
        raise RowError("hash_ids", f"id {twice} twice in one row: ids are not chained")
    return ids


def write_mooncake(trace: Trace, path: str | Path) -> None:
    """Write the fields that this format has; sessions and links are lost. Raises OSError."""
    names: dict[tuple[int | str, tuple[Piece, ...]], int] = {}
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for request in trace.requests:
            # two are equal if and only if the tenants are, and the prompts up to the end of the block
            ids: list[int] = []
            parent: int | str = request.salt
            for pieces in _blocks(request):
                unique = any(key is None for key, _, _ in pieces)
                name = (parent, (*pieces, (-1, request.request_id, 0)) if unique else pieces)
                ids.append(names.setdefault(name, len(names)))
                parent = ids[-1]
            values = (request.arrival_us // 1000, request.prompt_tokens, request.output_tokens, ids)
            file.write(json.dumps(dict(zip(_KEYS, values, strict=True))) + "\n")


def _blocks(request: TraceRequest) -> list[tuple[Piece, ...]]:
    blocks: list[list[Piece]] = []
    left = 0  # tokens that still fit into the last block
    for key, tokens in request.segments:
        start = 0
        while start < tokens:
            if not left:
                blocks.append([])
                left = BLOCK_TOKENS
            taken = min(left, tokens - start)
            blocks[-1].append((key, start, taken))
            start += taken
            left -= taken
    return [tuple(block) for block in blocks]


_BAILIAN_BLOCK = 16
_BAILIAN_KEYS = ("chat_id", "parent_chat_id", *_KEYS[:3], "type", "turn", "hash_ids")
_TYPES = ("text", "search", "image", "file")
_WITH_TAIL, _FULL = "partial last block has an id", "partial last block has no id"


@dataclass(frozen=True)
class _Chat:
    line: int
    request_id: int
    turn: int
    session: str


class BailianSource(LineSource):
    """Rows of a Bailian trace. Keys are chained until an id has another parent or position."""

    format = "bailian"
    source_block_tokens = _BAILIAN_BLOCK
    time_field = "timestamp"

    def __init__(self, file: SourceFile) -> None:
        super().__init__(file)
        self._chats: dict[int, _Chat] = {}
        self._chain = ChainCheck()
        self._rule: str | None = None

    def read_row(self, line_text: str, line: int) -> TraceRow:
        """Time in nanoseconds from the start. `more` holds the chat ids until `accept` replaces them by links."""
        record = read_object(line_text)
        require_keys(record, _BAILIAN_KEYS)
        time_us = microseconds(record, "timestamp", self.noted)
        prompt, output = count(record, "input_length", 1), count(record, "output_length")
        word = text(record, "type")
        if word not in _TYPES:
            raise RowError("type", f'one of {", ".join(_TYPES)} expected, found "{word[:40]}"')
        ids = integers(record["hash_ids"], "hash_ids")
        links = {"kind": word, "chat": count(record, "chat_id"), "parent": integer(record, "parent_chat_id")}
        links["turn"] = count(record, "turn", 1)
        note_unknown(self.noted, record, _BAILIAN_KEYS)
        rule, (whole, rest) = self._tail_rule(ids, prompt), divmod(prompt, _BAILIAN_BLOCK)
        segments = [Segment(key, _BAILIAN_BLOCK) for key in ids[:whole]]
        if rest:
            segments.append(Segment(ids[-1] if rule == _WITH_TAIL else None, rest))
        return TraceRow(time_us * 1_000, prompt, output, tuple(segments), links)

    def accept(self, row: TraceRow, line: int, request_id: int) -> TraceRow:
        """Link the chat to the chat that it continues."""
        assert row.more is not None  # set by read_row
        more = dict(row.more)
        chat, parent, turn = more.pop("chat"), more.pop("parent"), more["turn"]
        before = self._parent(chat, parent, turn)
        session = before.session if before else str(chat)
        ids = [key for key, _ in row.segments if key is not None]
        self._rule = self._tail_rule(ids, row.prompt_tokens) or self._rule
        self._chats[chat] = _Chat(line, request_id, turn, session)
        if self._rule is not None:
            self.noted[self._rule] = 1
        try:
            if self.key_kind == CHAINED:
                self._chain.check_row(ids, line)
        except RowError:
            self.key_kind = CONTENT
            note(self.noted, "ids with another parent or position")
        links = {"session": session, "parent": before.request_id if before else None}
        return row._replace(more={**more, **links})

    def clock_quantum_us(self) -> int:
        """One millisecond, as in the documented record."""
        return 1_000

    def _parent(self, chat: int, parent: int, turn: int) -> _Chat | None:
        if chat in self._chats:
            raise RowError("chat_id", f"{chat} already at line {self._chats[chat].line}")
        if parent == chat:
            raise RowError("parent_chat_id", f"request {chat} is its own parent")
        if parent < 0:
            if parent != -1:
                raise RowError("parent_chat_id", f"{parent}: -1 or an earlier chat_id expected")
            return None
        before = self._chats.get(parent)
        if before is None:
            raise RowError("parent_chat_id", f"{parent} unknown: no earlier row has this chat_id")
        if turn != before.turn + 1:
            raise RowError("turn", f"turn {turn}, parent has turn {before.turn}")
        return before

    def _tail_rule(self, ids: list[int], prompt: int) -> str | None:
        """The rule that this row follows, None if both. Raises RowError if neither, or not the rule of the file."""
        full, begun = prompt // _BAILIAN_BLOCK, -(-prompt // _BAILIAN_BLOCK)
        if len(ids) not in (full, begun):
            expected = f"{full} (full) or {begun} (with tail) expected, found {len(ids)}"
            raise RowError("hash_ids", f"{expected} for input_length {prompt}")
        if full == begun:
            return None
        rule = _WITH_TAIL if len(ids) == begun else _FULL
        if self._rule is not None and rule != self._rule:
            raise RowError("hash_ids", f"{len(ids)} ids: so far the {self._rule}; one rule a file")
        return rule


TRACE_FILE = "0_trace.jsonl"
_TABLES = {  # group -> file, name of its id; the order is that of the segments in a prompt
    "sys_prompt": ("1_sys_prompt.jsonl", "sys_prompt_id"),
    "passages_ids": ("2_passages.jsonl", "passage_id"),
    "history": ("3_history.jsonl", "history_id"),
    "web_search": ("5_web_search.jsonl", "web_search_id"),
    "user_input": ("4_user_input.jsonl", "user_input_id"),
}
GROUPS = tuple(_TABLES)
_RAGPULSE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids", "session_id")
_DAY_S, _WEEK_S = 86_400, 604_800


class RagPulseSource(LineSource):
    """Rows of `0_trace.jsonl`."""

    format = "ragpulse"
    key_kind = CONTENT
    time_field = "timestamp"

    def __init__(self, file: SourceFile) -> None:
        trace_file = Path(file.path)
        self._lengths = {
            group: _read_table(_table_path(trace_file, name), key) for group, (name, key) in _TABLES.items()
        }
        super().__init__(file)
        self._offset_s = self._last_s = 0

    def read_row(self, line_text: str, line: int) -> TraceRow:
        """Time in nanoseconds from the start of the first week. Segments in the order of `GROUPS`, then template."""
        record = read_object(line_text)
        require_keys(record, _RAGPULSE_KEYS)
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
        return TraceRow(self._week_time_s(time_s) * 1_000_000_000, prompt, output, tuple(segments), more)

    def accept(self, row: TraceRow, line: int, request_id: int) -> TraceRow:
        """Detect a restart of the clock, and number the turns of a session."""
        assert row.more is not None  # set by read_row
        session, time_s = row.more["session"], row.more["turn"]
        if time_s < self._last_s:
            self._offset_s += _WEEK_S
            note(self.noted, "clock_restarts")
        self._last_s = time_s
        return row._replace(more=self.turns.add(session, request_id))

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
                    reason = f"{key}: no token_length in {_TABLES[group][0]}"
                    raise RowError(f"hash_ids.{group}[{index}]", reason)
                segments.append(Segment(key, tokens))
        return segments


def _table_path(trace_file: Path, name: str) -> Path:
    """The table beside the trace or in the folder above. Raises TraceError."""
    for folder in (trace_file.parent, trace_file.parent.parent):
        if (folder / name).is_file():
            return folder / name
    wanted = ", ".join(file for file, _ in _TABLES.values())
    reason = f"the table {name} is not beside it; a RAGPulse trace needs {wanted}"
    raise TraceError(str(trace_file), None, None, reason)


def _read_table(path: Path, key: str) -> dict[int, int]:
    """Token lengths by id. Raises TraceError."""
    lengths: dict[int, int] = {}
    lines: dict[int, int] = {}
    for line, raw in open_source(path).lines():
        if not raw.strip():
            continue
        with placed(str(path), line):
            record = read_object(decode(raw))
            require_keys(record, (key, "token_length"))
            name, tokens = count(record, key), count(record, "token_length", 1)
            if lengths.get(name, tokens) != tokens:
                reason = f"id {name} has length {tokens}, had {lengths[name]} at line {lines[name]}"
                raise RowError("token_length", reason)
        lengths[name] = tokens
        lines.setdefault(name, line)
    return lengths


def _whole_seconds(value: object) -> int:
    if not (isinstance(value, str) and value.isascii() and value.isdigit()):
        shown = f'"{value[:40]}"' if isinstance(value, str) else kind(value)
        raise RowError("timestamp", f"string of digits expected, found {shown}")
    return plain_integer(value, "timestamp", 0)
