"""LLMServingSim JSONL: times in ns, single requests or sessions of sub-requests, with token ids if they were recorded.

Rows may be in any order. Token ids are cut where prompts differ, so their sharing is exact at any block size. A later
prompt may contain an earlier output.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from traces.errors import RowError
from traces.formats.files import SourceFile, decode
from traces.formats.parsing import count, integers, kind, read_object, require_keys
from traces.formats.rows import Numbered, Row, RowCounts, note
from traces.formats.segments import Tokens, TokenTree
from traces.trace import AFTER, CHAINED, Segment, TraceHeader

_FLAT, _CHAINED = (
    ("input_toks", "output_toks", "arrival_time_ns"),
    ("session_id", "arrival_time_ns", "sub_requests"),
)
_CALL = ("input_toks", "output_toks", "tool_duration_ns")
_IDS = ("input_tok_ids", "output_tok_ids")


class _Call(NamedTuple):
    time_ns: int
    prompt_tokens: int
    output_tokens: int
    prompt_ids: Tokens | None
    all_ids: Tokens | None  # prompt and output
    more: dict[str, Any]


class ServingSimSource:
    """All requests of a file. The whole file is in memory, because prompts are compared with each other."""

    format = "servingsim"
    key_kind = CHAINED
    source_block_tokens: int | None = None
    has_clock = True
    is_ordered = False
    takes_arrivals = False
    embedded: TraceHeader | None = None

    def __init__(self, file: SourceFile, vocab_size: int | None) -> None:
        self.file = file
        self.source = file.name
        self.sha256 = file.sha256
        self.noted: dict[str, int] = {}
        self.assumed: list[str] = []
        self._highest_id = 2**63 - 1 if vocab_size is None else vocab_size - 1
        self._vocab_size = vocab_size

    def clock_quantum_us(self) -> int:
        """One microsecond: the recorded nanoseconds are cut."""
        return 1

    def rows(self, counts: RowCounts, sort: bool) -> Numbered:
        """Requests with their prompts as segments; `request_id` counts calls in the order of the file."""
        calls = list(self._calls(counts))
        tree = TokenTree()
        for _, call in calls:
            if call.prompt_ids is not None:
                ids = call.prompt_ids if call.all_ids is None else call.all_ids
                cuts = (len(call.prompt_ids), len(ids)) if len(ids) > len(call.prompt_ids) else (len(ids),)
                tree.insert(ids, cuts)
        for number, call in calls:
            yield number, self._row(call, tree)

    def _row(self, call: _Call, tree: TokenTree) -> Row:
        more = dict(call.more)
        segments: tuple[Segment, ...] = (Segment(None, call.prompt_tokens),)
        if call.prompt_ids is not None:
            segments = tree.segments(call.prompt_ids)
            if call.all_ids is not None:
                said = tree.segments(call.all_ids)[len(segments) :]
                more["output_key"] = said[0].key if len(said) == 1 else None
                if len(said) > 1:
                    note(self.noted, "outputs that return in part only: not recorded as shared")
        return Row(call.time_ns, call.prompt_tokens, call.output_tokens, segments, more or None)

    def _calls(self, counts: RowCounts) -> Iterator[tuple[int, _Call]]:
        sessions: dict[str, int] = {}
        for line, raw in self.file.lines():
            if not raw.strip():
                continue
            try:
                calls = self._line_calls(read_object(decode(raw)), counts.read, sessions, line)
            except RowError as error:
                counts.read += 1
                counts.refuse(line, error)
                continue
            for call in calls:
                counts.read += 1
                yield counts.read - 1, call

    def _line_calls(
        self, record: dict[str, object], first_id: int, sessions: dict[str, int], line: int
    ) -> list[_Call]:
        if "sub_requests" not in record:
            require_keys(record, _FLAT)
            self._note_unknown(record, (*_FLAT, *_IDS))
            return [self._call(record, count(record, "arrival_time_ns", 0, 2**62), {})]
        if "input_toks" in record:
            raise RowError("sub_requests", "flat (input_toks) or chained (sub_requests), not both")
        require_keys(record, _CHAINED)
        self._note_unknown(record, _CHAINED)
        name = str(record["session_id"])
        if name in sessions:
            raise RowError("session_id", f"{name[:40]} already at line {sessions[name]}")
        calls = list(self._chain(record, name, first_id))
        sessions[name] = line
        return calls

    def _chain(self, record: dict[str, object], session: str, first_id: int) -> Iterator[_Call]:
        """The calls of a session. A later call is released when the call before ends; its arrival is a lower bound."""
        time_ns = count(record, "arrival_time_ns", 0, 2**62)
        entries = record["sub_requests"]
        if not isinstance(entries, list):
            raise RowError("sub_requests", f"list expected, found {kind(entries)}")
        if not entries:
            raise RowError("sub_requests", "is empty")
        think_us = 0
        for index, entry in enumerate(entries):
            if not isinstance(entry, dict):
                raise RowError(f"sub_requests[{index}]", f"expected an object, found {kind(entry)}")
            more: dict[str, Any] = {"session": session, "turn": index + 1}
            if index:
                before = first_id + index - 1
                more |= {"parent": before, "after": (before,), "release": AFTER, "think_us": think_us}
                time_ns += think_us * 1000
            try:
                require_keys(entry, _CALL)
                think_us = count(entry, "tool_duration_ns", 0, 2**62) // 1000
                yield self._call(entry, time_ns, more)
            except RowError as error:
                raise RowError(f"sub_requests[{index}].{error.field}", error.reason) from error

    def _call(self, record: dict[str, object], time_ns: int, more: dict[str, Any]) -> _Call:
        prompt, output = count(record, "input_toks", 1), count(record, "output_toks")
        asked = self._ids(record, "input_tok_ids", prompt)
        answered = self._ids(record, "output_tok_ids", output)
        both = None if asked is None or answered is None else np.concatenate([asked, answered])
        return _Call(time_ns, prompt, output, asked, both, more)

    def _ids(self, record: dict[str, object], key: str, expected: int) -> Tokens | None:
        if key not in record:
            return None
        try:
            ids = integers(record[key], key, self._highest_id)
        except RowError as error:
            if "is above" not in error.reason:
                raise
            found = error.reason.partition(" ")[0]
            raise RowError(error.field, f"{found}: the vocabulary has {self._vocab_size}") from error
        if len(ids) != expected:
            raise RowError(key, f"{expected} token ids expected, found {len(ids)}")
        return np.array(ids, np.int64)

    def _note_unknown(self, record: dict[str, object], known: tuple[str, ...]) -> None:
        for key in record.keys() - known:
            note(self.noted, f"unknown key {key}")
