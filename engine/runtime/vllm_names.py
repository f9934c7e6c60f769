"""Options of an engine under the names that vLLM's `LLM` gives them.

A name of vLLM's that PageTwin has something for is translated. One that only says what PageTwin does anyway is taken.
Everything else is refused by name: an option that is silently ignored would make a measurement worthless.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from engine.core.errors import CoreError
from engine.core.options import SchedulerLimits, Scheduling
from engine.runtime.errors import EngineOptionError
from engine.runtime.options import EngineOptions

_RENAMED = {
    "enable_prefix_caching": "prefix_caching",
    "kv_cache_dtype": "kv_dtype",
    "num_speculative_tokens": "draft_tokens",
    "prefix_caching_hash_algo": "hash",
}
_LIMITS = {  # fields of SchedulerLimits
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_batched_tokens",
    "max_model_len": "max_model_len",
    "enable_chunked_prefill": "chunked_prefill",
    "long_prefill_token_threshold": "long_prefill_tokens",
    "scheduling_policy": "policy",
}
_ONLY: Mapping[str, tuple[Any, ...]] = {  # names with the values that ask for nothing that is not done anyway
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "trust_remote_code": (False,),
    "quantization": (None,),
    "enable_lora": (False,),
    "swap_space": (0, 4),  # GiB: vLLM's default, which its present engine does not use
    "cpu_offload_gb": (0,),
    "disable_log_stats": (True, False),
    "skip_tokenizer_init": (False,),
    "tokenizer_mode": ("auto",),
    "load_format": ("auto", "safetensors"),
    "task": (None, "auto", "generate"),
    "runner": (None, "auto", "generate"),
    "speculative_config": (None,),
}
_VALUES = {"kv_dtype": {"auto": "model", "fp8": "fp8_e4m3"}, "hash": {"xxhash": "xxh3_128"}}


def options_of(given: Mapping[str, Any]) -> EngineOptions:
    """The engine options of keywords, PageTwin's names and vLLM's. Raises EngineOptionError, which names the option."""
    ours, limits = {}, {}
    known = {field.name for field in fields(EngineOptions)}
    for name, value in given.items():
        if name in known:
            ours[name] = value
        elif name in _LIMITS:
            limits[_LIMITS[name]] = value
        elif name in _RENAMED:
            renamed = _VALUES.get(_RENAMED[name], {})
            ours[_RENAMED[name]] = renamed.get(value, value) if isinstance(value, str) else value
        elif name == "enforce_eager":
            ours["cuda_graphs"] = not value
        elif name == "num_gpu_blocks_override":
            if value is not None:
                ours["pool_tokens"] = value * given.get("block_size", EngineOptions().block_size)
        elif name not in _ONLY:
            raise EngineOptionError(
                f"{name}: there is no such option; there are {', '.join(sorted(known))}, and {_names()}"
            )
        elif value not in _ONLY[name]:
            allowed = " or ".join(map(repr, _ONLY[name]))
            raise EngineOptionError(f"{name}: {value!r} is not offered here, only {allowed}")
    options = EngineOptions(**ours)
    return replace(options, limits=_limits(options, limits)) if limits else options


def _limits(options: EngineOptions, given: dict[str, Any]) -> SchedulerLimits:
    if options.limits is not None:
        wrong = ", ".join(name for name, field in _LIMITS.items() if field in given)
        raise EngineOptionError(f"{wrong}: give it in `limits`, which is given too")
    for name, field in _LIMITS.items():
        value = given.get(field)
        if value is None:
            given.pop(field, None)
        elif field == "policy":
            if value not in tuple(Scheduling):
                raise EngineOptionError(f"{name}: {value!r} is not one of {', '.join(Scheduling)}")
            given[field] = Scheduling(value)
        elif field == "chunked_prefill":
            if not isinstance(value, bool):
                raise EngineOptionError(f"{name}: {value!r} is not True or False")
        elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise EngineOptionError(f"{name}: {value!r} is not a whole number of at least 1")
    try:
        return SchedulerLimits(**given)
    except CoreError as error:
        raise EngineOptionError(str(error)) from error


def _names() -> str:
    return f"vLLM's {', '.join(sorted([*_RENAMED, *_LIMITS, 'enforce_eager', 'num_gpu_blocks_override']))}"
