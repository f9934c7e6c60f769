"""Beam searches of a step, several requests at once: rows of logits to new hypotheses and their parents."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from engine.core.plan import Row
from engine.runtime.beam import best_continuations, candidates_of
from engine.runtime.sequences import Generation


def advance_searches(
    wanted: Sequence[int], rows: Sequence[Row], logits: torch.Tensor, generations: Mapping[int, Generation]
) -> dict[int, list[int]]:
    """New hypotheses of every beam request among the `wanted` rows, and their parents."""
    members: dict[int, list[int]] = defaultdict(list)
    for index in wanted:
        members[rows[index].request_id].append(index)
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for request_id, mine in members.items():
        mine.sort(key=lambda index: rows[index].branch)
        generation = generations[request_id]
        count = candidates_of(generation.rules, generation.request.width)
        alike[len(mine), count].append(request_id)
    parents: dict[int, list[int]] = {}
    for (_, count), request_ids in alike.items():
        places = torch.tensor([members[request_id] for request_id in request_ids], device=logits.device)
        chosen = [generations[request_id] for request_id in request_ids]
        parents.update(zip(request_ids, _advance_alike(logits[places], chosen, count), strict=True))
    return parents


def _advance_alike(logits: torch.Tensor, generations: Sequence[Generation], count: int) -> list[list[int]]:
    """Advance requests with equally many hypotheses, logits `[requests, hypotheses, vocab]`; note the outcome."""
    hypotheses = logits.shape[1]
    known = np.stack(
        [generation.search.scores[:hypotheses] for generation in generations if generation.search]
    )
    best = best_continuations(logits, torch.from_numpy(known).to(logits.device), count)
    columns = (column.cpu().numpy() for column in (best.parents, best.tokens, best.scores))
    return [
        _advance_one(generation, hypotheses, *candidates)
        for generation, *candidates in zip(generations, *columns, strict=True)
    ]


def _advance_one(
    generation: Generation, hypotheses: int, parents: np.ndarray, tokens: np.ndarray, scores: np.ndarray
) -> list[int]:
    """One request's candidates `[M]`. A search that is over leaves its hypotheses as they are."""
    assert generation.search is not None
    texts = [generation.text(branch) for branch in range(hypotheses)]
    chosen = generation.search.advance(parents, tokens, scores, texts)
    if chosen.stop:
        return chosen.parents
    generation.reparent(chosen.parents)
    position = generation.known[0]
    for branch, token in enumerate(chosen.tokens):
        generation.append(branch, position, token)
    return chosen.parents
