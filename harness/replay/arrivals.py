"""Sources of requests: open loop (at given times), closed loop (waiting users), or turns of conversations.

What stands between a source and the engine is a source too: `Capped` holds requests back, `FrontEnd` delays them, and
`Resubmitting` sends several in the place of one.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from random import Random
from typing import Any, NamedTuple, Protocol

import numpy as np

from engine.core.request import Request
from harness.metrics.log import FloatArray, IntArray

NS_PER_S = 1_000_000_000
NEVER = -1  # a time in ns of what did not happen
LATEST_NS = 2**62  # 146 years; the sum of two times must fit into 64 bits
_TOO_LONG = (
    "the replay would last longer than 146 years: a rate or a figure of device.* is too small or too large"
)


class TimeSpanError(OverflowError):
    """A replay would last longer than `LATEST_NS`."""

    def __init__(self, message: str = _TOO_LONG) -> None:
        super().__init__(message)


def to_ns(seconds: float | FloatArray) -> Any:
    """Seconds to the nearest whole nanosecond, int or int64 array."""
    if isinstance(seconds, np.ndarray):
        return np.rint(seconds * NS_PER_S).astype(np.int64)
    return round(seconds * NS_PER_S)


def to_s(nanoseconds: int | IntArray) -> Any:
    """Nanoseconds to seconds."""
    return nanoseconds / NS_PER_S


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request and its arrival in ns from the start of the replay."""

    request: Request
    arrival_ns: int


class Arrivals(Protocol):
    """A source of requests: the replay calls `take` until `next_ns` is None, and `left` once at the end.

    Every request comes out of `take` or of `left`.
    """

    total: int

    def next_ns(self) -> int | None:
        """When the next request arrives, as far as is known now. None: after the end of another request, or never."""

    def take(self, now_ns: int) -> list[TimedRequest]:
        """The requests that have arrived by now, in order of arrival; equal times keep their order."""

    def ended(self, request_id: int, now_ns: int) -> None:
        """A request finished, or was rejected."""

    def left(self) -> list[Request]:
        """The requests that have not arrived; called once, when the replay is over."""


class OpenLoop:
    """Open loop: requests arrive at given times. They must be sorted by arrival.

    `requests` may be a generator; then at most one request is in memory before it arrives.
    """

    def __init__(self, requests: Iterable[TimedRequest], total: int) -> None:
        self.total = total
        self._rest = iter(requests)
        self._next = next(self._rest, None)

    def next_ns(self) -> int | None:
        """The arrival of the next request."""
        return None if self._next is None else self._next.arrival_ns

    def take(self, now_ns: int) -> list[TimedRequest]:
        """The requests that have arrived by now."""
        due: list[TimedRequest] = []
        while self._next is not None and self._next.arrival_ns <= now_ns:
            due.append(self._next)
            self._next = next(self._rest, None)
        return due

    def ended(self, request_id: int, now_ns: int) -> None:
        """Does nothing: no request waits for another."""

    def left(self) -> list[Request]:
        """The rest of the requests."""
        head = [] if self._next is None else [self._next]
        self._next = None
        return [timed.request for timed in (*head, *self._rest)]


class _Due:
    """Requests by time of arrival; equal times keep the order of `add` calls."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._number = 0

    def add(self, at_ns: int, request: Request) -> None:
        """A request that arrives at `at_ns`."""
        heappush(self._heap, (at_ns, self._number, request))
        self._number += 1

    def next_ns(self) -> int | None:
        """When the first of them arrives."""
        return self._heap[0][0] if self._heap else None

    def take(self, now_ns: int) -> list[TimedRequest]:
        """Those that have arrived by now."""
        due: list[TimedRequest] = []
        while self._heap and self._heap[0][0] <= now_ns:
            at_ns, _, request = heappop(self._heap)
            due.append(TimedRequest(request, at_ns))
        return due

    def left(self) -> list[Request]:
        """Those that have not arrived."""
        return [request for _, _, request in sorted(self._heap, key=lambda entry: entry[:2])]


class ClosedLoop(_Due):
    """Closed loop: each of `users` users sends a request, waits for its end, pauses, and sends the next of the list.

    User u starts with request u at time 0. After that the user who is ready first takes the next request. `pause_ns`
    is the pause before each request by its place in the list; there is none before a user's first request.
    """

    def __init__(self, requests: Iterable[Request], total: int, users: int, pause_ns: Sequence[int]) -> None:
        super().__init__()
        self.total = total
        self._rest = iter(requests)
        self._pause_ns = pause_ns
        self._taken = 0
        for request in islice(self._rest, users):
            self.add(0, request)
            self._taken += 1

    def ended(self, request_id: int, now_ns: int) -> None:
        """Its user pauses and sends the next request."""
        request = next(self._rest, None)
        if request is not None:
            self.add(now_ns + self._pause_ns[self._taken], request)
            self._taken += 1

    def left(self) -> list[Request]:
        """The requests that no user has sent."""
        return [*super().left(), *self._rest]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation: it arrives `think_ns` after the last request of `after` has ended.

    Without `after` it arrives at its recorded time.
    """

    timed: TimedRequest
    after: tuple[int, ...] = ()
    think_ns: int = 0


