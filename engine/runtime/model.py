"""From a model spec to a model that runs on paged KV, or to the reason why it cannot.

transformers swaps attention functions by name, and a model that ignores the name only logs a warning. So nothing is
believed here: after the swap one token is run, and every layer must have called our function.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.runtime.checkpoint import read_config
from engine.runtime.errors import ModelError
from engine.runtime.families import check_shape, config_values
from engine.runtime.refusals import check_config
from engine.runtime.spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from engine.runtime.probe import LayerShape
    from paged_kernels import Workspace

__all__ = [
    "LoadedModel",
    "ModelError",
    "ModelSpec",
    "adopt_model",
    "check_model",
    "load_model",
    "native_attention",
]

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LoadedModel:
    """A transformers model whose attention reads and writes paged KV."""

    name: str
    model: Any  # a transformers PreTrainedModel, in eval mode
    kv_shapes: (
        "tuple[LayerShape, ...]"  # per layer ((kv_heads, dk), (kv_heads, dv)), as the layer really sends them
    )
    vocab_size: int
    max_position: int  # longest sequence in tokens
    kv_bytes_per_token: int  # K and V over all layers
    device: "torch.device"
    dtype: "torch.dtype"
    first_token_id: int  # ids below are, or stand among, the special tokens
    end_ids: tuple[int, ...]  # of its generation configuration, or else of its configuration
    native_attention: str  # the implementation the model came with
    workspace: "Workspace"  # scratch of the attention kernels, kept from run to run


def check_model(spec: ModelSpec) -> None:
    """Raise ModelError for a spec that cannot be loaded, as far as that is known without importing torch."""
    if spec.dtype not in DTYPES:
        raise ModelError(
            f"model {spec.name}: dtype {spec.dtype!r} does not exist; choose {', '.join(DTYPES)}"
        )
    if spec.path is None:
        check_config(spec.name, {"model_type": spec.family})
        check_shape(spec)
    else:
        check_config(spec.name, read_config(spec.path))


def load_model(spec: ModelSpec, *, device: str = "cpu") -> LoadedModel:
    """Build the random-initialised model, or load the checkpoint, and put it on paged KV. Raises ModelError."""
    import torch

    check_model(spec)
    dtype = getattr(torch, spec.dtype)
    model = _random_model(spec, dtype) if spec.path is None else _checkpoint(spec, dtype)
    return adopt_model(model.to(device), name=spec.name)


def adopt_model(model: Any, *, name: str) -> LoadedModel:
    """Swap the attention of a transformers causal LM for ours. A model that is refused (ModelError) stays as it was."""
    from engine.runtime.attention import use_paged_attention
    from engine.runtime.probe import probe_layers
    from paged_kernels import Workspace

    model.eval()
    config = model.config.get_text_config()
    check_config(name, config.to_dict())
    native = model.config._attn_implementation
    first = _first_token_id(config)
    try:
        use_paged_attention(model, name)
        shapes = probe_layers(model, name, first)
    except ModelError:
        model.set_attn_implementation(native)
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
        native_attention=native,
        workspace=Workspace(),
    )


@contextmanager
def native_attention(loaded: LoadedModel) -> Iterator[Any]:
    """The model as it came, attention and layers, for reference runs such as `generate()`; ours are put back after."""
    from engine.runtime.adopting import own_layers
    from engine.runtime.attention import use_paged_attention

    loaded.model.set_attn_implementation(loaded.native_attention)
    try:
        with own_layers(loaded.model):
            yield loaded.model
    finally:
        use_paged_attention(loaded.model, loaded.name)


def _random_model(spec: ModelSpec, dtype: "torch.dtype") -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(spec.family, **config_values(spec))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _checkpoint(spec: ModelSpec, dtype: "torch.dtype") -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            spec.path, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model {spec.name}: {spec.path} does not load: {error}") from error
    absent = sorted(info["missing_keys"])
    if absent:  # transformers would fill them with random numbers and say so in a log
        raise ModelError(
            f"model {spec.name}: {spec.path} lacks {len(absent)} of the weights that its config.json asks for, "
            f"{absent[0]} among them"
        )
    return model


def _end_token_ids(model: Any) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    value = getattr(generation, "eos_token_id", None)
    if value is None:
        value = getattr(model.config.get_text_config(), "eos_token_id", None)
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (int(value),)


def _first_token_id(config: Any) -> int:
    """The first id above the special tokens, where those lie at the bottom of the vocabulary; else 0."""
    special: list[int] = []
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, key, None)
        special.extend(value if isinstance(value, list) else [] if value is None else [value])
    low = [token for token in special if token < config.vocab_size // 2]
    return max(low) + 1 if low else 0
