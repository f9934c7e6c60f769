"""ShareGPT JSON: conversations as text in one array of objects. The user provides the tokenizer.

Each answer is a request, and its prompt is the conversation so far. Messages are tokenized one by one, without a chat
template. Sharing between and within conversations is exact. The file is read in pieces; only tokens stay in memory.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from traces.errors import RowError, TraceError
from traces.formats.files import ArrayItems, SourceFile
from traces.formats.parsing import kind, require_keys
from traces.formats.rows import Encode, Numbered, Row, RowCounts, note
from traces.formats.segments import Tokens, TokenTree
from traces.trace import AFTER, CHAINED, TraceHeader

_ASKS, _ANSWERS = ("human", "user"), ("gpt", "chatgpt", "assistant", "bard", "bing")


class _Dialogue(NamedTuple):
    name: str
    tokens: Tokens  # of the whole conversation
    cuts: tuple[int, ...]  # ends of prompts and answers, alternating


class ShareGptSource:
    """The requests of a ShareGPT file. An arrival process starts the conversations; turns follow without think time."""

    format = "sharegpt"
    key_kind = CHAINED
    source_block_tokens: int | None = None
    has_clock = False
    is_ordered = True
    takes_arrivals = True
    embedded: TraceHeader | None = None

    def __init__(self, file: SourceFile, encode: Encode | None) -> None:
        if encode is None:
            reason = "text must be tokenised: give a tokenizer (trace.tokenizer=FOLDER)"
            raise TraceError(file.path, 1, None, reason)
        self.file = file
        self.source = file.name
        self.sha256 = file.sha256
        self.noted: dict[str, int] = {}
        self.assumed = [
            "tokenised message by message, without a chat template; turns follow at once: no think times recorded"
        ]
        self._encode = encode

    def clock_quantum_us(self) -> int:
        """The assumed clock's resolution."""
        return 1

    def rows(self, counts: RowCounts, sort: bool) -> Numbered:
        """Requests, conversation by conversation, until `counts.limit_reached()`."""
        tree = TokenTree()
        dialogues: list[tuple[int, _Dialogue]] = []
        for first_id, dialogue in self._dialogues(counts):
            for end in range(
                2, len(dialogue.cuts) + 1, 2
            ):  # the prompt of each turn contains the turns before
                tree.insert(dialogue.tokens[: dialogue.cuts[end - 1]], dialogue.cuts[:end])
            dialogues.append((first_id, dialogue))
        for first_id, dialogue in dialogues:
            for row_id, row in self._turns(first_id, dialogue, tree):
                if counts.limit_reached():
                    return
                yield row_id, row

    def _turns(self, first_id: int, dialogue: _Dialogue, tree: TokenTree) -> Numbered:
        start = 0
        for turn, (asked, answered) in enumerate(zip(dialogue.cuts[::2], dialogue.cuts[1::2], strict=True)):
            segments = tree.segments(dialogue.tokens[:asked])
            said = tree.segments(dialogue.tokens[:answered])[len(segments) :]
            number = first_id + turn
            more: dict[str, Any] = {"session": dialogue.name, "turn": turn + 1}
            more["output_key"] = said[0].key if len(said) == 1 else None
            if turn:
                more |= {"parent": number - 1, "after": (number - 1,), "release": AFTER, "think_us": 0}
            yield number, Row(None, asked, answered - asked, segments, more)
            start = answered
        assert start == len(dialogue.tokens)  # the last cut is the end

    def _dialogues(self, counts: RowCounts) -> Iterator[tuple[int, _Dialogue]]:
        for line, value in ArrayItems(self.file):
            if counts.limit is not None and counts.read >= counts.limit:
                counts.more_follows = True
                return
            try:
                dialogue = self._dialogue(value, counts.read)
            except RowError as error:
                counts.read += 1
                counts.refuse(line, error)
                continue
            if dialogue is None:
                counts.read += 1
                note(counts.dropped, "no question with an answer")
                continue
            yield counts.read, dialogue
            counts.read += len(dialogue.cuts) // 2

    def _dialogue(self, value: object, number: int) -> _Dialogue | None:
        if not isinstance(value, dict):
            raise RowError("line", f"expected an object, found {kind(value)}")
        require_keys(value, ("conversations",))
        messages = value["conversations"]
        if not isinstance(messages, list):
            raise RowError("conversations", f"list expected, found {kind(messages)}")
        pieces: list[Tokens] = []
        cuts: list[int] = []
        end = asked = 0
        for index, message in enumerate(messages):
            is_answer, text = _message(message, f"conversations[{index}]")
            tokens = np.asarray(self._encode(text), np.int64)
            if is_answer and asked and end == asked and len(tokens):
                cuts += [end, end + len(tokens)]
            end += len(tokens)
            asked = 0 if is_answer else end
            pieces.append(tokens)
        if not cuts:
            return None
        whole = np.concatenate(pieces)[: cuts[-1]]
        return _Dialogue(str(value.get("id", number)), whole, tuple(cuts))


def _message(value: object, place: str) -> tuple[bool, str]:
    """Whether the message is an answer, and its text. Raises RowError."""
    if not isinstance(value, dict):
        raise RowError(place, f"expected an object, found {kind(value)}")
    speaker, text = value.get("from"), value.get("value")
    if not isinstance(text, str):
        raise RowError(f"{place}.value", f"string expected, found {kind(text)}")
    if speaker not in (*_ASKS, *_ANSWERS, "system"):
        raise RowError(f"{place}.from", f"human, gpt or system expected, found {str(speaker)[:40]}")
    return speaker in _ANSWERS, text
