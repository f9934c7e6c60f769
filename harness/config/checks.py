"""Which settings are valid: the range of each number (`RANGES`), and rules between keys.

`check_config` is called for every point before any point runs. Files and folders are checked in `harness.config.paths`.
"""

import re
from collections.abc import Callable, Iterator
from functools import reduce
from math import inf
from os.path import exists, expanduser
from typing import Any, NamedTuple, get_type_hints

from engine.core.options import (
    CachePolicy,
    Eviction,
    GroupPages,
    Preemption,
    Sharing,
    SpeculationMode,
    StateMode,
    TierStore,
)
from engine.runtime.models.spec import STATE_FAMILIES
from engine.runtime.options import Backend, KVDtype
from harness.config.capabilities import check_combinations
from harness.config.errors import ConfigError, UserError
from harness.config.execution import check_execution
from harness.config.memory import check_memory
from harness.config.paths import check_paths, check_trace_file
from harness.config.schema import (
    CostKind,
    DecodingMode,
    ModelConfig,
    RunConfig,
    SharingModel,
    TraceArrivals,
    TraceFormat,
    WeightDtype,
)
from harness.config.values import PerObject

OWN_POLICIES = ("cache.eviction", "scheduler.order", "scheduler.victim", "scheduler.admission")
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
FOLDER_FORMATS = (TraceFormat.auto, TraceFormat.agentic, TraceFormat.ragpulse, TraceFormat.servegen)
_WITHOUT_ARRIVALS = (TraceFormat.lengths, TraceFormat.lengths_chat, TraceFormat.sharegpt)
_ARRIVALS_ALLOWED = (TraceFormat.generated, TraceFormat.auto, TraceFormat.agentic, *_WITHOUT_ARRIVALS)
_LEAST_TEMPERATURE = 1e-5  # below, logits / temperature overflows


def check_config(config: RunConfig) -> list[ConfigError]:
    """All errors of a composed configuration; empty if it is valid."""
    return [*check_settings(config), *check_paths(config)]


def checked(config: RunConfig) -> RunConfig:
    """The configuration, if it is valid. Raises UserError with all its errors."""
    if errors := check_config(config):
        raise UserError("\n".join(map(str, errors)))
    return config


def check_settings(config: RunConfig) -> list[ConfigError]:
    """The errors of one point, without those of the folders that a sweep shares."""
    rules: tuple[Callable[[RunConfig], Iterator[ConfigError]], ...] = (
        check_ranges, _names, check_trace, check_policy, _pool, check_combinations, check_eviction,
        check_decoding, _model, check_memory, check_execution,
    )  # fmt: skip
    return [error for rule in rules for error in rule(config)]


def check_eviction(config: RunConfig) -> Iterator[ConfigError]:
    """Rules of eviction that exclude one another."""
    cache = config.cache
    if cache.tier_tokens and config.replay.optimum:
        reason = "found true, but not with cache.tier_tokens: it bounds the hits of one pool"
        yield ConfigError("replay.optimum", reason)
    if cache.tier_chunk is not None and cache.tier_chunk % cache.block_size:
        reason = f"found {cache.tier_chunk}, must be a multiple of cache.block_size={cache.block_size}"
        yield ConfigError("cache.tier_chunk", reason)
    if cache.tier_chunk not in (None, cache.block_size) and cache.tier_store is TierStore.evicted:
        reason = f"found {cache.tier_chunk} beside tier_store=evicted: the pool evicts single blocks"
        yield ConfigError("cache.tier_chunk", reason)
    if cache.tier_tokens and cache.tier_overlap and (config.measure or config.device.name == "cpu"):
        reason = "found true, but our engine copies before it computes, and a CPU's cores do both: omit it"
        yield ConfigError("cache.tier_overlap", reason)
    for key, tokens in (("cache.tier_tokens", cache.tier_tokens), ("cache.disk_tokens", cache.disk_tokens)):
        if 0 < tokens < (cache.tier_chunk or cache.block_size):
            yield ConfigError(key, f"found {tokens}, must hold a block (or cache.tier_chunk)")
    if config.replay.optimum and config.scheduler.order is not None:
        reason = "found true, but not with scheduler.order: ties of its order are not known"
        yield ConfigError("replay.optimum", reason)


