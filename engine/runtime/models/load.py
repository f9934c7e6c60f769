"""Loads the model of a `ModelSpec` onto the paged KV cache, or raises a `ModelError` that says why it cannot run.

transformers replaces the attention of a model by name, and a model that ignores the name only logs a warning. So the
replaced attention is probed with one token (`probe.py`), and a small copy of the architecture must compute on paged KV
what it computes natively (`guard.py`).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine.runtime.attention.layer import LayerAttention, use_paged_attention
from engine.runtime.attention.state import Mixer, find_mixers, mixing, state_shapes
from engine.runtime.errors import ModelError
from engine.runtime.group_pool import StateShape
from engine.runtime.kv_pool import LayerShape, kv_dtype_of
from engine.runtime.models import probe
from engine.runtime.models.cpu_layers import original_layers
from engine.runtime.models.guard import check_architecture
from engine.runtime.models.spec import ModelSpec, check_config, check_model, config_values
from engine.runtime.options import KVDtype
from paged_kernels import Workspace
from paged_kernels.backends import Demand, choose_for_layers, resolve_backend
from paged_kernels.private import attention_of


@dataclass(frozen=True)
class LoadedModel:
    """A transformers model whose attention reads and writes paged KV. Get one from `load_model` or `wrap_model`."""

    name: str
    model: Any  # a transformers PreTrainedModel, in eval mode
    # per layer ((kv_heads, dk), (kv_heads, dv)), as the layer really sends them; all 0 where it sends none
    kv_shapes: tuple[LayerShape, ...]
    latent_shapes: tuple[LayerShape, ...] | None  # of latent vectors, where every layer can hand them over
    windows: tuple[int, ...]  # per layer in tokens, as the layer tells its attention; 0: it sees every token
    vocab_size: int
    max_position: int  # longest sequence in tokens
    kv_bytes_per_token: int  # K and V over all layers
    device: torch.device
    dtype: torch.dtype
    first_token_id: int  # the ids below it are special tokens, or lie between special tokens
    end_ids: tuple[int, ...]  # of its generation configuration, or else of its configuration
    original_attention: str  # name of the attention implementation that transformers chose
    workspace: Workspace  # scratch memory of the attention kernels, kept from run to run
    mixers: tuple[Mixer, ...] = ()  # modules that keep a recurrent state
    singly: bool = False  # whether they go on from a state by one token alone

    @property
    def states(self) -> dict[int, StateShape]:
        """The state that each layer keeps of a sequence, of the layers that keep one."""
        return state_shapes(self.mixers)

    @property
    def group_shapes(self) -> tuple[LayerShape, ...]:
        """What the layers send where they lie in groups: latent vectors, else K and V."""
        return self.latent_shapes or self.kv_shapes

    def logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        paged: LayerAttention,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the model over a flat batch `[1, tokens]`: logits `[tokens, vocab]`, or `[len(keep), vocab]`.

        `paged` says where K and V are stored and read; `keep` are the flat positions whose logits are wanted.
        """
        return probe.run_flat(self.model, ids, positions, paged, keep)


def demands_of(models: Iterable[LoadedModel | None], kv_dtype: KVDtype | str) -> set[Demand]:
    """What the layers of models ask of the attention kernels, with K and V in `kv_dtype`. Raises ModelError."""
    sent = [_demands(loaded.model, loaded.kv_shapes, kv_dtype) for loaded in models if loaded is not None]
    return set().union(*sent)


def _demands(model: Any, shapes: Iterable[LayerShape], kv_dtype: KVDtype | str) -> set[Demand]:
    stored, found = kv_dtype_of(kv_dtype, model.dtype), set()
    heads = model.config.get_text_config().to_dict().get("num_attention_heads")
    for kv_heads, dim in {shape for layer in shapes for shape in layer if shape[0]}:
        group = heads // kv_heads if isinstance(heads, int) else 1
        found.add(Demand(model.dtype, stored, group, dim, dim % 16 == 0, dim % 2 == 0))
    return found


def check_backend(spec: ModelSpec, backend: str, device: str, kv_dtype: KVDtype | str) -> None:
    """Refuse a backend chosen by name that does not serve a layer, before weights are read: a model without any is run.

    Code that computes on values cannot run so; such a model is refused when it is loaded.
    """
    resolve_backend(backend, device)
    if backend == "auto":
        return
    try:
        with torch.device("meta"):
            model = _new_model(spec).eval()
        shapes = _layers_sent(model, spec.name, 1)[1].shapes
    except Exception:
        return
    choose_for_layers(backend, torch.device(device), _demands(model, shapes, kv_dtype))


