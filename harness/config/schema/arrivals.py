"""What arrives: the trace, and how the workload reshapes it."""

from dataclasses import dataclass
from enum import StrEnum


class TraceFormat(StrEnum):
    """Where the requests come from."""

    auto = "auto"  # recognise the file by its header or keys
    azure = "azure"  # Azure LLM inference CSV (needs trace.path)
    mooncake = "mooncake"  # Mooncake JSONL (needs trace.path)
    vidur = "vidur"  # Vidur's or Splitwise's CSV (needs trace.path)
    generated = "generated"  # the embedded generator, calibrated on published statistics


class Ticks(StrEnum):
    """What to do with arrivals that a trace's coarse clock lumps together (Mooncake: ticks of 3 s)."""

    keep = "keep"
    even = "even"
    random = "random"


class OnError(StrEnum):
    """A malformed row: refuse the file, or skip and count the row."""

    stop = "stop"
    skip = "skip"


class Oversize(StrEnum):
    """A request that can never fit the pool or the model: refuse the point, or drop and count the request."""

    error = "error"
    drop = "drop"


@dataclass
class TraceConfig:
    """Which requests arrive."""

    name: str = "azure_conv"  # shown in reports; for `generated` the calibration table's name
    format: TraceFormat = TraceFormat.generated
    path: str | None = None  # file to read; null for `generated`
    ticks: Ticks = Ticks.keep
    on_error: OnError = OnError.stop


@dataclass
class WorkloadConfig:
    """Changes made to the trace; every one is named in the record and in the report."""

    num_requests: int | None = 64  # the first so many rows; null: all
    request_rate: float | None = None  # mean requests per second, by scaling time; null: as recorded
    length_scale: float = 1.0  # factor on prompt, output and shared-prefix lengths
    prefix_share: float | None = (
        None  # share of each prompt that comes from a shared prefix; null: as in the trace
    )
    num_prefixes: int = 8  # how many distinct shared prefixes there are
    prefix_zipf: float = 1.0  # popularity exponent of the shared prefixes; 0 is uniform
    oversize: Oversize = Oversize.error
    seed: int = 0
