"""Model, device and pool of a point as numbers. Nothing here imports torch."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine.core.options import CachePolicy
from engine.runtime.models.spec import ModelSpec
from engine.runtime.options import Dtype, KVDtype
from harness.config.errors import ConfigError
from harness.config.schema import ModelConfig, RunConfig
from harness.cost.roofline import DeviceShape, ModelShape

BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2}
# Families whose configuration in transformers ties input and output embeddings if the checkpoint does not say.
_TIED = (
    *("bloom", "cohere", "cohere2", "ernie4_5", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2"),
    *("gpt_bigcode", "gpt_neo", "mpt", "opt", "smollm3", "starcoder2", "xglm"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_STATE = ("linear_attention", "mamba", "recurrent")  # kinds of layers that keep a state instead of K and V
_UNGATED = ("gpt2", "opt", "gpt_neox", "gpt_bigcode")  # two MLP matrices instead of three


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


def model_shape(model: ModelConfig) -> ModelShape:
    """The shape of the model, from the configuration or from the checkpoint's config.json."""
    facts = _checkpoint_facts(model) if model.path else {}
    heads = facts.get("num_attention_heads") or facts.get("n_head") or model.heads
    hidden = facts.get("hidden_size") or facts.get("n_embd") or model.hidden
    family = facts.get("model_type") or model.family
    derived = hidden // heads if facts else model.head_dim
    return ModelShape(
        layers=facts.get("num_hidden_layers") or facts.get("n_layer") or model.layers,
        hidden=hidden,
        heads=heads,
        kv_heads=facts.get("num_key_value_heads") or (heads if facts else model.kv_heads),
        head_dim=facts.get("head_dim") or derived,
        intermediate=facts.get("intermediate_size")
        or facts.get("ffn_dim")
        or facts.get("n_inner")
        or _mlp(model, facts),
        vocab=facts.get("vocab_size") or model.vocab,
        bytes_per_element=BYTES[model.dtype],
        mlp_matrices=2 if family in _UNGATED else 3,
        tied_embeddings=bool(facts.get("tie_word_embeddings", family in _TIED)),
        kv_bytes_per_element=1 if model.kv_dtype is KVDtype.fp8_e4m3 else None,
    )


def unmodelled(config: RunConfig) -> str:
    """What `ModelShape` does not know of the model, in words; empty if it knows all that the sequences can meet."""
    model = config.model
    facts = _checkpoint_facts(model) if model.path else {}
    family = str(facts.get("model_type") or model.family)
    found = [f"a mixture of experts ({key} = {facts[key]})" for key in _EXPERTS if (facts.get(key) or 0) > 1]
    if not found and ("moe" in family or family == "mixtral"):
        found.append(f"a mixture of experts (family {family})")
    if facts.get("kv_lora_rank"):
        found.append(f"latent K and V (kv_lora_rank = {facts['kv_lora_rank']})")
    window = facts.get("sliding_window")
    if (
        window
        and facts.get("use_sliding_window", True)
        and window < (config.cache.max_model_len or max_position(model))
    ):
        found.append(f"sliding windows of {window} tokens")
    states = sorted({kind for kind in facts.get("layer_types") or () if kind in _STATE})
    if states:
        found.append(f"layers with a state ({', '.join(states)})")
    return " and ".join(found)


def draft_of(model: ModelConfig, path: str) -> ModelConfig:
    """The checkpoint at `path` as a draft model for `model`, in its element type."""
    return replace(model, name=Path(path).name, path=path)


def draft_shape(config: RunConfig) -> ModelShape | None:
    """The shape of the model that proposes tokens; None without speculation."""
    if not config.decoding.draft_tokens:
        return None
    path = config.decoding.draft_path
    return model_shape(draft_of(config.model, path) if path else config.model)


def _mlp(model: ModelConfig, facts: dict[str, Any]) -> int:
    return 4 * int(facts["n_embd"]) if "n_embd" in facts else model.intermediate


def _checkpoint_facts(model: ModelConfig) -> dict[str, Any]:
    """The checkpoint's config.json; of a multi-part model its text part."""
    path = Path(str(model.path)) / "config.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "model.path", f"{path}: not a readable checkpoint configuration ({error})"
        ) from error
    return dict(facts.get("text_config") or facts)


def max_position(model: ModelConfig) -> int:
    """The longest sequence that the model takes, in tokens."""
    if not model.path:
        return model.max_position
    facts = _checkpoint_facts(model)
    return int(facts.get("max_position_embeddings") or facts.get("n_positions") or model.max_position)


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
        bandwidth=device.bandwidth_gbs * 1e9 * device.bandwidth_efficiency,
        flops=device.tflops * 1e12 * device.compute_efficiency,
        step_overhead_s=device.step_overhead_us * 1e-6,
        layer_overhead_s=device.layer_overhead_us * 1e-6,
        parallel=device.tensor_parallel,
        link_bandwidth=device.link_gbs * 1e9,
        link_latency_s=device.link_latency_us * 1e-6,
        host_bandwidth=device.host_link_gbs * 1e9,
        host_latency_s=device.host_link_latency_us * 1e-6,
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
    unknown = unmodelled(config)
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
