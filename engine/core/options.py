"""The options of the policy core: one enum for each built-in choice, and the limits of the scheduler.

A choice that a user can replace with a class of their own is a protocol in `engine.core.policies`.
"""

from dataclasses import dataclass
from enum import StrEnum

from engine.core.errors import CoreError


class Decoding(StrEnum):
    """How a request's sequences come to be and relate."""

    GREEDY = "greedy"  # one sequence
    SAMPLE = "sample"  # `width` independent sequences forked from one prompt
    BEAM = "beam"  # `width` hypotheses that are re-parented after every step


class SpeculationMode(StrEnum):
    """Where draft tokens are written."""

    LOOKAHEAD = "lookahead"  # into slots behind the sequence's own, which are void again if rejected
    FORK = "fork"  # into a forked child, which takes the sequence's place with the tokens that were accepted


class HashAlgorithm(StrEnum):
    """What names are made with."""

    SHA256 = "sha256"  # safe against crafted collisions
    XXH3_128 = "xxh3_128"  # twice as fast, for prompts that nobody crafts


class Retention(StrEnum):
    """What becomes of a block's name when nobody refers to the block any more."""

    LRU = "lru"  # it stays findable until the block is taken again
    NONE = "none"  # it is dropped at once: only requests that overlap in time share


class Reservation(StrEnum):
    """What is reserved when a request is admitted."""

    MAX = "max"  # the longest sequence that the model allows
    POW2 = "pow2"  # the prompt and the next power of two of the output: at most twice what it needs
    ORACLE = "oracle"  # what the sequence will write, known in advance: an upper bound for contiguous memory


class Placement(StrEnum):
    """Where a reservation goes."""

    FIRST_FIT = "first_fit"  # the lowest hole that is long enough
    BUDDY = "buddy"  # a chunk of the next power of two


class Scheduling(StrEnum):
    """Who is served first, and preempted last."""

    FCFS = "fcfs"  # in order of submission
    PRIORITY = "priority"  # lower `Request.priority` first, then in order of submission


class Preemption(StrEnum):
    """What becomes of the KV of a request that must make room."""

    RECOMPUTE = "recompute"  # it is dropped, and computed again
    SWAP = "swap"  # it is saved in host memory
    AUTO = "auto"  # saved for groups of several sequences, dropped for single ones


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step may hold.

    `max_batched_tokens` query tokens a step; `max_running` sequences at once (every branch counts); `watermark` is the
    share of the pool that stays free when a request is admitted beside running ones; `max_model_len` bounds prompt and
    output together. Without `chunked_prefill` a prompt must fit the budget of one step. `long_prefill_tokens` caps a
    request's chunk while others compete. With `admit_whole_prompt` a request enters only if all its known tokens fit
    now, otherwise as soon as its first chunk does. `static_batch` admits only into an empty batch, whose memory is
    held and whose requests return together when the last one ends.
    """

    max_batched_tokens: int = 512
    max_running: int = 64
    max_model_len: int | None = None
    chunked_prefill: bool = True
    watermark: float = 0.0
    scheduling: Scheduling = Scheduling.FCFS
    preemption: Preemption = Preemption.RECOMPUTE
    long_prefill_tokens: int | None = None
    admit_whole_prompt: bool = True
    static_batch: bool = False

    def __post_init__(self) -> None:
        if min(self.max_batched_tokens, self.max_running) < 1 or not 0 <= self.watermark < 1:
            raise CoreError(f"limits must be at least 1 and the watermark in [0, 1): {self}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise CoreError(f"max_model_len is {self.max_model_len}, must be at least 1")
        if self.long_prefill_tokens is not None and self.long_prefill_tokens < 1:
            raise CoreError(f"long_prefill_tokens is {self.long_prefill_tokens}, must be at least 1")
        if self.long_prefill_tokens is not None and not self.chunked_prefill:
            raise CoreError("long_prefill_tokens cuts prompts into chunks: it needs chunked_prefill")
