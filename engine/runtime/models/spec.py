"""Which model to run, and whether it can run. Nothing here imports torch.

A `ModelSpec` gives the shape of a model with random weights, or the directory of a checkpoint. `check_model` refuses
unknown families, impossible shapes and damaged checkpoints. It also refuses models that would give wrong tokens on the
paged KV cache without an error (`REFUSED_TYPES`, `REFUSED_ROPE`).
"""

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickletools import genops
from typing import Any

from engine.runtime.errors import ModelError
from engine.runtime.options import Dtype

_LONGEST_PICKLE = 64 << 20  # bytes of the part of a .bin that describes its tensors
_OF_TENSORS = ("torch", "collections", "_codecs")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model to load: the checkpoint directory `path`, or random weights of `family` with this shape.

    `family` is a transformers model_type. `initializer_range` is the standard deviation of the random weights: with the
    usual 0.02 a small model repeats one token for ever, with 0.1 its text varies. With a `path`, only `name` and
    `dtype` are used.
    """

    name: str = "tiny-llama"
    family: str = "llama"
    path: str | None = None
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 512
    vocab: int = 4096
    max_position: int = 2048
    dtype: str = "float32"
    seed: int = 0
    initializer_range: float = 0.1
    # tokens that windowed layers see, of families that have them; None: the family's own
    window: int | None = None
    state_layers: int = 0  # layers that keep a recurrent state, of families that have them


Config = Mapping[str, Any]

_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_MULTI_HEAD_ONLY = frozenset({"gpt2", "opt"})

_OWN_ATTENTION = "its attention is written out in its own code, so transformers cannot replace it"
_POSITION_BIAS = "it adds position biases to its scores, which the paged kernels do not support"
_NO_KV = "it keeps a recurrent state alone and has no KV cache per token, and a pool is sized in tokens"
_DROPS_KEYWORDS = "it does not pass extra arguments to its attention, so the paged KV does not reach it"
_TWO_FORMS = (
    "transformers limits the time steps of its states in a piece of a prompt and not in a single token, so its tokens "
    "would depend on how a prompt is cut"
)
_MASK_ONLY = "its chunked attention exists only as a mask, which the paged kernels do not get"

REFUSED_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("gptj", "falcon", "codegen", "gpt_neo", "xglm"), _OWN_ATTENTION),
    **dict.fromkeys(("bloom", "mpt"), _POSITION_BIAS),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv"), _NO_KV),
    **dict.fromkeys(("stablelm", "nemotron"), _DROPS_KEYWORDS),
    "nemotron_h": _TWO_FORMS,
    **dict.fromkeys(("llama4", "llama4_text"), _MASK_ONLY),
}

REFUSED_ROPE = {
    "dynamic": "its rotation depends on the longest sequence of a batch, so one request would change another",
    "longrope": "its rotation depends on the longest sequence of a batch, so one request would change another",
}


_NAMES = {  # of our fields in a family's config
    "llama": "hidden_size num_hidden_layers num_attention_heads max_position_embeddings intermediate_size "
    "initializer_range",
    "gpt2": "n_embd n_layer n_head n_positions n_inner initializer_range",
    "opt": "hidden_size num_hidden_layers num_attention_heads max_position_embeddings ffn_dim init_std",
}


def _named(spec: ModelSpec, family: str) -> dict[str, Any]:
    sizes = (spec.hidden, spec.layers, spec.heads, spec.max_position, spec.intermediate)
    return dict(zip(_NAMES[family].split(), (*sizes, spec.initializer_range), strict=True))


def _llama_like(spec: ModelSpec) -> Config:
    return {**_named(spec, "llama"), "num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim}


def _windowed(spec: ModelSpec) -> Config:
    """Like Llama, with windows in the layers that the family chooses."""
    return {**_llama_like(spec), **({} if spec.window is None else {"sliding_window": spec.window})}


def _with_states(spec: ModelSpec) -> Config:
    """Like Llama, with gated delta nets in `state_layers` layers; the others are spread evenly, the last among them."""
    whole = spec.layers - spec.state_layers
    ends = [(layer + 1) * whole // spec.layers > layer * whole // spec.layers for layer in range(spec.layers)]
    return {
        **_llama_like(spec),
        "layer_types": ["full_attention" if end else "linear_attention" for end in ends],
        "linear_num_key_heads": spec.kv_heads,
        "linear_num_value_heads": spec.heads,
        "linear_key_head_dim": spec.head_dim,
        "linear_value_head_dim": spec.head_dim,
        "num_experts": 0,
    }


# Families of `FAMILIES` with a recurrent state in some layers.
STATE_FAMILIES = frozenset({"qwen3_next"})

FAMILIES: Mapping[str, Callable[[ModelSpec], Config]] = {
    "llama": _llama_like,
    "qwen3": _llama_like,
    "mistral": _windowed,
    "gemma2": _windowed,
    "qwen3_next": _with_states,
    "gpt2": lambda spec: _named(spec, "gpt2"),
    "opt": lambda spec: {**_named(spec, "opt"), "word_embed_proj_dim": spec.hidden},
}


def config_values(spec: ModelSpec) -> Config:
    """Keyword arguments for the family's transformers config. There are no special tokens."""
    return {"vocab_size": spec.vocab, **_NO_SPECIAL_TOKENS, **FAMILIES[spec.family](spec)}


