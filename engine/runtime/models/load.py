"""Loads the model of a `ModelSpec` onto the paged KV cache, or raises a `ModelError` that says why it cannot run.

transformers replaces the attention of a model by name, and a model that ignores the name only logs a warning. So one
token is run through the model after the replacement: every layer must call our function exactly once. The same token
shows the K and V shapes that each layer really sends, because configs often state them wrongly.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine.runtime.attention.layer import PagedStep, use_paged_attention
from engine.runtime.errors import ModelError
from engine.runtime.kv_pool import LayerShape
from engine.runtime.models.cpu_layers import original_layers
from engine.runtime.models.spec import ModelSpec, check_config, check_model, config_values
from paged_kernels import Scoring, Workspace

# keywords that layers may send beside q, k, v and the paged kernels' arguments; they do not change the attention
_IGNORED_KEYWORDS = frozenset(
    {"position_ids", "use_cache", "dropout", "is_causal", "cache_position", "layer_type"}
)


@dataclass(frozen=True)
class LoadedModel:
    """A transformers model whose attention reads and writes paged KV. Get one from `load_model` or `wrap_model`."""

    name: str
    model: Any  # a transformers PreTrainedModel, in eval mode
    kv_shapes: tuple[
        LayerShape, ...
    ]  # per layer ((kv_heads, dk), (kv_heads, dv)), as the layer really sends them
    vocab_size: int
    max_position: int  # longest sequence in tokens
    kv_bytes_per_token: int  # K and V over all layers
    device: torch.device
    dtype: torch.dtype
    first_token_id: int  # the ids below it are special tokens, or lie between special tokens
    end_ids: tuple[int, ...]  # of its generation configuration, or else of its configuration
    original_attention: str  # name of the attention implementation that transformers chose
    workspace: Workspace  # scratch memory of the attention kernels, kept from run to run

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, paged: PagedStep, keep: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the model over a flat batch `[1, tokens]`: logits `[tokens, vocab]`, or `[len(keep), vocab]`.

        `paged` says where K and V are stored and read; `keep` are the flat positions whose logits are wanted.
        """
        kept = {} if keep is None else {"logits_to_keep": keep}
        output = self.model(input_ids=ids, position_ids=positions, use_cache=False, paged=paged, **kept)
        logits: torch.Tensor = output.logits[0]
        return logits


def load_model(spec: ModelSpec, *, device: str = "cpu") -> LoadedModel:
    """Build the model with random weights, or load the checkpoint, and put it on paged KV. Raises ModelError."""
    check_model(spec)
    dtype = getattr(torch, spec.dtype)
    model = _random_model(spec, dtype) if spec.path is None else _checkpoint(spec, dtype)
    return wrap_model(model.to(device), name=spec.name)


def wrap_model(model: Any, *, name: str) -> LoadedModel:
    """Put a causal language model of transformers on paged KV. Raises ModelError, and the model stays as it was."""
    model.eval()
    config = model.config.get_text_config()
    check_config(name, config.to_dict())
    original = model.config._attn_implementation
    first = _first_token_id(config)
    try:
        use_paged_attention(model, name)
        shapes = probe_layers(model, name, first)
    except ModelError:
        model.set_attn_implementation(original)
        raise
    width = sum(heads * dim for layer in shapes for heads, dim in layer)
    return LoadedModel(
        name=name,
        model=model,
        kv_shapes=shapes,
        vocab_size=config.vocab_size,
        max_position=config.max_position_embeddings,
        kv_bytes_per_token=width * model.dtype.itemsize,
        device=model.device,
        dtype=model.dtype,
        first_token_id=first,
        end_ids=_end_token_ids(model),
        original_attention=original,
        workspace=Workspace(),
    )


@contextmanager
def original_model(loaded: LoadedModel) -> Iterator[Any]:
    """The model with its original attention and layers, for reference runs such as `generate()`.

    On leaving the context, paged attention and the faster layers are put back.
    """
    loaded.model.set_attn_implementation(loaded.original_attention)
    try:
        with original_layers(loaded.model):
            yield loaded.model
    finally:
        use_paged_attention(loaded.model, loaded.name)


def _random_model(spec: ModelSpec, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(spec.family, **config_values(spec))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _checkpoint(spec: ModelSpec, dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            spec.path, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model {spec.name}: {spec.path} does not load: {error}") from error
    absent = sorted(info["missing_keys"])
    if absent:  # transformers fills them with random numbers and only logs a warning
        raise ModelError(
            f"model {spec.name}: {spec.path} lacks {len(absent)} of the weights that its config.json asks for, "
            f"for example {absent[0]}"
        )
    return model


def _end_token_ids(model: Any) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    value = getattr(generation, "eos_token_id", None)
    if value is None:
        value = getattr(model.config.get_text_config(), "eos_token_id", None)
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (int(value),)


def _first_token_id(config: Any) -> int:
    """The first id above the special tokens in the lower half of the vocabulary; 0 if there are none."""
    special: list[int] = []
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, key, None)
        special.extend(value if isinstance(value, list) else [] if value is None else [value])
    low = [token for token in special if token < config.vocab_size // 2]
    return max(low) + 1 if low else 0


def _is_ignored(name: str) -> bool:
    return name in _IGNORED_KEYWORDS or name.startswith("output_")  # `output_*`: what the model returns


class ShapeProbe:
    """Takes the place of the `PagedStep` in a test pass: records the shapes of K and V, and returns zeros."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.calls = 0
        self.unsupported: set[str] = set()

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        rest: Mapping[str, Any],
    ) -> torch.Tensor:
        """Record one layer's call."""
        self.calls += 1
        if rest.get("is_causal", getattr(module, "is_causal", True)) is False:
            self.unsupported.add("keys to the right of a query")
        self.shapes[module.layer_idx] = ((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]))
        self.unsupported |= {
            name for name, sent in rest.items() if sent is not None and not _is_ignored(name)
        }
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def probe_layers(model: Any, name: str, token: int) -> tuple[LayerShape, ...]:
    """Run one token through the model and return the KV shapes of its layers.

    Raises ModelError unless every layer called `paged_attention` exactly once, with arguments that the kernels support.
    """
    probe = ShapeProbe()
    ids = torch.tensor([[token]], device=model.device)
    with torch.inference_mode():
        model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False, paged=probe)
    layers = model.config.get_text_config().num_hidden_layers
    if probe.calls != layers or sorted(probe.shapes) != list(range(layers)):
        raise ModelError(
            f"model {name}: {len(probe.shapes)} of {layers} layers ran on paged attention ({probe.calls} calls): "
            f"{model.config.model_type} has layers without a KV cache per token"
        )
    if probe.unsupported:
        raise ModelError(
            f"model {name}: {model.config.model_type} asks its attention for {', '.join(sorted(probe.unsupported))}, "
            "which the paged kernels do not support"
        )
    return tuple(probe.shapes[layer] for layer in range(layers))