def load_model(spec: ModelSpec, *, device: str = "cpu") -> LoadedModel:
    """Build the model with random weights, or load the checkpoint, and put it on paged KV. Raises ModelError."""
    check_model(spec)
    if spec.path is not None:
        return wrap_model(_checkpoint(spec, getattr(torch, spec.dtype)).to(device), name=spec.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = _new_model(spec)
    return wrap_model(model.to(device), name=spec.name)


def _new_model(spec: ModelSpec) -> Any:
    """The model of a checkpoint's configuration, or of the spec's shape, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if spec.path is not None:
        config = AutoConfig.from_pretrained(spec.path, local_files_only=True, trust_remote_code=False)
    else:
        config = AutoConfig.for_model(spec.family, **config_values(spec))
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, spec.dtype))


def wrap_model(model: Any, *, name: str) -> LoadedModel:
    """Put a causal language model of transformers on paged KV. Raises ModelError, and the model stays as it was."""
    model.eval()
    original = attention_of(model)
    try:
        return _on_paged_kv(model, name, original)
    except Exception as error:
        model.set_attn_implementation(original)
        if isinstance(error, ModelError):
            raise
        kind = model.config.model_type
        raise ModelError(f"model {name}: {kind} cannot be put on paged KV: {probe.said(error)}") from error


def _on_paged_kv(model: Any, name: str, original: str) -> LoadedModel:
    config = model.config.get_text_config()
    check_config(name, config.to_dict())
    longest = probe.longest_sequence(config)
    if longest is None:
        raise ModelError(f"model {name}: the config of {config.model_type} names no longest sequence")
    first = _first_token_id(config)
    mixers, (shapes, windows) = _layers_sent(model, name, first)
    with mixing(mixers, None):
        probe.check_masks(model, name, first)
        latent_shapes = probe.probe_latents(model, first, len(shapes))
    verdict = check_architecture(model, name)
    width = sum(heads * dim for layer in shapes for heads, dim in layer)
    return LoadedModel(
        name=name,
        model=model,
        kv_shapes=shapes,
        latent_shapes=latent_shapes,
        windows=windows,
        vocab_size=config.vocab_size,
        max_position=longest,
        kv_bytes_per_token=width * model.dtype.itemsize,
        device=model.device,
        dtype=model.dtype,
        first_token_id=first,
        end_ids=_end_token_ids(model),
        original_attention=original,
        workspace=Workspace(),
        mixers=mixers,
        singly=verdict.singly,
    )


def _layers_sent(model: Any, name: str, token: int) -> tuple[tuple[Mixer, ...], probe.LayerProbe]:
    """Put a model's layers on paged KV, and run one token: the mixers, and what all layers send."""
    use_paged_attention(model, name)
    mixers = find_mixers(model, token, probe.ShapeProbe())
    with mixing(mixers, None):
        return mixers, probe.probe_layers(model, name, token, [mixer.layer for mixer in mixers])


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


def _checkpoint(spec: ModelSpec, dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        given = {"dtype": dtype, "local_files_only": True, "output_loading_info": True}
        model, info = AutoModelForCausalLM.from_pretrained(spec.path, **given, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model {spec.name}: {spec.path} does not load: {error}") from error
    absent = sorted(info["missing_keys"])
    if absent:  # transformers fills them with random numbers and only logs a warning
        raise ModelError(
            f"model {spec.name}: {spec.path} lacks {len(absent)} of the weights that its config.json asks for, "
            f"for example {absent[0]}"
        )
    modules = dict(model.named_modules())
    if left := sorted(key for key in info["unexpected_keys"] if _has_no_place(key, modules)):
        reason = f"for {len(left)} of the weights of {spec.path}, as {left[0]}: its config.json differs"
        raise ModelError(f"model {spec.name}: {model.config.model_type} has no place {reason}")
    return model


def _has_no_place(key: str, modules: dict[str, Any]) -> bool:
    """Whether a weight belongs to a module that is there, without a place for it: a bias, or the scales of another one.

    Whole modules that a checkpoint has beside are left out, as those of images or of more tokens at a time.
    """
    module, _, name = key.rpartition(".")
    return module in modules and getattr(modules[module], name, None) is None


def _end_token_ids(model: Any) -> tuple[int, ...]:
    configs = (getattr(model, "generation_config", None), model.config.get_text_config())
    values = (getattr(config, "eos_token_id", None) for config in configs)
    value = next((value for value in values if value is not None), None)
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (int(value),)


def _first_token_id(config: Any) -> int:
    """The first id above the special tokens in the lower half of the vocabulary; 0 if there are none."""
    special: list[int] = []
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, key, None)
        special.extend(value if isinstance(value, list) else [] if value is None else [value])
    low = [token for token in special if token < config.vocab_size // 2]
    return max(low) + 1 if low else 0
