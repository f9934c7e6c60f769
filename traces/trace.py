"""A trace: a header, and requests in order of arrival.

All values are frozen. A change makes a new trace and adds a sentence to `TraceHeader.changes`.
Prompt tokens are not stored. A prompt is a list of segments, and equal keys mean equal tokens.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, astuple, dataclass, field, fields, make_dataclass, replace
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

CHAINED = "chained"  # equal keys: the whole prefix is equal, the segment included
CONTENT = "content"  # equal keys: this piece of text is equal, at any position
AT = "at"  # released at its arrival time
AFTER = "after"  # released when others have finished


class ClientKind(StrEnum):
    """How the client of a workload decides when it sends."""

    open = "open"  # by its own schedule, whatever the server does
    capped = "capped"  # by its own schedule, but with at most so many requests in flight
    closed = "closed"  # without a schedule: the next request whenever fewer than so many are in flight
    multi_turn = "multi_turn"  # a turn follows the answer to the turn before it


_CLIENTS = {
    ClientKind.open: "an open loop",
    ClientKind.capped: "capped",
    ClientKind.closed: "a closed loop",
    ClientKind.multi_turn: "in conversations, whose turns follow their answers",
}


@dataclass(frozen=True)
class Client:
    """Who sends the requests of a workload. `max_in_flight`: it holds back what would be more; None: nothing.

    What is held is sent in order, `pause_us` after the end of the answer that makes room.
    """

    kind: ClientKind = ClientKind.open
    max_in_flight: int | None = None
    pause_us: int = 0

    def __str__(self) -> str:
        """Words that follow "the client is"."""
        words = _CLIENTS[self.kind]
        if self.max_in_flight is None:
            return words
        return f"{words}, with at most {self.max_in_flight:,} requests in flight"


OPEN = Client()


class Segment(NamedTuple):
    """Consecutive prompt tokens. Segments with equal keys have equal tokens; a shorter one is a prefix of a longer one.

    `key` is an unsigned 64-bit number, or None for tokens that no other request has.
    """

    key: int | None
    tokens: int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: `arrival_us` microseconds after the trace's start, and lengths in tokens.

    `request_id` is the row number in the source, counted from 0; a window of the trace keeps it. The tokens of
    `segments` sum to `prompt_tokens`. `output_tokens` is exact: the replay ignores end-of-sequence tokens.

    A request is released at `arrival_us` (open loop). If `release` is AFTER, it is released `think_us` after the last
    of the requests in `after` has finished (closed loop); `arrival_us` is then recorded or assumed, and only orders
    the file. The time that a client's tools take counts as think time.
    """

    request_id: int
    arrival_us: int
    prompt_tokens: int
    output_tokens: int
    segments: Sequence[Segment]
    session: str | None = None  # the conversation's name
    turn: int | None = None  # from 1 within the session
    parent: int | None = None  # the request whose context this one continues, or that launched it
    after: tuple[int, ...] = ()  # requests that must finish first; several if nested chains run
    think_us: int | None = None  # from the end of the last of `after` to this request
    release: str = AT  # 'at' or 'after'
    output_key: int | None = None  # key under which this output returns in a later prompt
    n: int | None = None  # sequences returned; in this and the next two fields None leaves it to the sweep
    best_of: int | None = None  # sequences sampled, at least n
    beam_width: int | None = None
    salt: str = ""  # tenant: only requests of equal salt share prefixes
    priority: int = 0  # lower first
    model: str | None = None  # the model that the source names
    kind: str | None = None  # the source's word for the request, e.g. 'search'

    @property
    def think_s(self) -> float | None:
        """`think_us` in seconds."""
        return None if self.think_us is None else self.think_us / 1e6


_VALUES = attrgetter(*(f.name for f in fields(TraceRequest)))
_Unfrozen: Any = make_dataclass(  # with the same slots
    "_Unfrozen",
    [
        (f.name, Any) if f.default is MISSING else (f.name, Any, field(default=f.default))
        for f in fields(TraceRequest)
    ],
    slots=True,
)


def new_request(*values: Any) -> TraceRequest:
    """The same as `TraceRequest(*values)`; a frozen dataclass takes five times as long to be made by its own name."""
    made = _Unfrozen(*values)
    made.__class__ = TraceRequest
    request: TraceRequest = made
    return request


