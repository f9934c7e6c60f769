"""The schema of a run: every key that a user can set, with its type and its default.

The classes are plain dataclasses that Hydra fills. Options of the engine have their enums in `engine.core.options` and
`engine.runtime.options`; the scheduler's options are declared there too. Allowed ranges are in `harness.config.checks`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Any, get_args, get_type_hints

from engine.core.options import (
    CachePolicy,
    Decoding,
    Eviction,
    GroupPages,
    HashAlgorithm,
    Placement,
    Retention,
    SchedulerOptions,
    Sharing,
    SpeculationMode,
    StateMode,
    TierLoad,
    TierStore,
    WindowHits,
)
from engine.runtime.options import Audit, Backend, Dtype, KVDtype


class TraceFormat(StrEnum):
    """Where the requests come from."""

    auto = "auto"  # recognise the file or folder by its content
    azure = "azure"  # Azure LLM inference CSV; this and all formats below except `generated` need trace.path
    mooncake = "mooncake"  # Mooncake JSONL: chained ids of 512-token blocks
    vidur = "vidur"  # Vidur's or Splitwise's CSV
    burstgpt = "burstgpt"  # BurstGPT CSV, version 1 or 2
    bailian = "bailian"  # Qwen-Bailian JSONL: ids of 16-token blocks, chats that continue chats
    ragpulse = "ragpulse"  # RAGPulse folder, or its 0_trace.jsonl beside the tables
    agentic = "agentic"  # a recorded agent conversation (kv-cache-tester), or a folder of them
    lengths = "lengths"  # table of lengths without arrivals (needs trace.arrivals)
    lengths_chat = "lengths_chat"  # the same, with rows joined to conversations by a rule
    sharegpt = "sharegpt"  # ShareGPT JSON (needs trace.tokenizer and trace.arrivals)
    servegen = "servegen"  # folder of ServeGen client models, to draw from
    servingsim = "servingsim"  # LLMServingSim JSONL
    kv_events = "kv_events"  # KV cache events of vLLM or of a replay, as msgpack
    simple = "simple"  # our own CSV or JSONL: arrival_s, prompt_tokens, output_tokens, ...
    pagetwin = "pagetwin"  # PageTwin's own trace, JSONL or Parquet, as `trace convert` writes it
    generated = "generated"  # no file: a generator that is calibrated on published statistics


class Ticks(StrEnum):
    """How to treat arrivals that a trace's coarse clock gives the same time (Mooncake: ticks of 3 s)."""

    keep = "keep"
    even = "even"
    random = "random"


class TraceArrivals(StrEnum):
    """When requests arrive: as recorded, or by a random process for generated traces and traces without timestamps."""

    recorded = "recorded"
    even = "even"
    poisson = "poisson"
    gamma = "gamma"  # of trace.arrival_shape; below 1 is burstier than Poisson
    diurnal = "diurnal"  # Poisson whose rate swings by 80 % over a day
    modulated = "modulated"  # two-state Poisson: four times as busy for a tenth of the time


class SharingModel(StrEnum):
    """How generated prompts share prefixes; workload.num_prefixes and prefix_zipf describe the shared texts."""

    none = "none"
    system = "system"  # a system prompt
    few_shot = "few_shot"  # a task and as many of its examples as fit
    tree = "tree"  # a walk down a tree of texts
    passages = "passages"  # a system prompt and retrieved passages


class OnError(StrEnum):
    """What to do with a malformed row: refuse the file, or skip and count the row."""

    stop = "stop"
    skip = "skip"


class Oversize(StrEnum):
    """What to do with a request that can never fit the pool or the model: refuse the point, or drop and count it."""

    error = "error"
    drop = "drop"


class Widths(StrEnum):
    """How many sequences a request has."""

    recorded = "recorded"  # from its row of the trace (n, best_of, beam_width), or else from `decoding`
    configured = "configured"  # from `decoding`


