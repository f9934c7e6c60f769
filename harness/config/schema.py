"""The schema of a run: plain dataclasses that Hydra fills. Ranges live in `harness.config.checks`.

Each field's comment is its documentation: unit, meaning, and what `null` stands for.
"""

from dataclasses import dataclass, field
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


class CachePolicy(StrEnum):
    """Who hands out KV memory."""

    paged = "paged"
    contiguous_max = "contiguous_max"


class DecodingMode(StrEnum):
    """How next tokens are chosen when `decoding.beam_width` is 1."""

    greedy = "greedy"
    sample = "sample"


class EngineDevice(StrEnum):
    """Where the measured engine runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    """Element type of weights and KV."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Backend(StrEnum):
    """Attention kernels of the measured engine."""

    auto = "auto"
    torch = "torch"
    triton = "triton"


class Audit(StrEnum):
    """How often written slots are counted in the tensors and compared with the books."""

    off = "off"
    sampled = "sampled"
    full = "full"


class CostKind(StrEnum):
    """What predicts a step's seconds."""

    auto = "auto"  # fitted where this device and model are or will be calibrated, else roofline
    fitted = "fitted"
    roofline = "roofline"


class Clock(StrEnum):
    """What a measured second is."""

    auto = "auto"  # cpu on a CPU device, wall on CUDA
    wall = "wall"
    cpu = "cpu"  # CPU-seconds of the engine's thread: steady on a shared machine


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


@dataclass
class CacheConfig:
    """KV memory: how much, and who hands it out."""

    policy: CachePolicy = CachePolicy.paged
    block_size: int = 16  # tokens per block; the contiguous policies reserve single slots and ignore it
    pool_tokens: int | None = (
        None  # KV slots in the pool; null: what the device's memory holds beside the weights
    )
    prefix_caching: bool = True  # paged only
    max_model_len: int | None = (
        None  # longest prompt + output; what contiguous_max reserves; null: the model's
    )


@dataclass
class SchedulerConfig:
    """Continuous batching."""

    max_batched_tokens: int = 512  # token budget of one step
    max_running: int = 64  # sequences (beams count) that may run at once
    chunked_prefill: bool = True
    watermark: float = (
        0.0  # share of the pool kept free when a waiting request is admitted beside running ones
    )


@dataclass
class DecodingConfig:
    """Greedy, parallel sampling, beam search."""

    beam_width: int = 1  # above 1: beam search, and `mode` and `n` do not apply
    mode: DecodingMode = DecodingMode.greedy
    n: int = 1  # parallel samples a request, mode=sample
    temperature: float = 1.0
    beam_churn: float | None = None  # simulated share of beams dropped in a step; null: as calibrated


@dataclass
class ModelConfig:
    """Shape of the model; `path` loads a local checkpoint directory instead."""

    name: str = "tiny-llama"
    family: str = "llama"  # transformers model_type of a random-initialised model
    path: str | None = None
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 512
    vocab: int = 4096
    max_position: int = 2048
    dtype: Dtype = Dtype.float32
    seed: int = 0


@dataclass
class DeviceConfig:
    """Datasheet of the simulated device, for `cost=roofline` and for the pool size."""

    name: str = "cpu"
    memory_gb: float = 8.0  # 10^9 bytes
    bandwidth_gbs: float = 20.0  # 10^9 bytes per second
    tflops: float = 0.1  # dense, at the model's dtype
    step_overhead_us: float = 1000.0  # host time of a step beside the device
    layer_overhead_us: float = 250.0  # host or launch time per layer
    memory_utilization: float = 0.9


@dataclass
class EngineConfig:
    """The measured engine."""

    device: EngineDevice = EngineDevice.auto
    backend: Backend = Backend.auto
    threads: int = 1  # torch threads on the CPU
    audit: Audit = Audit.sampled
    audit_every: int = 16  # steps between audits when sampled


@dataclass
class CostConfig:
    """The cost model of the simulated side."""

    kind: CostKind = CostKind.auto
    recalibrate: bool = False  # measure again although this device is calibrated
    follow_pace: bool = True  # scale a fitted prediction by how fast the device is now, by a fixed probe
    cache_dir: str | None = None  # where calibrations are kept; null: the user's cache directory


@dataclass
class ReplayConfig:
    """How a replay runs."""

    clock: Clock = Clock.auto
    repeats: int = 3  # measured runs; their spread stands beside every error


@dataclass
class RunConfig:
    """One point of a sweep."""

    name: str = "default"  # of the sweep, shown in the report
    out: str = "results/default"  # store folder
    measure: bool = True  # false: simulation only
    workers: int = (
        0  # processes for simulation-only points; 0: one per core; measured points run one at a time
    )
    trace: TraceConfig = field(default_factory=TraceConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
