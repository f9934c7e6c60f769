"""Which settings of a trace go together: a generator reads no file, a source without a clock needs arrivals."""

from collections.abc import Iterator

from harness.config.errors import ConfigError
from harness.config.paths import check_trace_file
from harness.config.schema import RunConfig, SharingModel, TraceArrivals, TraceFormat

FOLDERS = (TraceFormat.auto, TraceFormat.agentic, TraceFormat.ragpulse, TraceFormat.servegen)
_NO_CLOCK = (TraceFormat.lengths, TraceFormat.lengths_chat, TraceFormat.sharegpt)
_CLOCK = (TraceFormat.generated, TraceFormat.auto, TraceFormat.agentic, *_NO_CLOCK)


def check_trace(config: RunConfig) -> Iterator[ConfigError]:
    """Everything about the trace that can be said without reading it."""
    trace = config.trace
    generated = trace.format is TraceFormat.generated
    if generated and trace.path is not None:
        yield ConfigError(
            "trace.path",
            f"found '{trace.path}', but trace.format=generated reads no file; choose trace=azure, ...",
        )
    elif not generated and not trace.path:
        yield ConfigError(
            "trace.path", f"missing: trace.format={trace.format} reads a file; add trace.path=FILE"
        )
    elif not generated and trace.path:
        yield from check_trace_file(trace.path, trace.format in FOLDERS)
    yield from _arrivals(config)
    if trace.sharing is not SharingModel.none and not generated:
        yield ConfigError(
            "trace.sharing",
            f"found {trace.sharing}, but a file has its own sharing; use workload.prefix_share to replace it",
        )
    if trace.format is TraceFormat.sharegpt and not trace.tokenizer:
        yield ConfigError(
            "trace.tokenizer", "missing: trace.format=sharegpt holds text; add trace.tokenizer=FOLDER"
        )


def _arrivals(config: RunConfig) -> Iterator[ConfigError]:
    trace = config.trace
    recorded = trace.arrivals is TraceArrivals.recorded
    if recorded and trace.format in _NO_CLOCK:
        yield ConfigError(
            "trace.arrivals",
            f"found recorded, but trace.format={trace.format} has no timestamps; "
            "use trace.arrivals=poisson trace.arrival_rate=1",
        )
    if not recorded and trace.format not in _CLOCK:
        yield ConfigError(
            "trace.arrivals",
            f"found {trace.arrivals}, but trace.format={trace.format} records arrivals; "
            "change their rate with workload.request_rate",
        )
    if not recorded and trace.arrival_rate is None:
        yield ConfigError(
            "trace.arrival_rate", f"missing: trace.arrivals={trace.arrivals} needs requests per second"
        )
    if recorded and trace.arrival_rate is not None:
        yield ConfigError(
            "trace.arrival_rate",
            f"found {trace.arrival_rate}, but trace.arrivals=recorded has its own rate; choose trace.arrivals=poisson, "
            "or scale time with workload.request_rate",
        )
