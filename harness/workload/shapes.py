"""Model, device and pool of a point as numbers. Nothing here imports torch."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine.core.options import CachePolicy
from engine.runtime.models.spec import ModelSpec
from engine.runtime.options import Dtype, KVDtype
from harness.config.checkpoint import CheckpointFacts
from harness.config.errors import ConfigError
from harness.config.schema import ModelConfig, RunConfig
from harness.cost.roofline import DeviceShape, ModelShape

BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2}
# Families whose configuration in transformers ties input and output embeddings if the checkpoint does not say.
_TIED = (
    *("bloom", "cohere", "cohere2", "ernie4_5", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2"),
    *("gpt_bigcode", "mpt", "opt", "smollm3", "starcoder2"),
)
# Families with two MLP matrices instead of three.
_UNGATED = (
    *(
        "apertus",
        "arcee",
        "bloom",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gptj",
        "mpt",
        "nemotron",
        "opt",
    ),
    *("phi", "starcoder2"),
)
# Families whose every layer is full or windowed attention and a dense MLP: what `ModelShape` describes.
_DENSE = (
    *(*_TIED, *_UNGATED),
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "stablelm", "olmo", "olmo2", "granite"),
    *("exaone4", "glm", "glm4", "helium", "seed_oss"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class PoolShape:
    """KV memory of a point. A contiguous policy has blocks of one token."""

    policy: CachePolicy
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int
    max_model_len: int
    prefix_caching: bool

    @property
    def tokens(self) -> int:
        """KV slots of the pool."""
        return self.num_blocks * self.block_size


def model_shape(model: ModelConfig, key: str = "model.path") -> ModelShape:
    """The shape of the model, from the configuration or from the checkpoint's config.json.

    Raises:
        ConfigError: the checkpoint's config.json does not give the shape; names `key`.
    """
    width = 1 if model.kv_dtype is KVDtype.fp8_e4m3 else None
    size = BYTES[model.dtype]
    if not model.path:
        return ModelShape(
            *(model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim),
            *(model.intermediate, model.vocab, size),
            mlp_matrices=2 if model.family in _UNGATED else 3,
            kv_bytes_per_element=width,
            tied_embeddings=model.family in _TIED,
        )
    facts = CheckpointFacts(model.path, key)
    heads = facts.number("num_attention_heads", "n_head", "n_heads")
    hidden = facts.number("hidden_size", "n_embd", "d_model")
    mlp = facts.maybe("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    tied = facts.get("tie_word_embeddings")
    return ModelShape(
        layers=facts.number("num_hidden_layers", "n_layer", "n_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(facts, heads),
        head_dim=facts.maybe("head_dim") or hidden // heads,
        intermediate=mlp or (4 * hidden if facts.family in _UNGATED else facts.number("intermediate_size")),
        vocab=facts.number("vocab_size"),
        bytes_per_element=size,
        mlp_matrices=2 if facts.family in _UNGATED else 3,
        kv_bytes_per_element=width,
        tied_embeddings=facts.family in _TIED if tied is None else bool(tied),
    )


def _kv_heads(facts: CheckpointFacts, heads: int) -> int:
    """Grouped-query attention says how many; multi-query attention (gpt_bigcode, the first falcon) has one."""
    if facts.get("multi_query") and not facts.get("new_decoder_architecture"):
        return 1
    return facts.maybe("num_key_value_heads", "num_kv_heads") or heads


def unmodelled(config: RunConfig, model: ModelConfig, key: str = "model.path") -> str:
    """What `ModelShape` does not know of `model`, in words; empty if it knows all that the sequences can meet."""
    if not model.path:
        moe = "moe" in model.family or model.family == "mixtral"
        return f"a mixture of experts (family {model.family})" if moe else ""
    facts = CheckpointFacts(model.path, key)
    experts = [name for name in _EXPERTS if facts.get(name) not in (None, 0, 1)]
    found = [f"a mixture of experts ({name} = {facts.get(name)})" for name in experts]
    if facts.get("kv_lora_rank"):
        found.append(f"latent K and V (kv_lora_rank = {facts.get('kv_lora_rank')})")
    kinds = facts.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []
    other = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if other:
        found.append(f"layers of other kinds ({', '.join(other)})")
    if facts.get("quantization_config"):
        found.append("quantised weights (quantization_config)")
    window = _window(facts, kinds)
    if window and window < (config.cache.max_model_len or max_position(model)):
        found.append(
            f"sliding windows of {window} tokens (cache.max_model_len={window} never reaches beyond one)"
        )
    if not found and facts.family not in _DENSE:
        found.append(f"an architecture that it has not been taught (model_type {facts.family or 'missing'})")
    return " and ".join(found)


def _window(facts: CheckpointFacts, kinds: list[Any]) -> int | None:
    """The sliding window, or None where no layer slides."""
    layers, first = facts.maybe("num_hidden_layers", "n_layer", "n_layers"), facts.get("max_window_layers")
    if facts.get("use_sliding_window") is False or (kinds and "sliding_attention" not in kinds):
        return None
    if not kinds and layers and isinstance(first, int) and first >= layers:
        return None
    return facts.maybe("sliding_window")


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
        host_bandwidth=device.host_link_gbs * 1e9,
        host_latency_s=device.host_link_latency_us * 1e-6,
        bandwidth_efficiency=device.bandwidth_efficiency,
        kv_efficiency=device.kv_efficiency,
        compute_efficiency=device.compute_efficiency,
        attention_efficiency=device.attention_efficiency,
        attention_overhead_s=device.attention_overhead_us * 1e-6,
        row_overhead_s=device.row_overhead_us * 1e-6,
        overlaps=True,
    )


def pool_shape(config: RunConfig) -> PoolShape:
    """The pool: `cache.pool_tokens`, or the tokens that the device's memory holds beside the weights.

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
    tokens = cache.pool_tokens or _tokens_beside_weights(config, model)
    size = cache.block_size if cache.policy is CachePolicy.paged else 1
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
    )


def _tokens_beside_weights(config: RunConfig, model: ModelShape) -> int:
    unknown = unmodelled(config, config.model)
    if unknown:
        raise ConfigError(
            "cache.pool_tokens",
            f"null, but the memory beside the weights of {config.model.path or config.model.name} is not known: it has "
            f"{unknown}, which PageTwin does not model. Set the pool by hand",
        )
    device = config.device
    memory_gb = device.memory_gb * device.tensor_parallel
    draft = draft_shape(config)
    own = draft is not None and config.decoding.draft_path is not None
    weights = model.weight_bytes + (draft.weight_bytes if draft and own else 0)
    token_bytes = model.kv_bytes_per_token + (draft.kv_bytes_per_token if draft else 0)
    free = memory_gb * 1e9 * device.memory_utilization - weights
    if free < token_bytes:
        raise ConfigError(
            "cache.pool_tokens",
            f"{device.tensor_parallel} x {device.name} has {memory_gb:g} GB, the weights of {config.model.name} take "
            f"{weights / 1e9:.1f} GB, so that no KV fits. Choose another device, or set the pool by hand",
        )
    return int(free // token_bytes)


def model_spec(model: ModelConfig) -> ModelSpec:
    """The engine's description of `model`."""
    fields = {**asdict(model), "dtype": str(model.dtype)}
    del fields["kv_dtype"]  # the pool's, not the model's
    return ModelSpec(**fields)
