"""Recorded agent conversations (kv-cache-tester): one JSON object per file, or a folder of such files.

The files have no common clock, so the start of each conversation is an assumption. Within a conversation, a turn is
released `think_time` after the turn before it has finished, and after each nested agent that this turn started.
The `t` of a nested entry is the time of its end, so it starts `duration_ms` earlier. (An entry without a duration was
started without waiting for it: it starts at its `t`.) Ids are chained and local to the file, with 64 tokens per
block. The partial last block has no id.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from traces.arrivals import ArrivalProcess
from traces.errors import RowError, TraceError
from traces.formats.files import SourceFile, open_source, read_document
from traces.formats.parsing import count, integers, kind, microseconds, read_object, require_keys, text
from traces.formats.rows import Numbered, Row, RowCounts, note
from traces.formats.segments import BlockSegments, ChainCheck
from traces.trace import AFTER, CHAINED, TraceHeader

Record = dict[str, object]
_KEYS = ("id", "block_size", "requests")
_TURN = ("t", "in", "out", "hash_ids")
_NESTED = ("t", "requests", "status")
_SCOPES = ("local", "global")
_LOCAL_BITS = 32
_STARTS = ArrivalProcess("poisson", 1 / 60)  # default: one conversation per minute


def check_totals(record: Record, entries: list[Record]) -> None:
    """Check the stated sums of input and output tokens, of the conversation and of its nested agents."""
    totals = record.get("totals")
    if not isinstance(totals, dict):
        return
    nested = [entry for entry in entries if entry.get("type") == "subagent"]
    own = [entry for entry in entries if entry.get("type") != "subagent"]
    groups = {"parent_tokens": own, "subagent_tokens": [r for entry in nested for r in entry["requests"]]}  # type: ignore[attr-defined]
    for group, requests in groups.items():
        stated = totals.get(group)
        if not isinstance(stated, dict):
            continue
        for side, key in (("input", "in"), ("output", "out")):
            found = sum(request[key] for request in requests)
            if stated.get(side, found) != found:
                raise RowError("totals", f"{group}.{side} states {stated[side]}, the requests sum to {found}")


@dataclass(frozen=True)
class Conversation:
    """The content of a file. Times of `rows` are nanoseconds from the start of the conversation."""

    name: str
    block_tokens: int
    rows: tuple[Row, ...]
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
    rows: list[Row] = field(default_factory=list)
    noted: dict[str, int] = field(default_factory=dict)
    chain: ChainCheck = field(default_factory=lambda: ChainCheck(place="request"))
    launcher: int | None = None  # the last turn of the conversation itself
    launcher_end_us: int | None = None
    waits: tuple[int, ...] = ()
    turns: int = 0

    def next_id(self) -> int:
        return self.first_id + len(self.rows)


def read_conversation(document: str, file_number: int, first_id: int) -> Conversation:
    """Read one file's text. Its first request gets `first_id`. RowError names the path in the document."""
    record = read_object(document)
    require_keys(record, _KEYS)
    name, block = text(record, "id"), _block_size(record)
    is_local = _scope(record) == "local"
    line = _Timeline(
        name=name,
        block=block,
        base=file_number << _LOCAL_BITS if is_local else 0,
        highest=2**_LOCAL_BITS - 1 if is_local else 2**63 - 1,
        first_id=first_id,
    )
    entries = _entries(record, "requests")
    last_us = 0
    for index, entry in enumerate(entries):
        place = f"requests[{index}]"
        last_us = _in_order(entry, place, last_us, line)
        if entry.get("type") == "subagent":
            _add_nested(line, entry, place)
        else:
            _add_turn(line, entry, place)
    check_totals(record, entries)
    inputs = tuple(row.prompt_tokens for row in line.rows)
    digest = hashlib.sha256(repr(record["requests"]).encode()).hexdigest()
    return Conversation(name, block, tuple(line.rows), inputs, digest, line.noted)


def _block_size(record: Record) -> int:
    value = record["block_size"]
    if type(value) is not int or not 1 <= value <= 2**20:
        raise RowError("block_size", f"integer of at least 1 expected, found {kind(value)}")
    return value


def _scope(record: Record) -> str:
    scope = record.get("hash_id_scope", "local")  # older files have no such key, and their ids are local
    if scope not in _SCOPES:
        raise RowError("hash_id_scope", f"local or global expected, found {str(scope)[:40]}")
    return str(scope)