def revised(
    request: TraceRequest,
    *,
    arrival_us: int | None = None,
    lengths: tuple[int, int] | None = None,
    segments: tuple[Segment, ...] | None = None,
) -> TraceRequest:
    """The request with another arrival, other lengths (prompt, output) or other segments.

    `dataclasses.replace` takes twenty times as long, which shows in traces of a million requests.
    """
    number, before, prompt, output, own, *rest = _VALUES(request)
    arrival_us = before if arrival_us is None else arrival_us
    prompt, output = lengths or (prompt, output)
    return new_request(number, arrival_us, prompt, output, own if segments is None else segments, *rest)


@dataclass(frozen=True)
class TraceHeader:
    """Where a trace comes from, and how it was changed. Always `rows_read == rows_kept + sum(dropped.values())`."""

    name: str
    format: str
    source: str  # file name without folders, or a description of the generator
    key_kind: str  # 'chained' or 'content'
    # sharing is known at multiples of it only; None: token-exact or no sharing
    source_block_tokens: int | None
    clock_quantum_us: int  # resolution of the recorded arrivals
    sha256: str  # of the file's bytes, or of the generator's specification
    rows_read: int
    rows_kept: int
    dropped: Mapping[str, int] = field(default_factory=dict)  # rows that cannot be replayed, by reason
    noted: Mapping[str, int] = field(default_factory=dict)  # small faults that a rule repaired, by name
    changes: tuple[str, ...] = ()  # one sentence for each change, in order
    licence: str = "not stated"
    calibration: Mapping[str, float | str] = field(default_factory=dict)  # of a generator
    client: Client = OPEN


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival; file order breaks ties."""

    header: TraceHeader
    requests: tuple[TraceRequest, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the source's identity and every field of every request; the same in every process.

        Names, counts and sentences are not part of it, so two ways to the same requests give the same digest.
        """
        header = self.header
        identity = [header.format, header.key_kind, header.source_block_tokens, header.sha256]
        if header.client != OPEN:  # the same requests are sent at other times
            identity += [*astuple(header.client)]
        state = hashlib.sha256(json.dumps(identity).encode())
        for column in self._columns():
            state.update(column.astype("<u8").tobytes())

        for row in filter(None, map(_other_fields, self.requests)):
            state.update(row)
        return state.hexdigest()

    def _columns(self) -> list[np.ndarray[tuple[int], np.dtype[np.int64 | np.uint64]]]:
        rows = [
            (r.request_id, r.arrival_us, r.prompt_tokens, r.output_tokens, len(r.segments))
            for r in self.requests
        ]
        segments = [segment for request in self.requests for segment in request.segments]
        keys = np.array([0 if s.key is None else s.key for s in segments], dtype=np.uint64)
        lengths = np.array([s.tokens * 2 + (s.key is None) for s in segments], dtype=np.int64)
        return [np.array(rows, dtype=np.int64).ravel(), keys, lengths]

    @property
    def mean_rate(self) -> float | None:
        """Requests per second between the first arrival and the last; None where all arrive at one instant."""
        span_us = self.requests[-1].arrival_us - self.requests[0].arrival_us if self.requests else 0
        return (len(self.requests) - 1) / span_us * 1e6 if span_us else None

    def changed(self, requests: tuple[TraceRequest, ...], sentence: str, **header: object) -> "Trace":
        """This trace with other requests, and a sentence that says what changed. `header` replaces header fields."""
        changes = (*self.header.changes, sentence)
        return Trace(replace(self.header, changes=changes, **header), requests)  # type: ignore[arg-type]


_LENGTHS = ("request_id", "arrival_us", "prompt_tokens", "output_tokens", "segments")
_OTHER_FIELDS = tuple((f.name, f.default) for f in fields(TraceRequest) if f.name not in _LENGTHS)
_OTHER_VALUES = attrgetter(*(name for name, _ in _OTHER_FIELDS))
_DEFAULTS = tuple(default for _, default in _OTHER_FIELDS)


def _other_fields(request: TraceRequest) -> bytes:
    """The fields beyond times and lengths that differ from their default, or nothing if none does.

    So a trace that uses none of them keeps its digest when a field is added.
    """
    if _OTHER_VALUES(request) == _DEFAULTS:
        return b""
    said = {name: value for name, default in _OTHER_FIELDS if (value := getattr(request, name)) != default}
    return json.dumps([request.request_id, said], sort_keys=True).encode()
