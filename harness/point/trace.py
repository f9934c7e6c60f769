"""The trace of a point: read or generated, then reshaped as the configuration says. Points that agree share it."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.config.errors import ConfigError
from harness.config.schema import RunConfig, TraceFormat
from traces.errors import ParameterError, TraceError
from traces.synth.generator import generate_trace
from traces.reading import read_trace
from traces.reshape import scale_lengths, set_rate, share_prefixes
from traces.trace import Trace

_KEYS = {
    "share": "workload.prefix_share",
    "num_prefixes": "workload.num_prefixes",
    "zipf": "workload.prefix_zipf",
    "requests_per_s": "workload.request_rate",
    "factor": "workload.length_scale",
    "num_requests": "workload.num_requests",
    "seed": "workload.seed",
    "table": "trace.name",
    "format": "trace.format",
    "ticks": "trace.ticks",
    "on_error": "trace.on_error",
}
_GENERATED = 1000  # requests of a generated trace where `workload.num_requests` is null


def reshaped_trace(config: RunConfig) -> Trace:
    """The point's trace before anything is dropped for its size; raises ConfigError with file, line and field."""
    trace, workload = config.trace, config.workload
    try:
        return _reshaped(
            _source_key(config),
            workload.num_requests,
            workload.length_scale,
            workload.prefix_share,
            workload.num_prefixes,
            workload.prefix_zipf,
            workload.request_rate,
            workload.seed,
        )
    except TraceError as error:
        raise ConfigError("trace.path" if trace.path else "trace.name", str(error)) from error
    except ParameterError as error:
        raise ConfigError(_KEYS[error.parameter], error.reason) from error


def _source_key(config: RunConfig) -> tuple[Any, ...]:
    """All that decides what is read; a file that changed is read again."""
    trace = config.trace
    stamp = Path(trace.path).stat().st_mtime_ns if trace.path and Path(trace.path).exists() else 0
    return (trace.format, trace.name, trace.path, stamp, trace.ticks, trace.on_error, config.workload.seed)


@lru_cache(maxsize=64)
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
    trace = scale_lengths(_taken(source, num_requests), length_scale)
    if prefix_share is not None:
        trace = share_prefixes(trace, prefix_share, num_prefixes, zipf, seed)
    return set_rate(trace, rate) if rate is not None else trace


@lru_cache(maxsize=8)
def _taken(source: tuple[Any, ...], num_requests: int | None) -> Trace:
    format_, name, path, _, ticks, on_error, seed = source
    if format_ is TraceFormat.generated:
        return generate_trace(name, num_requests=num_requests or _GENERATED, seed=seed)
    return read_trace(
        path, str(format_), name=name, ticks=str(ticks), on_error=str(on_error), seed=seed, limit=num_requests
    )
