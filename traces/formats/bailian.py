"""Qwen-Bailian JSONL: seconds from the start, ids of 16-token blocks, and the chat that a chat continues.

In some files the partial last block has an id, in others it has none. The first row that shows the rule decides, and
all rows of the file must follow it. Ids are read as hashes of content. If each id has one parent and one position in
the whole file, they are chained, and the header says so.
"""

from dataclasses import dataclass

from traces.errors import RowError
from traces.formats.parsing import count, integer, integers, microseconds, read_object, require_keys, text
from traces.formats.rows import Row, note
from traces.formats.segments import ChainCheck
from traces.trace import CHAINED, CONTENT, Segment

BLOCK_TOKENS = 16
_KEYS = (
    "chat_id",
    "parent_chat_id",
    "timestamp",
    "input_length",
    "output_length",
    "type",
    "turn",
    "hash_ids",
)
_TYPES = ("text", "search", "image", "file")
_WITH_TAIL, _FULL = "partial last block has an id", "partial last block has no id"


@dataclass(frozen=True)
class _Chat:
    line: int
    request_id: int
    turn: int
    session: str


class BailianReader:
    """Rows of a Bailian trace."""

    format = "bailian"
    source_block_tokens: int | None = BLOCK_TOKENS
    time_field = "timestamp"
    has_header = False
    has_clock = True
    is_ordered = True

    def __init__(self) -> None:
        self.noted: dict[str, int] = {}
        self._chats: dict[int, _Chat] = {}
        self._chain = ChainCheck()
        self._rule: str | None = None

    @property
    def key_kind(self) -> str:
        """Content, unless all ids read so far are chained."""
        return CONTENT if "ids with another parent or position" in self.noted else CHAINED

    def read_header(self, text: str) -> None:
        """Never called: JSONL has no header."""

    def read_row(self, line_text: str, line: int) -> Row:
        """Time in nanoseconds from the start. `more` holds the chat ids until `accept` replaces them by links."""
        record = read_object(line_text)
        require_keys(record, _KEYS)
        time_us = microseconds(record, "timestamp", self.noted)
        prompt, output = count(record, "input_length", 1), count(record, "output_length")
        word = text(record, "type")
        if word not in _TYPES:
            raise RowError("type", f'one of {", ".join(_TYPES)} expected, found "{word[:40]}"')
        ids = integers(record["hash_ids"], "hash_ids")
        links = {"chat": count(record, "chat_id"), "parent": integer(record, "parent_chat_id")}
        turn = count(record, "turn", 1)
        for key in record.keys() - _KEYS:
            note(self.noted, f"unknown key {key}")
        segments = _segments(ids, prompt, self._tail_rule(ids, prompt))
        return Row(time_us * 1_000, prompt, output, segments, {"kind": word, "turn": turn, **links})

    def accept(self, row: Row, line: int, request_id: int) -> Row:
        """Link the chat to the chat that it continues."""
        assert row.more is not None  # set by read_row
        more = dict(row.more)
        chat, parent, turn = more.pop("chat"), more.pop("parent"), more["turn"]
        before = self._parent(chat, parent, turn)
        session = before.session if before else str(chat)
        ids = [key for key, _ in row.segments if key is not None]
        self._rule = self._tail_rule(ids, row.prompt_tokens) or self._rule
        self._chats[chat] = _Chat(line, request_id, turn, session)
        self._watch_chain(ids, line)
        return row._replace(
            more={**more, "session": session, "parent": before.request_id if before else None}
        )

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
        full, begun = prompt // BLOCK_TOKENS, -(-prompt // BLOCK_TOKENS)
        if len(ids) not in (full, begun):
            expected = f"{full} (full) or {begun} (with tail) expected, found {len(ids)}"
            raise RowError("hash_ids", f"{expected} for input_length {prompt}")
        if full == begun:
            return None
        rule = _WITH_TAIL if len(ids) == begun else _FULL
        if self._rule is not None and rule != self._rule:
            raise RowError("hash_ids", f"{len(ids)} ids: so far the {self._rule}; one rule a file")
        return rule

    def _watch_chain(self, ids: list[int], line: int) -> None:
        if self._rule is not None:
            self.noted[self._rule] = 1
        try:
            if self.key_kind == CHAINED:
                self._chain.check_row(ids, line)
        except RowError:
            note(self.noted, "ids with another parent or position")


def _segments(ids: list[int], prompt: int, rule: str | None) -> tuple[Segment, ...]:
    whole = [Segment(key, BLOCK_TOKENS) for key in ids[: prompt // BLOCK_TOKENS]]
    rest = prompt % BLOCK_TOKENS
    if rest:
        whole.append(Segment(ids[-1] if rule == _WITH_TAIL else None, rest))
    return tuple(whole)
