"""Which values make sense: one range per key, and the rules that tie keys together.

Types were checked when the configuration was composed. Everything here is cheap and imports nothing heavy, because
all points of a sweep are checked before any runs. Whether requests fit the pool is for `harness.point.check_point`.
"""

import re
from collections.abc import Callable, Iterator
from functools import reduce
from math import inf
from typing import Any, NamedTuple

from harness.config.decoding_checks import check_decoding
from harness.config.errors import ConfigError
from harness.config.paths import check_cache_dir, check_kernels, check_out
from harness.config.policy_checks import check_policy
from harness.config.schema import Backend, CachePolicy, KvDtype, RunConfig
from harness.config.trace_checks import check_trace


class Range(NamedTuple):
    """Allowed numbers: `low` to `high`, an end left out where `open_low` or `open_high`."""

    low: float
    high: float = inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value is allowed; NaN and infinity never are."""
        above = self.low < value if self.open_low else self.low <= value
        below = value < self.high if self.open_high or self.high == inf else value <= self.high
        return above and below

    def __str__(self) -> str:
        low = f"greater than {self.low:g}" if self.open_low else f"{self.low:g} or greater"
        if self.high == inf:
            return low
        return f"{low} and {'less than' if self.open_high else 'at most'} {_number(self.high)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


_COUNT, _NOT_NEGATIVE, _POSITIVE, _SHARE = Range(1, 10**9), Range(0), Range(0, open_low=True), Range(0, 1)
_FIGURE = Range(1e-6, 1e9)  # of a datasheet: beyond, a step takes years or no time
_LISTED = Range(1, 10**7)  # as many things as are kept in memory one by one
_SLOTS = Range(1, 10**9)  # KV slots, far beyond any device's memory

RANGES: dict[str, Range] = {
    **dict.fromkeys(
        (
            "scheduler.max_batched_tokens",
            "scheduler.max_running",
            "scheduler.long_prefill_tokens",
            "decoding.beam_width",
            "decoding.n",
            "model.layers",
            "model.hidden",
            "model.heads",
            "model.kv_heads",
            "model.head_dim",
            "model.intermediate",
            "engine.audit_every",
            "replay.repeats",
            "replay.users",
            "device.tensor_parallel",
        ),
        _COUNT,
    ),
    **dict.fromkeys(("workload.num_requests", "workload.num_prefixes"), _LISTED),
    **dict.fromkeys(("cache.block_size", "cache.pool_tokens"), _SLOTS),
    **dict.fromkeys(("cache.max_model_len", "model.max_position"), Range(2, 10**9)),
    "model.vocab": Range(
        8, 10**9
    ),  # calibration searches with a few beams, which need as many tokens to choose from
    "engine.threads": Range(1, 256),
    "workers": Range(0, 1024),
    "workload.request_rate": Range(1e-6, 1e9),  # arrivals are whole microseconds in 64 bits
    "workload.length_scale": Range(1e-6, 1e6),
    "trace.arrival_rate": Range(1e-6, 1e9),
    "trace.arrival_shape": Range(0.01, 1000),
    **dict.fromkeys(
        (
            "cache.host_tokens",
            "workload.prefix_zipf",
            "workload.seed",
            "model.seed",
            "device.step_overhead_us",
            "device.layer_overhead_us",
            "device.link_latency_us",
            "device.host_link_latency_us",
            "replay.think_s",
            "decoding.draft_tokens",
        ),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(
        (
            "device.memory_gb",
            "device.bandwidth_gbs",
            "device.tflops",
            "device.link_gbs",
            "device.host_link_gbs",
        ),
        _FIGURE,
    ),
    **dict.fromkeys(("decoding.temperature", "replay.duration_s"), _POSITIVE),
    **dict.fromkeys(
        ("workload.prefix_share", "trace.share", "decoding.beam_churn", "decoding.acceptance"), _SHARE
    ),
    "decoding.branch_hazard": Range(0, 1, open_high=True),
    "scheduler.watermark": Range(0, 1, open_high=True),
    "replay.burstiness": Range(0.01, 100),
    **dict.fromkeys(
        ("device.memory_utilization", "device.bandwidth_efficiency", "device.compute_efficiency"),
        Range(0, 1, open_low=True),
    ),
}


def check_config(config: RunConfig) -> list[ConfigError]:
    """Everything that is wrong with a composed configuration; empty if it can be planned."""
    rules: tuple[Callable[[RunConfig], Iterator[ConfigError]], ...] = (
        _ranges,
        _names,
        check_trace,
        check_policy,
        _pool,
        check_decoding,
        _model,
    )
    found = [error for rule in rules for error in rule(config)]
    paths = (
        check_out(config.out),
        check_cache_dir(config.cost.cache_dir),
        check_kernels("cost.kernels", config.cost.kernels),
        check_kernels("report.kernels", config.report.kernels),
    )
    return [*found, *(error for errors in paths for error in errors)]


def value_of(config: RunConfig, key: str) -> Any:
    """The value at a dotted key."""
    return reduce(getattr, key.split("."), config)


def _ranges(config: RunConfig) -> Iterator[ConfigError]:
    for key, allowed in RANGES.items():
        value = value_of(config, key)
        if value is not None and not allowed.holds(value):
            yield ConfigError(key, f"found {value}, must be {allowed}")


def _names(config: RunConfig) -> Iterator[ConfigError]:
    if not re.fullmatch(r"\w[\w.+-]*", config.name):
        yield ConfigError("name", f"found '{config.name}', must be letters, digits and . _ + -")


def _pool(config: RunConfig) -> Iterator[ConfigError]:
    cache = config.cache
    pool, longest = cache.pool_tokens, cache.max_model_len
    if pool is not None and cache.policy is CachePolicy.paged and pool < cache.block_size:
        yield ConfigError(
            "cache.pool_tokens",
            f"found {pool}, less than one block (cache.block_size={cache.block_size}); enlarge the pool",
        )
    if cache.policy is CachePolicy.contiguous_max and pool and longest and pool < longest:
        yield ConfigError(
            "cache.pool_tokens",
            f"found {pool}, but contiguous_max reserves cache.max_model_len={longest} slots for every sequence; "
            "enlarge the pool or lower cache.max_model_len",
        )


def _model(config: RunConfig) -> Iterator[ConfigError]:
    model, longest = config.model, config.cache.max_model_len
    if config.engine.backend is Backend.native and KvDtype.fp8_e4m3 is model.kv_dtype:
        yield ConfigError(
            "engine.backend",
            f"found native, whose attention reads no 8-bit cache (model.kv_dtype={model.kv_dtype}); use auto: torch "
            "widens it, and what else is compiled stays so",
        )
    if model.path is not None:
        return  # the checkpoint's own config decides; harness.point checks it
    if model.heads > 0 and model.kv_heads > 0 and model.heads % model.kv_heads:
        yield ConfigError(
            "model.kv_heads", f"found {model.kv_heads}, must divide model.heads={model.heads} evenly"
        )
    if longest is not None and longest > model.max_position:
        yield ConfigError(
            "cache.max_model_len",
            f"found {longest}, more than model.max_position={model.max_position}; lower it or set null",
        )
