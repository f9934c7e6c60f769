"""The options of vLLM and SGLang under our keys, and the defaults of their versions.

What an engine calls `max_num_seqs` is `scheduler.max_running` here, and so on; `overrides` gives the settings as
`key=value`. `origin` says for each setting where it comes from: a file, or a default of a version of the engine. What
has no key of ours stands in `unmapped`; what changes the engine's schedule in a way that is not simulated stands in
`unmodelled`. Nothing is left out.

Source: `vllm/engine/arg_utils.py` and `vllm/config/` of vLLM 0.8.5, 0.10.2 and 0.19.0; `gpu_memory_utilization` of
0.25.0 from `vllm/config/cache.py`. Versions before 0.8 have another scheduler (V0), whose defaults are not taken.
`sglang/srt/server_args.py` of SGLang 0.5.23. It runs prefill and decode in steps of their own unless
`--enable-mixed-chunk` is given, and orders the queue by the longest matching prefix by default. The simulation serves
first come, first served; `unmapped` says so.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite, nan
from typing import Any

from engine.runtime.options import VLLM_NAMES
from traces.errors import RowError
from traces.formats.parsing import MAX_INTEGER

_GIB = 2**30
_BOOKS = ("origin", "unmapped", "unmodelled")
_LIMITS = ("max_running", "max_batched_tokens")
_KEYS = {  # groups of our configuration; a key is called as the setting is
    "scheduler": (
        *("max_running", "max_batched_tokens", "chunked_prefill", "async_scheduling", "policy"),
        *("long_prefill_tokens", "long_prefill_adaptive", "mixed_steps", "watermark", "admit_whole_prompt"),
    ),
    "cache": (
        *("block_size", "prefix_caching", "prefix_match_unit", "pool_tokens", "pool_blocks", "max_model_len"),
    ),
    "model": ("dtype", "kv_dtype"),
    "device": ("memory_utilization",),
}


@dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine that decide what its scheduler and its KV pool do.

    None means: neither a file nor a known default says. `pool_blocks` and `pool_tokens` are those of one replica.
    `dtype` and `kv_dtype` are our names (`bfloat16`; `fp8_e4m3`, or `model` for that of the weights).
    """

    engine: str = "unknown"  # vllm, sglang
    version: str | None = None
    model: str | None = None  # as the engine was told: a name on the hub or a folder
    device: str | None = None  # as the log names it
    max_running: int | None = None
    max_batched_tokens: int | None = None
    chunked_prefill: bool | None = None
    async_scheduling: bool | None = None
    policy: str | None = None
    long_prefill_tokens: int | None = None
    long_prefill_adaptive: bool | None = None
    mixed_steps: bool | None = None
    watermark: float | None = None
    admit_whole_prompt: bool | None = None
    block_size: int | None = None
    prefix_caching: bool | None = None
    prefix_match_unit: int | None = None
    pool_blocks: int | None = None
    pool_tokens: int | None = None
    pool_bytes: int | None = None  # of KV on each device
    memory_utilization: float | None = None
    host_memory_gb: float | None = None  # 10^9 bytes for blocks that are swapped or offloaded to the host
    max_model_len: int | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    quantization: str | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    expert_parallel: bool | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    unmapped: Mapping[str, str] = field(default_factory=dict)
    unmodelled: Mapping[str, str] = field(default_factory=dict)

    def overrides(self) -> tuple[str, ...]:
        """The settings of scheduler, cache and precision as overrides `key=value` of our configuration.

        Model, device and the number of devices are not among them: a preset or the user says what they are.
        """
        tokens = self.tokens_of_pool
        said = self if tokens is None else replace(self, pool_tokens=tokens, pool_blocks=None)
        values = {f"{group}.{name}": getattr(said, name) for group, names in _KEYS.items() for name in names}
        return tuple(
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in values.items()
            if value is not None
        )

    @property
    def tokens_of_pool(self) -> int | None:
        """KV slots of one replica, from its blocks or as logged; None: not known."""
        if self.pool_blocks is not None and self.block_size is not None:
            return self.pool_blocks * self.block_size
        return self.pool_tokens

    @property
    def knows_pool(self) -> bool:
        """Whether the size of the pool is known, in tokens, in blocks or in bytes."""
        return any(one is not None for one in (self.tokens_of_pool, self.pool_blocks, self.pool_bytes))

    def given(self) -> dict[str, Any]:
        """The settings that are known, by field."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _BOOKS}
        return {name: value for name, value in values.items() if value not in (None, "unknown")}

    def changed(self, origin: str, **values: Any) -> "EngineSettings":
        """These settings with other values, which come from `origin`."""
        return replace(self, **values, origin={**self.origin, **dict.fromkeys(values, origin)})

    def completed(self, origin: str, values: Mapping[str, Any]) -> "EngineSettings":
        """These settings, with what is not known here taken from `values`, which come from `origin`."""
        known = self.given()
        return self.changed(origin, **{name: value for name, value in values.items() if name not in known})

    def filled(self, other: "EngineSettings") -> "EngineSettings":
        """These settings, with what is not known here taken from `other`."""
        known = self.given()
        more = {name: value for name, value in other.given().items() if name not in known}
        origin = {name: where for name, where in other.origin.items() if name in more}
        return replace(
            self,
            **more,
            origin={**origin, **self.origin},
            unmapped={**other.unmapped, **self.unmapped},
            unmodelled={**other.unmodelled, **self.unmodelled},
        )


# Reads the value of an option, which it names in errors; None says nothing. Raises RowError.
Read = Callable[[Any, str], Any]

_SECRET = re.compile(r"key|token$|password|secret|header", re.IGNORECASE)


@dataclass(frozen=True)
class EngineArguments:
    """What the options of an engine mean, by their names with `_`.

    `mapped` gives our field, and how its value is read. `unmodelled` options change the schedule or the memory in a way
    that is not simulated, unless they have one of the values given here. `silent` ones say nothing of time or memory.
    `short` are its short flags.
    """

    engine: str
    mapped: Mapping[str, tuple[str, Read]]
    unmodelled: Mapping[str, tuple[object, ...]]
    silent: Collection[str]
    short: Mapping[str, str]

    def read(self, args: Mapping[str, Any], where: str, version: str | None = None) -> EngineSettings:
        """The settings that `args` gives, by name with `_` or `-`; `where` is the file they stand in.

        The value of an option that looks like a secret is kept nowhere.

        Raises:
            RowError: a value has the wrong type, or names something that we do not know.
        """
        values: dict[str, Any] = {"engine": self.engine}
        if version is not None:
            values["version"] = version
        unmapped: dict[str, str] = {}
        unmodelled: dict[str, str] = {}
        for raw, value in args.items():
            if not isinstance(raw, str):
                raise RowError(str(raw), "the name of an option expected; write it in quotes")
            name = raw.replace("-", "_")
            if value is None:
                continue
            if name in self.mapped:
                key, read = self.mapped[name]
                found = read(value, raw)
                if found is not None:  # of two names of one limit the lower one counts
                    values[key] = min(found, values.get(key, found)) if key in _LIMITS else found
                if key == "policy" and value != found:
                    unmapped[name] = f"{value}; simulated as {found}"
            elif (whole := name.partition(".")[0]) in self.unmodelled:  # of an object a member may be given
                if str(value) not in map(str, self.unmodelled[whole]):
                    unmodelled[name] = str(value)
            elif name not in self.silent:
                unmapped[name] = "given" if _SECRET.search(name) else str(value)
        origin = dict.fromkeys(values, where)
        return EngineSettings(**values, origin=origin, unmapped=unmapped, unmodelled=unmodelled)


# -- values -----------------------------------------------------------------------------------------------------------


def count(value: Any, name: str) -> int:
    """A whole number of at least 1, also as `2k` (2,000) or `2K` (2,048). Raises RowError."""
    text = "" if isinstance(value, bool) else str(value).strip()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text)
    factors = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    number = float(found[1]) * factors[found[2]] if found else 0.0
    if not 1 <= number <= MAX_INTEGER or number != int(number):
        raise RowError(name, f"whole number of at least 1 expected, found {value}")
    return int(number)


def _yes_or_no(value: Any, name: str) -> bool:
    found = {"true": True, "false": False, "1": True, "0": False}.get(str(value).strip().lower())
    if found is None:
        raise RowError(name, f"true or false expected, found {value}")
    return found


def _number(value: Any) -> float:
    try:
        return nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return nan


def _share(value: Any, name: str) -> float:
    found = _number(value)
    if not 0 < found <= 1:
        raise RowError(name, f"number above 0 and at most 1 expected, found {value}")
    return found


def _host_gb(value: Any, name: str) -> float:
    found = _number(value)
    if not (isfinite(found) and found >= 0):
        raise RowError(name, f"number of GiB of at least 0 expected, found {value}")
    return found * _GIB / 1e9


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise RowError(name, f"text expected, found {value}")
    return value


def _named(known: Mapping[str, str], more: str = "") -> Read:
    """Reads one of the names that are `known`."""

    def read(value: Any, name: str) -> str:
        text = str(value).removeprefix("torch.").strip()
        if text not in known:
            raise RowError(name, f"{text} is not known here; known are {', '.join(known)}{more}")
        return known[text]

    return read


def _unless(read: Read, *nothing: str) -> Read:
    """Reads a value that may also be one of the words that say nothing."""
    return lambda value, name: None if str(value).strip().lower() in nothing else read(value, name)


def _budget_of_sglang(value: Any, name: str) -> int | None:
    if str(value) == "-1":
        reason = "-1 turns chunked prefill off, which is not read; give scheduler.chunked_prefill by hand"
        raise RowError(name, reason)
    return count(value, name)


_DTYPES = {"half": "float16", "float16": "float16", "bfloat16": "bfloat16"}
_DTYPES |= {"float": "float32", "float32": "float32"}
_DTYPE = _unless(_named(_DTYPES, ", auto"), "auto")
_FP8 = dict.fromkeys(("fp8_e4m3", "fp8_e5m2"), "fp8_e4m3")  # one byte an element in either form
_AS_MODEL = dict.fromkeys(("auto", "bfloat16"), "model")

# -- vLLM -------------------------------------------------------------------------------------------------------------

_VLLM: Mapping[str, Read] = {
    "max_running": count,
    "max_batched_tokens": count,
    "chunked_prefill": _yes_or_no,
    "async_scheduling": _yes_or_no,
    "policy": _named({"fcfs": "fcfs", "priority": "priority"}),
    "long_prefill_tokens": _unless(count, "0"),
    "long_prefill_adaptive": _yes_or_no,
    "watermark": _unless(_share, "0", "0.0"),
    "admit_whole_prompt": lambda value, name: None if _yes_or_no(value, name) else False,
    "block_size": count,
    "prefix_caching": _yes_or_no,
    "prefix_match_unit": count,
    "pool_blocks": lambda value, name: count(value, name) - 1,  # without vLLM's null block
    "memory_utilization": _share,
    "host_memory_gb": _host_gb,
    "max_model_len": _unless(count, "auto", "-1"),
    "dtype": _DTYPE,
    "kv_dtype": _named({**_AS_MODEL, "float16": "model", "half": "model", "fp8": "fp8_e4m3", **_FP8}),
    "quantization": _text,
    "tensor_parallel": count,
    "data_parallel": count,
    "expert_parallel": _yes_or_no,
}
_BY_OPTION = {VLLM_NAMES.get(key, key): (key, read) for key, read in _VLLM.items()}
VLLM = EngineArguments(
    "vllm",
    mapped={
        **_BY_OPTION,
        "model": ("model", _text),
        "device_memory_utilization": ("memory_utilization", _share),
        "max_num_active_seqs": ("max_running", count),
        "max_num_scheduled_tokens": ("max_batched_tokens", count),
        "kv_cache_memory_bytes": ("pool_bytes", _unless(count, "0")),
    },
    unmodelled={
        "pipeline_parallel_size": (1,),
        "decode_context_parallel_size": (1,),
        "prefill_context_parallel_size": (1,),
        "speculative_config": (None, {}),
        "speculative_model": (None,),
        "num_speculative_tokens": (None, 0),
        **dict.fromkeys(("spec_method", "spec_model", "spec_tokens", "diffusion_config"), ()),
        "kv_transfer_config": (None, {}),
        "cpu_offload_gb": (0,),
        "enable_lora": (False, None),
        "prefill_schedule_interval": (1,),
        "scheduler_cls": (None, "vllm.v1.core.sched.scheduler.Scheduler"),
    },
    silent=(  # how clients reach the server, and what it prints
        *("host", "port", "uvicorn_log_level", "served_model_name", "seed", "trust_remote_code", "tokenizer"),
        *("disable_log_requests", "enable_log_requests", "disable_log_stats", "download_dir", "load_format"),
        *("model_tag", "api_server_count", "revision", "tokenizer_mode", "chat_template", "task", "runner"),
        *("otlp_traces_endpoint", "tool_call_parser", "enable_auto_tool_choice", "reasoning_parser"),
        *("allowed_origins", "subparser", "config", "skip_tokenizer_init", "dispatch_function"),
        *("distributed_executor_backend", "max_log_len", "headless"),
    ),
    short={
        "tp": "tensor_parallel_size",
        "dp": "data_parallel_size",
        "pp": "pipeline_parallel_size",
        "dcp": "decode_context_parallel_size",
        "pcp": "prefill_context_parallel_size",
        "ep": "enable_expert_parallel",
        "sc": "speculative_config",
        "q": "quantization",
        "O": "optimization_level",
    },
)
# Defaults of both engines.
_DEFAULTS = {
    "chunked_prefill": True,
    "prefix_caching": True,
    "policy": "fcfs",
    "kv_dtype": "model",
    "tensor_parallel": 1,
    "data_parallel": 1,
    "expert_parallel": False,
}


def with_vllm_defaults(
    settings: EngineSettings, *, memory_gb: float | None = None, device: str | None = None
) -> EngineSettings:
    """The settings with the defaults of their version where nothing is given. Those of a server, not of `LLM(...)`.

    `max_num_seqs` and `max_num_batched_tokens` depend on the device: `memory_gb` in 10^9 bytes, and its name. Without
    these, and for versions before 0.8, they stay unknown.
    """
    numbers = re.match(r"v?(\d+(?:\.\d+)+)", settings.version or "")
    version = tuple(map(int, numbers[1].split("."))) if numbers else ()
    if settings.engine != "vllm" or version < (0, 8):
        return settings
    # 16 is CacheConfig.DEFAULT_BLOCK_SIZE
    plain: dict[str, Any] = {**_DEFAULTS, "block_size": 16, "host_memory_gb": 0.0}
    if version <= (0, 19, 99) or version >= (0, 25):
        plain["memory_utilization"] = 0.9 if version <= (0, 19, 99) else 0.92
    if version <= (0, 10, 99) or version >= (0, 19):
        plain["async_scheduling"] = version >= (0, 19)
    if memory_gb is not None:  # `get_batch_defaults`: more for 70 GiB or more, the A100 excepted since 0.9
        smaller = "a100" in (device or settings.device or "").lower() and version >= (0, 9)
        large = memory_gb * 1e9 >= 70 * _GIB and not smaller
        largest = memory_gb * 1e9 >= 160 * _GIB and version >= (0, 32)
        twice = 2 if settings.unmapped.get("performance_mode") == "throughput" else 1
        longest, rows = settings.max_model_len, settings.max_running or twice * (1024 if large else 256)
        tokens = twice * (16_384 if largest else 8192 if large else 2048)
        if longest:
            tokens = min(max(tokens, longest * (settings.chunked_prefill is False)), rows * longest)
        tokens = settings.max_batched_tokens or tokens
        plain |= {"max_batched_tokens": tokens, "max_running": min(rows, tokens)}
    return settings.completed(f"default of vLLM {settings.version}", plain)


# -- SGLang -----------------------------------------------------------------------------------------------------------

_NOT_SIMULATED = "speculative_algorithm disaggregation_mode cpu_offload_gb pp_size pipeline_parallel_size"
SGLANG = EngineArguments(
    "sglang",
    mapped={
        "model_path": ("model", _text),
        "model": ("model", _text),
        "max_running_requests": ("max_running", count),
        "chunked_prefill_size": ("max_batched_tokens", _budget_of_sglang),
        "schedule_policy": ("policy", lambda value, _: "priority" if value == "priority" else "fcfs"),
        "enable_mixed_chunk": ("mixed_steps", _yes_or_no),
        "disable_overlap_schedule": ("async_scheduling", lambda value, name: not _yes_or_no(value, name)),
        "page_size": ("block_size", count),
        "disable_radix_cache": ("prefix_caching", lambda value, name: not _yes_or_no(value, name)),
        "max_total_tokens": ("pool_tokens", count),
        "max_total_num_tokens": ("pool_tokens", count),
        "mem_fraction_static": ("memory_utilization", _share),
        "context_length": ("max_model_len", count),
        "dtype": ("dtype", _DTYPE),
        "kv_cache_dtype": ("kv_dtype", _named({"auto": "model", "bf16": "model", **_AS_MODEL, **_FP8})),
        "quantization": ("quantization", _text),
        "tp_size": ("tensor_parallel", count),
        "tensor_parallel_size": ("tensor_parallel", count),
        "dp_size": ("data_parallel", count),
        "data_parallel_size": ("data_parallel", count),
    },
    unmodelled=dict.fromkeys(_NOT_SIMULATED.split(), (None, "null", 1, 0, 0.0, "")),
    silent=(
        *("host", "port", "tokenizer_path", "trust_remote_code", "random_seed", "api_key", "log_level"),
        *("log_requests", "log_requests_level", "log_requests_format", "log_requests_target"),
        *("served_model_name", "show_time_cost", "watchdog_timeout", "chat_template", "tool_call_parser"),
        *("enable_metrics", "reasoning_parser"),
    ),
    short={"tp": "tp_size", "dp": "dp_size"},
)


def with_sglang_defaults(settings: EngineSettings) -> EngineSettings:
    """The settings with SGLang's defaults where nothing is given, and what differs in its scheduler in `unmapped`."""
    if settings.engine != "sglang":
        return settings
    unmapped = dict(settings.unmapped)
    if settings.policy is None:
        unmapped["schedule_policy"] = "the default orders the queue by matching prefixes; simulated as fcfs"
    filled = settings.completed("default of SGLang", {**_DEFAULTS, "block_size": 1, "mixed_steps": False})
    return replace(filled, unmapped=unmapped)
