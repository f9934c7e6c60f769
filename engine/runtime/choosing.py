"""From a step's logits to next tokens: every sampled row by its request's way of decoding, all of a kind at once."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.core.plan import Row
from engine.core.request import Decoding
from engine.runtime.decoded import NO_TOKEN, Decoded
from engine.runtime.drawing import Draw, draw_all
from engine.runtime.errors import NaNLogitsError
from engine.runtime.logprobs import note_logprobs
from engine.runtime.searching import advance_searches
from engine.runtime.sequences import Generation


@dataclass(slots=True)
class Choice:
    """What a step's logits led to: beam parents by request, requests that are over, branches that ended before the
    others of their request, and requests whose logits are NaN."""

    parents: dict[int, list[int]] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)  # draft tokens that were right
    finished: set[int] = field(default_factory=set)
    ended: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    failed: dict[int, NaNLogitsError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenChooser:
    """Chooses the next tokens of a step and notes them in the generations."""

    seed: int
    temperature: float

    def choose(
        self, step: int, rows: Sequence[Row], decoded: Decoded, generations: Mapping[int, Generation]
    ) -> Choice:
        """Take what a pass said of the sampled rows; what needs logits in float32 makes them so.

        A request with NaN in its logits is `failed`, with an error that names step and sequence, and gets no token.
        """
        logits, tokens = decoded.logits, decoded.tokens.tolist()
        choice = Choice(failed=nan_rows(step, rows, tokens))
        kinds: dict[Decoding, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            if row.request_id not in choice.failed:
                kinds[generations[row.request_id].request.decoding].append(index)
        draws = [
            Draw(index, rows[index].request_id, 0, rows[index].context_len + rows[index].query_len)
            for index in kinds[Decoding.GREEDY]
        ]
        chosen = [tokens[draw.row] for draw in draws]
        if kinds[Decoding.SAMPLE]:
            sampled, drawn = draw_all(
                self.seed, self.temperature, kinds[Decoding.SAMPLE], rows, logits, generations
            )
            draws += sampled
            chosen += drawn
        self._note(draws, chosen, logits, generations, choice)
        if kinds[Decoding.BEAM]:
            choice.parents = advance_searches(kinds[Decoding.BEAM], rows, logits, generations)
            choice.finished.update(request for request in choice.parents if generations[request].ended)
        for request_id in choice.failed:
            choice.parents[request_id] = list(range(generations[request_id].request.width))
        for request_id in choice.finished:
            choice.ended.pop(request_id, None)
        return choice

    @staticmethod
    def _note(
        draws: Sequence[Draw],
        tokens: Sequence[int],
        logits: torch.Tensor,
        generations: Mapping[int, Generation],
        choice: Choice,
    ) -> None:
        draws, tokens = _verified(draws, tokens, generations, choice)
        note_logprobs(draws, tokens, logits, generations)
        for draw, token in zip(draws, tokens, strict=True):
            generation = generations[draw.request_id]
            generation.append(draw.branch, draw.position, token)
            if token not in generation.rules.end_ids:
                continue
            if generation.ended:
                choice.finished.add(draw.request_id)
            else:
                choice.ended[draw.request_id].append(draw.branch)


def _verified(
    draws: Sequence[Draw], tokens: Sequence[int], generations: Mapping[int, Generation], choice: Choice
) -> tuple[Sequence[Draw], Sequence[int]]:
    """What is left when draft tokens meet the model's own: up to the first that differs or ends the sequence."""
    if not any(generations[draw.request_id].proposed for draw in draws):
        return draws, tokens
    kept: list[tuple[Draw, int]] = []
    closed: set[int] = set()
    for draw, token in sorted(zip(draws, tokens, strict=True), key=lambda pair: pair[0].position):
        if draw.request_id in closed:
            continue
        generation, request_id = generations[draw.request_id], draw.request_id
        kept.append((draw, token))
        if generation.proposed:
            ahead = choice.accepted[request_id] = choice.accepted.get(request_id, -1) + 1
            right = ahead < len(generation.proposed) and token == generation.proposed[ahead]
            if not right or token in generation.rules.end_ids:
                closed.add(request_id)
    for request_id in choice.accepted:
        generations[request_id].proposed = []
    return [draw for draw, _ in kept], [token for _, token in kept]


def nan_rows(step: int, rows: Sequence[Row], tokens: Sequence[int]) -> dict[int, NaNLogitsError]:
    """An error for every request with a row that has no token."""
    failed: dict[int, NaNLogitsError] = {}
    for row, token in zip(rows, tokens, strict=True):
        if token != NO_TOKEN:
            continue
        error = NaNLogitsError(
            f"step {step}, request {row.request_id} branch {row.branch}: NaN in the logits after position "
            f"{row.context_len + row.query_len - 1}; it read a slot that was never written, or its model is broken"
        )
        failed.setdefault(row.request_id, error)
    return failed
