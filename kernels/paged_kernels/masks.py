"""Which keys a query may see: one definition for the reference and for the fast paths."""

import torch


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
    """The mask as a number to add to scores: 0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))