def _entries(record: Record, place: str) -> list[Record]:
    value = record["requests"]
    if not isinstance(value, list):
        raise RowError(place, f"list expected, found {kind(value)}")
    if not value:
        raise RowError(place, "is empty")
    for index, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise RowError(f"{place}[{index}]", f"expected an object, found {kind(entry)}")
    return value


def _at(place: str, read: Any, entry: Record, key: str, *more: Any) -> Any:
    """`read(entry, key, ...)`, with the place in the document in its errors."""
    try:
        return read(entry, key, *more)
    except RowError as error:
        raise RowError(f"{place}.{error.field}", error.reason) from error


def _in_order(entry: Record, place: str, last_us: int, line: _Timeline) -> int:
    _require(entry, place, ("t",))
    time_us: int = _at(place, microseconds, entry, "t", line.noted)
    if time_us < last_us:
        raise RowError(f"{place}.t", f"goes back from {last_us / 1e6:g} to {time_us / 1e6:g} s")
    return time_us


def _require(entry: Record, place: str, keys: tuple[str, ...]) -> None:
    try:
        require_keys(entry, keys)
    except RowError as error:
        raise RowError(f"{place}.{error.field}", error.reason.partition(", unknown")[0]) from error


def _add_turn(line: _Timeline, entry: Record, place: str) -> None:
    """A turn of the conversation itself."""
    line.turns += 1
    number, launcher = line.next_id(), line.launcher
    links = _links(line, entry, place, launcher, (launcher, *line.waits) if launcher is not None else ())
    row = _request(line, entry, place, 0, {"session": line.name, "turn": line.turns, **links})
    line.rows.append(row)
    line.launcher, line.waits = number, ()
    took_us = _optional_us(line, entry, place, "api_time")
    assert row.time_ns is not None  # set by _request
    line.launcher_end_us = None if took_us is None else row.time_ns // 1000 + took_us


def _add_nested(line: _Timeline, entry: Record, place: str) -> None:
    """A chain of requests beside the conversation."""
    _require(entry, place, _NESTED)
    start_us = _start_us(line, entry, place)
    name = f"{line.name}/{entry.get('agent_id', place)}"
    before: int | None = None
    last_us = 0
    for index, request in enumerate(_entries(entry, f"{place}.requests")):
        inner = f"{place}.requests[{index}]"
        if request.get("type") == "subagent":
            raise RowError(inner, "nested deeper than one level")
        last_us = _in_order(request, inner, last_us, line)
        number = line.next_id()
        if before is None:
            after = () if line.launcher is None else (line.launcher,)
            delay_us = max(0, start_us - line.launcher_end_us) if line.launcher_end_us is not None else 0
            links: dict[str, Any] = {
                "parent": line.launcher,
                "after": after,
                "think_us": delay_us if after else None,
            }
            links |= {"release": AFTER} if after else {}
        else:
            links = _links(line, request, inner, before, (before,))
        line.rows.append(
            _request(line, request, inner, start_us, {"session": name, "turn": index + 1, **links})
        )
        before = number
    assert before is not None  # an empty list is refused
    if entry["status"] == "completed":
        line.waits = (*line.waits, before)
    else:
        note(line.noted, "nested entry that nobody waits for")


def _start_us(line: _Timeline, entry: Record, place: str) -> int:
    ended_us: int = _at(place, microseconds, entry, "t", line.noted)
    if entry.get("duration_ms") is None:
        if entry["status"] == "completed":
            raise RowError(f"{place}.duration_ms", "required when completed")
        return ended_us
    duration_us: int = _at(place, count, entry, "duration_ms") * 1000
    return max(0, ended_us - duration_us)


def _links(
    line: _Timeline, entry: Record, place: str, parent: int | None, after: tuple[int, ...]
) -> dict[str, Any]:
    think_us = _optional_us(line, entry, place, "think_time")
    if not after:
        return {"parent": parent}
    if think_us is None:
        note(line.noted, "think_time missing: 0 assumed")
    return {"parent": parent, "after": after, "release": AFTER, "think_us": think_us or 0}


def _optional_us(line: _Timeline, entry: Record, place: str, key: str) -> int | None:
    if entry.get(key) is None:
        return None
    value: int = _at(place, microseconds, entry, key, line.noted)
    return value