def check_decoding(config: RunConfig) -> Iterator[ConfigError]:
    """Errors in the combination of decoding options, with one another and with the scheduler's limits."""
    yield from _width(config)
    yield from _sharing(config)
    yield from _beams(config)
    yield from _drafts(config)


def _width(config: RunConfig) -> Iterator[ConfigError]:
    decoding, limits = config.decoding, config.scheduler
    beams = decoding.beam_width > 1
    key, width = ("decoding.beam_width", decoding.beam_width) if beams else ("decoding.n", decoding.n)
    for name in ("max_running", "max_batched_tokens"):
        limit = getattr(limits, name)
        if width > limit and decoding.sharing is not Sharing.prefix_cache:
            reason = f"found {width}, more than scheduler.{name}={limit}: a group runs in one step"
            yield ConfigError(key, reason)
    if beams and config.model.path is None and width > config.model.vocab:
        reason = f"found {width}, more than the tokens there are (model.vocab={config.model.vocab})"
        yield ConfigError(key, reason)
    if not beams and decoding.mode is DecodingMode.greedy and decoding.n > 1:
        reason = f"found {decoding.n}, but greedy decoding has one sequence; use decoding.mode=sample"
        yield ConfigError("decoding.n", reason)
    if 0 < decoding.temperature < _LEAST_TEMPERATURE:
        reason = f"found {decoding.temperature}, must be {_LEAST_TEMPERATURE:g} or greater"
        yield ConfigError("decoding.temperature", f"{reason}; decoding=greedy takes the most likely token")


NO_INDIRECTION = "found tail_at_fork with beams, but the engine has no indirection table: set measure=false"


def _sharing(config: RunConfig) -> Iterator[ConfigError]:
    decoding, cache = config.decoding, config.cache
    sharing = decoding.sharing
    if sharing is Sharing.copy_on_write:
        return
    head = f"found {sharing}"
    if cache.policy is not CachePolicy.paged or cache.copy_at_fork:
        reason = f"{head}, which needs cache.policy=paged and cache.copy_at_fork=false"
        yield ConfigError("decoding.sharing", reason)
    if sharing is Sharing.tail_at_fork and config.measure and decoding.beam_width > 1:
        yield ConfigError("decoding.sharing", NO_INDIRECTION)
    if sharing is Sharing.prefix_cache:
        if not cache.prefix_caching:
            yield ConfigError("decoding.sharing", f"{head}, which needs cache.prefix_caching=true")
        if decoding.branch_hazard:
            yield ConfigError("decoding.sharing", f"{head}, which does not go with decoding.branch_hazard")


def _beams(config: RunConfig) -> Iterator[ConfigError]:
    decoding = config.decoding
    if decoding.beam_parents is None:
        return
    if decoding.beam_churn is not None:
        yield ConfigError(
            "decoding.beam_churn",
            f"found {decoding.beam_churn}, but decoding.beam_parents replays recorded beams; set one of them to null",
        )
    if not exists(expanduser(decoding.beam_parents)):
        yield ConfigError(
            "decoding.beam_parents",
            f"no such file or folder: '{decoding.beam_parents}'; name a point's folder, a store, or a parents.parquet",
        )


