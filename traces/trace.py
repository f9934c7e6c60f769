"""A trace: a header, and requests in order of arrival.

All values are frozen. A change makes a new trace and adds a sentence to `TraceHeader.changes`.
Prompt tokens are not stored. A prompt is a list of segments, and equal keys mean equal tokens.
"""

import hashlib
import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise, repeat, starmap
from operator import attrgetter
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

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


_LENGTHS = ("request_id", "arrival_us", "prompt_tokens", "output_tokens", "segments")
_OTHER_FIELDS = tuple((f.name, f.default) for f in fields(TraceRequest) if f.name not in _LENGTHS)
_OTHER_VALUES = attrgetter(*(name for name, _ in _OTHER_FIELDS))
_DEFAULTS = tuple(default for _, default in _OTHER_FIELDS)
_PLACES = {name: place for place, (name, _) in enumerate(_OTHER_FIELDS)}
Ints = npt.NDArray[np.int64]
_CHUNK = 4096  # rows that are made at a time


class SegmentColumns(NamedTuple):
    """The segments of many prompts: those of prompt i are numbers `first[i]` to `first[i + 1] - 1`.

    `first` is int64 `[prompts + 1]`. Of each segment `key` is uint64, 0 where it has none, and `tokens` int64.
    """

    first: Ints
    key: npt.NDArray[np.uint64]
    tokens: Ints
    is_keyed: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, prompts: Sequence[Sequence[Segment]]) -> "SegmentColumns":
        """The columns of prompts that are given as segments."""
        first = np.cumsum([0, *map(len, prompts)], dtype=np.int64)
        keys = [key for segments in prompts for key, _ in segments]
        tokens = [tokens for segments in prompts for _, tokens in segments]
        return cls(
            first,
            np.array([key or 0 for key in keys], dtype=np.uint64),
            np.array(tokens, dtype=np.int64),
            np.array([key is not None for key in keys], dtype=np.bool_),
        )

    @classmethod
    def private(cls, prompt_tokens: Ints) -> "SegmentColumns":
        """Prompts of one segment that no other prompt has."""
        count = len(prompt_tokens)
        return cls(np.arange(count + 1), np.zeros(count, np.uint64), prompt_tokens, np.zeros(count, np.bool_))

    def take(self, prompts: Ints) -> "SegmentColumns":
        """Those of some prompts, in this order."""
        counts = np.diff(self.first)[prompts]
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        places = np.repeat(self.first[prompts] - first[:-1], counts) + np.arange(first[-1])
        return SegmentColumns(first, *(column[places] for column in self[1:]))

    def rows(self, first: int, last: int) -> Iterator[tuple[Segment, ...]]:
        """The segments of prompts `first` to `last - 1`, one prompt after the other."""
        ends = self.first[first : last + 1].tolist()
        inside = slice(ends[0], ends[-1])
        keys: list[Any] = self.key[inside].tolist()
        for place in np.flatnonzero(~self.is_keyed[inside]).tolist():
            keys[place] = None
        segments = list(map(Segment, keys, self.tokens[inside].tolist()))
        for start, end in pairwise(ends):
            yield tuple(segments[start - ends[0] : end - ends[0]])


