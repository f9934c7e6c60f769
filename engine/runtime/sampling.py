"""Choosing next tokens: the best one, or a draw whose chance depends on the sequence alone.

A draw uses one uniform number made from (seed, request, branch, position) by a counter-based hash, so that a request
gets the same tokens whatever else is in the batch, whatever order it runs in, and after a preemption.
"""

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
    seed: int, requests: list[int], branches: list[int], positions: list[int]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per draw, float64 `[draws]`, a function of its own four keys only."""
    state = np.full(len(requests), seed % 2**64, dtype=np.uint64)
    for column in (requests, branches, positions):
        state = _mix(state + _STEP * (np.array(column, dtype=np.uint64) + np.uint64(1)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(logits: torch.Tensor, temperature: float, uniform: npt.NDArray[np.float64]) -> torch.Tensor:
    """Tokens `[draws]`: where the running sum of softmax(logits / temperature) passes `uniform`."""
    probability = torch.softmax(logits.double() / temperature, dim=-1)
    cumulative = probability.cumsum(dim=-1)
    point = torch.from_numpy(uniform).to(logits.device) * cumulative[:, -1]
    found = torch.searchsorted(cumulative, point.unsqueeze(1), right=True).squeeze(1)
    return found.clamp_max(logits.shape[1] - 1)
