"""What arrives: the trace, and how the workload reshapes it."""

from dataclasses import dataclass
from enum import StrEnum


class TraceFormat(StrEnum):
    """Where the requests come from."""

    auto = "auto"  # recognise the file or folder by its content
    azure = "azure"  # Azure LLM inference CSV; like all that follow but the last it needs trace.path
    mooncake = "mooncake"  # Mooncake JSONL: chained ids of 512-token blocks
    vidur = "vidur"  # Vidur's or Splitwise's CSV
    burstgpt = "burstgpt"  # BurstGPT CSV, version 1 or 2
    bailian = "bailian"  # Qwen-Bailian JSONL: ids of 16-token blocks, chats that continue chats
    ragpulse = "ragpulse"  # RAGPulse folder, or its 0_trace.jsonl beside the tables
    agentic = "agentic"  # a recorded agent conversation (kv-cache-tester), or a folder of them
    lengths = "lengths"  # table of lengths without arrivals (needs trace.arrivals)
    lengths_chat = "lengths_chat"  # the same, its rows joined to conversations by a rule
    sharegpt = "sharegpt"  # ShareGPT JSON (needs trace.tokenizer and trace.arrivals)
    servegen = "servegen"  # folder of ServeGen client models, to draw from
    servingsim = "servingsim"  # LLMServingSim JSONL
    simple = "simple"  # our own CSV or JSONL: arrival_s, prompt_tokens, output_tokens, ...
    pagetwin = "pagetwin"  # a trace of ours, JSONL or Parquet, as `trace convert` writes it
    generated = "generated"  # an embedded generator, calibrated on published statistics


class Ticks(StrEnum):
    """What to do with arrivals that a trace's coarse clock lumps together (Mooncake: ticks of 3 s)."""

    keep = "keep"
    even = "even"
    random = "random"


class TraceArrivals(StrEnum):
    """When requests arrive: as the trace says, or by a process, where it has no clock or a generator makes it."""

    recorded = "recorded"
    even = "even"
    poisson = "poisson"
    gamma = "gamma"  # of trace.arrival_shape; below 1 is burstier than Poisson
    diurnal = "diurnal"  # Poisson whose rate swings by 80 % over a day
    modulated = "modulated"  # two-state Poisson: four times as busy for a tenth of the time


class SharingModel(StrEnum):
    """How generated prompts share their beginnings; workload.num_prefixes and prefix_zipf say among how many texts."""

    none = "none"
    system = "system"  # a system prompt
    few_shot = "few_shot"  # a task and as many of its examples as fit
    tree = "tree"  # a walk down a tree of texts
    passages = "passages"  # a system prompt and retrieved passages


class OnError(StrEnum):
    """A malformed row: refuse the file, or skip and count the row."""

    stop = "stop"
    skip = "skip"


class Oversize(StrEnum):
    """A request that can never fit the pool or the model: refuse the point, or drop and count the request."""

    error = "error"
    drop = "drop"


class Widths(StrEnum):
    """How many sequences a request has."""

    recorded = "recorded"  # as its row of the trace says (n, best_of, beam_width), else as `decoding` says
    configured = "configured"  # as `decoding` says


@dataclass
class TraceConfig:
    """Which requests arrive."""

    name: str = "azure_conv"  # shown in reports; for `generated` the calibration table's name
    format: TraceFormat = TraceFormat.generated
    path: str | None = None  # file or folder to read; null for `generated`
    ticks: Ticks = Ticks.keep
    on_error: OnError = OnError.stop
    sort: bool = False  # allow rows out of order, and sort them by time
    arrivals: TraceArrivals = TraceArrivals.recorded
    arrival_rate: float | None = (
        None  # mean requests (conversations) per second of trace.arrivals; null: the table's
    )
    arrival_shape: float = 0.5  # arrivals=gamma
    tokenizer: str | None = None  # sharegpt: folder or file of the tokenizer (tokenizer.json)
    sharing: SharingModel = SharingModel.none  # generated: how prompts share their beginnings
    share: float = 0.5  # about so much of each prompt is shared by trace.sharing


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
    widths: Widths = Widths.recorded
    oversize: Oversize = Oversize.error
    seed: int = 0
