"""How scores are formed from q and k: what a layer may ask of every attention kernel."""

from typing import NamedTuple

import torch


class Scoring(NamedTuple):
    """Scores are q . k x `scale`, then the softcap, then the mask, then a sink column joins the softmax."""

    scale: float
    window: int = 0  # keys kept: query position - window < key position <= query position; 0: all
    softcap: float = 0.0  # tanh(score / softcap) x softcap; 0: none
    sinks: torch.Tensor | None = None  # [heads], one extra logit per head, in the denominator only

    @property
    def plain(self) -> bool:
        """True where torch's fused SDPA computes this."""
        return not self.softcap and self.sinks is None