@dataclass
class TraceConfig:
    """The trace: which requests arrive, and when."""

    name: str = "azure_conv"  # shown in reports; for `generated` the calibration table's name
    format: TraceFormat = TraceFormat.generated
    path: str | None = None  # file or folder to read; null for `generated`
    ticks: Ticks = Ticks.keep
    on_error: OnError = OnError.stop
    sort: bool = False  # allow rows out of order, and sort them by time
    arrivals: TraceArrivals = TraceArrivals.recorded
    arrival_rate: float | None = None  # mean requests (conversations) per second of arrivals; null: table's
    arrival_shape: float = 0.5  # arrivals=gamma
    tokenizer: str | None = None  # sharegpt: folder or file of the tokenizer (tokenizer.json)
    sharing: SharingModel = SharingModel.none  # generated: how prompts share their beginnings
    share: float = 0.5  # approximate share of each prompt that trace.sharing makes common


@dataclass
class WorkloadConfig:
    """Changes to the trace; the record and the report name each of them."""

    num_requests: int | None = 64  # number of rows, from the first on; null: all
    request_rate: float | None = None  # mean requests per second, by scaling time; null: as recorded
    length_scale: float = 1.0  # factor on prompt, output and shared-prefix lengths
    # of prompt tokens that stood in an earlier prompt; null: as in the trace
    prefix_share: float | None = None
    num_prefixes: int = 8  # how many distinct shared prefixes there are
    prefix_zipf: float = 1.0  # popularity exponent of the shared prefixes; 0 is uniform
    widths: Widths = Widths.recorded
    oversize: Oversize = Oversize.error
    seed: int = 0


class EngineDevice(StrEnum):
    """Where the measured engine runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class WeightDtype(StrEnum):
    """How the matrices of the layers are stored, for a prediction. Embeddings stay in the model's element type."""

    model = "model"
    fp8 = "fp8"  # 8 bits; scales per tensor or per channel take less than a thousandth
    int8 = "int8"  # the same
    int4 = "int4"  # 4 bits, and 16 for the scale of each model.weight_group of them
    mxfp4 = "mxfp4"  # 4 bits, and 8 for the scale of each 32 of them (Open Compute Project, MX 1.0)


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
    kv_dtype: KVDtype = KVDtype.model
    seed: int = 0
    tied_embeddings: bool | None = None  # one matrix for input and output; null: as the family has it
    weight_dtype: WeightDtype = WeightDtype.model  # for predictions; the measured engine has none of these
    weight_group: int = 128  # weight_dtype=int4: elements that share a scale
    experts_only: bool = False  # weight_dtype applies to routed experts alone
    experts: int = 0  # routed experts of a layer; 0: a dense model
    experts_per_token: int = 1
    expert_intermediate: int = 0  # width of one of them
    shared_intermediate: int = 0  # width of all shared experts together
    dense_layers: int = 0  # first layers, which have a dense MLP instead
    expert_skew: float = 0.0  # popularity of the i-th expert is i^-skew; 0: all alike
    window: int | None = None  # tokens that a windowed layer attends to
    windowed_layers: int = 0
    chunked_windows: bool = False  # a window is the chunk of fixed place that a token lies in (Llama 4)
    state_layers: int = 0  # layers with a recurrent state and no K and V; the engine builds family=qwen3_next
    state_bytes: int = 0  # of a sequence's state in one of them
    # latent attention (MLA): width of the latent vector; 0: none, and the next three do not apply
    latent_rank: int = 0
    rope_dim: int = 0  # width of its rotary key; head_dim is the other part
    value_dim: int = 0  # width of a head's value
    query_rank: int = 0  # width of its compressed query; 0: not compressed


class EngineSystem(StrEnum):
    """Whose engine is measured."""

    pagetwin = "pagetwin"
    vllm = "vllm"  # in an environment of its own: oracle.python


@dataclass
class EngineConfig:
    """The measured engine."""

    system: EngineSystem = EngineSystem.pagetwin
    device: EngineDevice = EngineDevice.auto
    backend: Backend = Backend.auto
    threads: int = 1  # torch threads on the CPU
    audit: Audit = Audit.sampled
    audit_every: int = 16  # steps between audits when sampled
    cuda_graphs: bool | None = None  # triton on CUDA: replay decode steps as graphs; null: only in `serve`

    @property
    def on_vllm(self) -> bool:
        """Whether vLLM is the engine that is measured."""
        return self.system is EngineSystem.vllm


