"""What a step may hold."""

from dataclasses import dataclass

from engine.core.errors import CoreError


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step may hold.

    `max_batched_tokens` query tokens a step; `max_running` sequences at once (every branch counts); `watermark` is the
    share of the pool that stays free when a request is admitted beside running ones; `max_model_len` bounds prompt and
    output together. Without `chunked_prefill` a prompt must fit the budget of one step.
    """

    max_batched_tokens: int = 512
    max_running: int = 64
    max_model_len: int | None = None
    chunked_prefill: bool = True
    watermark: float = 0.0

    def __post_init__(self) -> None:
        if min(self.max_batched_tokens, self.max_running) < 1 or not 0 <= self.watermark < 1:
            raise CoreError(f"limits must be at least 1 and the watermark in [0, 1): {self}")
