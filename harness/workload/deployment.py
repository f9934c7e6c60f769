"""What serves: a model on a device, its engine, limits, pool and cache policy, and where its seconds come from.

`deployment_of` derives all of it from a configuration, once. A `Deployment` is what everything below the configuration
works on: replay, measurement, calibration and prices take it, and derive no shape and no pool again. Nothing here
imports torch.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from engine.core.errors import CoreError
from engine.core.memory.eviction import CheckpointRule
from engine.core.memory.group_chunks import pages_of
from engine.core.memory.group_layout import GroupLayout, LayerSet, layout_of
from engine.core.options import CachePolicy, GroupKind, GroupPages, SchedulerLimits, SchedulerOptions
from engine.runtime.models.spec import ModelSpec
from engine.runtime.options import Dtype, KVDtype
from harness.config.errors import ConfigError
from harness.config.groups import DEPLOYED
from harness.config.schema import (
    CacheConfig,
    Clock,
    CostConfig,
    DecodingConfig,
    DeviceConfig,
    EngineConfig,
    EngineDevice,
    ModelConfig,
    RunConfig,
    SchedulerConfig,
    WeightDtype,
)
from harness.cost.model_shape import Experts, LatentKV, ModelShape
from harness.cost.roofline import DeviceShape, block_size_factor
from harness.environment import device_identity, engine_device
from harness.metrics.log import FloatArray, IntArray
from harness.replay.features import Sight
from harness.workload.architecture import TIED, UNGATED, CheckpointFacts, checkpoint_shape, unknown_parts

BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2}


WINDOWS_KEPT = (
    "windowed layers keep every block, as in vLLM with --disable-hybrid-kv-cache-manager; by default vLLM frees blocks "
    "beyond a window, so its pool holds more (cache.groups=uniform without asynchronous scheduling predicts that)"
)
_TIERS = (
    "copies beside a step take up to {:.1%} of the memory's bandwidth each way, which is not priced, and no step waits "
    "for a write, so the gain of tiers is an upper end"
)

# The sampler of the profile run holds for each logit: bfloat16 (2), float32 (4), sorted (4), index of the sorted (8),
# probability (4), sum of the sorted (4). FlashInfer's and Triton's samplers, which newer versions choose, take less.
_SAMPLER_BYTES = 26


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of each device in bytes: `usable` = `weights` + `activations` + `other` + `graphs` + KV.

    `usable` is the share of the device's memory that the engine may take. `activations` is the peak of the profile run,
    `other` what libraries allocate outside of PyTorch and the rotations of the positions.
    """

    usable: float
    weights: float
    activations: float
    other: float
    graphs: float

    @property
    def kv(self) -> float:
        """What is left for KV; negative where the weights do not fit."""
        return self.usable - self.weights - self.activations - self.other - self.graphs


