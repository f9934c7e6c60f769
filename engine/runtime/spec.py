"""Which model to run: its shape, or where its checkpoint lies. Plain values, no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A random-initialised model of `family` with this shape, or, where `path` is set, a local checkpoint directory.

    `family` is a transformers model_type. `initializer_range` is the standard deviation of the random weights: at the
    customary 0.02 a small model repeats one token for ever, at 0.1 its text varies. With a path only `name` and
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
