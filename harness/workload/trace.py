"""The trace of a point: read or generated, then reshaped as the configuration says.

Points with the same trace settings share one trace in memory.
"""

from collections.abc import Callable
from functools import lru_cache
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from harness.config.errors import ConfigError
from harness.config.memory import GENERATED
from harness.config.schema import RunConfig, SharingModel, TraceArrivals, TraceFormat
from harness.console import remark
from traces.arrivals import ArrivalProcess
from traces.errors import ParameterError, TraceError
from traces.formats.rows import Encode
from traces.reading import read_trace
from traces.reshape import scale_lengths, set_rate, share_prefixes
from traces.synth.generator import generate_trace
from traces.synth.sharing import Sharing
from traces.trace import Trace


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
        raise ParameterError(
            "tokenizer", f"cannot read {file}: {error}; name a folder with tokenizer.json"
        ) from error

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
_SLOW_TO_DRAW, _SECONDS_TO_DRAW = 200_000, 6e-5  # seconds a request: 6 CPU-seconds for 100,000


def reshaped_trace(config: RunConfig) -> Trace:
    """The point's trace, before requests that never fit are dropped.

    Raises:
        ConfigError: the trace cannot be read or reshaped; names file, line and field.
    """
    trace, workload = config.trace, config.workload
    try:
        reshaping = (
            _source_key(config),
            workload.num_requests,
            workload.length_scale,
            workload.prefix_share,
            workload.num_prefixes,
            workload.prefix_zipf,
            workload.request_rate,
            workload.seed,
        )
        return _RESHAPED.get(reshaping, lambda: _reshaped(*reshaping))
    except TraceError as error:
        raise ConfigError("trace.path" if trace.path else "trace.name", str(error)) from error
    except ParameterError as error:
        raise ConfigError(_KEYS[error.parameter], error.reason) from error


def _source_key(config: RunConfig) -> tuple[Any, ...]:
    """The cache key: all settings that decide what is read, and the file's modification time."""
    trace = config.trace
    reading = (trace.ticks, trace.on_error, trace.sort, trace.tokenizer, config.workload.seed)
    return (
        trace.format,
        trace.name,
        trace.path,
        _stamp(trace.path),
        reading,
        _arrivals(config),
        _sharing(config),
    )


def _stamp(path: str | None) -> int:
    """The modification time of the file, or the latest one in the folder; 0 without a file."""
    if not path or not Path(path).exists():
        return 0
    place = Path(path)
    files = (place, *(place.rglob("*") if place.is_dir() else ()))
    return max((file.stat().st_mtime_ns for file in files), default=0)


def _arrivals(config: RunConfig) -> ArrivalProcess | None:
    trace = config.trace
    if trace.arrivals is TraceArrivals.recorded:
        return None
    assert trace.arrival_rate is not None  # harness.config.checks
    return ArrivalProcess(str(trace.arrivals), trace.arrival_rate, shape=trace.arrival_shape)


def _sharing(config: RunConfig) -> Sharing | None:
    trace, workload = config.trace, config.workload
    if trace.sharing is SharingModel.none:
        return None
    return Sharing(str(trace.sharing), trace.share, workload.num_prefixes, workload.prefix_zipf)


class RecentTraces:
    """The traces that were used last: at most `traces`, and as many as have `requests` requests together."""

    def __init__(self, traces: int, requests: int) -> None:
        self._most = traces, requests
        self._kept: dict[Any, Trace] = {}
        self.requests = 0  # of all kept traces

    def get(self, key: Any, make: Callable[[], Trace]) -> Trace:
        """The trace of `key`, made where it is not kept. The last one is kept however large it is."""
        known = self._kept.pop(key, None)
        trace = self._kept[key] = make() if known is None else known
        self.requests += len(trace.requests) if known is None else 0
        while len(self._kept) > 1 and (len(self._kept) > self._most[0] or self.requests > self._most[1]):
            self.requests -= len(self._kept.pop(next(iter(self._kept))).requests)
        return trace


_SOURCES, _RESHAPED = RecentTraces(8, 200_000), RecentTraces(64, 200_000)  # some 400 MB


def _reshaped(
    source: tuple[Any, ...],
    num_requests: int | None,
    length_scale: float,
    prefix_share: float | None,
    num_prefixes: int,
    zipf: float,
    rate: float | None,
    seed: int,
) -> Trace:
    taken = _SOURCES.get((source, num_requests), lambda: _taken(source, num_requests))
    trace = scale_lengths(taken, length_scale)
    if prefix_share is not None:
        trace = share_prefixes(trace, prefix_share, num_prefixes, zipf, seed)
    return set_rate(trace, rate) if rate is not None else trace


def _taken(source: tuple[Any, ...], num_requests: int | None) -> Trace:
    format_, name, path, _, (ticks, on_error, sort, tokenizer, seed), arrivals, sharing = source
    if format_ is TraceFormat.generated:
        count = num_requests or GENERATED
        if count >= _SLOW_TO_DRAW and parent_process() is None:  # a worker draws what was announced before
            remark(f"drawing {count:,} requests of {name}: about {count * _SECONDS_TO_DRAW:,.0f} s")
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
