"""Options of an engine: KV pool, cache policy, kernels. Plain values; importing this module imports no torch.

The enums of the engine are declared here once; `harness.config.schema` uses the same classes. `build_manager` makes
the KV cache manager that the options describe.

`options_of` takes vLLM's names as well. A name of vLLM's that PageTwin has something for is translated. One that only
says what PageTwin does anyway is taken. Everything else is refused by name: an option that is silently ignored would
make a measurement worthless.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from numbers import Integral
from typing import TYPE_CHECKING, Any

from engine.core.errors import CoreError
from engine.core.options import (
    CachePolicy,
    GroupPages,
    HashAlgorithm,
    Placement,
    SchedulerLimits,
    Scheduling,
    SpeculationMode,
    StateMode,
    TierStore,
    WindowHits,
)
from engine.runtime.errors import EngineOptionError, not_offered

if TYPE_CHECKING:
    from engine.core.memory.manager import KVCacheManager
    from engine.core.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

MakeScheduler = Callable[[int, SchedulerLimits], "Scheduler"]


class Dtype(StrEnum):
    """Element type of weights, and of K and V unless `KVDtype` says otherwise."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class KVDtype(StrEnum):
    """Element type of K and V in the pool."""

    model = "model"  # the same as the weights
    fp8_e4m3 = "fp8_e4m3"  # 8 bits: 4 of exponent, 3 of mantissa, up to 448; kept without a scale


class Backend(StrEnum):
    """Attention kernels of the engine."""

    auto = "auto"  # triton on CUDA, native on a CPU with a C compiler, else torch
    torch = "torch"
    native = "native"
    triton = "triton"


