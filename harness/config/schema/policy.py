"""What is decided: KV memory, batching, decoding."""

from dataclasses import dataclass
from enum import StrEnum


class CachePolicy(StrEnum):
    """Who hands out KV memory."""

    paged = "paged"
    contiguous_max = "contiguous_max"


class DecodingMode(StrEnum):
    """How next tokens are chosen when `decoding.beam_width` is 1."""

    greedy = "greedy"
    sample = "sample"


@dataclass
class CacheConfig:
    """KV memory: how much, and who hands it out."""

    policy: CachePolicy = CachePolicy.paged
    block_size: int = 16  # tokens per block; the contiguous policies reserve single slots and ignore it
    pool_tokens: int | None = (
        None  # KV slots in the pool; null: what the device's memory holds beside the weights
    )
    prefix_caching: bool = True  # paged only
    max_model_len: int | None = (
        None  # longest prompt + output; what contiguous_max reserves; null: the model's
    )


@dataclass
class SchedulerConfig:
    """Continuous batching."""

    max_batched_tokens: int = 512  # token budget of one step
    max_running: int = 64  # sequences (beams count) that may run at once
    chunked_prefill: bool = True
    watermark: float = (
        0.0  # share of the pool kept free when a waiting request is admitted beside running ones
    )


@dataclass
class DecodingConfig:
    """Greedy, parallel sampling, beam search."""

    beam_width: int = 1  # above 1: beam search, and `mode` and `n` do not apply
    mode: DecodingMode = DecodingMode.greedy
    n: int = 1  # parallel samples a request, mode=sample
    temperature: float = 1.0
    beam_churn: float | None = None  # simulated share of beams dropped in a step; null: as calibrated
