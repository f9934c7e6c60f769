"""The options of the policy core: one enum for each choice, the options of the scheduler, and its limits.

Each enum is declared here once. `harness.config.schema` uses the same classes as types of configuration keys, and so
the members have the names that users type. A choice that a user can replace with a class of their own is a protocol
in `engine.core.policies`. To add a scheduler option: add a field to `SchedulerOptions`, use it in
`engine.core.scheduling`, and add its range to `harness.config.checks`.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from engine.core.errors import CoreError


class CachePolicy(StrEnum):
    """Which KV cache manager hands out memory."""

    paged = "paged"  # blocks on demand
    contiguous_max = "contiguous_max"  # contiguous slots, as many as the model's longest sequence needs
    contiguous_pow2 = "contiguous_pow2"  # slots for the prompt and the next power of two of the output
    contiguous_oracle = "contiguous_oracle"  # slots for what the sequence will write, known in advance

    @property
    def reservation(self) -> "Reservation":
        """What a contiguous policy reserves; raises ValueError for `paged`."""
        return Reservation(self.removeprefix("contiguous_"))


class Retention(StrEnum):
    """What happens to the hash of a full block when the block's reference count falls to 0."""

    lru = "lru"  # the block stays in the prefix cache until it is evicted
    none = "none"  # the block leaves the prefix cache at once: only requests that overlap in time share


class HashAlgorithm(StrEnum):
    """The hash function for token blocks."""

    sha256 = "sha256"  # safe against crafted collisions
    xxh3_128 = "xxh3_128"  # twice as fast, not safe against crafted prompts; seeded in each process
    sha256_cbor = "sha256_cbor"  # vLLM's hashes of the same name; slower, needs cbor2
    xxh3_128_cbor = "xxh3_128_cbor"  # vLLM's xxhash_cbor


class Reservation(StrEnum):
    """How many slots a contiguous policy reserves when a request is admitted."""

    max = "max"  # the longest sequence that the model allows
    pow2 = "pow2"  # the prompt and the next power of two of the output: at most twice what it needs
    oracle = "oracle"  # what the sequence will write, known in advance: an upper bound for contiguous memory


class Placement(StrEnum):
    """Where a contiguous reservation is placed."""

    auto = "auto"  # first_fit for Reservation.max, whose sizes are all equal; else buddy, as SOSP'23 assumes
    first_fit = "first_fit"  # the lowest hole that is long enough
    buddy = "buddy"  # a chunk of the next power of two


class Eviction(StrEnum):
    """Which cached block is evicted first (`engine.core.memory.eviction`)."""

    lru = "lru"  # of the table that was released first, from its end; so leaves of the prefix tree before the rest
    fifo = "fifo"  # what was released to the cache first; neither a hit nor a later release moves it
    lfu = "lfu"  # what was used least often, leaves of the prefix tree before the rest
    sieve = "sieve"  # what was cached first, but what was used is spared once
    s3fifo = "s3fifo"  # what is not used again soon after it was cached, then as fifo with a second chance
    ttl = "ttl"  # all but what a session has released less than a time to live ago
    pinned = "pinned"  # all but the first tokens of every prompt
    priority = "priority"  # what requests with a higher priority number, which matter less, have left
    superseded = "superseded"  # what a later turn of the same session has not taken up
    gdsf = "gdsf"  # what costs the fewest seconds to compute again, by its uses so far


class TierStore(StrEnum):
    """When a tier below the pool is filled (`engine.core.memory.tiers`)."""

    written = "written"  # when a request ends or is preempted, with all that it has cached (write-through)
    evicted = "evicted"  # when the pool evicts a block (write-back)


class TierLoad(StrEnum):
    """Which of the blocks that a tier has are loaded, and not computed again."""

    always = "always"
    cheaper = "cheaper"  # where reading takes less time than computing


class GroupKind(StrEnum):
    """What the layers of a group keep of a sequence."""

    full = "full"  # K and V of every token
    window = "window"  # K and V of the last tokens, as many as the window has
    chunk = "chunk"  # K and V of the tokens in the chunk of fixed place that the next token is in (Llama 4)
    latent = "latent"  # one latent vector of every token (MLA)
    state = "state"  # a state of fixed size (recurrent layers, linear attention)


class GroupPages(StrEnum):
    """How the memory is divided among groups of layers that keep different things of a sequence."""

    off = "off"  # there are no groups: every layer keeps every token
    uniform = "uniform"  # one pool of equal pages, as vLLM: padded, with as many layers in every group
    separate = "separate"  # a pool for each group, with a fixed share of the memory
    lcm = "lcm"  # as Jenga: chunks of the least common multiple, small pages nested in them, given to one request first


class WindowHits(StrEnum):
    """Which blocks of a window's layers a prefix hit needs."""

    window = "window"  # those of the last window before the hit's end, as vLLM
    all = "all"  # those of the whole prefix