class DecodingMode(StrEnum):
    """How next tokens are chosen when `decoding.beam_width` is 1.

    It is not `engine.core.options.Decoding`, because beam search is chosen by `decoding.beam_width` and not here.
    """

    greedy = Decoding.greedy.value
    sample = Decoding.sample.value


@dataclass
class CacheConfig:
    """KV memory: its size, and the policy that allocates it."""

    policy: CachePolicy = CachePolicy.paged
    block_size: int = 16  # tokens per block; the contiguous policies reserve single slots and ignore it
    pool_tokens: int | None = None  # KV slots in the pool; null: what memory holds beside the weights
    pool_blocks: int | None = None  # the same in blocks, as vLLM's log has it; not together with pool_tokens
    prefix_caching: bool = True  # paged only
    retention: Retention = Retention.lru
    hash: HashAlgorithm = HashAlgorithm.sha256
    deduplicate: bool = False  # free a block whose content another block held first
    copy_at_fork: bool = False  # branches never share a block: shows what copy-on-write saves
    host_tokens: int = 0  # KV slots of host memory for swapped requests
    # which cached block is evicted first: a rule of Eviction, or module:Class of your own
    eviction: str = "lru"
    ttl_s: float = 60.0  # eviction=ttl: how long what a session has released is kept, s
    pinned_tokens: int = 1024  # eviction=pinned: leading tokens of every prompt that are evicted last
    tier_tokens: int = 0  # KV slots of host memory below the pool, a second tier of the prefix cache
    disk_tokens: int = 0  # of a disk below that; predicted alone
    tier_store: TierStore = TierStore.written  # when they are filled
    tier_chunk: int | None = None  # tokens of a unit of the tiers, which hold whole ones; null: a block
    tier_eviction: Eviction = Eviction.lru  # their rule, as of cache.eviction
    tier_load: TierLoad = TierLoad.always  # or where reading takes less time than computing
    tier_overlap: bool = False  # read while the step computes, not before it
    answers: bool = False  # later prompts find the answers that the trace names (output_key)
    placement: Placement = Placement.auto  # contiguous only
    max_model_len: int | None = None  # longest prompt + output; contiguous_max reserves it; null: the model's
    groups: GroupPages = GroupPages.off  # how layers that keep different things share the memory
    # with groups: which blocks of windowed layers a prefix hit needs
    window_hits: WindowHits = WindowHits.window
    # with groups: keep of windows and states what a hit needs at checkpoints and every so many tokens; null: everywhere
    retention_interval: int | None = 0
    # with groups beside states: hits end with every so many tokens, also inside a block; null: with whole blocks
    prefix_match_unit: int | None = None
    behind_first: bool = False  # with groups: evict what a window has left before what a whole prefix needs
    states: StateMode = StateMode.align  # with groups: which states layers with recurrent state keep
    # tokens of a block of states, but for groups=uniform; null: as of other layers
    state_every: int | None = None


@dataclass
class SchedulerConfig(SchedulerOptions):
    """Continuous batching: the options of `engine.core.options.SchedulerOptions`, and policies of your own."""

    order: str | None = None  # module:Class of your own queue order; null: by `policy`
    victim: str | None = None  # module:Class of your own choice of the request to preempt; null: by `policy`
    admission: str | None = None  # module:Class of your own admission rule; null: admit what fits
    async_scheduling: bool = False  # schedule a step while the one before it runs
    # then too what a step ends is free for the next, as PageTwin once had it
    async_frees_at_once: bool = False


@dataclass
class DecodingConfig:
    """Greedy, parallel sampling, beam search, speculation."""

    beam_width: int = 1  # above 1: beam search, and `mode` and `n` do not apply
    mode: DecodingMode = DecodingMode.greedy
    n: int = 1  # parallel samples per request, for mode=sample
    sharing: Sharing = Sharing.copy_on_write  # how samples and beams share blocks
    temperature: float = 1.0
    beam_churn: float | None = None  # simulated share of beams dropped in a step; null: as calibrated
    beam_parents: str | None = None  # point folder, store or parents.parquet to replay; null: drawn
    branch_hazard: float = 0.0  # probability that a sampled branch ends after a token, on both sides
    draft_tokens: int = 0  # proposed per step and verified together, for single sequences; 0: none
    draft_place: SpeculationMode = SpeculationMode.whole
    draft_path: str | None = None  # checkpoint of the model that proposes; null: the model itself
    acceptance: float | None = None  # simulated share of draft tokens that are right; null: as calibrated