@dataclass(frozen=True, eq=False)
class Requests(Sequence[TraceRequest]):
    """The requests of a trace in order of arrival, as columns: int64 `[requests]`, which nobody changes.

    A `TraceRequest` is made when it is asked for. So a million requests take some 70 MB. `others` has the values of all
    fields that have no column, by request; None where all have their default.
    """

    request_id: Ints
    arrival_us: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    segments: SegmentColumns
    others: tuple[tuple[Any, ...], ...] | None = None

    @classmethod
    def of(cls, rows: Iterable[TraceRequest]) -> "Requests":
        """The columns of `rows`."""
        if isinstance(rows, Requests):
            return rows
        rows = tuple(rows)
        others = tuple(map(_OTHER_VALUES, rows))
        lengths = {name: np.array([getattr(row, name) for row in rows], np.int64) for name in _LENGTHS[:-1]}
        return cls(
            **lengths,
            segments=SegmentColumns.of([row.segments for row in rows]),
            others=None if all(values == _DEFAULTS for values in others) else others,
        )

    def values(self, name: str) -> Sequence[Any]:
        """The values of a field that has no column, by request."""
        place = _PLACES[name]
        if self.others is None:
            return [_DEFAULTS[place]] * len(self)
        return [values[place] for values in self.others]

    def with_values(self, columns: Mapping[str, Sequence[Any]]) -> "Requests":
        """The same requests with other values of some fields that have no column."""
        values = [columns[name] if name in columns else self.values(name) for name in _PLACES]
        return replace(self, others=tuple(zip(*values, strict=True)))

    def from_first(self) -> "Requests":
        """The same requests, and the first arrives at zero."""
        return replace(self, arrival_us=self.arrival_us - self.arrival_us[:1])

    def take(self, places: Ints) -> "Requests":
        """Some of the requests, in this order."""
        lengths = {name: getattr(self, name)[places] for name in _LENGTHS[:-1]}
        others = None if self.others is None else tuple(self.others[place] for place in places.tolist())
        return Requests(**lengths, segments=self.segments.take(places), others=others)

    def __len__(self) -> int:
        return len(self.request_id)

    @overload
    def __getitem__(self, place: int) -> TraceRequest: ...
    @overload
    def __getitem__(self, place: slice) -> "Requests": ...
    def __getitem__(self, place: int | slice) -> "TraceRequest | Requests":
        if isinstance(place, slice):
            return self.take(np.arange(len(self))[place])
        at = range(len(self))[place]
        return next(self._made(at, at + 1))

    def __iter__(self) -> Iterator[TraceRequest]:
        for start in range(0, len(self), _CHUNK):
            yield from self._made(start, min(start + _CHUNK, len(self)))

    def _made(self, first: int, last: int) -> Iterator[TraceRequest]:
        columns = [getattr(self, name)[first:last].tolist() for name in _LENGTHS[:-1]]
        lengths = zip(*columns, self.segments.rows(first, last), strict=True)
        others = repeat(_DEFAULTS, last - first) if self.others is None else self.others[first:last]
        return starmap(TraceRequest, map(operator.add, lengths, others))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Requests):
            return isinstance(other, Sequence) and tuple(self) == tuple(other)
        pairs = [(getattr(self, name), getattr(other, name)) for name in _LENGTHS[:-1]]
        pairs += zip(self.segments, other.segments, strict=True)
        return all(map(np.array_equal, *zip(*pairs, strict=True))) and self.others == other.others


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
    requests: Sequence[TraceRequest]

    def __post_init__(self) -> None:
        object.__setattr__(self, "requests", Requests.of(self.requests))

    @property
    def columns(self) -> Requests:
        """The requests as columns: what `requests` always is."""
        assert isinstance(self.requests, Requests)
        return self.requests

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
        rows, prompts = self.columns, self.columns.segments
        lengths = [getattr(rows, name) for name in _LENGTHS[:-1]]
        state.update(np.stack([*lengths, np.diff(prompts.first)], axis=1).astype("<u8").tobytes())
        state.update(prompts.key.astype("<u8").tobytes())
        state.update((prompts.tokens * 2 + ~prompts.is_keyed).astype("<u8").tobytes())
        for request_id, values in zip(rows.request_id.tolist(), rows.others or (), strict=False):
            if values != _DEFAULTS:
                state.update(_other_fields(request_id, values))
        return state.hexdigest()

    @property
    def tenants(self) -> Ints:
        """A number for each request, equal for equal salts: only such requests share prefixes."""
        rows, numbers = self.columns, dict[str, int]()
        if rows.others is None:
            return np.zeros(len(rows), np.int64)
        return np.array([numbers.setdefault(salt, len(numbers)) for salt in rows.values("salt")], np.int64)

    @property
    def mean_rate(self) -> float | None:
        """Requests per second between the first arrival and the last; None where all arrive at one instant."""
        times = self.columns.arrival_us
        span_us = int(times[-1] - times[0]) if len(times) else 0
        return (len(times) - 1) / span_us * 1e6 if span_us else None

    def changed(self, requests: Sequence[TraceRequest], sentence: str, **header: object) -> "Trace":
        """This trace with other requests, and a sentence that says what changed. `header` replaces header fields."""
        changes = (*self.header.changes, sentence)
        return Trace(replace(self.header, changes=changes, **header), requests)  # type: ignore[arg-type]


def _other_fields(request_id: int, values: tuple[Any, ...]) -> bytes:
    """The fields beyond times and lengths that differ from their default.

    So a trace that uses none of them keeps its digest when a field is added.
    """
    found = zip(_OTHER_FIELDS, values, strict=True)
    said = {name: value for (name, default), value in found if value != default}
    return json.dumps([request_id, said], sort_keys=True).encode()