class Audit(StrEnum):
    """How often written slots are counted in the tensors and compared with the counters of the core."""

    off = "off"
    sampled = "sampled"
    full = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of an engine.

    The KV pool has `pool_tokens` slots. Without it, the pool takes `kv_cache_memory_bytes`, or else the part of the
    share `gpu_memory_utilization` of the GPU's memory that is still free (on a CPU 1 GiB). A contiguous `cache`
    reserves single slots and ignores `block_size` and `prefix_caching`. Without `limits`, a step takes at most 512
    tokens of 64 sequences, and sequences are as long as model and pool allow.

    With `groups`, layers that keep different things of a sequence lie in pages of their own, in the memory of the same
    pool, and blocks behind a window are freed while a sequence runs.

    `scheduler` is a function that makes a scheduler from the number of blocks and the limits in effect, with any
    manager and policies of `engine.core`. It replaces the scheduler that `prefix_caching`, `copy_at_fork`, `placement`
    and `groups` describe.
    """

    pool_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    host_blocks: int = 0  # blocks of host memory to swap to
    tier_blocks: int = 0  # blocks of host memory that keep what the pool loses, found again by their hash
    tier_store: TierStore | str = TierStore.written  # when they are filled
    block_size: int = 16
    cache: CachePolicy | str = CachePolicy.paged
    prefix_caching: bool = True
    copy_at_fork: bool = False  # branches never share a block
    placement: Placement | str = Placement.first_fit  # of contiguous reservations
    groups: GroupPages | str = GroupPages.off  # how layers that keep different things share the memory
    # with groups: what a prefix hit needs of windowed layers
    window_hits: WindowHits | str = WindowHits.window
    # with groups: tokens between checkpoints of windows and states; 0: each prompt's own; None: at every match unit
    retention_interval: int | None = 0
    # with groups beside states: hits end with every so many tokens, also inside a block; None: with whole blocks
    prefix_match_unit: int | None = None
    behind_first: bool = False  # with groups: evict what a window has left first
    states: StateMode | str = StateMode.align  # with groups: which states layers with recurrent state keep
    # tokens of a block of states, but for groups=uniform; None: as of other layers
    state_every: int | None = None
    limits: SchedulerLimits | None = None
    scheduler: MakeScheduler | None = None
    kv_dtype: KVDtype | str = KVDtype.model  # in 8 bits the pool holds two or four times the tokens
    hash: HashAlgorithm = HashAlgorithm.sha256  # of block hashes
    backend: Backend | str = Backend.auto
    audit: Audit | str = Audit.sampled
    audit_every: int = 16
    temperature: float = 1.0  # of requests that set none, as in a replay
    seed: int = 0
    cuda_graphs: bool = True  # run decode steps as recorded graphs, if Triton kernels run on a GPU
    draft_tokens: int = 4  # proposed per step, if the engine has a draft model
    draft_mode: SpeculationMode | str = SpeculationMode.whole
    pack_weights: bool | None = None  # pack linear weights for a CPU's matrix kernels; None: if small

    def __post_init__(self) -> None:
        """Raise EngineOptionError for a value that is out of range."""
        for name in (*_OPTIONAL_COUNTS, *_COUNTS):
            value, least = getattr(self, name), int(name not in _FROM_ZERO)
            if value is None and name in _OPTIONAL_COUNTS:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise EngineOptionError(f"{name}: {value!r} is not a whole number of at least {least}")
            object.__setattr__(self, name, int(value))
        if self.groups == GroupPages.off and self.prefix_match_unit not in (None, self.block_size):
            reason = "with one group of layers hits end with its blocks; leave it out, or set groups=uniform"
            raise EngineOptionError(f"prefix_match_unit: {self.prefix_match_unit}, {reason}")
        for name, fits, wanted in (
            *((name, isinstance(getattr(self, name), bool), "True or False") for name in _FLAGS),
            ("pack_weights", isinstance(self.pack_weights, bool | None), "True, False or None"),
            ("seed", isinstance(self.seed, Integral), "a whole number"),
            ("limits", isinstance(self.limits, SchedulerLimits | None), "SchedulerLimits"),
            ("scheduler", self.scheduler is None or callable(self.scheduler), "a function"),
            ("gpu_memory_utilization", _lies(self.gpu_memory_utilization, 1), "above 0 and at most 1"),
            ("temperature", _lies(self.temperature, 2**31), "a number above 0"),
        ):
            if not fits:  # a text such as "false" would count as True
                raise EngineOptionError(f"{name}: {getattr(self, name)!r} is not {wanted}")
        for name, kind in _CHOICES:
            if getattr(self, name) not in tuple(kind):
                raise EngineOptionError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(kind)}")

    @property
    def kept_states(self) -> StateMode:
        """The states in effect: without a prefix cache `align` is `none`, as in vLLM."""
        return StateMode(self.states).within(self.prefix_caching)

    @property
    def slots_per_block(self) -> int:
        """The block size in effect: 1 for a contiguous cache."""
        return self.block_size if CachePolicy(self.cache) is CachePolicy.paged else 1


def _lies(value: object, most: float) -> bool:
    """Whether a value is a number above 0, and at most `most`."""
    return isinstance(value, int | float) and 0 < value <= most


_FLAGS = ("prefix_caching", "copy_at_fork", "behind_first", "cuda_graphs")
_CACHE_COUNTS = ("retention_interval", "prefix_match_unit", "state_every")
_OPTIONAL_COUNTS = ("pool_tokens", "kv_cache_memory_bytes", *_CACHE_COUNTS)
_COUNTS = ("host_blocks", "tier_blocks", "block_size", "audit_every", "draft_tokens")
_FROM_ZERO = ("host_blocks", "tier_blocks", "draft_tokens", "retention_interval")
_CHOICES: tuple[tuple[str, type[StrEnum]], ...] = (
    ("cache", CachePolicy),
    ("placement", Placement),
    ("groups", GroupPages),
    ("window_hits", WindowHits),
    ("states", StateMode),
    ("kv_dtype", KVDtype),
    ("hash", HashAlgorithm),
    ("tier_store", TierStore),
    ("audit", Audit),
    ("draft_mode", SpeculationMode),
)


def build_manager(options: EngineOptions, num_blocks: int, max_model_len: int) -> "KVCacheManager":
    """The KV cache manager that the options ask for."""
    from engine.core.memory.contiguous import ContiguousManager
    from engine.core.memory.eviction import LruQueue
    from engine.core.memory.paged import PagedManager
    from engine.core.memory.tiers import HostBlocks, Tier, Tiers, TierSpec

    policy = CachePolicy(options.cache)
    if policy is CachePolicy.paged:
        eviction, host = LruQueue(), TierSpec("host", options.tier_blocks)
        tiers = options.tier_blocks and Tiers(
            [Tier(host, LruQueue())],
            eviction.facts,
            store=TierStore(options.tier_store),
            copies=HostBlocks(options.host_blocks, min(num_blocks, options.tier_blocks)),
        )
        return PagedManager(
            num_blocks,
            options.block_size,
            prefix_caching=options.prefix_caching,
            copy_at_fork=options.copy_at_fork,
            host_blocks=options.host_blocks,
            eviction=eviction,
            tiers=tiers or None,
        )
    return ContiguousManager(num_blocks, max_model_len, policy.reservation, Placement(options.placement))


VLLM_NAMES: Mapping[str, str] = {
    "max_running": "max_num_seqs",
    "max_batched_tokens": "max_num_batched_tokens",
    "chunked_prefill": "enable_chunked_prefill",
    "async_scheduling": "async_scheduling",
    "policy": "scheduling_policy",
    "watermark": "watermark",
    "admit_whole_prompt": "scheduler_reserve_full_isl",
    "long_prefill_tokens": "long_prefill_token_threshold",
    "long_prefill_adaptive": "long_prefill_token_threshold_adaptive",
    "block_size": "block_size",
    "prefix_caching": "enable_prefix_caching",
    "retention_interval": "prefix_cache_retention_interval",
    "prefix_match_unit": "prefix_match_unit",
    "hash": "prefix_caching_hash_algo",
    "pool_blocks": "num_gpu_blocks_override",
    "memory_utilization": "gpu_memory_utilization",
    "host_memory_gb": "kv_offloading_size",
    "max_model_len": "max_model_len",
    "dtype": "dtype",
    "kv_dtype": "kv_cache_dtype",
    "quantization": "quantization",
    "draft_tokens": "num_speculative_tokens",
    "tensor_parallel": "tensor_parallel_size",
    "data_parallel": "data_parallel_size",
    "expert_parallel": "enable_expert_parallel",
}
"""vLLM's names of options, by ours: those of the engine, of the configuration and of a deployment's settings."""
_KNOWN = {field.name for field in fields(EngineOptions)}
_LIMITS = {VLLM_NAMES[one.name]: one.name for one in fields(SchedulerLimits) if one.name in VLLM_NAMES}
_RENAMED = {theirs: ours for ours, theirs in VLLM_NAMES.items() if ours in _KNOWN}
_ONLY: Mapping[str, tuple[Any, ...]] = {  # names with the values that ask for nothing that is not done anyway
    name: values
    for names, values in (
        ("tensor_parallel_size pipeline_parallel_size data_parallel_size", (1,)),
        ("trust_remote_code enable_lora enable_expert_parallel enable_sleep_mode", (False,)),
        ("enable_return_routed_experts return_sampling_mask disable_sliding_window", (False,)),
        ("task runner", (None, "auto", "generate")),
        ("convert config_format", (None, "auto", "none", "hf")),
        ("quantization quantization_config pooler_config profiler_config max_num_active_seqs", (None,)),
        ("kv_transfer_config kv_events_config offload_params num_gpu_blocks_override", (None,)),
        ("hf_overrides logits_processors mm_processor_kwargs", (None, {}, [])),
        ("limit_mm_per_prompt allowed_media_domains", (None, {}, [])),
        ("cpu_offload_gb offload_group_size", (0,)),
        ("swap_space", (0, 4)),  # GiB: vLLM's default of before, which its present engine does not use
        ("allowed_local_media_path reasoning_parser", (None, "")),
        ("tokenizer_mode", ("auto", "hf")),
        ("load_format", ("auto", "safetensors")),
        ("logprobs_mode", ("raw_logprobs",)),
        ("max_logprobs", (None, *range(21))),
    )
    for name in names.split()
}
_WITHOUT_EFFECT = {
    name
    for names in (
        "async_scheduling disable_log_requests max_parallel_loading_workers optimization_level use_tqdm_on_load",
        "attention_backend disable_custom_all_reduce disable_log_stats guided_decoding_backend max_cpu_loras",
        "attention_config max_lora_rank offload_num_in_group offload_prefetch_step structured_outputs_config",
        "compilation_config disable_cascade_attn distributed_executor_backend max_loras model_impl served_model_name",
    )
    for name in names.split()
}
"""Names that change how vLLM runs or what it logs, and no token: taken, and the log says that they do nothing."""
_HASHES = {"xxhash": "xxh3_128", "xxhash_cbor": "xxh3_128_cbor"}
_VALUES = {"kv_dtype": {"auto": "model", "fp8": "fp8_e4m3"}, "hash": _HASHES}


def options_of(given: Mapping[str, Any]) -> EngineOptions:
    """The engine options of keywords, PageTwin's names and vLLM's. Raises EngineOptionError, which names the option."""
    ours, limits = {}, {}
    for name, value in given.items():
        if name in _KNOWN:
            ours[name] = value
        elif name in _LIMITS:
            limits[_LIMITS[name]] = value
        elif name in _RENAMED:
            renamed = _VALUES.get(_RENAMED[name], {})
            ours[_RENAMED[name]] = renamed.get(value, value) if isinstance(value, str) else value
        elif name == "enforce_eager":
            ours["cuda_graphs"] = not value if isinstance(value, bool) else value
        elif name == "num_gpu_blocks_override" and value is not None:
            if not isinstance(value, int) or value < 2:  # the null block is one of vLLM's
                raise EngineOptionError(f"{name}: {value!r} is not a whole number of at least 2")
            if given.get("groups", GroupPages.off) != GroupPages.off:
                raise EngineOptionError(f"{name}: a page of groups has part of the layers; use pool_tokens")
            ours["pool_tokens"] = (value - 1) * (given.get("block_size") or EngineOptions().block_size)
        elif name in _WITHOUT_EFFECT:
            log.info("%s=%r has no effect here", name, value)
        elif name not in _ONLY:
            vllm = sorted({*_RENAMED, *_LIMITS, "enforce_eager", "num_gpu_blocks_override"} - _KNOWN)
            raise EngineOptionError(
                f"{name}: there is no such option; there are {', '.join(sorted(_KNOWN))}, and vLLM's {', '.join(vllm)}"
            )
        elif reason := not_offered(value, _ONLY[name]):
            raise EngineOptionError(f"{name}: {reason}")
    options = EngineOptions(**ours)
    return replace(options, limits=_limits(options, limits)) if limits else options


def _limits(options: EngineOptions, given: dict[str, Any]) -> SchedulerLimits:
    if options.limits is not None:
        wrong = ", ".join(name for name, field in _LIMITS.items() if field in given)
        raise EngineOptionError(f"{wrong}: give it in `limits`, which is given too")
    for name, field in _LIMITS.items():
        value = given.get(field)
        if value is None or (field == "long_prefill_tokens" and value == 0):  # no cap
            given.pop(field, None)
        elif field == "policy":
            if value not in tuple(Scheduling):
                raise EngineOptionError(f"{name}: {value!r} is not one of {', '.join(Scheduling)}")
            given[field] = Scheduling(value)
        elif field == "watermark" and not (isinstance(value, int | float) and 0 <= value < 1):
            raise EngineOptionError(f"{name}: {value!r} is not a number of at least 0 and below 1")
        elif isinstance(getattr(SchedulerLimits, field), bool):
            if not isinstance(value, bool):
                raise EngineOptionError(f"{name}: {value!r} is not True or False")
        elif field != "watermark" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise EngineOptionError(f"{name}: {value!r} is not a whole number of at least 1")
    try:
        return SchedulerLimits(**given)
    except CoreError as error:
        raise EngineOptionError(str(error)) from error