class CostKind(StrEnum):
    """The model that predicts the seconds of a step."""

    # table with cost.kernels, operators with cost.operators, fitted with a calibration (existing or to come), else
    # roofline
    auto = "auto"
    fitted = "fitted"
    table = "table"  # attention interpolated in a measured grid, all else fitted
    roofline = "roofline"
    # attention and matrix products from a CSV of timed operators, all else as roofline
    operators = "operators"
    published = "published"  # whole steps from published timings of operators on GPUs (extra gpu-tables)


class TableEngine(StrEnum):
    """The engine whose kernels the published timings are of."""

    vllm = "vllm"
    sglang = "sglang"
    trtllm = "trtllm"


class ReplayMode(StrEnum):
    """How requests are sent."""

    trace = "trace"  # open loop: at the trace's times (scaled by workload.request_rate)
    poisson = "poisson"  # open loop: drawn anew, at workload.request_rate (null: the trace's mean rate)
    gamma = "gamma"  # the same, with gamma gaps of replay.burstiness
    closed = "closed"  # replay.users users, who each wait for the answer and pause before the next request
    offline = "offline"  # all requests arrive at the start
    sessions = "sessions"  # a turn waits until its parent has ended and its user has paused


class Clock(StrEnum):
    """The clock of measured runs."""

    auto = "auto"  # cpu on a CPU device, wall on CUDA
    wall = "wall"
    cpu = "cpu"  # CPU-seconds of the engine's thread: steady on a shared machine


class Compiled(StrEnum):
    """Whether requests without content are replayed by compiled code; results are the same."""

    auto = "auto"  # where it is possible and there are enough requests
    never = "never"
    always = "always"  # refuse the point where it is not possible


@dataclass
class DeviceConfig:
    """Datasheet of the simulated device, for `cost=roofline` and for the pool size.

    With `tensor_parallel` above 1 it describes each of the devices.
    """

    name: str = "cpu"
    memory_gb: float = 8.0  # 10^9 bytes, as the driver reports them to an engine
    bandwidth_gbs: float = 20.0  # 10^9 bytes per second
    tflops: float = 0.1  # dense, at the model's dtype
    multiprocessors: int = 0  # of the datasheet, as the next two; 0: not known. For timed operators alone
    l2_mib: float = 0.0  # 2^20 bytes of the last cache before the memory; 0: not known
    clock_ghz: float = 0.0  # boost clock; 0: not known
    step_overhead_us: float = 1000.0  # host time of a step, added to the device's
    layer_overhead_us: float = 250.0  # host or launch time per layer
    attention_overhead_us: float = 0.0  # the shortest attention of a layer
    row_overhead_us: float = 0.0  # of one sequence in one layer, beside its bytes and FLOP
    memory_utilization: float = 0.9  # share of the memory that the engine may take, as in vLLM
    activation_gb: float | None = 0.0  # 10^9 bytes: peak of vLLM's profile run; null: by formula
    other_memory_gb: float = 0.0  # 10^9 bytes: what libraries hold beside it
    # 10^9 bytes: CUDA graphs; vLLM subtracts them from 0.21 on, its log says how much
    graph_memory_gb: float = 0.0
    bandwidth_efficiency: float = 1.0  # share of the bandwidth that reading weights reaches
    kv_efficiency: float = 1.0  # share of the bandwidth that reading KV in attention reaches
    compute_efficiency: float = 1.0  # share of the peak FLOP/s that dense layers reach
    attention_efficiency: float = 1.0  # share of the peak FLOP/s that attention of prompts reaches
    tensor_parallel: int = 1  # number of devices that every layer is split among
    data_parallel: int = 1  # replicas of all this behind one queue, balanced as vLLM does
    expert_parallel: bool = False  # whole experts on each of them, instead of a slice of every expert
    link_gbs: float = 300.0  # tensor_parallel > 1: 10^9 bytes per second that a device sends to the others
    link_efficiency: float = 1.0  # share of link_gbs that an all-reduce reaches
    link_round_us: float = 5.0  # of each round of an all-reduce, beside its bytes
    host_link_gbs: float = 10.0  # 10^9 bytes/s one way between a device and its host, for swapped blocks
    host_link_latency_us: float = 0.2  # of one transfer, beside its bytes; a swapped block has 2 x layers
    # 10^9 bytes/s from the disk of cache.disk_tokens, beside the link to the device
    disk_read_gbs: float = 5.0
    disk_write_gbs: float = 2.0
    disk_latency_us: float = 100.0  # of one block or chunk
    # Of the server before the scheduler's queue (HTTP, template, tokeniser), of a request and of a token of its prompt
    frontend_request_us: float = 0.0
    frontend_token_us: float = 0.0
    # of a request or an answer alone, while the others wait: what one thread of it does
    frontend_turn_us: float = 0.0
    # Factors on published timings (cost=published), of attention and of all other operators: a fit anchors them
    tables_attention: float = 1.0
    tables_dense: float = 1.0
    fitted_from: str | None = None  # the log that shares and overheads were fitted to; null: they are assumed
    fits: str | None = None  # other values of them that the log allows, for bands: "key=value,value,…; key=…"
    # Standard deviations of logarithms that no constants explain, by parts of the log: of steps, and of TTFT beside
    step_spread: float = 0.0
    ttft_spread: float = 0.0
    seen: str | None = None  # the model and the largest steps of that log, as `harness.cost.seen` writes them


