"""Sampling: temperature, top-k, top-p and min-p, and one random number per token.

The number depends only on (seed, request, branch, position), through a counter-based hash. So a request gets the same
tokens with any other requests in the batch, in any order of execution, and after a preemption.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.core.plan import Row
from engine.runtime.decoding.change import change_logits
from engine.runtime.decoding.generation import Generation
from engine.runtime.params import DecodingRules

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
    """One number in [0, 1) per draw, float64 `[draws]`. It depends only on the four values of its draw."""
    seeds = [seed] * len(requests) if isinstance(seed, int) else seed
    state = np.array([value % 2**64 for value in seeds], dtype=np.uint64)
    for column in (requests, branches, positions):
        state = _mix(state + _STEP * (np.array(column, dtype=np.uint64) + np.uint64(1)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def restrict(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Set the logits `[draws, vocab]` (after temperature) of tokens that must not be drawn to -inf; limits `[draws]`.

    The limits apply in this order: the `top_k` best tokens (0: all); of these the fewest best ones whose probabilities
    reach `top_p`; of these the ones with at least `min_p` times the best probability. The best token always stays. The
    results are those of transformers' logits warpers.
    """
    best, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[1]).unsqueeze(1)
    best = best.masked_fill(rank >= limit, float("-inf"))
    probability = torch.softmax(best, dim=-1)
    before = probability.cumsum(dim=-1) - probability
    out = (before >= top_p.unsqueeze(1)) | (probability < min_p.unsqueeze(1) * probability[:, :1])
    out[:, 0] = False
    return torch.empty_like(logits).scatter_(1, order, best.masked_fill(out, float("-inf")))


def draw(
    logits: torch.Tensor, temperature: float | torch.Tensor, uniform: npt.NDArray[np.float64]
) -> torch.Tensor:
    """Tokens `[draws]`: the first ones where the cumulative sum of softmax(logits / temperature) exceeds `uniform`.

    `temperature` is one number or `[draws, 1]`.
    """
    probability = torch.softmax(logits.double() / temperature, dim=-1)
    cumulative = probability.cumsum(dim=-1)
    total = cumulative[:, -1]
    point = torch.minimum(torch.from_numpy(uniform).to(logits.device) * total, total.nextafter(total * 0))
    found = torch.searchsorted(cumulative, point.unsqueeze(1), right=True).squeeze(1)
    return found.clamp_max(logits.shape[1] - 1)


class Draw(NamedTuple):
    """One token to choose: from the logits of `row`, for `position` of a branch of a request."""

    row: int
    request_id: int
    branch: int
    position: int


def draw_all(
    seed: int,
    temperature: float,
    wanted: Sequence[int],
    rows: Sequence[Row],
    logits: torch.Tensor,
    generations: Mapping[int, Generation],
) -> tuple[list[Draw], list[int]]:
    """Draw a token for each of the `wanted` rows. A row that finishes a prompt draws one for every branch.

    `seed` and `temperature` hold for requests that set none. Returns the draws and their tokens.
    """
    draws = list(_draws(wanted, rows, generations))
    rules = [generations[draw.request_id].rules for draw in draws]
    source = logits[torch.tensor([draw.row for draw in draws], device=logits.device)].float()
    for row, drawn in zip(source, draws, strict=True):
        change_logits(row, generations[drawn.request_id], drawn.branch, drawn.position)
    values = [temperature if rule.temperature is None else rule.temperature for rule in rules]
    temperatures = torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)
    _restrict_rows(source, temperatures, rules)
    return draws, draw(source, temperatures, _uniforms_of(seed, draws, rules)).tolist()


def _draws(
    wanted: Sequence[int], rows: Sequence[Row], generations: Mapping[int, Generation]
) -> Iterator[Draw]:
    for index in wanted:
        row = rows[index]
        position = row.context_len + row.query_len
        request = generations[row.request_id].request
        first = position == request.prompt_tokens
        for branch in range(request.width) if first else (row.branch,):
            yield Draw(index, row.request_id, branch, position)


def _uniforms_of(seed: int, draws: Sequence[Draw], rules: Sequence[DecodingRules]) -> npt.NDArray[np.float64]:
    """The random numbers of draws. If a request sets a seed, its id is not used, so that its tokens can be repeated."""
    seeds = [seed if rule.seed is None else rule.seed for rule in rules]
    ids = [draw.request_id if rule.seed is None else 0 for rule, draw in zip(rules, draws, strict=True)]
    return uniforms(seeds, ids, [draw.branch for draw in draws], [draw.position for draw in draws])


def _restrict_rows(source: torch.Tensor, temperatures: torch.Tensor, rules: Sequence[DecodingRules]) -> None:
    """Set logits `[draws, vocab]` of tokens that must not be drawn to -inf, in place. Temperature is applied first."""
    index = [row for row, rule in enumerate(rules) if rule.restricted]
    if not index:
        return
    chosen = torch.tensor(index, device=source.device)
    limits = [rules[row] for row in index]
    top_k = torch.tensor([rule.top_k for rule in limits], device=source.device)
    top_p = torch.tensor([rule.top_p for rule in limits], device=source.device)
    min_p = torch.tensor([rule.min_p for rule in limits], device=source.device)
    scale = temperatures[chosen].float()
    source[chosen] = restrict(source[chosen] / scale, top_k, top_p, min_p) * scale
