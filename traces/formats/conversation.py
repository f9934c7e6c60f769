"""One recorded agent conversation: its requests in order, those of nested agents between the turns that wait for them.

A nested entry's `t` is its completion, so it starts `duration_ms` earlier, after the turn that launched it; the next
turn waits for it. (An entry that was launched without waiting has no duration: it starts at its `t`.)
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from traces.blocks import BlockSegments
from traces.chain import ChainMemory
from traces.errors import RowError
from traces.formats.conversation_totals import check_totals
from traces.jsonl import count, integers, kind, microseconds, read_object, require_keys, text
from traces.rows import Row, note
from traces.trace import AFTER

_KEYS = ("id", "block_size", "requests")
_TURN = ("t", "in", "out", "hash_ids")
_NESTED = ("t", "requests", "status")
_SCOPES = ("local", "global")
_LOCAL_BITS = 32
Record = dict[str, object]


@dataclass(frozen=True)
class Conversation:
    """What a file holds; times of `rows` are nanoseconds from the conversation's start."""

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
    base: int  # added to ids, so that files do not meet
    highest: int
    first_id: int
    rows: list[Row] = field(default_factory=list)
    noted: dict[str, int] = field(default_factory=dict)
    chain: ChainMemory = field(default_factory=lambda: ChainMemory(place="request"))
    launcher: int | None = None  # the last turn of the conversation itself
    launcher_end_us: int | None = None
    waits: tuple[int, ...] = ()
    turns: int = 0

    def next_id(self) -> int:
        return self.first_id + len(self.rows)


def read_conversation(document: str, file_number: int, first_id: int) -> Conversation:
    """Read one file's text; its first request gets `first_id`. Raises RowError with the path inside as its field."""
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
    scope = record.get("hash_id_scope", "local")  # an older form lacks the key, and its ids are local
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
    """`read(entry, key, ...)`, its errors placed inside the document."""
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
    for request_id in more.get(
        "after", ()
    ):  # recorded times are whole seconds: never before what it waits for
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