class StateMode(StrEnum):
    """Which states of a sequence layers with recurrent state keep."""

    align = "align"  # at the end of each row; rows of a prompt end at a block's end, or the prompt's (vLLM)
    every_block = "every_block"  # at the end of each block
    none = "none"  # the last one alone: without a prefix cache

    def within(self, prefix_caching: bool) -> "StateMode":
        """The mode in effect: where nothing is shared, `align` keeps the last state alone."""
        return StateMode.none if self is StateMode.align and not prefix_caching else self


class Scheduling(StrEnum):
    """Which request is served first, and preempted last."""

    fcfs = "fcfs"  # in order of submission
    priority = "priority"  # lower `Request.priority` first, then in order of submission


class Preemption(StrEnum):
    """What happens to the KV of a preempted request."""

    recompute = "recompute"  # it is dropped, and computed again later
    swap = "swap"  # it is saved in host memory
    auto = "auto"  # swap for groups of several sequences, recompute for single sequences


class Decoding(StrEnum):
    """How many sequences a request has, and how they are related."""

    greedy = "greedy"  # one sequence
    sample = "sample"  # `width` independent sequences forked from one prompt
    beam = "beam"  # `width` beams; after each step, every beam continues one of the previous beams


class Sharing(StrEnum):
    """How the sequences of one request share the blocks of their prompt, and beams those of their past."""

    copy_on_write = "copy_on_write"  # all blocks; a shared block is copied when a sequence writes to it
    tail_at_fork = "tail_at_fork"  # full blocks of the prompt; beams keep what they write, as in TensorRT-LLM
    prefix_cache = "prefix_cache"  # full blocks alone: a request for each sample, or beam and token (vLLM)


class SpeculationMode(StrEnum):
    """Where draft tokens are written, and how many there are at a request's end."""

    # as lookahead, but as many in every step, whatever is left of the request, with slots for those of the next step
    whole = "whole"  # vLLM with a draft model
    lookahead = "lookahead"  # into the sequence's own next slots, at most what the request has left
    fork = "fork"  # into a forked child, which replaces the sequence with the accepted tokens


@dataclass
class SchedulerOptions:
    """The scheduler options that a user sets. The configuration group `scheduler` has the same fields and defaults."""

    max_batched_tokens: int = 512  # token budget of one step
    max_running: int = 64  # sequences (every beam and sample counts) that may run at once
    chunked_prefill: bool = True  # False: a prompt must fit the budget of one step
    watermark: float = 0.0  # share of the pool kept free when a request is admitted beside running ones
    adaptive_watermark: bool = False  # keep more free for a while after a preemption
    policy: Scheduling = Scheduling.fcfs
    preemption: Preemption = Preemption.recompute
    long_prefill_tokens: int | None = None  # largest prompt chunk while others compete; None: the budget
    # that is at least the share of the budget that each request would have
    long_prefill_adaptive: bool = False
    admit_whole_prompt: bool = True  # False: a request enters as soon as its first chunk fits
    static_batch: bool = False  # admit only into an empty batch; all its memory is released at its end
    mixed_steps: bool = True  # False: a step of prompts alone goes before decodes (SGLang)


@dataclass
class SchedulerLimits(SchedulerOptions):
    """The options of a scheduler, checked, with the longest sequence allowed. Do not change them after construction.

    `max_model_len` bounds prompt and output together, in tokens; None: unbounded. With `ahead` a step is scheduled
    while the one before it runs, so what that one ends keeps its blocks. Raises CoreError on a value out of range.
    """

    max_model_len: int | None = None
    ahead: bool = False

    @cached_property
    def most_chunk(self) -> int:
        """The largest chunk of a prompt that competes with others."""
        return min(self.max_batched_tokens, self.long_prefill_tokens or self.max_batched_tokens)

    def __post_init__(self) -> None:
        try:  # they are asked for by identity: plain strings would mean the default
            self.policy, self.preemption = Scheduling(self.policy), Preemption(self.preemption)
        except ValueError as error:
            raise CoreError(f"limits: {error}; choose of {[*Scheduling]} and of {[*Preemption]}") from error
        if min(self.max_batched_tokens, self.max_running) < 1 or not 0 <= self.watermark < 1:
            raise CoreError(f"limits must be at least 1 and the watermark in [0, 1): {self}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise CoreError(f"max_model_len is {self.max_model_len}, must be at least 1")
        if self.long_prefill_tokens is not None and self.long_prefill_tokens < 1:
            raise CoreError(f"long_prefill_tokens is {self.long_prefill_tokens}, must be at least 1")
        if self.long_prefill_tokens is not None and not self.chunked_prefill:
            raise CoreError("long_prefill_tokens cuts prompts into chunks: it needs chunked_prefill")
