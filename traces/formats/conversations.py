"""Recorded conversations as documents: agents (kv-cache-tester), ShareGPT and LLMServingSim.

* `agentic`: one JSON object per file, or a folder of such files. The files have no common clock, so the start of each
  conversation is an assumption. Within a conversation, a turn is released `think_time` after the turn before it has
  finished, and after each nested agent that this turn started. The `t` of a nested entry is the time of its end, so it
  starts `duration_ms` earlier. (An entry without a duration was started without waiting for it: it starts at its `t`.)
  Ids are chained and local to the file, with 64 tokens per block. The partial last block has no id.
* `sharegpt`: conversations as text in one array of objects. The user provides the tokenizer. Each answer is a request,
  and its prompt is the conversation so far. Messages are tokenized one by one, without a chat template. Sharing between
  and within conversations is exact. The file is read in pieces; only tokens stay in memory.
* `servingsim`: JSONL, times in ns, single requests or sessions of sub-requests, with token ids if they were recorded.
  Rows may be in any order. Token ids are cut where prompts differ, so their sharing is exact at any block size. A later
  prompt may contain an earlier output.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from traces.arrivals import ArrivalProcess
from traces.errors import RowError, TraceError
from traces.formats.files import ArrayItems, SourceFile, decode, open_source, read_document
from traces.formats.parsing import (
    count,
    integers,
    kind,
    microseconds,
    note_unknown,
    read_object,
    require_keys,
    require_list,
    require_object,
    text,
    within,
)
from traces.formats.rows import Encode, Numbered, RowCounts, RowSource, TraceRow, note
from traces.formats.segments import BlockSegments, ChainCheck, Tokens, TokenTree
from traces.trace import AFTER, Segment

Record = dict[str, object]
_KEYS = ("id", "block_size", "requests")
_SCOPES = ("local", "global")
_LOCAL_BITS = 32
_STARTS = ArrivalProcess("poisson", 1 / 60)  # default: one conversation per minute


def check_totals(record: Record, entries: list[Record]) -> None:
    """Check the stated sums of input and output tokens, of the conversation and of its nested agents."""
    totals = record.get("totals")
    if not isinstance(totals, dict):
        return
    both: list[Any] = entries
    own = [entry for entry in both if entry.get("type") != "subagent"]
    nested = [one for entry in both if entry.get("type") == "subagent" for one in entry["requests"]]
    for group, requests in (("parent_tokens", own), ("subagent_tokens", nested)):
        stated = totals.get(group)
        if not isinstance(stated, dict):
            continue
        for side, key in (("input", "in"), ("output", "out")):
            summed = sum(request[key] for request in requests)
            if stated.get(side, summed) != summed:
                reason = f"{group}.{side} states {stated[side]}, the requests sum to {summed}"
                raise RowError("totals", reason)


@dataclass(frozen=True)
class Conversation:
    """The content of a file. Times of `rows` are nanoseconds from the start of the conversation."""

    name: str
    block_tokens: int
    rows: tuple[TraceRow, ...]
    inputs: tuple[int, ...]
    digest: str  # of the requests, without the file's id
    noted: dict[str, int]


@dataclass
class _Timeline:
    """The conversation built so far. `waits` are the requests that the next turn waits for."""

    name: str
    block: int
    base: int  # added to ids, so that ids of different files differ
    highest: int
    first_id: int
    chain: ChainCheck
    rows: list[TraceRow] = field(default_factory=list)
    noted: dict[str, int] = field(default_factory=dict)
    agents: set[str] = field(default_factory=set)
    launcher: int | None = None  # the last turn of the conversation itself
    launcher_end_us: int | None = None
    waits: tuple[int, ...] = ()
    turns: int = 0

    def in_order(self, entry: Record, last_us: int) -> int:
        """The time of an entry, which must not lie before the last one."""
        _require(entry, ("t",))
        time_us = microseconds(entry, "t", {})  # noted where the entry is added
        if time_us < last_us:
            raise RowError("t", f"goes back from {last_us / 1e6:g} to {time_us / 1e6:g} s")
        return time_us

    def add_turn(self, entry: Record) -> None:
        """A turn of the conversation itself."""
        self.turns += 1
        launcher = self.launcher
        links = self._links(entry, launcher, (launcher, *self.waits) if launcher is not None else ())
        arrival_us = self._add(entry, 0, {"session": self.name, "turn": self.turns, **links})
        self.launcher, self.waits = self.first_id + len(self.rows) - 1, ()
        took_us = self._optional_us(entry, "api_time")
        self.launcher_end_us = None if took_us is None else arrival_us + took_us

    def add_nested(self, entry: Record, place: str) -> None:
        """A chain of requests beside the conversation."""
        _require(entry, ("t", "requests", "status"))
        start_us = microseconds(entry, "t", self.noted)
        is_awaited = entry["status"] == "completed"
        if entry.get("duration_ms") is not None:
            start_us = max(0, start_us - count(entry, "duration_ms") * 1000)
        elif is_awaited:
            raise RowError("duration_ms", "required when completed")
        name = f"{self.name}/{entry.get('agent_id') or place}"
        if name in self.agents:
            note(self.noted, "agent_id of an earlier nested entry: its place added")
            name = f"{name}/{place}"
        self.agents.add(name)
        last_us = 0
        for index, request in enumerate(_entries(entry)):
            if request.get("type") == "subagent":
                raise RowError(f"requests[{index}]", "nested deeper than one level")
            with within(f"requests[{index}]"):
                last_us = self.in_order(request, last_us)
                before = self.first_id + len(self.rows) - 1
                if index:
                    links = self._links(request, before, (before,))
                elif self.launcher is None:
                    links = {"parent": None, "after": (), "think_us": None}
                else:
                    ended_us = start_us if self.launcher_end_us is None else self.launcher_end_us
                    links = {"parent": self.launcher, "after": (self.launcher,)}
                    links |= {"think_us": max(0, start_us - ended_us), "release": AFTER}
                self._add(request, start_us, {"session": name, "turn": index + 1, **links})
        if is_awaited:
            self.waits = (*self.waits, self.first_id + len(self.rows) - 1)
        else:
            note(self.noted, "nested entry that nobody waits for")

    def _links(self, entry: Record, parent: int | None, after: tuple[int, ...]) -> dict[str, Any]:
        think_us = self._optional_us(entry, "think_time")
        if not after:
            return {"parent": parent}
        if think_us is None:
            note(self.noted, "think_time missing: 0 assumed")
        return {"parent": parent, "after": after, "release": AFTER, "think_us": think_us or 0}

    def _optional_us(self, entry: Record, key: str) -> int | None:
        return None if entry.get(key) is None else microseconds(entry, key, self.noted)

    def _add(self, entry: Record, start_us: int, more: dict[str, Any]) -> int:
        """Add a request; returns its arrival in microseconds."""
        if entry.get("type") not in ("n", "s"):
            raise RowError("type", f"n, s or subagent expected, found {str(entry.get('type'))[:40]}")
        _require(entry, ("t", "in", "out", "hash_ids"))
        prompt, output = count(entry, "in", 1), count(entry, "out")
        ids = integers(entry["hash_ids"], "hash_ids", self.highest)
        whole = prompt // self.block
        if len(ids) != whole:
            reason = f"floor({prompt}/{self.block}) = {whole} expected, found {len(ids)}"
            raise RowError("hash_ids", reason)
        self.chain.check_row(ids, self.first_id + len(self.rows))
        segments = BlockSegments(np.array(ids, np.uint64) + np.uint64(self.base), self.block, prompt)
        arrival_us = start_us + microseconds(entry, "t", self.noted)
        # Recorded times are whole seconds, so a request could seem earlier than those that it waits for.
        for request_id in more.get("after", ()):
            arrival_us = max(arrival_us, (self.rows[request_id - self.first_id].time_ns or 0) // 1000)
        model = entry.get("model")
        more["model"] = model and str(model)
        self.rows.append(TraceRow(arrival_us * 1000, prompt, output, segments, more))
        return arrival_us


def read_conversation(said: str, number: int, files: int, first_id: int, shared: ChainCheck) -> Conversation:
    """Read the text of one of `files` files. Its first request gets `first_id`. RowError names the path in it.

    Ids of all files are chained in `shared` where they are global.
    """
    record = read_object(said)
    require_keys(record, _KEYS)
    name, block = text(record, "id"), record["block_size"]
    if type(block) is not int or not 1 <= block <= 2**20:
        raise RowError("block_size", f"integer of at least 1 expected, found {kind(block)}")
    scope = record.get("hash_id_scope", "local")  # older files have no such key, and their ids are local
    if scope not in _SCOPES:
        raise RowError("hash_id_scope", f"local or global expected, found {str(scope)[:40]}")
    is_local = scope == "local"
    base = (number if is_local else files) << _LOCAL_BITS  # global ids stand behind all that are local
    highest = 2**_LOCAL_BITS - 1 if is_local else 2**63 - 1
    line = _Timeline(name, block, base, highest, first_id, ChainCheck("request") if is_local else shared)
    entries = _entries(record)
    last_us = 0
    for index, entry in enumerate(entries):
        place = f"requests[{index}]"
        with within(place):
            last_us = line.in_order(entry, last_us)
            if entry.get("type") == "subagent":
                line.add_nested(entry, place)
            else:
                line.add_turn(entry)
    check_totals(record, entries)
    inputs = tuple(row.prompt_tokens for row in line.rows)
    digest = hashlib.sha256(repr(record["requests"]).encode()).hexdigest()
    return Conversation(name, block, tuple(line.rows), inputs, digest, line.noted)


def _entries(record: Record) -> list[Record]:
    entries = require_list(record["requests"], "requests")
    if not entries:
        raise RowError("requests", "is empty")
    return [require_object(entry, f"requests[{index}]") for index, entry in enumerate(entries)]


def _require(entry: Record, keys: tuple[str, ...]) -> None:
    try:
        require_keys(entry, keys)
    except RowError as error:
        raise RowError(error.field, error.reason.partition(", unknown")[0]) from error


class AgenticSource(RowSource):
    """The requests of one conversation file, or of all files in a folder, in the order of their names."""

    format = "agentic"
    is_ordered = False
    takes_arrivals = True

    def __init__(self, path: Path, starts: ArrivalProcess | None, seed: int) -> None:
        if not (paths := conversation_files(path)):
            raise TraceError(str(path), None, None, "no conversation files (*.json) in this folder")
        self.files = [open_source(file) for file in paths]
        sums = "".join(f"{file.sha256}  {Path(file.path).name}\n" for file in self.files)
        common = hashlib.sha256(sums.encode()).hexdigest()
        super().__init__(path.name, self.files[0].sha256 if path.is_file() else common)
        self._starts = (starts or _STARTS).times_us(len(paths), seed)
        sentence = f"conversation starts assumed: {(starts or _STARTS).describe()}"
        self.assumed = [sentence] if len(paths) > 1 else []
        self._blocks: set[int] = set()
        self._loaded: dict[str, str] = {}  # id or digest of the requests -> file
        self._inputs: set[tuple[int, ...]] = set()

    def clock_quantum_us(self) -> int:
        """One second, the resolution within a conversation."""
        return 1_000_000

    def rows(self, counts: RowCounts, sort: bool) -> Numbered:
        """Requests, conversation by conversation. A malformed conversation is refused, or skipped, as a whole."""
        shared, files = ChainCheck("request"), len(self.files)
        for number, (file, start_us) in enumerate(zip(self.files, self._starts, strict=True)):
            try:
                conversation = read_conversation(read_document(file), number, files, counts.read, shared)
                for name in (conversation.name, conversation.digest):
                    if name in self._loaded:
                        raise RowError("id", f"{conversation.name} already loaded from {self._loaded[name]}")
            except RowError as error:
                counts.read += 1
                counts.refuse(error.text_line, error, file.path)
                continue
            self._remember(conversation, Path(file.path))
            for row in conversation.rows:
                counts.read += 1
                assert row.time_ns is not None  # from the conversation's start
                yield counts.read - 1, row._replace(time_ns=row.time_ns + start_us * 1000)

    def _remember(self, conversation: Conversation, file: Path) -> None:
        self._loaded |= dict.fromkeys((conversation.name, conversation.digest), file.name)
        self._blocks.add(conversation.block_tokens)
        self.source_block_tokens = conversation.block_tokens if len(self._blocks) == 1 else None
        for name, times in conversation.noted.items():
            note(self.noted, name, times)
        if conversation.inputs in self._inputs:
            note(self.noted, "conversation repeats the inputs of another")
        self._inputs.add(conversation.inputs)
        if conversation.name != file.name.removesuffix(".gz").removesuffix(".json"):
            note(self.noted, "id is not the file's name")


def conversation_files(path: Path) -> list[Path]:
    """The file itself, or the JSON files of a folder, packed or not, sorted by name."""
    if not path.is_dir():
        return [path]
    return sorted([*path.glob("*.json"), *path.glob("*.json.gz")])


_ASKS, _ANSWERS = ("human", "user"), ("gpt", "chatgpt", "assistant", "bard", "bing")


class _Dialogue(NamedTuple):
    name: str
    tokens: Tokens  # of the whole conversation
    cuts: tuple[int, ...]  # ends of prompts and answers, alternating


class ShareGptSource(RowSource):
    """The requests of a ShareGPT file. An arrival process starts the conversations; turns follow without think time."""

    format = "sharegpt"
    has_clock = False
    takes_arrivals = True

    def __init__(self, file: SourceFile, encode: Encode | None) -> None:
        if encode is None:
            reason = "text must be tokenised: give a tokenizer (trace.tokenizer=FOLDER)"
            raise TraceError(file.path, 1, None, reason)
        super().__init__(file.name, file.sha256)
        self.file = file
        self.assumed = [
            "tokenised message by message, without a chat template; turns follow at once: no think times recorded"
        ]
        self._encode = encode

    def rows(self, counts: RowCounts, sort: bool) -> Numbered:
        """Requests, conversation by conversation, until `counts.limit_reached()`."""
        tree = TokenTree()
        dialogues: list[tuple[int, _Dialogue]] = []
        for first_id, dialogue in self._dialogues(counts):
            # the prompt of each turn contains the turns before
            for end in range(2, len(dialogue.cuts) + 1, 2):
                tree.insert(dialogue.tokens[: dialogue.cuts[end - 1]], dialogue.cuts[:end])
            dialogues.append((first_id, dialogue))
        for first_id, dialogue in dialogues:
            for row_id, row in self._turns(first_id, dialogue, tree):
                if counts.limit_reached():  # the turns that follow are not read
                    counts.read = counts.kept + sum(counts.dropped.values())
                    return
                yield row_id, row

    def _turns(self, first_id: int, dialogue: _Dialogue, tree: TokenTree) -> Numbered:
        for turn, (asked, answered) in enumerate(zip(dialogue.cuts[::2], dialogue.cuts[1::2], strict=True)):
            segments = tree.segments(dialogue.tokens[:asked])
            number = first_id + turn
            more: dict[str, Any] = {"session": dialogue.name, "turn": turn + 1}
            more["output_key"] = _output_key(tree, dialogue.tokens[:answered], len(segments), self.noted)
            if turn:
                more |= {"parent": number - 1, "after": (number - 1,), "release": AFTER, "think_us": 0}
            yield number, TraceRow(None, asked, answered - asked, segments, more)

    def _dialogues(self, counts: RowCounts) -> Iterator[tuple[int, _Dialogue]]:
        names = set[str]()
        for line, value in ArrayItems(self.file):
            if counts.limit is not None and counts.read - sum(counts.dropped.values()) >= counts.limit:
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
            if dialogue.name in names:
                note(self.noted, "id of an earlier conversation: its number added")
                dialogue = dialogue._replace(name=f"{dialogue.name}/{counts.read}")
            names.add(dialogue.name)
            yield counts.read, dialogue
            counts.read += len(dialogue.cuts) // 2

    def _dialogue(self, value: object, number: int) -> _Dialogue | None:
        record = require_object(value, "line")
        require_keys(record, ("conversations",))
        messages = require_list(record["conversations"], "conversations")
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
        return _Dialogue(str(number if record.get("id") is None else record["id"]), whole, tuple(cuts))


def _message(value: object, place: str) -> tuple[bool, str]:
    """Whether the message is an answer, and its text. Raises RowError."""
    message = require_object(value, place)
    speaker, text = message.get("from"), message.get("value")
    if not isinstance(text, str):
        raise RowError(f"{place}.value", f"string expected, found {kind(text)}")
    if speaker not in (*_ASKS, *_ANSWERS, "system"):
        raise RowError(f"{place}.from", f"human, gpt or system expected, found {str(speaker)[:40]}")
    return speaker in _ANSWERS, text


def _output_key(tree: TokenTree, tokens: Tokens, asked: int, noted: dict[str, int]) -> int | None:
    """The key of the output behind the first `asked` segments of a sequence; none, and noted, if it is cut."""
    said = tree.segments(tokens)[asked:]
    if len(said) > 1:
        note(noted, "outputs that return in part only: not recorded as shared")
    return said[0].key if len(said) == 1 else None


_FLAT = ("input_toks", "output_toks", "arrival_time_ns")
_CHAINED = ("session_id", "arrival_time_ns", "sub_requests")
_CALL = ("input_toks", "output_toks", "tool_duration_ns")
_IDS = ("input_tok_ids", "output_tok_ids")


class _Call(NamedTuple):
    time_ns: int
    prompt_tokens: int
    output_tokens: int
    prompt_ids: Tokens | None
    all_ids: Tokens | None  # prompt and output
    more: dict[str, Any]


class ServingSimSource(RowSource):
    """All requests of a file. The whole file is in memory, because prompts are compared with each other.

    The recorded nanoseconds are cut to microseconds.
    """

    format = "servingsim"
    is_ordered = False

    def __init__(self, file: SourceFile, vocab_size: int | None) -> None:
        super().__init__(file.name, file.sha256)
        self.file = file
        self._highest_id = 2**63 - 1 if vocab_size is None else vocab_size - 1
        self._vocab_size = vocab_size

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

    def _row(self, call: _Call, tree: TokenTree) -> TraceRow:
        more = dict(call.more)
        segments: tuple[Segment, ...] = (Segment(None, call.prompt_tokens),)
        if call.prompt_ids is not None:
            segments = tree.segments(call.prompt_ids)
            if call.all_ids is not None:
                more["output_key"] = _output_key(tree, call.all_ids, len(segments), self.noted)
        return TraceRow(call.time_ns, call.prompt_tokens, call.output_tokens, segments, more or None)

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
            note_unknown(self.noted, record, (*_FLAT, *_IDS))
            return [self._call(record, count(record, "arrival_time_ns", 0, 2**62), {})]
        if "input_toks" in record:
            raise RowError("sub_requests", "flat (input_toks) or chained (sub_requests), not both")
        require_keys(record, _CHAINED)
        note_unknown(self.noted, record, _CHAINED)
        name = str(record["session_id"])
        if name in sessions:
            raise RowError("session_id", f"{name[:40]} already at line {sessions[name]}")
        calls = list(self._chain(record, name, first_id))
        sessions[name] = line
        return calls

    def _chain(self, record: dict[str, object], session: str, first_id: int) -> Iterator[_Call]:
        """The calls of a session. A later call is released when the call before ends; its arrival is a lower bound."""
        time_ns = count(record, "arrival_time_ns", 0, 2**62)
        entries = require_list(record["sub_requests"], "sub_requests")
        if not entries:
            raise RowError("sub_requests", "is empty")
        think_us = 0
        for index, value in enumerate(entries):
            entry = require_object(value, f"sub_requests[{index}]")
            more: dict[str, Any] = {"session": session, "turn": index + 1}
            if index:
                before = first_id + index - 1
                more |= {"parent": before, "after": (before,), "release": AFTER, "think_us": think_us}
                time_ns += think_us * 1000
            with within(f"sub_requests[{index}]"):
                require_keys(entry, _CALL)
                note_unknown(self.noted, entry, (*_CALL, *_IDS))
                think_us = count(entry, "tool_duration_ns", 0, 2**62) // 1000
                call = self._call(entry, time_ns, more)
            yield call

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
