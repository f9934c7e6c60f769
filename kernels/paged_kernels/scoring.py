"""The options of attention: how scores are computed from q and k, and which keys a query may see.

The reference and the torch path use the masks here. The Triton kernels have the same rules in their own code.
"""

from typing import NamedTuple

import torch


class Scoring(NamedTuple):
    """Scores are q . k x `scale`, then the softcap, then ALiBi, then the mask. A sink column joins the softmax.

    An fp8 cache holds keys divided by `k_scale` and values divided by `v_scale` (one number per tensor).
    """

    scale: float
    window: int = 0  # keys kept: query position - window < key position <= query position; 0: all keys
    softcap: float = 0.0  # tanh(score / softcap) x softcap; 0: none
    sinks: torch.Tensor | None = None  # [heads], one extra logit per head, in the denominator only
    alibi: torch.Tensor | None = None  # [heads], slopes; adds slope x (key position - query position)
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def options(self) -> tuple[str, ...]:
        """What is asked beside scale and window."""
        asked = {
            "a softcap": self.softcap > 0,
            "sinks": self.sinks is not None,
            "ALiBi": self.alibi is not None,
        }
        return tuple(name for name, on in asked.items() if on)

    @property
    def plain(self) -> bool:
        """Whether torch's fused SDPA can compute this: no softcap, sinks or ALiBi."""
        return not self.softcap and self.sinks is None and self.alibi is None


def causal_window(
    queries: int, keys: int, window: int = 0, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Bool `[queries, keys]`: True where the query may look. The queries are the last positions of the keys.

    Query position p sees key positions `p - window < k <= p`; window 0 means no limit.
    """
    query = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device).unsqueeze(0)
    visible = key <= query
    return visible & (key > query - window) if window else visible


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask as numbers to add to the scores: 0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))
