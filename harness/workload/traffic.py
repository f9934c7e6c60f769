"""When requests arrive: as recorded, drawn anew, all at once, from waiting users (closed loop), or as conversations."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.config.errors import ConfigError
from harness.config.schema import ReplayMode, RunConfig
from harness.replay.arrivals import Arrivals, ClosedLoop, OpenLoop, Sessions, TimedRequest, Turn
from harness.replay.virtual_time import to_ns
from traces.arrivals import ArrivalProcess
from traces.trace import Trace, TraceRequest

_PAUSES = 5  # number of the random stream of pauses; other uses of the seed have other streams
_NS_PER_US = 1000


@dataclass(frozen=True)
class Traffic:
    """The arrival pattern of a point; `arrivals()` makes the source of requests that a replay reads. Times in s."""

    mode: ReplayMode = ReplayMode.trace
    users: int = 1
    think_s: float = 0.0
    seed: int = 0
    until_s: float | None = None

    @property
    def until_ns(self) -> int | None:
        """When the replay stops, in ns; None: when everything has finished."""
        return None if self.until_s is None else int(to_ns(self.until_s))

    def arrivals(self, rows: Sequence[TraceRequest], requests: Iterable[TimedRequest]) -> Arrivals:
        """The source of `requests`; there is one request for each of `rows`, in the same order."""
        if self.mode is ReplayMode.closed:
            pauses = pauses_ns(len(rows), self.think_s, self.seed)
            return ClosedLoop((timed.request for timed in requests), len(rows), self.users, pauses)
        if self.mode is ReplayMode.sessions:
            pauses = pauses_ns(len(rows), self.think_s, self.seed)
            pairs = zip(rows, requests, pauses, strict=True)
            return Sessions([_turn(row, timed, pause) for row, timed, pause in pairs])
        return OpenLoop(requests, len(rows))


def traffic_of(config: RunConfig) -> Traffic:
    """The arrival pattern that the configuration asks for."""
    replay = config.replay
    return Traffic(replay.mode, replay.users, replay.think_s, config.workload.seed, until_s=replay.duration_s)


def pauses_ns(count: int, mean_s: float, seed: int) -> list[int]:
    """Exponential pauses in whole ns; number i depends on the seed and i alone."""
    if mean_s == 0:
        return [0] * count
    source = np.random.Generator(np.random.Philox(key=np.array([seed, _PAUSES], dtype=np.uint64)))
    pauses: list[int] = to_ns(source.standard_exponential(count) * mean_s).tolist()
    return pauses


def _turn(row: TraceRequest, timed: TimedRequest, pause_ns: int) -> Turn:
    """A turn after its parents; a recorded pause is preferred to the drawn one."""
    after = row.after or (() if row.parent is None else (row.parent,))
    return Turn(timed, after, pause_ns if row.think_us is None else row.think_us * _NS_PER_US)


def retimed(trace: Trace, config: RunConfig) -> Trace:
    """The trace with the arrivals that `replay.mode` asks for, and a note that says so.

    Raises:
        ConfigError: new arrivals need a mean rate, and the trace has none.
    """
    mode, replay = config.replay.mode, config.replay
    if mode is ReplayMode.offline:
        return _at(trace, [0] * len(trace.requests), "offline: everything is there at the start")
    if mode is ReplayMode.closed:
        pause = f"pause {replay.think_s:g} s on average" if replay.think_s else "do not pause"
        return trace.changed(trace.requests, f"closed loop: {replay.users:,} users, who {pause}")
    if mode not in (ReplayMode.poisson, ReplayMode.gamma):
        return trace
    rate = config.workload.request_rate or _mean_rate(trace)
    kind = (
        f"{mode}" if mode is ReplayMode.poisson else f"gamma (coefficient of variation {replay.burstiness:g})"
    )
    process = ArrivalProcess(str(mode), rate, shape=replay.burstiness**-2)
    times = process.times_us(len(trace.requests), config.workload.seed)
    return _at(
        trace, times, f"arrivals drawn anew: {kind}, {rate:.4g} requests/s, seed {config.workload.seed}"
    )


def _mean_rate(trace: Trace) -> float:
    if len(trace.requests) < 2:
        return 1.0
    span_us = trace.requests[-1].arrival_us - trace.requests[0].arrival_us
    if span_us:
        return (len(trace.requests) - 1) / span_us * 1e6
    raise ConfigError(
        "workload.request_rate",
        "missing: the trace's requests all arrive at one instant, so it has no mean rate; set a number",
    )


def _at(trace: Trace, times_us: Sequence[int], sentence: str) -> Trace:
    pairs = zip(trace.requests, times_us, strict=True)
    return trace.changed(tuple(replace(row, arrival_us=at) for row, at in pairs), sentence)