@dataclass(frozen=True)
class PoolShape:
    """KV memory of a point. A contiguous policy has blocks of one token.

    `sized_by` is the key that set the size, `device.memory_gb` where nothing did; then `memory` has the parts. `window`
    is that of the model's windowed layers. The pool keeps their blocks as long as those of the others, as vLLM does
    with `--disable-hybrid-kv-cache-manager`; `note` says so where sequences may be longer. With `groups`
    (cache.groups) blocks behind a window are released; then `num_blocks` are the pages of all pools, `page_counts`
    those of each, and `block_size` is the match unit of the prefix cache.
    """

    policy: CachePolicy
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int
    max_model_len: int
    prefix_caching: bool
    sized_by: str = "cache.pool_tokens"
    memory: DeviceMemory | None = None
    window: Sight | None = None
    note: str = ""
    groups: GroupLayout | None = None
    page_counts: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """KV slots of the pool, of `slot_bytes` each. Without groups, a slot holds one token in all layers."""
        if self.groups is None:
            return self.num_blocks * self.block_size
        return pages_of(self.groups, self.page_counts).slots()[0]

    @property
    def whole_tokens(self) -> int:
        """Tokens whose K and V in all layers take the memory of the pool: its `cache.pool_tokens`."""
        return self.tokens * self.slot_bytes // self.kv_bytes_per_token

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot; with groups, the largest size of which pages, tokens and states are multiples."""
        return self.kv_bytes_per_token if self.groups is None else self.groups.slot_bytes

    @property
    def page_slots(self) -> Callable[[Sequence[int]], float] | None:
        """How many KV slots (a token in all layers) have the bytes of pages; None without groups."""
        if self.groups is None:
            return None
        page_bytes = pages_of(self.groups, self.page_counts).page_bytes
        return lambda pages: sum(map(page_bytes, pages)) / self.kv_bytes_per_token

    @property
    def origin(self) -> str:
        """In words where the size comes from."""
        if self.memory is None:
            return f"set by {self.sized_by}"
        parts = {name: f"{size / 1e9:.2f}" for name, size in asdict(self.memory).items()}
        rest = f"{parts['activations']} activations - {parts['other']} other - {parts['graphs']} graphs"
        words = f"automatic, on each device {parts['usable']} GB usable - {parts['weights']} weights - {rest}"
        return f"{words}; {self.note}" if self.note else words


@dataclass(frozen=True)
class Deployment:
    """A model that is served: the settings of its parts, and the numbers that follow from them.

    `shape` is that of the model, `pool` the KV memory and `limits` those of the scheduler. `clock` is the clock of
    the engine's seconds as configured. With `measured` the engine at hand runs it too, so that it can be calibrated.
    """

    model: ModelConfig
    device: DeviceConfig
    engine: EngineConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    decoding: DecodingConfig
    cost: CostConfig
    clock: Clock
    measured: bool
    shape: ModelShape
    pool: PoolShape
    limits: SchedulerLimits
    vllm_python: str | None = None  # interpreter of the measured engine where that is vLLM; None: ours

    @cached_property
    def draft(self) -> ModelShape | None:
        """The shape of the model that proposes tokens; None without speculation."""
        return _draft_shape(self.model, self.decoding)

    @cached_property
    def hardware(self) -> DeviceShape:
        """The simulated device in SI units.

        Raises:
            ConfigError: the heads cannot be split evenly among the devices, or `cost.block_sizes` has no figure.
        """
        return _device_shape(self)

    @property
    def model_spec(self) -> ModelSpec:
        """The engine's description of the model."""
        return model_spec(self.model)

    @property
    def draft_spec(self) -> ModelSpec:
        """The same of the model that proposes tokens: that of the checkpoint for it, or the model itself."""
        path = self.decoding.draft_path
        return model_spec(draft_of(self.model, path)) if path else self.model_spec

    @property
    def runs_on(self) -> str:
        """Where the engine runs: `cuda` or `cpu`."""
        return engine_device(self.engine.device)

    @property
    def copies_tiers(self) -> bool:
        """Whether the engine at hand fills and reads the host tier itself, so that a step waits for the copies."""
        return self.measured or self.device.name == "cpu"

    @property
    def device_at_hand(self) -> str:
        """The name of the device that the engine runs on."""
        return device_identity(self.engine.device)

    @property
    def clock_used(self) -> Clock:
        """The clock; `auto` is CPU-seconds of the engine's thread where that does all work, else wall time."""
        if self.clock is not Clock.auto:
            return self.clock
        single = self.runs_on == "cpu" and self.engine.threads == 1
        return Clock.cpu if single else Clock.wall

    @property
    def has_yardstick(self) -> bool:
        """Whether a yardstick between the steps follows the pace (`cost.follow_pace`). It describes a core, no GPU."""
        return self.cost.follow_pace and self.runs_on == "cpu"

    @property
    def is_at_hand(self) -> bool:
        """Whether `device`, which the simulation predicts, is the device that the engine runs on.

        Only then do seconds measured here say anything about it. `device=cpu`, the default, stands for the machine at
        hand. Of any other name the first part must be a word of the GPU's: `h100_sxm` is an "NVIDIA H100 80GB HBM3";
        of an RTX all must. The memory must be equal where both name it, and a PCIe card must be called one.
        """
        name = self.device.name.lower()
        if name == EngineDevice.cpu.value:
            return True
        if self.runs_on == "cpu":
            return False
        parts, words = name.split("_"), re.findall(r"[a-z0-9]+", self.device_at_hand.lower())
        sizes = [{word for word in some if re.fullmatch(r"\d+gb", word)} for some in (parts, words)]
        same_memory = sizes[0] == sizes[1] or not all(sizes)
        pcie = ("pcie" in words) == ("pcie" in parts)
        named = set(parts if parts[0] == "rtx" else parts[:1])
        return named <= {*words} - {"nvidia"} and same_memory and pcie

    def front_end_s(self, prompt_tokens: IntArray) -> FloatArray:
        """Seconds that prompts of so many tokens spend in the server before the scheduler's queue."""
        found: FloatArray = 1e-6 * self.device.frontend_token_us * prompt_tokens.astype(np.float64)
        return found + 1e-6 * self.device.frontend_request_us

    @property
    def longest(self) -> int:
        """The longest sequence that is served, in tokens: `cache.max_model_len`, or the model's."""
        return self.cache.max_model_len or max_position(self.model)


