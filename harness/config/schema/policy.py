"""What is decided: KV memory, batching, decoding."""

from dataclasses import dataclass
from enum import StrEnum


class CachePolicy(StrEnum):
    """Who hands out KV memory."""

    paged = "paged"  # blocks on demand
    contiguous_max = "contiguous_max"  # a run of slots as long as the model allows
    contiguous_pow2 = "contiguous_pow2"  # the prompt and the next power of two of the output
    contiguous_oracle = "contiguous_oracle"  # what the sequence will write, known in advance


class PlacementRule(StrEnum):
    """Where a contiguous reservation goes."""

    auto = "auto"  # first_fit for contiguous_max, whose runs are all alike; buddy for the others, as SOSP'23 assumes
    first_fit = "first_fit"
    buddy = "buddy"


class RetentionRule(StrEnum):
    """What becomes of a full block's name when nobody refers to the block any more."""

    lru = "lru"  # findable until the block is taken again
    none = "none"  # forgotten at once


class HashRule(StrEnum):
    """What the measured engine names blocks with."""

    sha256 = "sha256"
    xxh3_128 = "xxh3_128"


class SchedulingRule(StrEnum):
    """Who is served first, and preempted last."""

    fcfs = "fcfs"
    priority = "priority"


class PreemptionRule(StrEnum):
    """What becomes of the KV of a request that must make room."""

    recompute = "recompute"
    swap = "swap"  # saved in host memory (cache.host_tokens)
    auto = "auto"  # swap for groups of several sequences, recompute for single ones


class DecodingMode(StrEnum):
    """How next tokens are chosen when `decoding.beam_width` is 1."""

    greedy = "greedy"
    sample = "sample"


class DraftPlace(StrEnum):
    """Where draft tokens are written."""

    lookahead = "lookahead"  # into slots behind the sequence's own, void again where they are rejected
    fork = "fork"  # into a forked child, which takes the sequence's place


@dataclass
class CacheConfig:
    """KV memory: how much, and who hands it out."""

    policy: CachePolicy = CachePolicy.paged
    block_size: int = 16  # tokens per block; the contiguous policies reserve single slots and ignore it
    pool_tokens: int | None = (
        None  # KV slots in the pool; null: what the device's memory holds beside the weights
    )
    prefix_caching: bool = True  # paged only
    retention: RetentionRule = RetentionRule.lru
    hash: HashRule = HashRule.sha256
    deduplicate: bool = False  # free a block whose content another block held first
    copy_at_fork: bool = False  # branches never share a block: shows what copy-on-write saves
    host_tokens: int = 0  # KV slots of host memory for swapped requests
    eviction: str | None = None  # module:Class of your own eviction queue; null: least recently used
    placement: PlacementRule = PlacementRule.auto  # contiguous only
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
    policy: SchedulingRule = SchedulingRule.fcfs
    preemption: PreemptionRule = PreemptionRule.recompute
    long_prefill_tokens: int | None = (
        None  # largest chunk of one prompt while others compete; null: the budget
    )
    admit_whole_prompt: bool = True  # false: a request enters as soon as its first chunk fits
    static_batch: bool = False  # the classic baseline: a batch enters together, and leaves together
    order: str | None = None  # module:Class of your own queue order; null: as `policy` says
    victim: str | None = None  # module:Class of your own choice of whom to preempt; null: as `policy` says
    admission: str | None = None  # module:Class of your own admission rule; null: whatever fits


@dataclass
class DecodingConfig:
    """Greedy, parallel sampling, beam search, speculation."""

    beam_width: int = 1  # above 1: beam search, and `mode` and `n` do not apply
    mode: DecodingMode = DecodingMode.greedy
    n: int = 1  # parallel samples a request, mode=sample
    temperature: float = 1.0
    beam_churn: float | None = None  # simulated share of beams dropped in a step; null: as calibrated
    beam_parents: str | None = (
        None  # point folder, store or parents.parquet whose beams are replayed; null: drawn
    )
    branch_hazard: float = 0.0  # chance that a sampled branch ends after a token, drawn alike on both sides
    draft_tokens: int = 0  # proposed a step and verified together, for single sequences; 0: no speculation
    draft_place: DraftPlace = DraftPlace.lookahead
    draft_path: str | None = None  # checkpoint of the model that proposes; null: the model itself
    acceptance: float | None = None  # simulated share of draft tokens that are right; null: as calibrated
