"""How one request's tokens are chosen: everything that the chooser reads, and nothing of lengths or text."""

from dataclasses import dataclass
from typing import Literal

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """Rules of one request; which way of decoding applies stands in its `Request`.

    `seed` None draws from the engine's seed and the request's number. `end_ids` end a sequence (and are part of it);
    beams look at one more candidate per hypothesis for each of them. `logprobs` is how many of the best tokens are
    reported beside the chosen one; None reports nothing.
    """

    temperature: float | None = None  # None: the engine's
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    end_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    @property
    def restricted(self) -> bool:
        """Whether only a part of the vocabulary may be drawn."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


PLAIN = DecodingRules()
