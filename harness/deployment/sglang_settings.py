"""SGLang's main options under our keys.

Source: `sglang/srt/server_args.py` of SGLang 0.5.23. Its scheduler is not ours: it runs prefill and decode in steps of
their own unless `--enable-mixed-chunk` is given, and orders the queue by the longest matching prefix by default. The
simulation serves first come, first served with mixed steps; `unmapped` says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from harness.deployment.settings import EngineOptions, EngineSettings
from harness.deployment.vllm_settings import count, named, share, text, yes_or_no
from traces.errors import RowError

_KV = {"auto": "model", "bf16": "model", "bfloat16": "model", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e4m3"}
_DTYPES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
_SILENT = {
    *(
        "host",
        "port",
        "tokenizer_path",
        "trust_remote_code",
        "log_level",
        "log_requests",
        "log_requests_level",
    ),
    *("enable_metrics", "served_model_name", "random_seed", "show_time_cost", "watchdog_timeout", "api_key"),
    *("log_requests_format", "log_requests_target", "chat_template", "tool_call_parser", "reasoning_parser"),
}
_UNMODELLED = (
    "speculative_algorithm",
    "disaggregation_mode",
    "pp_size",
    "pipeline_parallel_size",
    "cpu_offload_gb",
)
_NEUTRAL = (None, "null", 1, 0, 0.0, "")


def sglang_settings(args: Mapping[str, Any], where: str, version: str | None = None) -> EngineSettings:
    """The settings that SGLang's options give, by name with `_` or `-`. Raises RowError."""
    found = EngineOptions("sglang", _MAPPED, dict.fromkeys(_UNMODELLED, _NEUTRAL), _SILENT).read(
        args, where, version
    )
    policy = str(args.get("schedule_policy", args.get("schedule-policy", "fcfs")))
    if policy in ("fcfs", "priority"):
        return found
    unmapped = {**found.unmapped, "schedule_policy": f"{policy}; simulated as fcfs"}
    return replace(found, unmapped=unmapped)


def with_sglang_defaults(settings: EngineSettings) -> EngineSettings:
    """The settings with SGLang's defaults where nothing is given, and what differs in its scheduler in `unmapped`."""
    if settings.engine != "sglang":
        return settings
    plain: dict[str, Any] = {
        "prefix_caching": True,
        "block_size": 1,
        "chunked_prefill": True,
        "kv_dtype": "model",
        "tensor_parallel": 1,
        "data_parallel": 1,
        "expert_parallel": False,
        "policy": "fcfs",
    }
    unmapped = dict(settings.unmapped)
    if settings.unmapped.get("enable_mixed_chunk") != "True":
        unmapped["enable_mixed_chunk"] = (
            "False: prefill and decode run in separate steps; simulated as mixed steps"
        )
    if settings.policy is None:
        unmapped["schedule_policy"] = "the default orders the queue by matching prefixes; simulated as fcfs"
    missing = {name: value for name, value in plain.items() if name not in settings.given()}
    return replace(settings.changed("default of SGLang", **missing), unmapped=unmapped)


def _not(value: Any, name: str) -> bool:
    return not yes_or_no(value, name)


def _budget(value: Any, name: str) -> int | None:
    if str(value) == "-1":
        raise RowError(
            name, "-1 turns chunked prefill off, which is not read; give scheduler.chunked_prefill by hand"
        )
    return count(value, name)


def _policy(value: Any, name: str) -> str:
    return "priority" if value == "priority" else "fcfs"


def _dtype(value: Any, name: str) -> str | None:
    return None if value == "auto" else named(_DTYPES, ", auto")(value, name)


_MAPPED: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "model_path": ("model", text),
    "model": ("model", text),
    "max_running_requests": ("max_running", count),
    "chunked_prefill_size": ("max_batched_tokens", _budget),
    "schedule_policy": ("policy", _policy),
    "page_size": ("block_size", count),
    "disable_radix_cache": ("prefix_caching", _not),
    "max_total_tokens": ("pool_tokens", count),
    "max_total_num_tokens": ("pool_tokens", count),
    "mem_fraction_static": ("memory_utilization", share),
    "context_length": ("max_model_len", count),
    "dtype": ("dtype", _dtype),
    "kv_cache_dtype": ("kv_dtype", named(_KV)),
    "quantization": ("quantization", text),
    "tp_size": ("tensor_parallel", count),
    "tensor_parallel_size": ("tensor_parallel", count),
    "dp_size": ("data_parallel", count),
    "data_parallel_size": ("data_parallel", count),
}
SHORT = {"tp": "tp_size", "dp": "dp_size"}
"""SGLang's short flags."""