def deployment_of(config: RunConfig) -> Deployment:
    """The deployment that a configuration describes.

    Raises:
        ConfigError: the model's shape cannot be read, the pool holds no block, or the sequences are longer than the
            model allows.
    """
    shape = model_shape(config.model)
    pool = _pool_shape(config, shape)
    return Deployment(
        config.model,
        config.device,
        config.engine,
        config.cache,
        config.scheduler,
        config.decoding,
        config.cost,
        config.replay.clock,
        config.measure,
        shape,
        pool,
        limits_of(config.scheduler, pool.max_model_len),
        config.oracle.python,
    )


def settings_text(config: RunConfig) -> str:
    """The settings of a deployment as YAML, a section for each part; `deployment=FILE` reads them back.

    What a run asks of it (the requests, how they are replayed, whether it is measured) is not in the file.
    """
    return OmegaConf.to_yaml(OmegaConf.masked_copy(OmegaConf.structured(config), list(DEPLOYED)))


def limits_of(scheduler: SchedulerConfig, max_model_len: int) -> SchedulerLimits:
    """The scheduler's limits, as the configuration says; `max_model_len` in tokens."""
    options = {option.name: getattr(scheduler, option.name) for option in fields(SchedulerOptions)}
    ahead = scheduler.async_scheduling and not scheduler.async_frees_at_once
    return SchedulerLimits(**options, max_model_len=max_model_len, ahead=ahead)


def model_shape(model: ModelConfig, key: str = "model.path") -> ModelShape:
    """The shape of the model, from the configuration or from the checkpoint's config.json.

    Raises:
        ConfigError: the checkpoint's config.json does not give the shape; names `key`.
    """
    width = 1 if model.kv_dtype is KVDtype.fp8_e4m3 else None
    size = BYTES[model.dtype]
    bits = _bits_of(model.weight_dtype, model.weight_group)
    latent = model.latent_rank, model.rope_dim, model.value_dim, model.query_rank
    experts = (
        *(model.experts, model.experts_per_token, model.expert_intermediate),
        *(model.shared_intermediate, model.dense_layers, model.expert_skew),
    )
    if model.path:
        shape = checkpoint_shape(CheckpointFacts(model.path, key), size, width)
        if shape.experts:
            shape = replace(shape, experts=replace(shape.experts, skew=model.expert_skew))
        if bits is not None:  # an engine can quantise while it loads
            shape = replace(shape, layer_bits=None if model.experts_only else bits, expert_bits=bits)
        return _with_states(shape, model)
    return ModelShape(
        *(model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim),
        *(model.intermediate, model.vocab, size),
        mlp_matrices=2 if model.family in UNGATED else 3,
        kv_bytes_per_element=width,
        tied_embeddings=model.family in TIED if model.tied_embeddings is None else model.tied_embeddings,
        experts=Experts(*experts) if model.experts else None,
        latent=LatentKV(*latent) if model.latent_rank else None,
        window=model.window if model.windowed_layers else None,
        windowed_layers=model.windowed_layers if model.window else 0,
        chunked=model.chunked_windows,
        state_layers=model.state_layers,
        state_bytes=model.state_bytes,
        layer_bits=None if model.experts_only else bits,
        expert_bits=bits,
    )


def _bits_of(kind: WeightDtype, group: int) -> float | None:
    """Bits of a weight with its share of the scales; None: as the model's element type."""
    if kind is WeightDtype.int4:
        return 4 + 16 / group
    return {WeightDtype.fp8: 8.0, WeightDtype.int8: 8.0, WeightDtype.mxfp4: 4.25}.get(kind)


def _with_states(shape: ModelShape, model: ModelConfig) -> ModelShape:
    """A checkpoint's shape with the layers that keep a state, which its config.json does not tell in bytes."""
    if not model.state_layers:
        return shape
    if model.state_layers + shape.windowed_layers > shape.layers or model.state_layers == shape.layers:
        raise ConfigError(
            "model.state_layers",
            f"found {model.state_layers}, but the checkpoint has {shape.layers} layers, {shape.windowed_layers} of "
            "them with a window, and at least one layer must keep tokens",
        )
    return replace(shape, state_layers=model.state_layers, state_bytes=model.state_bytes)


