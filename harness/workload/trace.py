"""The trace of a point: read or generated, then reshaped as the configuration says.

Points with the same trace settings share one trace in memory.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.errors import ConfigError
from harness.config.memory import GENERATED
from harness.config.schema import Oversize, ReplayMode, RunConfig, SharingModel, TraceArrivals, TraceFormat
from harness.replay.arrivals import (
    Arrivals,
    Capped,
    ClosedLoop,
    OpenLoop,
    Sessions,
    TimedRequest,
    Turn,
    to_ns,
)
from traces.arrivals import ArrivalProcess
from traces.errors import ParameterError, TraceError
from traces.formats.rows import Encode
from traces.reading import read_trace
from traces.reshape import scale_lengths, set_rate, share_prefixes
from traces.synth.generator import PrefixSharing, generate_trace
from traces.trace import OPEN, Client, ClientKind, Trace, TraceRequest


@lru_cache(maxsize=4)
def encoder(path: str) -> Encode:
    """An encoder from `tokenizer.json` in a folder, or from that file; it adds no special tokens.

    Raises:
        ParameterError: the file cannot be read.
    """
    from tokenizers import Tokenizer

    place = Path(path).expanduser()
    file = place / "tokenizer.json" if place.is_dir() else place
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for every fault of the file
        reason = f"cannot read {file}: {error}; name a folder with tokenizer.json"
        raise ParameterError("tokenizer", reason) from error

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


_KEYS = {
    "share": "workload.prefix_share",
    "num_prefixes": "workload.num_prefixes",
    "zipf": "workload.prefix_zipf",
    "requests_per_s": "workload.request_rate",
    "factor": "workload.length_scale",
    "num_requests": "workload.num_requests",
    "limit": "workload.num_requests",
    "seed": "workload.seed",
    "table": "trace.name",
    "format": "trace.format",
    "ticks": "trace.ticks",
    "on_error": "trace.on_error",
    "arrivals": "trace.arrivals",
    "rate_rps": "trace.arrival_rate",
    "shape": "trace.arrival_shape",
    "sharing": "trace.sharing",
    "tokenizer": "trace.tokenizer",
}


def reshaped_trace(config: RunConfig) -> Trace:
    """The point's trace, before requests that never fit are dropped and what is left of them is shared.

    Raises:
        ConfigError: the trace cannot be read or reshaped; names file, line and field.
    """
    trace, workload = config.trace, config.workload
    try:
        source = _source_key(config), workload.num_requests
        shared = workload.prefix_share, workload.num_prefixes, workload.prefix_zipf, workload.seed
        reshaping = (source, workload.length_scale, shared, workload.request_rate, workload.oversize)
        return _RESHAPED.get(reshaping, lambda: _reshaped(source, config))
    except TraceError as error:
        raise ConfigError("trace.path" if trace.path else "trace.name", str(error)) from error
    except ParameterError as error:
        raise ConfigError(_KEYS[error.parameter], error.reason) from error


def shared_as_asked(trace: Trace, config: RunConfig) -> Trace:
    """The trace with `workload.prefix_share` of its prompt tokens shared: for what is left after requests are dropped.

    Raises:
        ConfigError: these requests cannot share so much.
    """
    workload = config.workload
    if workload.prefix_share is None:
        return trace
    drawn = workload.num_prefixes, workload.prefix_zipf, workload.seed
    try:
        return share_prefixes(trace, workload.prefix_share, *drawn)
    except ParameterError as error:
        raise ConfigError(_KEYS[error.parameter], error.reason) from error


def _source_key(config: RunConfig) -> tuple[Any, ...]:
    """The cache key: all settings that decide what is read, and the file's modification time."""
    trace, workload, arrivals, sharing = config.trace, config.workload, None, None
    if trace.arrivals is not TraceArrivals.recorded:
        assert trace.arrival_rate is not None  # harness.config.checks
        arrivals = ArrivalProcess(str(trace.arrivals), trace.arrival_rate, shape=trace.arrival_shape)
    if trace.sharing is not SharingModel.none:
        prefixes = workload.num_prefixes, workload.prefix_zipf
        sharing = PrefixSharing(str(trace.sharing), trace.share, *prefixes)
    reading = (trace.ticks, trace.on_error, trace.sort, trace.tokenizer, config.workload.seed)
    return trace.format, trace.name, trace.path, _stamp(trace.path), reading, arrivals, sharing