@dataclass
class CostConfig:
    """The cost model of the simulation."""

    kind: CostKind = CostKind.auto
    recalibrate: bool = False  # measure again, even if a calibration exists
    # Follow the device's pace: on a CPU measured times are divided by it, on a GPU the prediction is scaled by it
    follow_pace: bool = True
    cache_dir: str | None = None  # where calibrations are kept; null: the user's cache directory
    # roofline: replay at the bound and at the ends too; null: up to 2,000 requests
    bounds: bool | None = None
    operators: str | None = None  # operators: the CSV, with rows of the predicted device (device.name)
    kernels: str | None = None  # table: folder (or table) of bench kernels; null: calibrate's grid
    engine: TableEngine = TableEngine.vllm  # published: whose kernels
    # roofline of a GPU: price block size by a static model of our kernels, not measured
    block_sizes: bool = False


@dataclass
class ReplayConfig:
    """How a replay runs."""

    clock: Clock = Clock.auto
    repeats: int = 3  # measured runs; their spread is shown beside every error
    mode: ReplayMode = ReplayMode.trace
    users: int = 16  # mode=closed
    # Requests that the client has in flight at most; it sends more when an answer ends. null: as the trace's client
    # does; 0: no limit
    max_in_flight: int | None = None
    think_s: float = 0.0  # closed, sessions: mean exponential pause of users, where the trace has none
    burstiness: float = 2.0  # gamma: coefficient of variation of the gaps; 1 is Poisson
    duration_s: float | None = None  # stop then, in virtual time; null: when all requests have ended
    records: bool = True  # keep a row for every step and request; false: metrics alone, in constant memory
    # keep each change of the prefix cache as a file in vLLM's format, one for each run
    kv_events: bool = False
    lookups: bool = False  # keep a table of the prefix cache's lookups
    residency: float | None = None  # share of blocks whose lifetime, idle time and reuse are kept as a table
    # also compute a bound on the hits of any order of eviction (Belady), for the run's own order
    optimum: bool = False
    compiled: Compiled = Compiled.auto  # machine code where the rules allow (harness.workload.simulate)


class OracleEngine(StrEnum):
    """Whose scheduler decides beside ours, on the same requests and step results."""

    none = "none"
    vllm = "vllm"  # vLLM's own scheduler and KV cache manager, on the CPU, without a model


class AllowedDifference(StrEnum):
    """A known difference to the other scheduler that is allowed; any other one makes the point fail."""

    none = "none"
    block_ids = "block_ids"  # numbers of blocks: the order in which freed blocks without a hash are given out
    # vLLM preempts by priority a request that the step has given tokens
    scheduled_victim = "scheduled_victim"
    all = "all"


@dataclass
class OracleConfig:
    """Another system's scheduler as a third side."""

    engine: OracleEngine = OracleEngine.none
    python: str | None = None  # interpreter of the environment that has it, for engine=vllm too; null: ours
    allow: AllowedDifference = AllowedDifference.none