def unmodelled(model: ModelConfig, key: str = "model.path") -> str:
    """What `ModelShape` does not know of `model`, in words; empty if it knows all."""
    if model.path:
        return " and ".join(unknown_parts(CheckpointFacts(model.path, key), states=model.state_layers > 0))
    moe = ("moe" in model.family or model.family == "mixtral") and not model.experts
    return f"a mixture of experts (family {model.family}), but model.experts is 0" if moe else ""


def draft_of(model: ModelConfig, path: str) -> ModelConfig:
    """The checkpoint at `path` as a draft model for `model`, in its element type."""
    return replace(model, name=Path(path).name, path=path)


_STRETCHED = ("llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")  # in the positions already


def max_position(model: ModelConfig) -> int:
    """The longest sequence that the model takes, in tokens. Raises ConfigError where a checkpoint says none.

    As vLLM's `_get_and_verify_max_len`: positions that are stretched by a factor take as many more, those of LongRoPE
    end where its short form does.
    """
    if not model.path:
        return model.max_position
    names = "max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "max_sequence_length"
    facts = CheckpointFacts(model.path)
    longest = facts.maybe("model_max_length", *names) or facts.number(*names)  # the first is Command R's own
    rope = facts.written("rope_parameters") or facts.written("rope_scaling")
    labels = facts.get("layer_types") or ()  # without them, one for each kind of layers is none for any
    whole = [rope, *(one for name, one in rope.items() if name in labels)] if isinstance(rope, dict) else []
    kinds = {
        one.get("rope_type", one.get("type")): one.get("factor") for one in whole if isinstance(one, dict)
    }
    if {"longrope", "su"} & kinds.keys():
        return facts.maybe("original_max_position_embeddings") or longest
    factors = [factor for kind, factor in kinds.items() if kind not in _STRETCHED and factor is not None]
    factor = factors[-1] if factors and "gemma3" not in facts.family else None
    return int(longest * factor) if isinstance(factor, int | float) and 0 < factor < 1e6 else longest


def layer_sets(model: ModelShape) -> list[LayerSet]:
    """The layers of a model by what they keep of a sequence: a state, a window, all tokens (or latent vectors).

    This is the order of their first layers in nearly every model, and so that of vLLM's groups: a request's pages are
    released group by group, so pages of states and windows are evicted first.
    """
    found = []
    if model.state_layers:
        found.append(LayerSet(GroupKind.state, model.state_layers, model.state_bytes))
    if model.windowed_layers:
        kind = GroupKind.chunk if model.chunked else GroupKind.window
        found.append(LayerSet(kind, model.windowed_layers, model.layer_kv_bytes, model.window))
    everything = model.attention_layers - model.windowed_layers
    kind = GroupKind.latent if model.latent else GroupKind.full
    return [*found, *([LayerSet(kind, everything, model.layer_kv_bytes)] if everything else [])]


def model_spec(model: ModelConfig) -> ModelSpec:
    """The engine's description of `model`."""
    known = {each.name: getattr(model, each.name) for each in fields(ModelSpec) if hasattr(model, each.name)}
    return ModelSpec(**known | {"dtype": str(model.dtype)})


def _draft_shape(model: ModelConfig, decoding: DecodingConfig) -> ModelShape | None:
    if not decoding.draft_tokens:
        return None
    path = decoding.draft_path
    return model_shape(draft_of(model, path), "decoding.draft_path") if path else model_shape(model)


def _device_shape(deployment: Deployment) -> DeviceShape:
    device, shape = deployment.device, deployment.shape
    parallel, kv_heads = device.tensor_parallel, 1 if shape.latent else shape.kv_heads
    if shape.heads % parallel or (kv_heads % parallel and parallel % kv_heads):
        reason = f"found {parallel}, must divide the {shape.heads} heads of {deployment.model.name} evenly, and its "
        raise ConfigError("device.tensor_parallel", f"{reason}{kv_heads} KV heads, or be a multiple of these")
    same = {one.name: getattr(device, one.name) for one in fields(DeviceShape) if hasattr(device, one.name)}
    return DeviceShape(
        **same,
        bandwidth=device.bandwidth_gbs * 1e9,
        flops=device.tflops * 1e12,
        step_overhead_s=device.step_overhead_us * 1e-6,
        layer_overhead_s=device.layer_overhead_us * 1e-6,
        parallel=device.tensor_parallel,
        link_bandwidth=device.link_gbs * 1e9,
        link_latency_s=device.link_round_us * 1e-6,
        host_bandwidth=device.host_link_gbs * 1e9,
        host_latency_s=device.host_link_latency_us * 1e-6,
        attention_overhead_s=device.attention_overhead_us * 1e-6,
        row_overhead_s=device.row_overhead_us * 1e-6,
        overlaps=True,
        replicas=device.data_parallel if deployment.shape.experts else 1,
        cache=device.l2_mib * 2**20,
        block_size_factor=_block_size_factor(deployment),
    )


