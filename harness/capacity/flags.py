"""The flags of vLLM for a configuration, its line `vllm serve`, and the names of models on the hub."""

from typing import Any

import yaml

from engine.core.options import GroupPages, Scheduling
from engine.runtime.options import VLLM_NAMES, Dtype, KVDtype
from harness.config.capabilities import Way, asked_of, obstacles
from harness.config.compose import TOY_MODELS
from harness.config.groups import groups, option_file
from harness.config.schema import RunConfig, WeightDtype
from harness.workload.deployment import deployment_of, layer_sets, max_position, model_shape

HUB_IDS = {
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    "gemma-2-9b": "google/gemma-2-9b",
    "gemma-3-12b": "google/gemma-3-12b-it",
    "gemma-3-27b": "google/gemma-3-27b-it",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "llama-13b": "huggyllama/llama-13b",
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "llama-4-scout": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-v0.3",
    "mistral-nemo": "mistralai/Mistral-Nemo-Instruct-2407",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "opt-13b": "facebook/opt-13b",
    "opt-66b": "facebook/opt-66b",
    "phi-4-mini": "microsoft/Phi-4-mini-instruct",
    **{f"qwen2.5-{size}b": f"Qwen/Qwen2.5-{size}B" for size in ("0.5", "1.5", "7")},
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-next-80b-a3b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
}
"""The id on the hub of each preset's checkpoint, by `model.name`. OPT-175B is not on the hub, toys are nowhere."""
_ONE_POOL = (GroupPages.off, GroupPages.uniform)  # of pages that vLLM counts
_SHAPE = ("family", "layers", "hidden", "heads", "kv_heads", "intermediate", "vocab")


def serve_line(config: RunConfig) -> str:
    """The command that serves this configuration with vLLM 0.33; empty for a toy with random weights.

    MODEL stands for one that is not on the hub, or whose weights are quantised before they are served.
    """
    model = config.model
    if not model.path and model.name in TOY_MODELS:
        return ""
    stored = model.weight_dtype not in (WeightDtype.model, WeightDtype.fp8)  # vLLM quantises none of these
    hub = "MODEL" if stored else HUB_IDS.get(model.name, "MODEL")
    return " ".join(["vllm serve", model.path or hub, *flags_of(config)])


def flags_of(config: RunConfig) -> list[str]:
    """vLLM's flags (0.33) for the configuration."""
    cache, scheduler, device, model = config.cache, config.scheduler, config.device, config.model
    pool = deployment_of(config).pool
    blocks = pool.num_blocks + 1  # with vLLM's null block
    tier_gib = cache.tier_tokens * pool.kv_bytes_per_token / 2**30
    said: dict[str, Any] = {
        "block_size": cache.block_size,
        "max_running": scheduler.max_running,
        "max_batched_tokens": scheduler.max_batched_tokens,
        "max_model_len": cache.max_model_len or max_position(model),
        "memory_utilization": f"{device.memory_utilization:g}" if pool.memory else None,
        "pool_blocks": blocks if not pool.memory and cache.groups in _ONE_POOL else None,
        "prefix_caching": cache.prefix_caching,
        "tensor_parallel": device.tensor_parallel if device.tensor_parallel > 1 else None,
        "data_parallel": device.data_parallel if device.data_parallel > 1 else None,
        "expert_parallel": device.expert_parallel or None,
        "dtype": str(model.dtype) if model.dtype is Dtype.float32 else None,  # vLLM's auto takes 16 bits
        "prefix_match_unit": cache.prefix_match_unit,
        "watermark": f"{scheduler.watermark:g}" if scheduler.watermark else None,
        "kv_dtype": "fp8" if model.kv_dtype is KVDtype.fp8_e4m3 else None,
        "host_memory_gb": f"{tier_gib:g}" if tier_gib else None,
        "quantization": "fp8" if model.weight_dtype is WeightDtype.fp8 else None,
        "policy": scheduler.policy if scheduler.policy is not Scheduling.fcfs else None,
        "long_prefill_tokens": scheduler.long_prefill_tokens,
        "long_prefill_adaptive": scheduler.long_prefill_adaptive or None,
        "chunked_prefill": None if scheduler.chunked_prefill else False,
        "admit_whole_prompt": None if scheduler.admit_whole_prompt else False,
    }
    if cache.groups is not GroupPages.off and cache.prefix_caching and cache.retention_interval != 0:
        said["retention_interval"] = str(cache.retention_interval)  # vLLM reads the word None
    flags = []
    for ours, value in said.items():
        name = VLLM_NAMES.get(ours, ours).replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            flags.append(f"--{name} {value}")
    if cache.groups is GroupPages.off and any(each.window for each in layer_sets(model_shape(config.model))):
        flags.append("--disable-hybrid-kv-cache-manager")
    return flags


_FLAGGED = ("device.data_parallel", "cache.tier_tokens", "decoding.mode")  # the last is said by each request
_DRAFTS = "whose model proposes the drafts is left open (--speculative-config; decoding.draft_tokens)"
_DISK = "a disk below the host has no flag of its own (cache.disk_tokens)"


def beyond_flags(config: RunConfig) -> str:
    """What of a simulated configuration the line of vLLM does not ask for, in words; empty where it asks for all."""
    found = [why for key, why in obstacles(asked_of(config), Way.oracle) if key not in _FLAGGED]
    found += [_DRAFTS] if config.decoding.draft_tokens else []
    return "; ".join(found + ([_DISK] if config.cache.tier_tokens and config.cache.disk_tokens else []))


def preset(group: str, name: str) -> dict[str, Any]:
    """The values of a preset's file, by key."""
    found: dict[str, Any] = yaml.safe_load(option_file(group, name).read_text(encoding="utf-8"))
    return found


def longer_preset(config: RunConfig, needed: int) -> tuple[str | None, int]:
    """The preset of the model's shape that takes `needed` tokens, else the longest beyond the model's, and its length.

    None, 0: no preset of the shape takes more than the model.
    """
    own, found = config.model, list[tuple[int, str]]()
    for name in groups()["model"] if not own.path else ():
        model = preset("model", name)
        if all(model.get(key) == getattr(own, key) for key in _SHAPE):
            found.append((int(model["max_position"]), name))
    longer = [one for one in found if one[0] > max_position(own)]
    takes = min((one for one in longer if one[0] >= needed), default=max(longer, default=(0, None)))
    return takes[1], takes[0]