def check_shape(spec: ModelSpec) -> None:
    """Raise ModelError for a family that cannot be built from a shape, or a shape that the family does not allow."""
    if spec.family not in FAMILIES:
        raise ModelError(
            f"model {spec.name}: family {spec.family!r} cannot be built from a shape; choose one of "
            f"{', '.join(FAMILIES)}, or give model.path a checkpoint directory"
        )
    if (spec.family in STATE_FAMILIES) != (0 < spec.state_layers < spec.layers):
        raise ModelError(
            f"model {spec.name}: {spec.family} with {spec.state_layers} state_layers of {spec.layers} layers; "
            f"{', '.join(sorted(STATE_FAMILIES))} has 1 to layers - 1 of them, other families that are built from a "
            "shape have none"
        )
    if spec.heads % spec.kv_heads:
        reason = f"model {spec.name}: {spec.heads} heads are not a multiple of {spec.kv_heads} kv_heads"
        raise ModelError(reason)
    if spec.hidden % spec.heads:  # transformers refuses it for every head_dim
        raise ModelError(f"model {spec.name}: hidden {spec.hidden} is not a multiple of {spec.heads} heads")
    if spec.family in _MULTI_HEAD_ONLY:
        if (spec.kv_heads, spec.heads * spec.head_dim) != (spec.heads, spec.hidden):
            raise ModelError(
                f"model {spec.name}: {spec.family} has one KV head per head and hidden = heads x head_dim; found "
                f"heads {spec.heads}, kv_heads {spec.kv_heads}, head_dim {spec.head_dim}, hidden {spec.hidden}"
            )
    elif spec.head_dim % 2:
        raise ModelError(f"model {spec.name}: rotary embedding needs an even head_dim, found {spec.head_dim}")


