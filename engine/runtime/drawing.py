"""Draws of parallel samples: which row feeds which branch, and the numbers that make each draw its sequence's own."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.core.plan import Row
from engine.runtime.rules import DecodingRules
from engine.runtime.sampling import draw, restrict, uniforms
from engine.runtime.sequences import Generation


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
