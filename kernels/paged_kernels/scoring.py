"""How scores are formed from q and k: what a layer may ask of every attention kernel."""

from typing import NamedTuple

import torch


class Scoring(NamedTuple):
    """Scores are q . k x `scale`, then the softcap, then ALiBi, then the mask; a sink column joins the softmax.

    An fp8 cache holds keys divided by `k_scale` and values divided by `v_scale` (one number per tensor).
    """

    scale: float
    window: int = 0  # keys kept: query position - window < key position <= query position; 0: all
    softcap: float = 0.0  # tanh(score / softcap) x softcap; 0: none
    sinks: torch.Tensor | None = None  # [heads], one extra logit per head, in the denominator only
    alibi: torch.Tensor | None = (
        None  # [heads], slopes: slope x (key position - query position) joins the score
    )
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def plain(self) -> bool:
        """True where torch's fused SDPA computes this."""
        return not self.softcap and self.sinks is None and self.alibi is None