def _stamp(path: str | None) -> int:
    """The modification time of the file, or the latest one in the folder; 0 without a file."""
    if not path or not Path(path).exists():
        return 0
    place = Path(path)
    files = (place, *(place.rglob("*") if place.is_dir() else ()))
    return max((file.stat().st_mtime_ns for file in files), default=0)


class RecentTraces:
    """The traces that were used last: at most `traces`, and as many as have `requests` requests together.

    The last `least` are kept however large they are.
    """

    def __init__(self, traces: int, requests: int, least: int = 1) -> None:
        self._most = traces, requests
        self._least = least
        self._kept: dict[Any, Trace] = {}
        self.requests = 0  # of all kept traces

    def get(self, key: Any, make: Callable[[], Trace]) -> Trace:
        """The trace of `key`, made where it is not kept."""
        known = self._kept.pop(key, None)
        trace = self._kept[key] = make() if known is None else known
        self.requests += len(trace.requests) if known is None else 0
        traces, requests = self._most
        while len(self._kept) > self._least and (len(self._kept) > traces or self.requests > requests):
            self.requests -= len(self._kept.pop(next(iter(self._kept))).requests)
        return trace


_SOURCES, _RESHAPED = RecentTraces(8, 200_000, least=0), RecentTraces(64, 200_000)


def _reshaped(source: tuple[tuple[Any, ...], int | None], config: RunConfig) -> Trace:
    trace, rate = _SOURCES.get(source, lambda: _taken(*source)), config.workload.request_rate
    trace = scale_lengths(trace, config.workload.length_scale)
    # where requests are dropped, those that are left will share
    if config.workload.oversize is Oversize.error:
        trace = shared_as_asked(trace, config)
    return set_rate(trace, rate) if rate is not None else trace


def _taken(source: tuple[Any, ...], num_requests: int | None) -> Trace:
    format_, name, path, _, (ticks, on_error, sort, tokenizer, seed), arrivals, sharing = source
    if format_ is TraceFormat.generated:
        count = num_requests or GENERATED
        return generate_trace(name, num_requests=count, seed=seed, arrivals=arrivals, sharing=sharing)
    return read_trace(
        path,
        str(format_),
        name=name,
        ticks=str(ticks),
        on_error=str(on_error),
        sort=sort,
        seed=seed,
        limit=num_requests,
        arrivals=arrivals,
        encode=encoder(tokenizer) if tokenizer else None,
    )


_PAUSES = 5  # number of the random stream of pauses; other uses of the seed have other streams
_NS_PER_US = 1000


@dataclass(frozen=True)
class Traffic:
    """The arrival pattern of a point; `arrivals()` makes the source of requests that a replay reads. Times in s.

    `client` is that of the trace: it holds requests back in every mode, and sends turns by itself in `trace`.
    """

    mode: ReplayMode = ReplayMode.trace
    users: int = 1
    think_s: float = 0.0
    seed: int = 0
    until_s: float | None = None
    client: Client = OPEN

    @property
    def until_ns(self) -> int | None:
        """When the replay stops, in ns; None: when everything has finished."""
        return None if self.until_s is None else int(to_ns(self.until_s))

    @property
    def turns(self) -> bool:
        """Whether a request waits for the turns before it."""
        of_client = self.client.kind is ClientKind.multi_turn and self.mode is ReplayMode.trace
        return of_client or self.mode is ReplayMode.sessions

    def arrivals(self, rows: Sequence[TraceRequest], requests: Iterable[TimedRequest]) -> Arrivals:
        """The source of `requests`; there is one request for each of `rows`, in the same order."""
        source, most = self._own(rows, requests), self.client.max_in_flight
        return source if most is None else Capped(source, most, self.client.pause_us * _NS_PER_US)

    @property
    def waits(self) -> str | None:
        """In words, what requests wait for; None where each is sent at its own time."""
        if self.mode in (ReplayMode.closed, ReplayMode.sessions):
            return str(self.mode)
        return None if self.client == OPEN else str(self.client.kind)

    def _own(self, rows: Sequence[TraceRequest], requests: Iterable[TimedRequest]) -> Arrivals:
        if self.mode is ReplayMode.closed:
            sent = (timed.request for timed in requests)
            return ClosedLoop(sent, len(rows), self.users, self.pauses_ns(rows))
        if self.turns:
            turns = zip(rows, requests, self.pauses_ns(rows), strict=True)
            return Sessions([Turn(timed, turns_before(row), pause) for row, timed, pause in turns])
        return OpenLoop(requests, len(rows))

    def pauses_ns(self, rows: Sequence[TraceRequest]) -> list[int]:
        """The pause before each request; before the turn of a conversation a recorded one is preferred."""
        pauses = pauses_ns(len(rows), self.think_s, self.seed)
        if not self.turns:
            return pauses
        return [
            drawn if row.think_us is None else row.think_us * _NS_PER_US
            for row, drawn in zip(rows, pauses, strict=True)
        ]


