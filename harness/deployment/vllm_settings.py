"""vLLM's options under our keys, and the defaults of its versions.

Source: `vllm/engine/arg_utils.py` and `vllm/config/` of vLLM 0.8.5, 0.10.2 and 0.19.0; `gpu_memory_utilization` of
0.25.0 from `vllm/config/cache.py`. Versions before 0.8 have another scheduler (V0), whose defaults are not taken.
"""

import re
from collections.abc import Callable, Mapping
from math import isfinite, nan
from typing import Any

from harness.deployment.settings import EngineOptions, EngineSettings
from traces.errors import RowError
from traces.formats.parsing import MAX_INTEGER

_GIB = 2**30
_BLOCK = 16  # CacheConfig.DEFAULT_BLOCK_SIZE
_DTYPES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
_KV_DTYPES = {"auto": "model", "bfloat16": "model", "float16": "model", "half": "model"}
_KV_DTYPES |= dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), "fp8_e4m3")  # one byte an element in either form
# Options that say nothing of time or memory of the KV cache: how clients reach the server, and what it prints.
_SILENT = {
    *("host", "port", "uvicorn_log_level", "served_model_name", "seed", "trust_remote_code", "tokenizer"),
    *(
        "disable_log_requests",
        "enable_log_requests",
        "disable_log_stats",
        "download_dir",
        "load_format",
        "model_tag",
    ),
    *(
        "api_server_count",
        "revision",
        "tokenizer_mode",
        "chat_template",
        "task",
        "runner",
        "otlp_traces_endpoint",
    ),
    *(
        "tool_call_parser",
        "enable_auto_tool_choice",
        "reasoning_parser",
        "allowed_origins",
        "subparser",
        "config",
    ),
    *("skip_tokenizer_init", "dispatch_function", "distributed_executor_backend", "max_log_len", "headless"),
}
# Options that change the schedule or the memory in a way that is not simulated, unless they have this value.
_UNMODELLED: dict[str, tuple[object, ...]] = {
    "pipeline_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "speculative_config": (None, {}),
    "speculative_model": (None,),
    "num_speculative_tokens": (None, 0),
    "kv_transfer_config": (None, {}),
    "cpu_offload_gb": (0,),
    "enable_lora": (False, None),
    "scheduler_cls": (None, "vllm.v1.core.sched.scheduler.Scheduler"),
}


def vllm_settings(args: Mapping[str, Any], where: str, version: str | None = None) -> EngineSettings:
    """The settings that `args` gives: vLLM's options by name, with `_` or `-`; `where` is the file they stand in.

    Raises:
        RowError: a value has the wrong type, or names something that we do not know.
    """
    return EngineOptions("vllm", _MAPPED, _UNMODELLED, _SILENT).read(args, where, version)


def with_vllm_defaults(
    settings: EngineSettings, *, memory_gb: float | None = None, device: str | None = None
) -> EngineSettings:
    """The settings with the defaults of their version where nothing is given. Those of a server, not of `LLM(...)`.

    `max_num_seqs` and `max_num_batched_tokens` depend on the device: `memory_gb` in 10^9 bytes, and its name. Without
    these, and for versions before 0.8, they stay unknown.
    """
    version = version_of(settings.version)
    if settings.engine != "vllm" or version is None or version < (0, 8):
        return settings
    where = f"default of vLLM {settings.version}"
    plain: dict[str, Any] = {
        "chunked_prefill": True,
        "prefix_caching": True,
        "policy": "fcfs",
        "kv_dtype": "model",
        "tensor_parallel": 1,
        "data_parallel": 1,
        "expert_parallel": False,
        "block_size": _BLOCK,
        "host_memory_gb": 0.0,
    }
    if version <= (0, 19, 99) or version >= (0, 25):
        plain["memory_utilization"] = 0.9 if version <= (0, 19, 99) else 0.92
    if version <= (0, 10, 99) or version >= (0, 19):
        plain["async_scheduling"] = version >= (0, 19)
    if memory_gb is not None:
        plain |= _batch_defaults(settings, version, memory_gb, (device or settings.device or "").lower())
    missing = {name: value for name, value in plain.items() if name not in settings.given()}
    return settings.changed(where, **missing)


