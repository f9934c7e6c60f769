"""From a step's logits to next tokens: every sampled row by its request's way of decoding, all of a kind at once."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.core.plan import Row
from engine.core.request import Decoding
from engine.runtime.beam import select_beams
from engine.runtime.errors import NaNLogitsError
from engine.runtime.sampling import draw, uniforms
from engine.runtime.sequences import Generation


@dataclass(frozen=True, slots=True)
class TokenChooser:
    """Chooses the next tokens of a step and notes them in the generations."""

    seed: int
    temperature: float

    def choose(
        self, step: int, rows: Sequence[Row], logits: torch.Tensor, generations: dict[int, Generation]
    ) -> dict[int, list[int]]:
        """Take logits `[rows, vocab]` of the sampled rows. Returns the parents of each beam request that sampled.

        Raises NaNLogitsError naming step and sequence.
        """
        best, greedy = logits.max(dim=-1)
        refuse_nan(step, rows, best)
        kinds: dict[Decoding, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            kinds[generations[row.request_id].request.decoding].append(index)
        tokens = greedy.tolist()
        for index in kinds[Decoding.GREEDY]:
            row = rows[index]
            generations[row.request_id].append(0, row.context_len + row.query_len, tokens[index])
        if kinds[Decoding.SAMPLE]:
            self._sample(kinds[Decoding.SAMPLE], rows, logits, generations)
        return select_hypotheses(kinds[Decoding.BEAM], rows, logits, generations)

    def _sample(
        self,
        wanted: Sequence[int],
        rows: Sequence[Row],
        logits: torch.Tensor,
        generations: dict[int, Generation],
    ) -> None:
        """One draw per branch; the row that finishes a prompt draws for all branches."""
        source: list[int] = []
        requests: list[int] = []
        branches: list[int] = []
        positions: list[int] = []
        for index in wanted:
            row = rows[index]
            position = row.context_len + row.query_len
            request = generations[row.request_id].request
            for branch in range(request.width) if position == request.prompt_tokens else (row.branch,):
                source.append(index)
                requests.append(row.request_id)
                branches.append(branch)
                positions.append(position)
        chance = uniforms(self.seed, requests, branches, positions)
        tokens = draw(logits[torch.tensor(source, device=logits.device)], self.temperature, chance).tolist()
        for request_id, branch, position, token in zip(requests, branches, positions, tokens, strict=True):
            generations[request_id].append(branch, position, token)


def select_hypotheses(
    wanted: Sequence[int], rows: Sequence[Row], logits: torch.Tensor, generations: dict[int, Generation]
) -> dict[int, list[int]]:
    """New hypotheses of every beam request among the `wanted` rows, and their parents."""
    members: dict[int, list[int]] = defaultdict(list)
    for index in wanted:
        members[rows[index].request_id].append(index)
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for request_id, mine in members.items():
        mine.sort(key=lambda index: rows[index].branch)
        alike[len(mine), generations[request_id].request.width].append(request_id)
    parents: dict[int, list[int]] = {}
    for (_, width), request_ids in alike.items():
        places = [members[request_id] for request_id in request_ids]
        positions = [rows[mine[0]].context_len + rows[mine[0]].query_len for mine in places]
        chosen = [generations[request_id] for request_id in request_ids]
        continued = _continue_alike(
            logits[torch.tensor(places, device=logits.device)], chosen, positions, width
        )
        parents.update(zip(request_ids, continued, strict=True))
    return parents


def _continue_alike(
    logits: torch.Tensor, generations: Sequence[Generation], positions: Sequence[int], width: int
) -> list[list[int]]:
    """Select for requests with equally many hypotheses, logits `[requests, hypotheses, vocab]`; note the outcome."""
    known = [torch.from_numpy(generation.scores[: logits.shape[1]]) for generation in generations]
    beams = select_beams(logits, torch.stack(known).to(logits.device), width)
    parents: list[list[int]] = beams.parents.tolist()
    outcome = zip(
        generations, positions, parents, beams.tokens.tolist(), beams.scores.cpu().numpy(), strict=True
    )
    for generation, position, mine, tokens, scores in outcome:
        generation.reparent(mine)
        generation.scores[:] = scores
        for branch, token in enumerate(tokens):
            generation.append(branch, position, token)
    return parents


def refuse_nan(step: int, rows: Sequence[Row], best: torch.Tensor) -> None:
    """Raise NaNLogitsError if any row's largest logit is NaN; a maximum is NaN as soon as one element is."""
    bad = torch.isnan(best)
    if bool(bad.any()):
        row = rows[int(bad.int().argmax())]
        raise NaNLogitsError(
            f"step {step}, request {row.request_id} branch {row.branch}: NaN in the logits after position "
            f"{row.context_len + row.query_len - 1}; it read a slot that was never written, or its model is broken"
        )