def _drafts(config: RunConfig) -> Iterator[ConfigError]:
    decoding, budget = config.decoding, config.scheduler.max_batched_tokens
    drafts = decoding.draft_tokens
    if drafts < 1:
        return
    width = max(decoding.beam_width, decoding.n)
    if width > 1:
        yield ConfigError(
            "decoding.draft_tokens",
            f"found {drafts}, but a request has {width} sequences, and speculation is for one; set draft_tokens=0, or "
            "beam_width and n to 1",
        )
    place, chunk = decoding.draft_place, config.scheduler.long_prefill_tokens
    if place is not SpeculationMode.lookahead and config.cache.policy is not CachePolicy.paged:
        yield ConfigError(
            "decoding.draft_place",
            f"found {place}, but cache.policy={config.cache.policy} reserves slots for what a request computes, and "
            "shares no blocks with a child; use lookahead",
        )
    budget -= place is SpeculationMode.whole  # of which the draft model needs one
    if drafts >= budget:
        yield ConfigError(
            "decoding.draft_tokens",
            f"found {drafts}, must be less than {budget}, what scheduler.max_batched_tokens leaves: they are verified "
            "in one step",
        )
    if place is SpeculationMode.whole and chunk is not None and drafts >= chunk:
        yield ConfigError(
            "decoding.draft_tokens",
            f"found {drafts}, must be less than scheduler.long_prefill_tokens={chunk}, which cuts decode steps too "
            "(vLLM); use decoding.draft_place=lookahead",
        )


def check_policy(config: RunConfig) -> Iterator[ConfigError]:
    """Errors in the combination of cache and scheduler options."""
    cache, scheduler = config.cache, config.scheduler
    for key in OWN_POLICIES:
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        rules = tuple(Eviction) if key == "cache.eviction" else ("null",)
        if value is not None and value not in rules and not _CLASS.fullmatch(value):
            allowed = f"module:Class of an importable class, or {', '.join(rules)}"
            yield ConfigError(key, f"found '{value}', must be {allowed}")
    if scheduler.preemption is not Preemption.recompute and cache.policy is CachePolicy.paged:
        if not cache.host_tokens:
            yield ConfigError(
                "scheduler.preemption",
                f"found {scheduler.preemption}, which saves blocks in host memory, but cache.host_tokens is 0; "
                "set it, or preemption=recompute",
            )
        elif cache.host_tokens < cache.block_size:
            reason = f"found {cache.host_tokens}, less than one block (cache.block_size={cache.block_size})"
            yield ConfigError("cache.host_tokens", reason)
    if scheduler.long_prefill_adaptive and scheduler.long_prefill_tokens is None:
        reason = "found true, but scheduler.long_prefill_tokens is null, and there is no cap to raise; set it"
        yield ConfigError("scheduler.long_prefill_adaptive", reason)
    if scheduler.long_prefill_tokens is not None and not scheduler.chunked_prefill:
        reason = f"found {scheduler.long_prefill_tokens}, but scheduler.chunked_prefill=false cuts no prompt; set null"
        yield ConfigError("scheduler.long_prefill_tokens", reason)


def check_trace(config: RunConfig) -> Iterator[ConfigError]:
    """Errors in the trace settings that are found without reading the trace."""
    trace = config.trace
    generated = trace.format is TraceFormat.generated
    if generated and trace.path is not None:
        reason = f"found '{trace.path}', but trace.format=generated reads no file; add trace=file"
        yield ConfigError("trace.path", reason)
    elif not generated and not trace.path:
        reason = f"missing: trace.format={trace.format} reads a file; add trace.path=FILE"
        yield ConfigError("trace.path", reason)
    elif not generated and trace.path:
        yield from check_trace_file(trace.path, trace.format in FOLDER_FORMATS)
    yield from _arrivals(config)
    if trace.sharing is not SharingModel.none and not generated:
        reason = f"found {trace.sharing}, but a file has its own sharing; workload.prefix_share replaces it"
        yield ConfigError("trace.sharing", reason)
    if trace.format is TraceFormat.sharegpt and not trace.tokenizer:
        reason = "missing: trace.format=sharegpt holds text; add trace.tokenizer=FOLDER"
        yield ConfigError("trace.tokenizer", reason)


