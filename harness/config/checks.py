"""Which values are valid: a range for each key, rules between keys, and files that must be readable.

`check_config` is called for every point before any point runs. A new key with a range gets a line in `RANGES`.
"""

import os
import re
from collections.abc import Callable, Iterator
from functools import reduce
from math import inf
from os.path import exists, expanduser
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.options import CachePolicy, Preemption, SpeculationMode
from engine.runtime.options import Backend, KVDtype
from harness.config.errors import ConfigError
from harness.config.memory import check_memory
from harness.config.schema import (
    DecodingMode,
    ModelConfig,
    RunConfig,
    SharingModel,
    TraceArrivals,
    TraceFormat,
    WeightDtype,
)

NO_KERNELS = "none"
"""`report.kernels=none`: no kernel section, even where timings lie beside the results."""

OWN_POLICIES = ("cache.eviction", "scheduler.order", "scheduler.victim", "scheduler.admission")
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
FOLDER_FORMATS = (TraceFormat.auto, TraceFormat.agentic, TraceFormat.ragpulse, TraceFormat.servegen)
_WITHOUT_ARRIVALS = (TraceFormat.lengths, TraceFormat.lengths_chat, TraceFormat.sharegpt)
_ARRIVALS_ALLOWED = (TraceFormat.generated, TraceFormat.auto, TraceFormat.agentic, *_WITHOUT_ARRIVALS)


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
_LEAST_TEMPERATURE = 1e-5  # below, logits / temperature overflows
_FIGURE = Range(1e-6, 1e9)  # of a datasheet; outside, a step would take years or no time
_LISTED = Range(1, 10**7)  # number of items that are kept in memory one by one
_SLOTS = Range(1, 10**9)  # KV slots, far beyond any device's memory