def traffic_of(config: RunConfig, client: Client = OPEN) -> Traffic:
    """The arrival pattern that the configuration asks for; `client` is that of the trace."""
    replay, most = config.replay, config.replay.max_in_flight
    if replay.mode in (ReplayMode.poisson, ReplayMode.gamma, ReplayMode.closed, ReplayMode.offline):
        client = OPEN  # the arrivals are of another client
    if most is not None:
        kind = client.kind
        if kind is not ClientKind.multi_turn:
            kind = ClientKind.capped if most else ClientKind.open
        client = Client(kind, most or None, client.pause_us if most else 0)
    return Traffic(replay.mode, replay.users, replay.think_s, config.workload.seed, replay.duration_s, client)


def pauses_ns(count: int, mean_s: float, seed: int) -> list[int]:
    """Exponential pauses in whole ns; number i depends on the seed and i alone."""
    if mean_s == 0:
        return [0] * count
    source = np.random.Generator(np.random.Philox(key=np.array([seed, _PAUSES], dtype=np.uint64)))
    pauses: list[int] = to_ns(source.standard_exponential(count) * mean_s).tolist()
    return pauses


def turns_before(row: TraceRequest) -> tuple[int, ...]:
    """The requests that a turn waits for."""
    return row.after or (() if row.parent is None else (row.parent,))


_LINKS = ("parent", "after")


def retimed(trace: Trace, config: RunConfig) -> Trace:
    """The trace with the arrivals that `replay.mode` asks for, and a note that says so.

    Raises:
        ConfigError: new arrivals need a mean rate, and the trace has none.
    """
    mode, replay = config.replay.mode, config.replay
    paused = traffic_of(config, trace.header.client).turns and any(trace.columns.values("think_us"))
    if paused and config.workload.request_rate is not None:
        slower = "fewer requests/s come than times were scaled to, until as many conversations run as that rate has"
        return trace.changed(
            trace.requests, f"turns wait for answers and pause as long as recorded: {slower}"
        )
    if mode is ReplayMode.offline:
        return _at(trace, [0] * len(trace.requests), "offline: everything is there at the start")
    if mode is ReplayMode.closed:
        pause = f"pause {replay.think_s:g} s on average" if replay.think_s else "do not pause"
        return trace.changed(trace.requests, f"closed loop: {replay.users:,} users, who {pause}")
    if mode is ReplayMode.sessions and not any({*trace.columns.values(name)} - {None, ()} for name in _LINKS):
        sentence = "sessions: no request names one before it, so each comes at its own time"
        return trace.changed(trace.requests, sentence)
    if mode not in (ReplayMode.poisson, ReplayMode.gamma):
        return trace
    rate = config.workload.request_rate or trace.mean_rate or (1.0 if len(trace.requests) < 2 else None)
    if rate is None:
        raise ConfigError(
            "workload.request_rate",
            "missing: the trace's requests all arrive at one instant, so it has no mean rate; set a number",
        )
    process = ArrivalProcess(str(mode), rate, shape=replay.burstiness**-2)
    kind = mode if mode is ReplayMode.poisson else f"gamma (coefficient of variation {replay.burstiness:g})"
    said = f"arrivals drawn anew: {kind}, {rate:.4g} requests/s, seed {config.workload.seed}"
    return _at(trace, process.times_us(len(trace.requests), config.workload.seed), said)


def _at(trace: Trace, times_us: Sequence[int], sentence: str) -> Trace:
    return trace.changed(replace(trace.columns, arrival_us=np.array(times_us, dtype=np.int64)), sentence)