def _arrivals(config: RunConfig) -> Iterator[ConfigError]:
    trace = config.trace
    recorded = trace.arrivals is TraceArrivals.recorded
    if recorded and trace.format in _WITHOUT_ARRIVALS:
        yield ConfigError(
            "trace.arrivals",
            f"found recorded, but trace.format={trace.format} has no timestamps; "
            "use trace.arrivals=poisson trace.arrival_rate=1",
        )
    if not recorded and trace.format not in _ARRIVALS_ALLOWED:
        yield ConfigError(
            "trace.arrivals",
            f"found {trace.arrivals}, but trace.format={trace.format} records arrivals; "
            "change their rate with workload.request_rate",
        )
    if not recorded and trace.arrival_rate is None:
        reason = f"missing: trace.arrivals={trace.arrivals} needs requests per second"
        yield ConfigError("trace.arrival_rate", reason)
    if recorded and trace.arrival_rate is not None:
        yield ConfigError(
            "trace.arrival_rate",
            f"found {trace.arrival_rate}, but trace.arrivals=recorded has its own rate; choose trace.arrivals=poisson, "
            "or scale time with workload.request_rate",
        )


def _names(config: RunConfig) -> Iterator[ConfigError]:
    if not re.fullmatch(r"\w[\w.+-]*", config.name):
        yield ConfigError("name", f"found '{config.name}', must be letters, digits and . _ + -")


def _pool(config: RunConfig) -> Iterator[ConfigError]:
    cache = config.cache
    pool, longest = cache.pool_tokens, cache.max_model_len
    if pool is not None and cache.pool_blocks is not None:
        reason = f"found {cache.pool_blocks}, but cache.pool_tokens={pool} sets the pool too; set one of them to null"
        yield ConfigError("cache.pool_blocks", reason)
    if cache.pool_blocks is not None and cache.policy is not CachePolicy.paged:
        reason = (
            f"found {cache.pool_blocks}, but cache.policy={cache.policy} has no blocks; use cache.pool_tokens"
        )
        yield ConfigError("cache.pool_blocks", reason)
    if pool is not None and cache.policy is CachePolicy.paged and pool < cache.block_size:
        reason = f"found {pool}, less than one block (cache.block_size={cache.block_size}); enlarge the pool"
        yield ConfigError("cache.pool_tokens", reason)
    if cache.policy is CachePolicy.contiguous_max and pool and longest and pool < longest:
        yield ConfigError(
            "cache.pool_tokens",
            f"found {pool}, but contiguous_max reserves cache.max_model_len={longest} slots for every sequence; "
            "enlarge the pool or lower cache.max_model_len",
        )


def _model(config: RunConfig) -> Iterator[ConfigError]:
    model, longest = config.model, config.cache.max_model_len
    if config.engine.backend is Backend.native and KVDtype.fp8_e4m3 is model.kv_dtype:
        yield ConfigError(
            "engine.backend",
            f"found native, whose attention reads no 8-bit cache (model.kv_dtype={model.kv_dtype}); use auto: torch "
            "widens it, and what else is compiled stays so",
        )
    yield from _predicted_only(config)
    yield from _states(config)
    if model.path is not None:
        return  # the checkpoint's own config decides; harness.point checks it
    if model.heads > 0 and model.kv_heads > 0 and model.heads % model.kv_heads:
        reason = f"found {model.kv_heads}, must divide model.heads={model.heads} evenly"
        yield ConfigError("model.kv_heads", reason)
    if longest is not None and longest > model.max_position:
        reason = f"found {longest}, more than model.max_position={model.max_position}; lower it or set null"
        yield ConfigError("cache.max_model_len", reason)
    yield from _experts(model)
    if model.latent_rank and not (model.rope_dim and model.value_dim):
        reason = f"found {model.latent_rank}, but model.rope_dim or model.value_dim is 0; set both"
        yield ConfigError("model.latent_rank", reason)
    if model.windowed_layers > model.layers or bool(model.windowed_layers) != bool(model.window):
        yield ConfigError(
            "model.windowed_layers",
            f"found {model.windowed_layers} with model.window={model.window}; must be 1 to model.layers={model.layers} "
            "with a window, and 0 without",
        )
    if model.chunked_windows and not model.window:
        reason = "found true, but model.window is null; set the tokens of a chunk"
        yield ConfigError("model.chunked_windows", reason)


