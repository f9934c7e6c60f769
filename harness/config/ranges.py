"""The range of each number. A new key with a range gets a line in `RANGES`."""

from collections.abc import Iterator
from functools import reduce
from math import inf
from typing import Any, NamedTuple, get_type_hints

from harness.config.errors import ConfigError
from harness.config.schema import RunConfig
from harness.config.values import PerObject


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
        return f"{low} and {'less than' if self.open_high else 'at most'} {_number(self.high)}"


def _number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


_COUNT, _SHARE = Range(1, 10**9), Range(0, 1)
_SEED = Range(0, 2**63 - 1)  # tables keep whole numbers in 64 bits
_MICROSECONDS = Range(0, 1e9)  # of one event
_SECONDS = 1e9  # 32 years of virtual time, well within what the clock of a replay counts
_FIGURE = Range(1e-6, 1e9)  # of a datasheet; outside, a step would take years or no time
_LISTED = Range(1, 10**7)  # number of items that are kept in memory one by one
_SLOTS = Range(1, 10**9)  # KV slots, far beyond any device's memory

_ROWS: tuple[tuple[Range, str], ...] = (  # a range, and the keys that it is of
    (
        _COUNT,
        "scheduler.max_batched_tokens scheduler.max_running scheduler.long_prefill_tokens engine.audit_every",
    ),
    (
        Range(1, 10**4),
        "decoding.beam_width decoding.n replay.repeats device.tensor_parallel device.data_parallel",
    ),
    (
        Range(1, 10**6),
        "model.layers model.hidden model.heads model.kv_heads model.head_dim model.intermediate",
    ),
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
    (Range(1, 10**9), "cache.state_every"),
    (Range(0, 10**4), "decoding.draft_tokens"),
    (Range(0, 100), "workload.prefix_zipf"),  # beyond, every prompt has the first prefix
    (Range(0, _SECONDS), "replay.think_s"),
    (Range(0, 10**7), "replay.max_in_flight"),
    (Range(0, 1, open_low=True), "replay.residency"),
    (Range(0, _SECONDS, open_low=True), "replay.duration_s"),
    (Range(0, 1e6, open_low=True), "decoding.temperature"),
    (_MICROSECONDS, "device.step_overhead_us device.layer_overhead_us device.attention_overhead_us"),
    (_MICROSECONDS, "device.row_overhead_us device.link_latency_us device.host_link_latency_us"),
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
    (
        Range(0, 1, open_low=True),
        "device.memory_utilization device.bandwidth_efficiency device.kv_efficiency",
    ),
    (
        Range(0, 1, open_low=True),
        "device.link_efficiency device.compute_efficiency device.attention_efficiency",
    ),
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