RANGES: dict[str, Range] = {
    **dict.fromkeys(
        (
            "scheduler.max_batched_tokens",
            "scheduler.max_running",
            "scheduler.long_prefill_tokens",
            "engine.audit_every",
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            "decoding.beam_width",
            "decoding.n",
            "replay.repeats",
            "device.tensor_parallel",
            "device.data_parallel",
        ),
        Range(1, 10**4),
    ),
    **dict.fromkeys(
        (
            "model.layers",
            "model.hidden",
            "model.heads",
            "model.kv_heads",
            "model.head_dim",
            "model.intermediate",
        ),
        Range(1, 10**6),
    ),
    "replay.users": _LISTED,
    **dict.fromkeys(("workload.num_requests", "workload.num_prefixes"), _LISTED),
    "cache.block_size": Range(1, 10**6),  # tables of one entry for each slot of a block
    **dict.fromkeys(("cache.pool_tokens", "cache.pool_blocks"), _SLOTS),
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
    **dict.fromkeys(("workload.seed", "model.seed"), _SEED),
    "cache.host_tokens": Range(0, 10**9),
    "decoding.draft_tokens": Range(0, 10**4),
    "workload.prefix_zipf": Range(0, 100),  # beyond, every prompt has the first prefix
    "replay.think_s": Range(0, _SECONDS),
    "replay.duration_s": Range(0, _SECONDS, open_low=True),
    "decoding.temperature": Range(0, 1e6, open_low=True),
    **dict.fromkeys(
        (
            "device.step_overhead_us",
            "device.layer_overhead_us",
            "device.attention_overhead_us",
            "device.row_overhead_us",
            "device.link_latency_us",
            "device.host_link_latency_us",
        ),
        _MICROSECONDS,
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
    **dict.fromkeys(
        ("device.activation_gb", "device.other_memory_gb", "device.graph_memory_gb"), Range(0, 1e9)
    ),
    **dict.fromkeys(
        (
            *(
                "model.experts",
                "model.expert_intermediate",
                "model.shared_intermediate",
                "model.dense_layers",
            ),
            *("model.windowed_layers", "model.latent_rank", "model.rope_dim", "model.value_dim"),
            "model.query_rank",
        ),
        Range(0, 10**9),
    ),
    **dict.fromkeys(("model.experts_per_token", "model.weight_group", "model.window"), _COUNT),
    "model.expert_skew": Range(0, 10),
    **dict.fromkeys(
        ("workload.prefix_share", "trace.share", "decoding.beam_churn", "decoding.acceptance"), _SHARE
    ),
    "decoding.branch_hazard": Range(0, 1, open_high=True),
    "scheduler.watermark": Range(0, 1, open_high=True),
    "replay.burstiness": Range(0.01, 100),
    **dict.fromkeys(
        (
            "device.memory_utilization",
            *("device.bandwidth_efficiency", "device.kv_efficiency"),
            *("device.compute_efficiency", "device.attention_efficiency"),
        ),
        Range(0, 1, open_low=True),
    ),
}


def check_trace_file(path: str, may_be_folder: bool = False) -> Iterator[ConfigError]:
    """Errors if a trace is absent, is no file (or folder) or cannot be read; `traces` checks its content."""
    file = Path(path).expanduser()
    try:
        exists = file.exists()
    except OSError as error:
        yield ConfigError("trace.path", f"cannot use '{path}': {error.strerror}")
        return
    if not exists:
        yield ConfigError("trace.path", f"no such file: '{path}' (looked for {file.absolute()})")
    elif not file.is_file() and not (may_be_folder and file.is_dir()):
        yield ConfigError("trace.path", f"'{path}' is not a file; name one trace file")
    elif not os.access(file, os.R_OK):
        yield ConfigError("trace.path", f"'{path}' cannot be read: permission denied")


def check_out(out: str) -> Iterator[ConfigError]:
    """Errors if the results folder cannot be created or written; it is not created here."""
    if not out.strip():
        yield ConfigError("out", "is empty; name the results folder, like out=results/mine")
    else:
        yield from _check_folder("out", out)


def check_cache_dir(folder: str | None) -> Iterator[ConfigError]:
    """Errors if the folder for calibrations cannot be created or written; null is checked when it is used."""
    if folder is not None:
        yield from _check_folder("cost.cache_dir", folder)


def check_kernels(key: str, named: str | None) -> Iterator[ConfigError]:
    """Errors if a named run of `bench kernels` does not exist; its content is checked when it is read."""
    if named is None or (key, named) == ("report.kernels", NO_KERNELS):
        return
    path = Path(named).expanduser()
    file = path / "kernels.parquet" if path.is_dir() else path
    if not named.strip() or not file.is_file():
        yield ConfigError(
            key,
            f"no kernels.parquet in '{named}' (looked for {file.absolute()}); name the folder that "
            "'python -m harness bench kernels --out FOLDER' wrote",
        )
    elif not os.access(file, os.R_OK):
        yield ConfigError(key, f"'{file}' cannot be read: permission denied")
    elif not _is_parquet(file):
        yield ConfigError(
            key, f"'{file}' is no Parquet table; name what 'python -m harness bench kernels' wrote"
        )


def _is_parquet(file: Path) -> bool:
    """Whether the first bytes are those of Parquet, so that a wrong file is refused before hours of points."""
    with file.open("rb") as content:
        return content.read(4) == b"PAR1"


def _check_folder(key: str, name: str) -> Iterator[ConfigError]:
    folder = Path(name).expanduser().absolute()
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:  # a name that is too long, or a folder above it that may not be looked into
        yield ConfigError(key, f"cannot use '{name}': {error.strerror}")
        return
    if not existing.is_dir():
        yield ConfigError(key, f"cannot use '{name}': {existing} is not a folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield ConfigError(key, f"cannot write to '{name}': no permission in {existing}")


def check_decoding(config: RunConfig) -> Iterator[ConfigError]:
    """Errors in the combination of decoding options, with one another and with the scheduler's limits."""
    yield from _width(config)
    yield from _beams(config)
    yield from _drafts(config)


def _width(config: RunConfig) -> Iterator[ConfigError]:
    decoding, limits = config.decoding, config.scheduler
    beams = decoding.beam_width > 1
    key, width = ("decoding.beam_width", decoding.beam_width) if beams else ("decoding.n", decoding.n)
    for name in ("max_running", "max_batched_tokens"):
        limit = getattr(limits, name)
        if width > limit:
            yield ConfigError(
                key, f"found {width}, more than scheduler.{name}={limit}: a group runs in one step"
            )
    if beams and config.model.path is None and width > config.model.vocab:
        yield ConfigError(
            key, f"found {width}, more than the tokens there are (model.vocab={config.model.vocab})"
        )
    if not beams and decoding.mode is DecodingMode.greedy and decoding.n > 1:
        yield ConfigError(
            "decoding.n",
            f"found {decoding.n}, but greedy decoding has one sequence; use decoding.mode=sample",
        )
    if 0 < decoding.temperature < _LEAST_TEMPERATURE:
        yield ConfigError(
            "decoding.temperature",
            f"found {decoding.temperature}, must be {_LEAST_TEMPERATURE:g} or greater; decoding=greedy takes the most "
            "likely token",
        )


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
    if decoding.draft_place is SpeculationMode.fork and config.cache.policy is not CachePolicy.paged:
        yield ConfigError(
            "decoding.draft_place",
            f"found fork, but cache.policy={config.cache.policy} shares no blocks with a child; use lookahead",
        )
    if drafts >= budget:
        yield ConfigError(
            "decoding.draft_tokens",
            f"found {drafts}, must be less than scheduler.max_batched_tokens={budget}: they are verified in one step",
        )


def check_policy(config: RunConfig) -> Iterator[ConfigError]:
    """Errors in the combination of cache and scheduler options."""
    cache, scheduler = config.cache, config.scheduler
    for key in OWN_POLICIES:
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value is not None and not _CLASS.fullmatch(value):
            yield ConfigError(key, f"found '{value}', must be module:Class of an importable class, or null")
    if scheduler.preemption is not Preemption.recompute and cache.policy is CachePolicy.paged:
        if not cache.host_tokens:
            yield ConfigError(
                "scheduler.preemption",
                f"found {scheduler.preemption}, which saves blocks in host memory, but cache.host_tokens is 0; "
                "set it, or preemption=recompute",
            )
        elif cache.host_tokens < cache.block_size:
            yield ConfigError(
                "cache.host_tokens",
                f"found {cache.host_tokens}, less than one block (cache.block_size={cache.block_size})",
            )
    if scheduler.long_prefill_tokens is not None and not scheduler.chunked_prefill:
        yield ConfigError(
            "scheduler.long_prefill_tokens",
            f"found {scheduler.long_prefill_tokens}, but scheduler.chunked_prefill=false cuts no prompt; set null",
        )
    if scheduler.async_scheduling and config.measure:
        yield ConfigError(
            "scheduler.async_scheduling",
            "true, but the engine that measures schedules a step when the one before it has ended; set "
            "measure=false to predict alone, or async_scheduling=false",
        )


def check_trace(config: RunConfig) -> Iterator[ConfigError]:
    """Errors in the trace settings that are found without reading the trace."""
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
        yield from check_trace_file(trace.path, trace.format in FOLDER_FORMATS)
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
        yield ConfigError(
            "trace.arrival_rate", f"missing: trace.arrivals={trace.arrivals} needs requests per second"
        )
    if recorded and trace.arrival_rate is not None:
        yield ConfigError(
            "trace.arrival_rate",
            f"found {trace.arrival_rate}, but trace.arrivals=recorded has its own rate; choose trace.arrivals=poisson, "
            "or scale time with workload.request_rate",
        )


def check_config(config: RunConfig) -> list[ConfigError]:
    """All errors of a composed configuration; empty if it is valid."""
    rules: tuple[Callable[[RunConfig], Iterator[ConfigError]], ...] = (
        _ranges,
        _names,
        check_trace,
        check_policy,
        _pool,
        check_decoding,
        _model,
        check_memory,
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
    if pool is not None and cache.pool_blocks is not None:
        yield ConfigError(
            "cache.pool_blocks",
            f"found {cache.pool_blocks}, but cache.pool_tokens={pool} sets the pool too; set one of them to null",
        )
    if cache.pool_blocks is not None and cache.policy is not CachePolicy.paged:
        yield ConfigError(
            "cache.pool_blocks",
            f"found {cache.pool_blocks}, but cache.policy={cache.policy} has no blocks; use cache.pool_tokens",
        )
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
    if config.engine.backend is Backend.native and KVDtype.fp8_e4m3 is model.kv_dtype:
        yield ConfigError(
            "engine.backend",
            f"found native, whose attention reads no 8-bit cache (model.kv_dtype={model.kv_dtype}); use auto: torch "
            "widens it, and what else is compiled stays so",
        )
    yield from _predicted_only(config)
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
    yield from _experts(model)
    if model.latent_rank and not (model.rope_dim and model.value_dim):
        yield ConfigError(
            "model.latent_rank",
            f"found {model.latent_rank}, but model.rope_dim or model.value_dim is 0; set both",
        )
    if model.windowed_layers > model.layers or bool(model.windowed_layers) != bool(model.window):
        yield ConfigError(
            "model.windowed_layers",
            f"found {model.windowed_layers} with model.window={model.window}; must be 1 to model.layers={model.layers} "
            "with a window, and 0 without",
        )


def _experts(model: ModelConfig) -> Iterator[ConfigError]:
    if not model.experts:
        return
    if model.experts_per_token > model.experts:
        yield ConfigError(
            "model.experts_per_token",
            f"found {model.experts_per_token}, more than model.experts={model.experts}",
        )
    if not model.expert_intermediate:
        yield ConfigError("model.expert_intermediate", "found 0, but there are experts; set the width of one")
    if model.dense_layers > model.layers:
        yield ConfigError(
            "model.dense_layers", f"found {model.dense_layers}, more than model.layers={model.layers}"
        )


def _predicted_only(config: RunConfig) -> Iterator[ConfigError]:
    """What a prediction knows and the measured engine does not run."""
    model = config.model
    if not config.measure:
        return
    if model.weight_dtype is not WeightDtype.model:
        yield ConfigError(
            "model.weight_dtype",
            f"found {model.weight_dtype}, but the measured engine does not quantise weights; use measure=false",
        )
    for name in ("experts", "latent_rank"):
        if model.path is None and getattr(model, name):
            yield ConfigError(
                f"model.{name}",
                f"found {getattr(model, name)}, but the measured engine cannot build such a model from a shape; use "
                "measure=false, or name a checkpoint (model.path)",
            )
