"""Sampling: temperature, top-k, top-p and min-p, and one random number per token.

The number depends only on (seed, request, branch, position), through a counter-based hash. So a request gets the same
tokens whatever else is in the batch, in whatever order it runs, and after a preemption.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.core.plan import Row
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


class Draw(NamedTuple):
    """One token to choose: from the logits of `row`, for a branch of a request, to stand at `position`."""

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
    """One draw per branch of the `wanted` rows, and its token; the row that finishes a prompt draws for all branches.

    `seed` and `temperature` hold for requests that set none of their own.
    """
    draws = list(_draws(wanted, rows, generations))
    rules = [generations[draw.request_id].rules for draw in draws]
    source = logits[torch.tensor([draw.row for draw in draws], device=logits.device)].float()
    degrees = [temperature if rule.temperature is None else rule.temperature for rule in rules]
    heat = torch.tensor(degrees, dtype=torch.float64, device=logits.device).unsqueeze(1)
    _restrict_rows(source, heat, rules)
    return draws, draw(source, heat, _chances(seed, draws, rules)).tolist()


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


def _chances(seed: int, draws: Sequence[Draw], rules: Sequence[DecodingRules]) -> npt.NDArray[np.float64]:
    """A request with a seed of its own is known by that seed alone, so that asking again gives the same answer."""
    own = [rule.seed is not None for rule in rules]
    seeds = [seed if rule.seed is None else rule.seed for rule in rules]
    names = [0 if mine else draw.request_id for mine, draw in zip(own, draws, strict=True)]
    return uniforms(seeds, names, [draw.branch for draw in draws], [draw.position for draw in draws])


def _restrict_rows(source: torch.Tensor, heat: torch.Tensor, rules: Sequence[DecodingRules]) -> None:
    """Put -inf where a draw must not go, in place; the temperature comes before the limits."""
    index = [place for place, rule in enumerate(rules) if rule.restricted]
    if not index:
        return
    chosen = torch.tensor(index, device=source.device)
    limits = [rules[place] for place in index]
    top_k = torch.tensor([rule.top_k for rule in limits], device=source.device)
    top_p = torch.tensor([rule.top_p for rule in limits], device=source.device)
    min_p = torch.tensor([rule.min_p for rule in limits], device=source.device)
    warm = heat[chosen].float()
    source[chosen] = restrict(source[chosen] / warm, top_k, top_p, min_p) * warm