def _states(config: RunConfig) -> Iterator[ConfigError]:
    """Layers with a recurrent state beside those of attention."""
    model, cache = config.model, config.cache
    if bool(model.state_layers) != bool(model.state_bytes):
        reason = f"found {model.state_bytes} with model.state_layers={model.state_layers}; set both or none"
        yield ConfigError("model.state_bytes", reason)
    if not model.state_layers:
        return
    # a checkpoint has its own layers
    most = model.layers - model.windowed_layers if model.path is None else None
    if most is not None and (model.state_layers > most or model.state_layers == model.layers):
        yield ConfigError(
            "model.state_layers",
            f"found {model.state_layers} beside {model.windowed_layers} layers with a window; all of them must fit in "
            f"model.layers={model.layers}, and at least one layer must keep tokens",
        )
    if cache.groups is GroupPages.off or cache.policy is not CachePolicy.paged:
        yield ConfigError(
            "cache.groups",
            f"found {cache.groups} and cache.policy={cache.policy}, but {model.name} has layers with a state, which "
            "only a paged cache with groups holds; use cache.policy=paged and cache.groups=uniform (as vLLM)",
        )
    if cache.states is StateMode.none and cache.prefix_caching:
        yield ConfigError(
            "cache.states",
            "none keeps no state that a later prompt could find; use align, or cache.prefix_caching=false",
        )
    if cache.state_every is not None and cache.state_every % cache.block_size:
        reason = f"found {cache.state_every}, must be a multiple of cache.block_size={cache.block_size}"
        yield ConfigError("cache.state_every", reason)
    if most is not None and config.device.tensor_parallel > model.kv_heads:
        yield ConfigError(
            "device.tensor_parallel",
            f"found {config.device.tensor_parallel}, more than model.kv_heads={model.kv_heads}: beyond that K and V "
            "are repeated on each device and states are not, and pages of two such ratios are not modelled",
        )
    if config.cost.kind not in (CostKind.auto, CostKind.roofline):
        reason = f"found {config.cost.kind}, which has no price of layers with a state; use cost=roofline"
        yield ConfigError("cost.kind", reason)


def _experts(model: ModelConfig) -> Iterator[ConfigError]:
    if not model.experts:
        return
    if model.experts_per_token > model.experts:
        reason = f"found {model.experts_per_token}, more than model.experts={model.experts}"
        yield ConfigError("model.experts_per_token", reason)
    if not model.expert_intermediate:
        yield ConfigError("model.expert_intermediate", "found 0, but there are experts; set the width of one")
    if model.dense_layers > model.layers:
        reason = f"found {model.dense_layers}, more than model.layers={model.layers}"
        yield ConfigError("model.dense_layers", reason)


def _predicted_only(config: RunConfig) -> Iterator[ConfigError]:
    """What a prediction knows and the measured engine does not run."""
    model = config.model
    if not config.measure:
        return
    if model.weight_dtype is not WeightDtype.model:
        reason = "but the measured engine does not quantise weights; a sweep with measure=false predicts them"
        yield ConfigError("model.weight_dtype", f"found {model.weight_dtype}, {reason}")
    stateful = model.family in STATE_FAMILIES
    for name in ("experts", "latent_rank", "chunked_windows", *(() if stateful else ("state_layers",))):
        if model.path is None and getattr(model, name):
            yield ConfigError(
                f"model.{name}",
                f"found {getattr(model, name)}, but the measured engine cannot build such a model from a shape: "
                "name a checkpoint (model.path), or predict it by a sweep with measure=false",
            )