class Sessions(_Due):
    """Conversations: a turn waits until its parents have ended and its user has paused.

    Parents that are not among `turns` are ignored (the trace begins in mid-session, or the parent could never fit). A
    turn without a known parent arrives at its recorded time, as a session of its own.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        super().__init__()
        self.total = len(turns)
        self._followers: dict[int, list[int]] = {}  # by request id: the places of the turns that wait for it
        self._waiting: dict[int, tuple[Turn, set[int]]] = {}  # by place
        known = {turn.timed.request.request_id for turn in turns}
        for place, turn in enumerate(turns):
            first = known.intersection(turn.after)
            if not first:
                self.add(turn.timed.arrival_ns, turn.timed.request)
                continue
            self._waiting[place] = (turn, first)
            for request_id in sorted(first):
                self._followers.setdefault(request_id, []).append(place)

    def ended(self, request_id: int, now_ns: int) -> None:
        """Turns whose last parent it was follow, each after its own pause."""
        for place in self._followers.pop(request_id, ()):
            turn, first = self._waiting[place]
            first.discard(request_id)
            if not first:
                del self._waiting[place]
                self.add(now_ns + turn.think_ns, turn.timed.request)

    def left(self) -> list[Request]:
        """The turns that were not sent."""
        return [*super().left(), *(turn.timed.request for turn, _ in self._waiting.values())]


class Capped:
    """The requests of `source` at their own times, but with at most `most` in flight, in order.

    A request that is held back arrives `pause_ns` after the end of the one that makes room for it.
    """

    def __init__(self, source: Arrivals, most: int, pause_ns: int = 0) -> None:
        self.total = source.total
        self._source = source
        self._pause_ns = pause_ns
        self._room = deque([0] * min(most, source.total))  # since when each free place is free
        self._held = deque[TimedRequest]()

    def next_ns(self) -> int | None:
        """When the next request is sent; None while no place is free."""
        own = self._held[0].arrival_ns if self._held else self._source.next_ns()
        return None if own is None or not self._room else max(own, self._room[0])

    def take(self, now_ns: int) -> list[TimedRequest]:
        """The requests that have been sent by now; each arrives when it was sent."""
        self._held += self._source.take(now_ns)
        sent: list[TimedRequest] = []
        while self._held and self._room and self._room[0] <= now_ns:
            own = self._held.popleft()
            sent.append(TimedRequest(own.request, max(own.arrival_ns, self._room.popleft())))
        return sent

    def ended(self, request_id: int, now_ns: int) -> None:
        """A place becomes free."""
        self._room.append(now_ns + self._pause_ns)
        self._source.ended(request_id, now_ns)

    def left(self) -> list[Request]:
        """The requests that were not sent."""
        return [*(timed.request for timed in self._held), *self._source.left()]


# Of a request's time in the front end, either way. One by one, requests of a client differ in their time to first token
# by some 6 to 8 % of it (standard deviation; logs of vLLM 0.18 and 0.22 behind HTTP). Where many wait for one another,
# which step a request meets is chance, which times without any spread would turn into a rule.
_VARIES = 0.15


class FrontTimes(NamedTuple):
    """What a front end takes: of its one thread for a request or an answer, and beside the others for a request and
    each of its tokens.
    """

    request_ns: int
    token_ns: float
    turn_ns: int = 0


def varied_ns(request_ns: int) -> Iterator[float]:
    """What each request takes beside the others without its tokens, in the order in which they leave the thread."""
    chance = Random(0)
    while True:
        yield (1 + _VARIES * chance.uniform(-1, 1)) * request_ns


class FrontEnd:
    """The requests of `source`, seen by the scheduler later: a server parses and tokenises each before.

    One thread takes `turn_ns` for each request that comes and for each answer that ends, one after another: answers
    that end in one step reach their clients one by one, and so do the requests that follow them reach the scheduler.
    Then each request takes `request_ns`, and `token_ns` for each token of its prompt, beside the others; the first of
    these varies by chance (`_VARIES`). It still arrives when it was sent.
    """

    def __init__(self, source: Arrivals, request_ns: int, token_ns: float, turn_ns: int = 0) -> None:
        self.total = source.total
        self._source = source
        self._varied_ns, self._token_ns, self._turn_ns = varied_ns(request_ns), token_ns, turn_ns
        self._free_ns = self._number = 0  # until when the thread is busy; requests that it has seen
        self._inside: list[tuple[int, int, TimedRequest]] = []  # by the time at which each leaves the server

    def next_ns(self) -> int | None:
        """When the next request leaves, or may enter."""
        times = (self._source.next_ns(), self._inside[0][0] if self._inside else None)
        return min((at for at in times if at is not None), default=None)

    def take(self, now_ns: int) -> list[TimedRequest]:
        """The requests that have left by now, in order of that."""
        self._enter(now_ns)
        through: list[TimedRequest] = []
        while self._inside and self._inside[0][0] <= now_ns:
            through.append(heappop(self._inside)[2])
        return through

    def _enter(self, now_ns: int) -> None:
        for timed in self._source.take(now_ns):
            delay = round(next(self._varied_ns) + self._token_ns * timed.request.prompt_tokens)
            heappush(self._inside, (self._turn(timed.arrival_ns) + delay, self._number, timed))
            self._number += 1

    def _turn(self, from_ns: int) -> int:
        """When the thread is done with what comes to it at `from_ns`."""
        self._free_ns = max(self._free_ns, from_ns) + self._turn_ns
        return self._free_ns

    def ended(self, request_id: int, now_ns: int) -> None:
        """The client, which is the source, has the answer after the turns of all that came before."""
        self._enter(now_ns)
        self._source.ended(request_id, self._turn(now_ns))

    def left(self) -> list[Request]:
        """The requests that the scheduler has not seen."""
        inside = [timed.request for *_, timed in sorted(self._inside, key=lambda one: one[:2])]
        return [*inside, *self._source.left()]


class Resubmitter(Protocol):
    """A client that serves a request by sending others, each step of them after the answers to the step before."""

    def begin(self, request: Request) -> Sequence[Request]:
        """The requests that are sent in the place of `request`; its id may be one of theirs."""

    def go_on(self, request_id: int) -> Sequence[Request]:
        """All that was sent for this request has ended: what is sent next, nothing at its end."""


class Resubmitting:
    """The requests that `client` sends in the place of those of `source`, each step at the end of the step before.

    A request of the source has ended when the client sends nothing more for it. `total` is the number of all requests
    that the client sends. Requests that the client has not sent when the replay stops are counted by those of the
    source that had not arrived.
    """

    def __init__(self, source: Arrivals, client: Resubmitter, total: int) -> None:
        self.total = total
        self._source = source
        self._client = client
        self._due = _Due()
        self._served: dict[int, int] = {}  # by id of what was sent: the request of the source
        self._open: dict[int, int] = {}  # by request of the source: how many of its last step have not ended

    def next_ns(self) -> int | None:
        """The next request of the source, or of the client."""
        known = [at for at in (self._source.next_ns(), self._due.next_ns()) if at is not None]
        return min(known, default=None)

    def take(self, now_ns: int) -> list[TimedRequest]:
        """The requests that have been sent by now, in order of time; of equal times those of the client go first."""
        new = [
            TimedRequest(sent, timed.arrival_ns)
            for timed in self._source.take(now_ns)
            for sent in self._sent(timed.request.request_id, self._client.begin(timed.request))
        ]
        return sorted([*self._due.take(now_ns), *new], key=lambda timed: timed.arrival_ns)

    def ended(self, request_id: int, now_ns: int) -> None:
        """The client goes on where this was the last of a step."""
        served = self._served.pop(request_id)
        self._open[served] -= 1
        if self._open[served]:
            return
        following = self._sent(served, self._client.go_on(served))
        for request in following:
            self._due.add(now_ns, request)
        if not following:
            del self._open[served]
            self._source.ended(served, now_ns)

    def left(self) -> list[Request]:
        """What the client had ready, and the rest of the source."""
        return [*self._due.left(), *self._source.left()]

    def _sent(self, served: int, requests: Sequence[Request]) -> Sequence[Request]:
        self._open[served] = len(requests)
        self._served.update((request.request_id, served) for request in requests)
        return requests