class Figures(StrEnum):
    """Which figures a report draws. Drawing a page of one point takes longer than to simulate a thousand requests."""

    all = "all"  # on the page, and as SVG, PDF and CSV beside it
    svg = "svg"  # the same without the PDFs
    none = "none"  # sentences and tables alone


class Paper(StrEnum):
    """Figures for a paper, beside those of the page: every panel in a file of its own, in the folder `paper`."""

    none = "none"
    column = "column"  # 3.33 inches wide
    page = "page"  # 7.0 inches wide, both columns
    both = "both"


@dataclass
class ReportConfig:
    """What the report shows beside the points of the sweep; it changes no point."""

    figures: Figures = Figures.all
    paper: Paper = Paper.none
    serif: bool = False  # letters with serifs in all figures (STIX, which goes with Times)
    latex: bool = False  # the points and the errors as tables in LaTeX (booktabs)
    kernels: str | None = None  # folder or table of `bench kernels`; null: beside the results; none: omit


class Place(StrEnum):
    """Where the points of a sweep run."""

    local = "local"  # in this process, simulation-only ones in `workers` processes
    slurm = "slurm"  # in jobs of Slurm on a shared file system (extra cluster)
    ray = "ray"  # in tasks of a Ray cluster, which needs no shared file system (extra ray)


@dataclass
class ExecuteConfig:
    """Where and how points run. It changes no result, and is no part of a point."""

    place: Place = Place.local
    # cores of a job (of a task in Ray); a job of Slurm runs as many simulation-only points at once
    cpus: int = 1
    gpus: int = 0  # GPUs of a job or task
    # 10^9 bytes of a job or task; null: the cluster's default, in Ray no limit
    memory_gb: float | None = None
    attempts: int = 3  # jobs or tasks that may die with a point before the point has failed
    jobs: int = 32  # slurm: most jobs of one submission; the points are shared among them by their cost
    # slurm: no job shorter than this, as far as earlier points tell how long they take
    job_min_s: float = 60.0
    minutes: int = 60  # slurm: time limit of a job; it is requeued shortly before, and goes on
    partition: str | None = None  # slurm: one or several, with commas; null: the cluster's default
    # slurm: further options of sbatch, as on its command line: --account=... --qos=...
    options: str | None = None
    # local: measured points are open together for so long, a run each in turn; 0: one by one
    spread_s: float = 180.0
    setup: str | None = None  # slurm: a line of shell that runs in each job before Python: module load ...
    # slurm: command that starts Python, for containers: apptainer exec F.sif python3
    python: str | None = None
    # slurm: further options of srun, for containers by a plugin: --container-image=...
    srun: str | None = None
    # slurm: private folder of job files, on all nodes; null: the user's state folder
    folder: str | None = None
    poll_s: float = 5.0  # slurm: seconds between two looks at the queue
    # ray: HOST:PORT of the cluster, auto or local; null: RAY_ADDRESS, or else local
    address: str | None = None


@dataclass
class RunConfig:
    """One point of a sweep."""

    name: str = "default"  # of the sweep, shown in the report
    out: str = "results/default"  # store folder
    measure: bool = True  # false: simulation only
    workers: int = 0  # processes for simulation-only points; 0: one per core; measured points run alone
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
    oracle: OracleConfig = field(default_factory=OracleConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    execute: ExecuteConfig = field(default_factory=ExecuteConfig)


_KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class ConfigKey:
    """A key of the schema: its dotted name, its type without None, and whether null is allowed."""

    key: str
    kind: Any
    optional: bool

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        words = "one of " + ", ".join(self.kind) if issubclass(self.kind, StrEnum) else _KINDS[self.kind]
        return words + " or null" if self.optional else words


@cache
def config_keys() -> dict[str, ConfigKey]:
    """Every key of the schema by its dotted name."""
    return {each.key: each for each in _walk(RunConfig, "")}


def _walk(section: type, prefix: str) -> Iterator[ConfigKey]:
    for name, hint in get_type_hints(section).items():
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _walk(hint, f"{prefix}{name}.")
            continue
        kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
        yield ConfigKey(prefix + name, kinds[0], NoneType in get_args(hint))
