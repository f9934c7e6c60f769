"""Choosing next tokens: the best one, or a draw whose chance depends on the sequence alone.

A draw uses one uniform number made from (seed, request, branch, position) by a counter-based hash, so that a request
gets the same tokens whatever else is in the batch, whatever order it runs in, and after a preemption.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_A
    value = (value ^ (value >> np.uint64(27))) * _MIX_B
    return value ^ (value >> np.uint64(31))


def uniforms(
    seed: int | Sequence[int], requests: list[int], branches: list[int], positions: list[int]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per draw, float64 `[draws]`, a function of its own four keys only."""
    seeds = [seed] * len(requests) if isinstance(seed, int) else seed
    state = np.array([value % 2**64 for value in seeds], dtype=np.uint64)
    for column in (requests, branches, positions):
        state = _mix(state + _STEP * (np.array(column, dtype=np.uint64) + np.uint64(1)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def restrict(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Logits `[draws, vocab]` (after temperature) with -inf outside of what may be drawn; limits `[draws]`.

    In this order: the `top_k` best (0: all), of those the fewest best ones whose chances reach `top_p`, of all those
    with at least `min_p` times the best one's chance. The best token always stays. As transformers' warpers do it.
    """
    best, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[1]).unsqueeze(1)
    best = best.masked_fill(rank >= limit, float("-inf"))
    chance = torch.softmax(best, dim=-1)
    before = chance.cumsum(dim=-1) - chance
    out = (before >= top_p.unsqueeze(1)) | (chance < min_p.unsqueeze(1) * chance[:, :1])
    out[:, 0] = False
    return torch.empty_like(logits).scatter_(1, order, best.masked_fill(out, float("-inf")))


def draw(
    logits: torch.Tensor, temperature: float | torch.Tensor, uniform: npt.NDArray[np.float64]
) -> torch.Tensor:
    """Tokens `[draws]`: where the running sum of softmax(logits / temperature) passes `uniform`.

    `temperature` is one number or `[draws, 1]`.
    """
    probability = torch.softmax(logits.double() / temperature, dim=-1)
    cumulative = probability.cumsum(dim=-1)
    total = cumulative[:, -1]
    point = torch.minimum(torch.from_numpy(uniform).to(logits.device) * total, total.nextafter(total * 0))
    found = torch.searchsorted(cumulative, point.unsqueeze(1), right=True).squeeze(1)
    return found.clamp_max(logits.shape[1] - 1)