def read_config(path: str) -> dict[str, Any]:
    """The config.json of a local checkpoint directory. Raises ModelError if the directory is not a checkpoint."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ModelError(f"model path {path} is not a checkpoint: there is no such directory")
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"model path {path} is not a checkpoint: it has no config.json") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"model path {path} is not a checkpoint: config.json: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"model path {path} is not a checkpoint: config.json has no model_type")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelError(f"model path {path} is not a checkpoint: it has no weights (*.safetensors or *.bin)")
    _check_architecture(path, config)
    for weights in sorted(folder.glob("*.safetensors")):
        _check_whole(weights)
    if not any(folder.glob("*.safetensors")):
        for weights in sorted(folder.glob("pytorch_model*.bin")):
            _check_pickled(weights)
    return config


def checkpoint_dtype(path: str) -> str:
    """The element type of a checkpoint's weights as its config.json names it; float32 if it names none of `Dtype`."""
    config = read_config(path)
    for part in (config, config.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            value = part.get(key) if isinstance(part, Mapping) else None
            if isinstance(value, str) and value.removeprefix("torch.") in set(Dtype):
                return value.removeprefix("torch.")
    return Dtype.float32


def checkpoint_stamp(path: str) -> str:
    """Names, sizes and times of the checkpoint's files. They tell whether the weights at a path have changed."""
    files = sorted(file for file in Path(path).expanduser().glob("*") if file.is_file())
    return " ".join(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)


def _check_architecture(path: str, config: dict[str, Any]) -> None:
    """Raise ModelError for a model without a language-model head, which cannot choose tokens."""
    names = [str(name) for name in config.get("architectures") or ()]
    if names and not any("CausalLM" in name or "LMHead" in name for name in names):
        raise ModelError(
            f"model path {path}: {', '.join(names)} is not a causal language model (…ForCausalLM or …LMHeadModel)"
        )


def _check_pickled(weights: Path) -> None:
    """Raise ModelError for a .bin that names anything but tensors: torch refuses it too, but when a point has begun.

    A file of torch is a zip with one pickle, or, before torch 1.6, five pickles in a row. They are looked at, not run.
    """
    try:
        if zipfile.is_zipfile(weights):
            with zipfile.ZipFile(weights) as parts:
                inside = next(name for name in parts.namelist() if name.endswith("data.pkl"))
                with parts.open(inside) as file:
                    named = set(_named_in(file.read(_LONGEST_PICKLE)))
        else:
            with weights.open("rb") as file:
                named = {name for _ in range(5) for name in _named_in(file)}
    except (OSError, ValueError, StopIteration, zipfile.BadZipFile) as error:
        raise ModelError(f"{weights}: no weights of torch ({error})") from error
    if foreign := sorted(
        name for name in named if name.partition(" ")[0].partition(".")[0] not in _OF_TENSORS
    ):
        raise ModelError(f"{weights}: names {foreign[0][:80]!r}, which is no tensor; save it as safetensors")


def _named_in(pickle: Any) -> Iterator[str]:
    """`module name` of all that a pickle would import; of a newer protocol, which torch does not write, no module."""
    for code, argument, _ in genops(pickle):
        if code.name in ("GLOBAL", "INST"):
            yield str(argument)
        elif code.name == "STACK_GLOBAL":
            yield "? a name that is put together"


def _check_whole(weights: Path) -> None:
    """Raise ModelError for an incomplete safetensors file. The file is 8 bytes of header length, JSON, data."""
    size = weights.stat().st_size
    try:
        with weights.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 0 < length <= size - 8 else None
        ends = [entry["data_offsets"][1] for name, entry in (header or {}).items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ModelError(f"{weights}: not a safetensors file ({error})") from error
    if not ends or size < 8 + length + max(ends):
        expected = f"{8 + length + max(ends):,}" if ends else "a header and data"
        reason = f"{weights}: incomplete or not a safetensors file: {size:,} bytes, {expected} expected"
        raise ModelError(reason)


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError if a model with this transformers config (as a dictionary) is known not to work."""
    kind = str(config.get("model_type"))
    if kind in REFUSED_TYPES:
        raise ModelError(f"model {name}: {kind} cannot run on paged KV: {REFUSED_TYPES[kind]}")
    for rope in rope_types(config):
        if rope in REFUSED_ROPE:
            raise ModelError(f"model {name}: RoPE type {rope!r} is refused: {REFUSED_ROPE[rope]}")


def rope_types(config: Mapping[str, Any]) -> Iterator[str]:
    """All RoPE types that a config names: one for the model, or one per kind of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        pending = [config.get(key)]
        while pending:
            value = pending.pop()
            if isinstance(value, Mapping):
                yield from (value[name] for name in ("rope_type", "type") if isinstance(value.get(name), str))
                pending.extend(value.values())


def check_model(spec: ModelSpec) -> None:
    """Raise ModelError for a spec that cannot be loaded, as far as this is known without torch."""
    if spec.dtype not in set(Dtype):
        raise ModelError(f"model {spec.name}: dtype {spec.dtype!r} does not exist; choose {', '.join(Dtype)}")
    if spec.path is None:
        check_config(spec.name, {"model_type": spec.family})
        check_shape(spec)
    else:
        check_config(spec.name, read_config(spec.path))
