"""What a request led to: text, tokens, why it ended, and how long everything took."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.runtime.sequences import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds of the engine's clock, None until they happen, and its token counts."""

    arrival_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    gap_s: float | None = None  # between the last two steps that gave tokens
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    output_tokens: int = 0  # of all sequences
    longest: int = 0  # tokens of the longest sequence
    steps: int = 0  # in which the request got tokens
    preemptions: int = 0
    drafted_tokens: int = 0  # proposed by the draft model
    accepted_tokens: int = 0  # of them

    def note_tokens(self, now_s: float) -> None:
        """A step gave tokens."""
        self.steps += 1
        if self.first_token_s is None or self.last_token_s is None:
            self.first_token_s = now_s
        else:
            self.gap_s = now_s - self.last_token_s
        self.last_token_s = now_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, of one sequence: (E2E - TTFT) / (tokens - 1)."""
        if self.first_token_s is None or self.last_token_s is None or self.steps < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (max(self.longest, self.steps) - 1)

    @property
    def queue_s(self) -> float | None:
        """Time until the request was first in a batch."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        """Time from arrival to the end."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sequence: all of it, or what is new, as the request's `output_kind` says."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    score: float = 0.0  # of a beam: log-probability, normalised by length
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over `token_ids`, where log-probabilities were asked for."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's news; `error` says why one with finish reason `error` failed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: Exception | None = field(default=None)
