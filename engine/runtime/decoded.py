"""What a pass says of the rows that are sampled: their logits, and the best token of each, chosen on the device.

A recorded pass chooses within the recording, so that a greedy step asks the device once, for one number a row. Draws
stay outside: they work on every probability in float64, which greedy rows must not pay for, and their uniform numbers
come from the host anyway; they follow on the device without a wait in between.
"""

from typing import NamedTuple

import torch

from engine.runtime.native.best import best_tokens

NO_TOKEN = -1  # of a row with NaN among its logits


class Decoded(NamedTuple):
    """Logits `[rows, vocab]` in the model's type, and tokens `[rows]`: the first of the largest, or NO_TOKEN."""

    logits: torch.Tensor
    tokens: torch.Tensor

    def front(self, rows: int) -> "Decoded":
        """The first rows: those of a recorded pass that are no padding."""
        return Decoded(self.logits[:rows], self.tokens[:rows])


def decode(logits: torch.Tensor) -> Decoded:
    """Choose the best tokens; a largest logit is NaN as soon as one of its row is."""
    best, tokens = best_tokens(logits)
    return Decoded(logits, tokens.masked_fill(torch.isnan(best), NO_TOKEN))