def _batch_defaults(
    settings: EngineSettings, version: tuple[int, ...], memory_gb: float, device: str
) -> dict[str, int]:
    """`get_batch_defaults` of a server: more for devices of at least 70 GiB, the A100 excepted since 0.9."""
    large = memory_gb * 1e9 >= 70 * _GIB and not ("a100" in device and version >= (0, 9))
    tokens = settings.max_batched_tokens or (8192 if large else 2048)
    return {"max_batched_tokens": tokens, "max_running": min(1024 if large else 256, tokens)}


def version_of(text: str | None) -> tuple[int, ...] | None:
    """The numbers of a version: `0.19.0+cu128` is (0, 19, 0); None where there are none."""
    found = re.match(r"v?(\d+(?:\.\d+)+)", text or "")
    return tuple(int(part) for part in found[1].split(".")) if found else None


def count(value: Any, name: str) -> int:
    """A whole number of at least 1, also as `2k` (2,000) or `2K` (2,048). Raises RowError."""
    found = (
        re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", str(value).strip())
        if not isinstance(value, bool)
        else None
    )
    factors = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    number = float(found[1]) * factors[found[2]] if found else 0.0
    if not 1 <= number <= MAX_INTEGER or number != int(number):
        raise RowError(name, f"whole number of at least 1 expected, found {value}")
    return int(number)


def yes_or_no(value: Any, name: str) -> bool:
    """A truth value, also as text. Raises RowError."""
    known = {"true": True, "false": False, "1": True, "0": False}
    found = known.get(str(value).strip().lower())
    if found is None:
        raise RowError(name, f"true or false expected, found {value}")
    return found


def share(value: Any, name: str) -> float:
    """A number above 0 and at most 1. Raises RowError."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = 0.0
    if isinstance(value, bool) or not 0 < found <= 1:
        raise RowError(name, f"number above 0 and at most 1 expected, found {value}")
    return found


def named(known: Mapping[str, str], more: str = "") -> Callable[[Any, str], str]:
    """A reader of one of the names that are `known`."""

    def read(value: Any, name: str) -> str:
        text = str(value).removeprefix("torch.").strip()
        if text not in known:
            raise RowError(name, f"{text} is not known here; known are {', '.join(known)}{more}")
        return known[text]

    return read


def text(value: Any, name: str) -> str:
    """Any text. Raises RowError."""
    if not isinstance(value, str) or not value:
        raise RowError(name, f"text expected, found {value}")
    return value


def _length(value: Any, name: str) -> int | None:
    return None if str(value).strip().lower() in ("auto", "-1") else count(value, name)


def _dtype(value: Any, name: str) -> str | None:
    return None if value == "auto" else named(_DTYPES, ", auto")(value, name)


def _host_gb(value: Any, name: str) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = nan
    if isinstance(value, bool) or not (isfinite(found) and found >= 0):
        raise RowError(name, f"number of GiB of at least 0 expected, found {value}")
    return found * _GIB / 1e9


def _threshold(value: Any, name: str) -> int | None:
    return None if str(value) == "0" else count(value, name)


_MAPPED: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "model": ("model", text),
    "max_num_seqs": ("max_running", count),
    "max_num_batched_tokens": ("max_batched_tokens", count),
    "enable_chunked_prefill": ("chunked_prefill", yes_or_no),
    "async_scheduling": ("async_scheduling", yes_or_no),
    "scheduling_policy": ("policy", named({"fcfs": "fcfs", "priority": "priority"})),
    "long_prefill_token_threshold": ("long_prefill_tokens", _threshold),
    "block_size": ("block_size", count),
    "enable_prefix_caching": ("prefix_caching", yes_or_no),
    "num_gpu_blocks_override": ("pool_blocks", count),
    "gpu_memory_utilization": ("memory_utilization", share),
    "kv_offloading_size": ("host_memory_gb", _host_gb),
    "max_model_len": ("max_model_len", _length),
    "dtype": ("dtype", _dtype),
    "kv_cache_dtype": ("kv_dtype", named(_KV_DTYPES)),
    "quantization": ("quantization", text),
    "tensor_parallel_size": ("tensor_parallel", count),
    "data_parallel_size": ("data_parallel", count),
    "enable_expert_parallel": ("expert_parallel", yes_or_no),
}
SHORT = {
    "tp": "tensor_parallel_size",
    "dp": "data_parallel_size",
    "pp": "pipeline_parallel_size",
    "O": "optimization_level",
}
"""vLLM's short flags."""