def _request(line: _Timeline, entry: Record, place: str, start_us: int, more: dict[str, Any]) -> Row:
    if entry.get("type") not in ("n", "s"):
        raise RowError(f"{place}.type", f"n, s or subagent expected, found {str(entry.get('type'))[:40]}")
    _require(entry, place, _TURN)
    prompt, output = _at(place, count, entry, "in", 1), _at(place, count, entry, "out")
    ids = integers(entry["hash_ids"], f"{place}.hash_ids", line.highest)
    whole = prompt // line.block
    if len(ids) != whole:
        reason = f"floor({prompt}/{line.block}) = {whole} expected, found {len(ids)}"
        raise RowError(f"{place}.hash_ids", reason)
    try:
        line.chain.check_row(ids, len(line.rows))
    except RowError as error:
        raise RowError(f"{place}.hash_ids", error.reason) from error
    keys = np.array(ids, np.uint64) + np.uint64(line.base)
    arrival_us = start_us + _at(place, microseconds, entry, "t", line.noted)
    # Recorded times are whole seconds, so a request could seem earlier than those that it waits for.
    for request_id in more.get("after", ()):
        earlier_ns = line.rows[request_id - line.first_id].time_ns
        arrival_us = max(arrival_us, (earlier_ns or 0) // 1000)
    model = entry.get("model")
    return Row(
        arrival_us * 1000,
        prompt,
        output,
        BlockSegments(keys, line.block, prompt),
        {**more, "model": model and str(model)},
    )


class AgenticSource:
    """The requests of one conversation file, or of all files in a folder, in the order of their names."""

    format = "agentic"
    key_kind = CHAINED
    has_clock = True
    is_ordered = False
    takes_arrivals = True
    embedded: TraceHeader | None = None

    def __init__(
        self, path: Path, starts: ArrivalProcess | None, seed: int, expect_sha256: str | None = None
    ) -> None:
        paths = conversation_files(path)
        self.source = path.name
        self.files = [open_source(found, None if path.is_dir() else expect_sha256) for found in paths]
        self.sha256 = self.files[0].sha256 if path.is_file() else _common_sha256(self.files)
        self.noted: dict[str, int] = {}
        self._starts = (starts or _STARTS).times_us(len(paths), seed)
        sentence = f"conversation starts assumed: {(starts or _STARTS).describe()}"
        self.assumed = [sentence] if len(paths) > 1 else []
        self._blocks: set[int] = set()
        self._loaded: dict[str, str] = {}  # id or digest of the requests -> file
        self._inputs: set[tuple[int, ...]] = set()

    @property
    def source_block_tokens(self) -> int | None:
        """The block size if all files have the same, else None."""
        return next(iter(self._blocks)) if len(self._blocks) == 1 else None

    def clock_quantum_us(self) -> int:
        """One second, the resolution within a conversation."""
        return 1_000_000

    def rows(self, counts: RowCounts, sort: bool) -> Numbered:
        """Requests, conversation by conversation. A malformed conversation is refused, or skipped, as a whole."""
        for number, (file, start_us) in enumerate(zip(self.files, self._starts, strict=True)):
            try:
                conversation = read_conversation(read_document(file), number, counts.read)
                self._check_once(conversation, file)
            except RowError as error:
                counts.read += 1
                counts.refuse(error.text_line, error, file.path)
                continue
            self._remember(conversation, file)
            for row in conversation.rows:
                counts.read += 1
                assert row.time_ns is not None  # from the conversation's start
                yield counts.read - 1, row._replace(time_ns=row.time_ns + start_us * 1000)

    def _check_once(self, conversation: Conversation, file: SourceFile) -> None:
        for name in (conversation.name, conversation.digest):
            if name in self._loaded:
                raise RowError("id", f"{conversation.name} already loaded from {self._loaded[name]}")

    def _remember(self, conversation: Conversation, file: SourceFile) -> None:
        self._loaded |= dict.fromkeys((conversation.name, conversation.digest), Path(file.path).name)
        self._blocks.add(conversation.block_tokens)
        for name, times in conversation.noted.items():
            note(self.noted, name, times)
        if conversation.inputs in self._inputs:
            note(self.noted, "conversation repeats the inputs of another")
        self._inputs.add(conversation.inputs)
        if conversation.name != Path(file.path).stem:
            note(self.noted, "id is not the file's name")


def conversation_files(path: Path) -> list[Path]:
    """The file itself, or the JSON files of a folder, sorted by name. Raises TraceError if there are none."""
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.json"))
    if not found:
        raise TraceError(str(path), None, None, "no conversation files (*.json) in this folder")
    return found


def _common_sha256(files: list[SourceFile]) -> str:
    lines = "".join(f"{file.sha256}  {Path(file.path).name}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()
