"""From the logits of a step to its next tokens.

`decode` finds the best token of each row on the device. In a recorded graph it is part of the recording, so a greedy
step copies one number per row to the host. `TokenChooser` then handles each request in its own way of decoding: greedy,
sampling or beam search. It also verifies draft tokens, notes log-probabilities, and reports requests with NaN logits.
Sampling stays outside of the graph: it needs float64 over the whole vocabulary, and greedy rows must not pay for that.
"""

import ctypes
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.core.options import Decoding
from engine.core.plan import Row
from engine.runtime.attention.native.compile import library, why_unavailable
from engine.runtime.decoding.beams import best_continuations, candidates_of
from engine.runtime.decoding.generation import Generation, TokenLogprobs
from engine.runtime.decoding.sample import Draw, draw_all
from engine.runtime.errors import NaNLogitsError

_NAMES = {torch.float32: "best_f32", torch.bfloat16: "best_bf16"}


def best_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit and its first place, each `[rows]`, of logits `[rows, vocab]`; NaN where a row has a NaN."""
    if logits.device.type != "cpu" or logits.dtype not in _NAMES or why_unavailable():
        best, place = logits.max(dim=-1)
        return best, place
    logits = logits.contiguous()
    best = torch.empty(len(logits), dtype=torch.float32)
    place = torch.empty(len(logits), dtype=torch.int64)
    run = _kernel(_NAMES[logits.dtype])
    run(logits.data_ptr(), *logits.shape, best.data_ptr(), place.data_ptr())
    return best, place


@cache
def _kernel(name: str) -> Any:
    function = getattr(library(), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = None
    return function


NO_TOKEN = -1  # of a row with NaN among its logits


class Decoded(NamedTuple):
    """Logits `[rows, vocab]` in the model's type, and tokens `[rows]`: the first of the largest, or NO_TOKEN."""

    logits: torch.Tensor
    tokens: torch.Tensor

    def front(self, rows: int) -> "Decoded":
        """The first rows: those of a recorded pass that are no padding."""
        return Decoded(self.logits[:rows], self.tokens[:rows])


def decode(logits: torch.Tensor) -> Decoded:
    """Choose the best tokens; a largest logit is NaN as soon as one of its row is."""
    best, tokens = best_tokens(logits)
    return Decoded(logits, tokens.masked_fill(torch.isnan(best), NO_TOKEN))


def note_logprobs(
    draws: Sequence[Draw], tokens: Sequence[int], logits: torch.Tensor, generations: Mapping[int, Generation]
) -> None:
    """Note what the draws' requests asked for; logits `[rows, vocab]`."""
    wanted = [
        (draw, token, count)
        for draw, token in zip(draws, tokens, strict=True)
        if (count := generations[draw.request_id].rules.logprobs) is not None
    ]
    if not wanted:
        return
    rows = torch.tensor([draw.row for draw, _, _ in wanted], device=logits.device)
    logprobs = torch.log_softmax(logits[rows].float(), dim=-1)
    chosen = torch.tensor([token for _, token, _ in wanted], device=logits.device).unsqueeze(1)
    own = logprobs.gather(1, chosen)
    ranks = (logprobs > own).sum(dim=1) + 1
    widest = min(max(count for _, _, count in wanted), logits.shape[1])
    best, ids = logprobs.topk(widest, dim=1) if widest else (logprobs[:, :0], chosen[:, :0])
    columns = zip(wanted, own.flatten().tolist(), ranks.tolist(), ids.tolist(), best.tolist(), strict=True)
    for (draw, token, count), logprob, rank, top, values in columns:
        pairs = tuple(zip(top[:count], values[:count], strict=True))
        generations[draw.request_id].logprobs[draw.branch].append(TokenLogprobs(token, logprob, rank, pairs))


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