def _block_size_factor(deployment: Deployment) -> float | None:
    """The factor on decode attention at this block size, by the static model; None without `cost.block_sizes`."""
    cache, shape = deployment.cache, deployment.shape
    if not deployment.cost.block_sizes or cache.policy is not CachePolicy.paged:
        return None
    if shape.latent:
        reason = f"true, but {deployment.model.name} has latent attention; leave it out"
        raise ConfigError("cost.block_sizes", reason)
    width, group = shape.kv_bytes_per_element or shape.bytes_per_element, shape.heads // shape.kv_heads
    try:
        return block_size_factor(
            deployment.device.name, int(width), cache.block_size, shape.head_dim, group
        ).factor
    except LookupError as error:
        reason = f"true, but the static model's table (conf/block_sizes.csv) does not hold {error.args[0]}"
        raise ConfigError("cost.block_sizes", reason) from error


def _pool_shape(config: RunConfig, model: ModelShape) -> PoolShape:
    """The pool: `cache.pool_blocks` or `cache.pool_tokens`, or what the devices' memory holds beside the weights."""
    cache = config.cache
    most = max_position(config.model)
    if cache.max_model_len is not None and cache.max_model_len > most:
        reason = f"{cache.max_model_len} tokens, but {config.model.name} takes {most} at most"
        raise ConfigError("cache.max_model_len", reason)
    longest = cache.max_model_len or most
    size = cache.block_size if cache.policy is CachePolicy.paged else 1
    tokens, sized_by, memory = _pool_tokens(config, model, size)
    groups = _group_layout(config, model)
    if groups is not None:
        chunk = config.scheduler.max_batched_tokens
        counts = groups.page_counts(tokens * model.kv_bytes_per_token, longest, chunk)
        if cache.pool_blocks:  # counts pages themselves
            counts = (cache.pool_blocks,)
        if min(counts) < 1:
            raise ConfigError(
                "cache.pool_tokens",
                f"the memory of {tokens} tokens holds {', '.join(map(str, counts))} pages of the groups of "
                f"{config.model.name}, each needs at least 1; enlarge the pool",
            )
    elif tokens < size:
        reason = f"{tokens} tokens hold no block of {size}; allowed: {size} or more"
        raise ConfigError("cache.pool_tokens", reason)
    slides = model.window is not None and model.window < longest
    beside = cache.tier_tokens > 0 and not config.measure and config.device.name != "cpu"
    taken = _TIERS.format(config.device.host_link_gbs / config.device.bandwidth_gbs)
    return PoolShape(
        policy=cache.policy,
        num_blocks=pages_of(groups, counts).num_pages if groups else tokens // size,
        block_size=groups.match_unit if groups else size,
        kv_bytes_per_token=model.kv_bytes_per_token,
        max_model_len=longest,
        prefix_caching=cache.prefix_caching and cache.policy is CachePolicy.paged,
        sized_by=sized_by,
        memory=memory,
        window=model.sight,
        note="; ".join([WINDOWS_KEPT] * (slides and not groups) + [taken] * beside),
        groups=groups,
        page_counts=counts if groups else (),
    )


def _group_layout(config: RunConfig, model: ModelShape) -> GroupLayout | None:
    """The groups of the model's layers; None with cache.groups=off."""
    cache, drafts = config.cache, config.decoding.draft_tokens
    if cache.groups is GroupPages.off:
        if cache.prefix_match_unit not in (None, cache.block_size):
            reason = f"found {cache.prefix_match_unit}: with one group of layers hits end with its blocks"
            raise ConfigError("cache.prefix_match_unit", f"{reason}, cache.block_size={cache.block_size}")
        return None
    sets, states = layer_sets(model), cache.states.within(cache.prefix_caching)
    try:
        layout = layout_of(cache.groups, sets, cache.block_size, cache.state_every, states)
    except CoreError as error:
        raise ConfigError("cache.groups", f"{cache.groups}: {error}") from error
    if drafts and model.state_layers:
        reason = f"found {drafts}, but {config.model.name} has layers with a state, and a state takes no draft back"
        raise ConfigError("decoding.draft_tokens", f"{reason}; set draft_tokens=0")
    if drafts and config.measure and all(group.forgets for group in layout.groups):
        reason = f"found {drafts}, but every layer has a window, and a measured draft model reads all tokens"
        raise ConfigError("decoding.draft_tokens", f"{reason}; set draft_tokens=0, or cache.groups=off")
    try:
        layout = replace(layout, unit=cache.prefix_match_unit if cache.prefix_caching else None)
    except CoreError as error:
        raise ConfigError("cache.prefix_match_unit", str(error)) from error
    try:
        CheckpointRule(cache.retention_interval, layout)
    except CoreError as error:
        raise ConfigError("cache.retention_interval", str(error)) from error
    return layout


