"""What runs: the model and the measured engine."""

from dataclasses import dataclass
from enum import StrEnum


class EngineDevice(StrEnum):
    """Where the measured engine runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    """Element type of weights and KV."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class KvDtype(StrEnum):
    """Element type of K and V in the pool."""

    model = "model"  # the weights' own
    fp8_e4m3 = "fp8_e4m3"  # 8 bits, kept without a scale


class Backend(StrEnum):
    """Attention kernels of the measured engine."""

    auto = "auto"  # triton on CUDA, native on a CPU with a C compiler, else torch
    torch = "torch"
    native = "native"
    triton = "triton"


class Audit(StrEnum):
    """How often written slots are counted in the tensors and compared with the books."""

    off = "off"
    sampled = "sampled"
    full = "full"


@dataclass
class ModelConfig:
    """Shape of the model; `path` loads a local checkpoint directory instead."""

    name: str = "tiny-llama"
    family: str = "llama"  # transformers model_type of a random-initialised model
    path: str | None = None
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 512
    vocab: int = 4096
    max_position: int = 2048
    dtype: Dtype = Dtype.float32
    kv_dtype: KvDtype = KvDtype.model
    seed: int = 0


@dataclass
class EngineConfig:
    """The measured engine."""

    device: EngineDevice = EngineDevice.auto
    backend: Backend = Backend.auto
    threads: int = 1  # torch threads on the CPU
    audit: Audit = Audit.sampled
    audit_every: int = 16  # steps between audits when sampled
    cuda_graphs: bool | None = (
        None  # CUDA, triton: replay decode steps as recorded graphs; null: `serve` alone does
    )