class Range(NamedTuple):
    """Allowed numbers: `low` to `high`; `open_low` and `open_high` exclude the end itself."""

    low: float
    high: float = inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value is allowed; NaN and infinity are not."""
        above = self.low < value if self.open_low else self.low <= value
        below = value < self.high if self.open_high or self.high == inf else value <= self.high
        return above and below

    def __str__(self) -> str:
        low = f"greater than {self.low:g}" if self.open_low else f"{self.low:g} or greater"
        if self.high == inf:
            return low
        high = f"{self.high:,}" if isinstance(self.high, int) or self.high < 1000 else f"{self.high:,.0f}"
        return f"{low} and {'less than' if self.open_high else 'at most'} {high}"


_COUNT, _SHARE = Range(1, 10**9), Range(0, 1)
_SEED = Range(0, 2**63 - 1)  # tables keep whole numbers in 64 bits
_MICROSECONDS = Range(0, 1e9)  # of one event
_SECONDS = 1e9  # 32 years of virtual time, well within what the clock of a replay counts
_FIGURE = Range(1e-6, 1e9)  # of a datasheet; outside, a step would take years or no time
_LISTED = Range(1, 10**7)  # number of items that are kept in memory one by one
_SLOTS = Range(1, 10**9)  # KV slots, far beyond any device's memory

_ROWS: tuple[tuple[Range, str], ...] = (  # a range, and the keys that it is of
    (_COUNT, "scheduler.max_batched_tokens scheduler.max_running scheduler.long_prefill_tokens"),
    (_COUNT, "engine.audit_every"),
    (Range(1, 10**4), "decoding.beam_width decoding.n replay.repeats"),
    (Range(1, 10**4), "device.tensor_parallel device.data_parallel"),
    (Range(1, 10**6), "model.layers model.hidden model.heads model.kv_heads model.head_dim"),
    (Range(1, 10**6), "model.intermediate"),
    (_LISTED, "replay.users workload.num_requests workload.num_prefixes"),
    (Range(1, 10**6), "cache.block_size"),  # tables of one entry for each slot of a block
    (_SLOTS, "cache.pool_tokens cache.pool_blocks"),
    (Range(2, 10**9), "cache.max_model_len model.max_position"),
    (Range(8, 10**9), "model.vocab"),  # calibration searches with a few beams, which need as many tokens
    (Range(1, 256), "engine.threads"),
    (Range(0, 1024), "workers"),
    (Range(1, 1024), "execute.cpus"),
    (Range(0, 64), "execute.gpus"),
    (Range(0.1, 1e5), "execute.memory_gb"),
    (Range(1, 100), "execute.attempts"),
    (Range(1, 1000), "execute.jobs"),  # clusters limit the tasks of an array, Slurm's default is 1,000
    (Range(0, 1e6), "execute.job_min_s execute.spread_s"),
    (Range(3, 525_600), "execute.minutes"),  # Slurm may warn a job up to a minute early
    (Range(0.1, 3600), "execute.poll_s"),
    (Range(1e-6, 1e9), "workload.request_rate"),  # arrivals are whole microseconds in 64 bits
    (Range(1e-6, 1e6), "workload.length_scale"),
    (Range(1e-6, 1e9), "trace.arrival_rate"),
    (Range(0.01, 1000), "trace.arrival_shape"),
    (_SEED, "workload.seed model.seed"),
    (Range(0, 10**9), "cache.host_tokens cache.tier_tokens cache.disk_tokens"),
    (Range(1, 10**9), "cache.tier_chunk"),
    (Range(0, _SECONDS), "cache.ttl_s"),
    (Range(0, 10**9), "cache.pinned_tokens cache.retention_interval"),
    (Range(1, 10**9), "cache.state_every cache.prefix_match_unit"),
    (Range(0, 10**4), "decoding.draft_tokens"),
    (Range(0, 100), "workload.prefix_zipf"),  # beyond, every prompt has the first prefix
    (Range(0, _SECONDS), "replay.think_s"),
    (Range(0, 10**7), "replay.max_in_flight"),
    (Range(0, 1, open_low=True), "replay.residency"),
    (Range(0, _SECONDS, open_low=True), "replay.duration_s"),
    (Range(0, 1e6, open_low=True), "decoding.temperature"),
    (_MICROSECONDS, "device.step_overhead_us device.layer_overhead_us device.attention_overhead_us"),
    (_MICROSECONDS, "device.row_overhead_us device.link_round_us device.host_link_latency_us"),
    (_MICROSECONDS, "device.disk_latency_us"),
    (_FIGURE, "device.disk_read_gbs device.disk_write_gbs"),
    (_MICROSECONDS, "device.frontend_request_us device.frontend_token_us device.frontend_turn_us"),
    (_FIGURE, "device.memory_gb device.bandwidth_gbs device.tflops device.link_gbs device.host_link_gbs"),
    (Range(0, 1e9), "device.activation_gb device.other_memory_gb device.graph_memory_gb device.l2_mib"),
    (Range(0, 10**6), "device.multiprocessors"),
    (Range(0, 1e3), "device.clock_ghz"),
    (Range(0, 10**9), "model.experts model.expert_intermediate model.shared_intermediate model.dense_layers"),
    (Range(0, 10**9), "model.windowed_layers model.latent_rank model.rope_dim model.value_dim"),
    (Range(0, 10**9), "model.state_layers model.state_bytes model.query_rank"),
    (_COUNT, "model.experts_per_token model.weight_group model.window"),
    (Range(0, 10), "model.expert_skew"),
    (Range(0, 10), "device.step_spread device.ttft_spread"),
    (Range(0.1, 10), "device.tables_attention device.tables_dense"),
    (_SHARE, "workload.prefix_share trace.share decoding.beam_churn decoding.acceptance"),
    (Range(0, 1, open_high=True), "decoding.branch_hazard scheduler.watermark"),
    (Range(0.01, 100), "replay.burstiness"),
    (Range(0, 1, open_low=True), "device.memory_utilization device.bandwidth_efficiency"),
    (Range(0, 1, open_low=True), "device.kv_efficiency device.link_efficiency"),
    (Range(0, 1, open_low=True), "device.compute_efficiency device.attention_efficiency"),
)
RANGES = {key: allowed for allowed, keys in _ROWS for key in keys.split()}


def value_of(config: RunConfig, key: str) -> Any:
    """The value at a dotted key."""
    return reduce(getattr, key.split("."), config)


def check_ranges(config: RunConfig) -> Iterator[ConfigError]:
    """An error for each number outside its range."""
    sections = (value for name, value in vars(config).items() if name in _BY_SECTION)
    if all(map(_holds, sections)) and RANGES["workers"].holds(config.workers):
        return
    for key, allowed in RANGES.items():
        value = value_of(config, key)
        if value is not None and not allowed.holds(value):
            yield ConfigError(key, f"found {value}, must be {allowed}")


_BY_SECTION: dict[str, list[tuple[str, Range]]] = {}
for _key, _allowed in RANGES.items():
    _section, _, _name = _key.rpartition(".")
    if _section:
        _BY_SECTION.setdefault(_section, []).append((_name, _allowed))
_KINDS = {kind: name for name, kind in get_type_hints(RunConfig).items()}


def _all_hold(section: Any) -> bool:
    values = vars(section)
    return all(
        values[name] is None or allowed.holds(values[name])
        for name, allowed in _BY_SECTION[_KINDS[type(section)]]
    )


_holds = PerObject(_all_hold, 1 << 12)  # the points of a sweep share most of their sections
