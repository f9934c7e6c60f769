"""Model, device and pool of a point as numbers. Nothing here imports torch."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from engine.core.errors import CoreError
from engine.core.memory.group_layout import GroupLayout, LayerSet, separate_layout, uniform_layout
from engine.core.memory.grouped import pages_of
from engine.core.options import CachePolicy, GroupKind, GroupPages
from engine.runtime.models.spec import ModelSpec
from engine.runtime.options import Dtype, KVDtype
from harness.config.checkpoint import CheckpointFacts
from harness.config.errors import ConfigError
from harness.config.schema import ModelConfig, RunConfig
from harness.cost.block_sizes import block_size_factor
from harness.cost.model_shape import Experts, LatentKV, ModelShape
from harness.cost.roofline import DeviceShape
from harness.workload.architecture import TIED, UNGATED, bits_of, checkpoint_shape, unknown_parts
from harness.workload.memory import DeviceMemory, device_memory

BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2}


_WINDOWS_KEPT = (
    "windowed layers keep every block, as in vLLM with --disable-hybrid-kv-cache-manager; by default vLLM frees blocks "
    "beyond a window, so its pool holds more (cache.groups=uniform predicts that)"
)


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
    window: int | None = None
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
    def slot_bytes(self) -> int:
        """Bytes of a slot; with groups, the largest size of which pages, tokens and states are multiples."""
        return self.kv_bytes_per_token if self.groups is None else self.groups.slot_bytes

    @property
    def origin(self) -> str:
        """In words where the size comes from."""
        if self.memory is None:
            return f"set by {self.sized_by}"
        parts = {name: f"{size / 1e9:.2f}" for name, size in asdict(self.memory).items()}
        words = (
            f"automatic, on each device {parts['usable']} GB usable - {parts['weights']} weights - "
            f"{parts['activations']} activations - {parts['other']} other - {parts['graphs']} graphs"
        )
        return f"{words}; {self.note}" if self.note else words


def model_shape(model: ModelConfig, key: str = "model.path") -> ModelShape:
    """The shape of the model, from the configuration or from the checkpoint's config.json.

    Raises:
        ConfigError: the checkpoint's config.json does not give the shape; names `key`.
    """
    width = 1 if model.kv_dtype is KVDtype.fp8_e4m3 else None
    size = BYTES[model.dtype]
    bits = bits_of(model.weight_dtype, model.weight_group)
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
        experts=_experts(model),
        latent=_latent(model),
        window=model.window if model.windowed_layers else None,
        windowed_layers=model.windowed_layers if model.window else 0,
        state_layers=model.state_layers,
        state_bytes=model.state_bytes,
        layer_bits=None if model.experts_only else bits,
        expert_bits=bits,
    )


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


def _experts(model: ModelConfig) -> Experts | None:
    if not model.experts:
        return None
    return Experts(
        count=model.experts,
        active=model.experts_per_token,
        intermediate=model.expert_intermediate,
        shared=model.shared_intermediate,
        dense_layers=model.dense_layers,
        skew=model.expert_skew,
    )


def _latent(model: ModelConfig) -> LatentKV | None:
    if not model.latent_rank:
        return None
    return LatentKV(model.latent_rank, model.rope_dim, model.value_dim, model.query_rank)


def unmodelled(model: ModelConfig, key: str = "model.path") -> str:
    """What `ModelShape` does not know of `model`, in words; empty if it knows all."""
    if model.path:
        return " and ".join(unknown_parts(CheckpointFacts(model.path, key), states=model.state_layers > 0))
    moe = ("moe" in model.family or model.family == "mixtral") and not model.experts
    return f"a mixture of experts (family {model.family}), but model.experts is 0" if moe else ""


def draft_of(model: ModelConfig, path: str) -> ModelConfig:
    """The checkpoint at `path` as a draft model for `model`, in its element type."""
    return replace(model, name=Path(path).name, path=path)


def draft_shape(config: RunConfig) -> ModelShape | None:
    """The shape of the model that proposes tokens; None without speculation."""
    if not config.decoding.draft_tokens:
        return None
    path = config.decoding.draft_path
    return (
        model_shape(draft_of(config.model, path), "decoding.draft_path")
        if path
        else model_shape(config.model)
    )


def max_position(model: ModelConfig) -> int:
    """The longest sequence that the model takes, in tokens."""
    if not model.path:
        return model.max_position
    facts = CheckpointFacts(model.path)
    return (
        facts.maybe("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
        or model.max_position
    )


def device_shape(config: RunConfig) -> DeviceShape:
    """The simulated device in SI units.

    Raises:
        ConfigError: the heads cannot be split evenly among the devices.
    """
    device = config.device
    heads = model_shape(config.model).heads
    if heads % device.tensor_parallel:
        raise ConfigError(
            "device.tensor_parallel",
            f"found {device.tensor_parallel}, must divide the {heads} heads of {config.model.name} evenly",
        )
    return DeviceShape(
        name=device.name,
        bandwidth=device.bandwidth_gbs * 1e9,
        flops=device.tflops * 1e12,
        step_overhead_s=device.step_overhead_us * 1e-6,
        layer_overhead_s=device.layer_overhead_us * 1e-6,
        parallel=device.tensor_parallel,
        link_bandwidth=device.link_gbs * 1e9,
        link_latency_s=device.link_latency_us * 1e-6,
        link_efficiency=device.link_efficiency,
        host_bandwidth=device.host_link_gbs * 1e9,
        host_latency_s=device.host_link_latency_us * 1e-6,
        bandwidth_efficiency=device.bandwidth_efficiency,
        kv_efficiency=device.kv_efficiency,
        compute_efficiency=device.compute_efficiency,
        attention_efficiency=device.attention_efficiency,
        attention_overhead_s=device.attention_overhead_us * 1e-6,
        row_overhead_s=device.row_overhead_us * 1e-6,
        overlaps=True,
        expert_parallel=device.expert_parallel,
        multiprocessors=device.multiprocessors,
        cache=device.l2_mib * 2**20,
        clock_ghz=device.clock_ghz,
        block_size_factor=block_size_factor_of(config),
    )


def block_size_factor_of(config: RunConfig) -> float | None:
    """The factor on decode attention at this block size, by the static model; None without `cost.block_sizes`.

    Raises:
        ConfigError: the model's table does not hold this device, shape or block size.
    """
    if not config.cost.block_sizes or config.cache.policy is not CachePolicy.paged:
        return None
    shape = model_shape(config.model)
    width = shape.kv_bytes_per_element or shape.bytes_per_element
    if shape.latent:
        raise ConfigError(
            "cost.block_sizes", f"true, but {config.model.name} has latent attention; leave it out"
        )
    group = shape.heads // shape.kv_heads
    try:
        return block_size_factor(
            config.device.name, int(width), config.cache.block_size, shape.head_dim, group
        ).factor
    except LookupError as error:
        raise ConfigError(
            "cost.block_sizes",
            f"true, but the static model's table (conf/block_sizes.csv) does not hold {error.args[0]}",
        ) from error


def pool_shape(config: RunConfig) -> PoolShape:
    """The pool: `cache.pool_blocks` or `cache.pool_tokens`, or what the devices' memory holds beside the weights.

    Raises:
        ConfigError: the pool holds no block, or the sequences are longer than the model allows.
    """
    cache, model = config.cache, model_shape(config.model)
    longest = max_position(config.model)
    if cache.max_model_len is not None and cache.max_model_len > longest:
        raise ConfigError(
            "cache.max_model_len",
            f"{cache.max_model_len} tokens, but {config.model.name} takes {longest} at most",
        )
    size = cache.block_size if cache.policy is CachePolicy.paged else 1
    tokens, sized_by, memory = _size(config, model, size)
    groups = group_layout(config, model)
    if groups is not None:
        return _grouped_pool(config, model, groups, tokens, sized_by, memory)
    if tokens < size:
        raise ConfigError(
            "cache.pool_tokens", f"{tokens} tokens hold no block of {size}; allowed: {size} or more"
        )
    return PoolShape(
        policy=cache.policy,
        num_blocks=tokens // size,
        block_size=size,
        kv_bytes_per_token=model.kv_bytes_per_token,
        max_model_len=cache.max_model_len or longest,
        prefix_caching=cache.prefix_caching and cache.policy is CachePolicy.paged,
        sized_by=sized_by,
        memory=memory,
        window=model.window,
        note=_WINDOWS_KEPT if _slides(config, model) else "",
    )


def layer_sets(model: ModelShape) -> list[LayerSet]:
    """The layers of a model by what they keep of a sequence: all tokens (or latent vectors), a window, a state."""
    everything = model.attention_layers - model.windowed_layers
    kind = GroupKind.latent if model.latent else GroupKind.full
    found = [LayerSet(kind, everything, model.layer_kv_bytes)] if everything else []
    if model.windowed_layers:
        found.append(LayerSet(GroupKind.window, model.windowed_layers, model.layer_kv_bytes, model.window))
    if model.state_layers:
        found.append(LayerSet(GroupKind.state, model.state_layers, model.state_bytes))
    return found


def group_layout(config: RunConfig, model: ModelShape) -> GroupLayout | None:
    """The groups of the model's layers; None with cache.groups=off.

    Raises:
        ConfigError: the pages of the groups cannot be unified.
    """
    cache = config.cache
    if cache.groups is GroupPages.off:
        return None
    sets = layer_sets(model)
    try:
        if cache.groups is GroupPages.uniform:
            return uniform_layout(sets, cache.block_size)
        return separate_layout(sets, cache.block_size, state_every=cache.state_every, pages=cache.groups)
    except CoreError as error:
        raise ConfigError("cache.groups", f"{cache.groups}: {error}") from error


def _grouped_pool(
    config: RunConfig,
    model: ModelShape,
    groups: GroupLayout,
    tokens: int,
    sized_by: str,
    memory: DeviceMemory | None,
) -> PoolShape:
    """Pages in the memory of `tokens` tokens in all layers; `cache.pool_blocks` counts pages themselves."""
    cache = config.cache
    longest = cache.max_model_len or max_position(config.model)
    chunk = config.scheduler.max_batched_tokens
    counts = groups.page_counts(tokens * model.kv_bytes_per_token, longest, chunk)
    if cache.pool_blocks:
        counts = (cache.pool_blocks,)
    if min(counts) < 1:
        raise ConfigError(
            "cache.pool_tokens",
            f"the memory of {tokens} tokens holds {', '.join(map(str, counts))} pages of the groups of "
            f"{config.model.name}, each needs at least 1; enlarge the pool",
        )
    return PoolShape(
        policy=cache.policy,
        num_blocks=pages_of(groups, counts).num_pages,
        block_size=groups.match_unit,
        kv_bytes_per_token=model.kv_bytes_per_token,
        max_model_len=longest,
        prefix_caching=cache.prefix_caching,
        sized_by=sized_by,
        memory=memory,
        window=model.window,
        groups=groups,
        page_counts=counts,
    )


def _size(config: RunConfig, model: ModelShape, size: int) -> tuple[int, str, DeviceMemory | None]:
    """Tokens of the pool, the key that says so, and the memory that they were taken from."""
    cache = config.cache
    if cache.pool_blocks:
        return cache.pool_blocks * size, "cache.pool_blocks", None
    if cache.pool_tokens:
        return cache.pool_tokens, "cache.pool_tokens", None
    tokens, memory = _tokens_beside_weights(config, model)
    return tokens, "device.memory_gb", memory


def _tokens_beside_weights(config: RunConfig, model: ModelShape) -> tuple[int, DeviceMemory]:
    unknown = unmodelled(config.model)
    if unknown:
        raise ConfigError(
            "cache.pool_tokens",
            f"null, but the memory beside the weights of {config.model.path or config.model.name} is not known: it has "
            f"{unknown}, which PageTwin does not model. Set the pool by hand (cache.pool_blocks or pool_tokens)",
        )
    device = config.device
    draft = draft_shape(config)
    own = draft is not None and config.decoding.draft_path is not None
    weights = model.weight_bytes + (draft.weight_bytes if draft and own else 0)
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
    return int(memory.kv // token_bytes), memory


def _slides(config: RunConfig, model: ModelShape) -> bool:
    """Whether sequences may be longer than the window of some layers."""
    longest = config.cache.max_model_len or max_position(config.model)
    return model.window is not None and model.window < longest


def model_spec(model: ModelConfig) -> ModelSpec:
    """The engine's description of `model`."""
    known = {each.name: getattr(model, each.name) for each in fields(ModelSpec) if hasattr(model, each.name)}
    return ModelSpec(**known | {"dtype": str(model.dtype)})