def _pool_tokens(config: RunConfig, model: ModelShape, size: int) -> tuple[int, str, DeviceMemory | None]:
    """Tokens of the pool, the key that says so, and the memory that they were taken from."""
    cache, device = config.cache, config.device
    if cache.pool_blocks:
        return cache.pool_blocks * size, "cache.pool_blocks", None
    if cache.pool_tokens:
        return cache.pool_tokens, "cache.pool_tokens", None
    unknown = unmodelled(config.model)
    if unknown:
        raise ConfigError(
            "cache.pool_tokens",
            f"null, but the memory beside the weights of {config.model.path or config.model.name} is not known: it has "
            f"{unknown}, which PageTwin does not model. Set the pool by hand (cache.pool_blocks or pool_tokens)",
        )
    draft = _draft_shape(config.model, config.decoding)
    own = draft is not None and config.decoding.draft_path is not None
    weights = model.weight_bytes + (draft.weight_bytes if draft and own else 0)
    if model.experts:  # they lie on the devices of all replicas
        weights -= round(model.experts.count * model.expert_bytes * (1 - 1 / device.data_parallel))
    lanes = [model, draft] if draft else [model]
    token_bytes = sum(shape.kv_bytes_per_token * shape.kv_share(device.tensor_parallel) for shape in lanes)
    memory = device_memory(device, config.scheduler, model, weights)
    if memory.kv < token_bytes:
        raise ConfigError(
            "cache.pool_tokens",
            f"no KV fits beside {config.model.name}: each {device.name} has {memory.usable / 1e9:.1f} GB usable "
            f"(memory_gb x memory_utilization), weights take {memory.weights / 1e9:.1f} GB and all else "
            f"{(memory.usable - memory.weights - memory.kv) / 1e9:.1f} GB. Choose another device, more devices "
            "(device.tensor_parallel), or set the pool by hand",
        )
    return int(memory.kv // token_bytes), "device.memory_gb", memory


def device_memory(
    device: DeviceConfig, scheduler: SchedulerConfig, model: ModelShape, weight_bytes: float
) -> DeviceMemory:
    """The memory of each of the devices that share the model; `weight_bytes` are those of all models together."""
    formula = activation_bytes(model, scheduler, device.tensor_parallel)
    return DeviceMemory(
        usable=device.memory_gb * 1e9 * device.memory_utilization,
        weights=weight_bytes / device.tensor_parallel,
        activations=formula if device.activation_gb is None else device.activation_gb * 1e9,
        other=device.other_memory_gb * 1e9,
        graphs=device.graph_memory_gb * 1e9,
    )


def activation_bytes(model: ModelShape, scheduler: SchedulerConfig, parallel: int = 1) -> float:
    """The peak of a profile run on each device: of a forward pass with a full budget of tokens, or of the sampler.

    The pass holds per token four vectors of the hidden width (input, residual, queries, output), and the MLP's
    input after and before the gate. A token of a mixture of experts holds them for each of its experts. The sampler
    holds `max_running` rows of logits over the whole vocabulary, beside one hidden vector for each token.
    """
    tokens, width = scheduler.max_batched_tokens, model.bytes_per_element
    hidden = float(model.hidden * width)
    mlp = model.mlp_matrices * model.intermediate * width / parallel
    if model.experts:
        routed = model.experts.intermediate / parallel
        each = max((model.mlp_matrices - 1) * routed, model.hidden) + routed
        shared = model.mlp_matrices * model.experts.shared * width / parallel
        mlp = max(mlp if model.experts.dense_layers else 0.0, model.experts.active * each * width + shared)
    forward = tokens * (4 * hidden + mlp)
    rows = min(scheduler.max_running, tokens)
    return max(forward, tokens * hidden + rows * model.vocab * _SAMPLER_BYTES)
