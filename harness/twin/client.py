"""Who sent the requests of a log: told by the log, or by when its requests were sent and its answers ended.

A client that has at most N requests in flight and holds others back sends its request k, by order, no earlier than the
(k - N)-th answer ends, and those that it holds back just then. A turn of a conversation is sent after its answer. What
would have been sent without that (a client's own schedule) is the measured time where nothing was held back, and is
assumed where something was. A replay of measured times alone would queue as the client never let it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harness.twin.log import FloatArray, LoggedRequests
from traces.trace import AFTER, AT, Client, ClientKind, Trace

BoolArray = npt.NDArray[np.bool_]

FEWEST_HELD = 5  # requests that follow an answer's end; fewer prove no cap
_TOLERANCE = 0.01  # of the median answer's time: so exact are clocks, and so quick are clients
_OVER = 0.01  # of the requests may exceed a cap by the inexactness of clocks
_AT_THE_CAP = 0.1  # of the requests reach the most in flight: an open loop reaches its own most a few times
_HELD = 0.5  # of those follow an answer's end; by chance few do
_CLOSED = 0.97  # of the requests after the first N are held back: the client has no schedule of its own
_FOLLOWS = 0.95  # of the turns are sent after the answer to the turn before


@dataclass(frozen=True)
class LogClient:
    """The client of a log; `said` is a sentence on it. Columns have one entry for each request, in the log's order.

    `own_s` is when each would have been sent by the client's own schedule. `before` is the place of the request whose
    answer it follows, -1 for none.
    """

    client: Client
    said: str
    own_s: FloatArray
    before: npt.NDArray[np.int64]

    def sends(self, trace: Trace, times: LoggedRequests) -> Trace:
        """The requests of `trace`, which are those of `times`, as this client sends them."""
        rows = []
        for row, own, before in zip(trace.requests, self.own_s, self.before, strict=True):
            at_us = max(0, round(float(own) * 1e6))
            if self.client.kind is not ClientKind.multi_turn:
                rows.append(replace(row, arrival_us=at_us))
                continue
            row = replace(row, arrival_us=at_us, after=(), parent=None, release=AT, think_us=None)
            if before >= 0:
                think = max(0.0, float(times.entered_s[row.request_id] - times.last_token_s[before]))
                row = replace(row, after=(int(before),), release=AFTER, think_us=round(think * 1e6))
            rows.append(row)
        return trace.changed(tuple(rows), f"the client is {self.client}", client=self.client)


@dataclass(frozen=True)
class _Cap:
    """A cap and the requests that it held back, each with the seconds since the answer whose end it waited for."""

    most: int
    held: BoolArray
    idle_s: FloatArray
    at_the_cap: int


def client_of(
    times: LoggedRequests,
    *,
    cap: int | None = None,
    rate: float | None = None,
    sessions: Sequence[str | None] = (),
) -> LogClient:
    """The client of the requests of a log.

    `cap` and `rate` (requests a second, may be infinite) are what the log says of it. `sessions` has the conversation
    of each request.
    """
    count, tolerance = len(times), _TOLERANCE * float(np.median(times.latency_s))
    before = _turns_before(times, sessions, tolerance)
    follows = before >= 0
    found = _cap_of(times.arrival_s, times.last_token_s, tolerance, None)
    doubt = ""
    if cap is not None and found.most > cap + 1:
        doubt = f" It states at most {cap} (max_concurrency), but {found.most} were; what its times show is taken."
        cap = None
    if cap is not None:
        found = _cap_of(times.arrival_s, times.last_token_s, tolerance, cap)
    is_held = found.held & ~follows
    reached = int(is_held.sum())
    shows = reached >= FEWEST_HELD and reached > _HELD * found.at_the_cap
    if cap is None and not (shows and found.at_the_cap >= _AT_THE_CAP * len(is_held)):
        client = Client(ClientKind.multi_turn if follows.any() else ClientKind.open)
        return LogClient(client, f"The client is {client}.{doubt}", times.entered_s, before)
    pause = max(0.0, float(np.median(found.idle_s[is_held]))) if reached else 0.0
    if times.queued_s is not None and reached:  # the replay starts at the queue
        pause += max(0.0, float(np.median((times.entered_s - times.arrival_s)[is_held])))
    always = rate == math.inf or (rate is None and reached >= _CLOSED * max(count - found.most, 1))
    closed = always and not follows.any()
    kind = ClientKind.closed if closed and reached else ClientKind.capped
    kind = ClientKind.multi_turn if follows.any() else kind
    client = Client(kind, found.most, round(pause * 1e6))
    own = _own_schedule(times.entered_s, is_held, rate, carried=closed)
    how = "as the log states" if cap is not None else "as the times of its requests show"
    many = f"{reached:,} of {count:,} were held back" if reached else "which the log never reaches"
    if not reached and rate == math.inf and count > found.most:
        many += ", as a client without a rate would: are its times whole, of one unit, and those of this run?"
    return LogClient(client, f"The client is {client} ({how}; {many}).{doubt}", own, before)


def _cap_of(sent_s: FloatArray, ended_s: FloatArray, tolerance: float, stated: int | None) -> _Cap:
    """The most in flight, or the stated cap, and what it held back."""
    order = np.argsort(sent_s, kind="stable")
    sent, ended, count = sent_s[order], np.sort(ended_s), len(sent_s)
    in_flight = np.arange(count) - np.searchsorted(ended, sent + tolerance, side="right")
    most = stated or 1 + max(0, int(np.quantile(in_flight, 1 - _OVER, method="higher")))
    places = np.arange(most, count)
    idle = np.full(count, np.inf)
    idle[places] = sent[places] - ended[places - most]
    reaches = int((sent[places] < ended[places - most + 1] + tolerance).sum())
    back = np.empty(count, np.int64)
    back[order] = np.arange(count)
    return _Cap(most, (idle <= tolerance)[back], idle[back], reaches)


def _own_schedule(entered: FloatArray, held: BoolArray, rate: float | None, *, carried: bool) -> FloatArray:
    """When each request would have been sent if nothing were held back; never after it was.

    Of those that were held back it is assumed: at once where the client is `carried` by the server alone; at the
    `rate` after the one before, if the log states one; else evenly between those that were not held back, and behind
    the last of these at the mean rate before it.
    """
    own = entered.copy()
    free = np.flatnonzero(~held)
    last = int(free[-1]) if len(free) else 0
    gap = 0.0
    if not carried:
        gap = 1 / rate if rate else float(own[last] - own[0]) / max(last, 1)
        if not rate and last:
            own[: last + 1] = np.interp(np.arange(last + 1), free, own[free])
    for place in np.flatnonzero(held):
        if carried or rate or place > last:
            own[place] = min(entered[place], own[place - 1] + gap) if place else entered[0]
    found: FloatArray = np.maximum.accumulate(np.minimum(own, entered))
    return found


def _turns_before(
    times: LoggedRequests, sessions: Sequence[str | None], tolerance: float
) -> npt.NDArray[np.int64]:
    """The place of the turn before each request, where the client sends turns after answers; else -1."""
    before = np.full(len(times), -1, np.int64)
    last: dict[str, int] = {}
    order = np.argsort(times.arrival_s, kind="stable")
    for place in order:
        name = sessions[place] if len(sessions) else None
        if name is not None:
            before[place] = last.get(name, -1)
            last[name] = int(place)
    turns = np.flatnonzero(before >= 0)
    waits = times.arrival_s[turns] - times.last_token_s[before[turns]]
    if not len(turns) or (waits >= -tolerance).mean() < _FOLLOWS:
        return np.full(len(times), -1, np.int64)
    before[turns[waits < -tolerance]] = -1
    return before
