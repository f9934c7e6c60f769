"""From the logits of a step to its next tokens.

`forward_output` finds the best token of each row on the device. In a recorded graph it is part of the recording, so a
greedy step copies one number per row to the host. `TokenChooser` then decodes each request in its own mode: greedy,
sampling or beam search. It also verifies draft tokens, records log-probabilities, and reports requests with NaN logits.
Sampling stays outside of the graph: it needs float64 over the whole vocabulary, and greedy rows must not pay for that.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from engine.core.options import Decoding
from engine.core.plan import Row
from engine.runtime.decoding.generation import (
    Generation,
    ScoredSpan,
    TokenLogprobs,
    best_continuations,
    candidates_of,
    own_continuations,
)
from engine.runtime.decoding.sample import Draw, change_logits, draw_all
from engine.runtime.errors import NaNLogitsError
from paged_kernels.native import c_function, why_unavailable

NO_TOKEN = -1  # the token of a row with NaN logits
_BEST_FUNCTIONS = {torch.float32: "best_f32", torch.bfloat16: "best_bf16"}


def best_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit and its first index, each `[rows]`, of logits `[rows, vocab]`.

    The largest logit is NaN if any logit of the row is NaN.
    """
    if logits.device.type != "cpu" or logits.dtype not in _BEST_FUNCTIONS or why_unavailable():
        best, index = logits.max(dim=-1)
        return best, index
    logits = logits.contiguous()
    best = torch.empty(len(logits), dtype=torch.float32)
    index = torch.empty(len(logits), dtype=torch.int64)
    run = c_function(_BEST_FUNCTIONS[logits.dtype], "piipp")
    run(logits.data_ptr(), *logits.shape, best.data_ptr(), index.data_ptr())
    return best, index


class ForwardOutput(NamedTuple):
    """What a forward pass gives: logits, and the best token of each row."""

    logits: torch.Tensor  # [rows, vocab], in the model's data type
    tokens: torch.Tensor  # int64 [rows], the first one with the largest logit, or NO_TOKEN

    def first(self, rows: int) -> "ForwardOutput":
        """The first rows. The other rows of a recorded pass are padding."""
        return ForwardOutput(self.logits[:rows], self.tokens[:rows])


def forward_output(logits: torch.Tensor) -> ForwardOutput:
    """Find the best token of each row of logits `[rows, vocab]`; NO_TOKEN where a row has a NaN."""
    best, tokens = best_tokens(logits)
    return ForwardOutput(logits, tokens.masked_fill(torch.isnan(best), NO_TOKEN))


def note_logprobs(
    draws: Sequence[Draw], tokens: Sequence[int], logits: torch.Tensor, generations: Mapping[int, Generation]
) -> None:
    """Record the log-probabilities that the requests of the draws asked for; logits `[rows, vocab]`."""
    wanted = [
        (draw, token, count)
        for draw, token in zip(draws, tokens, strict=True)
        if (count := generations[draw.request_id].rules.logprobs) is not None
    ]
    if not wanted:
        return
    rows = torch.tensor([draw.row for draw, _, _ in wanted], device=logits.device)
    found = token_logprobs(logits[rows], [token for _, token, _ in wanted], [count for _, _, count in wanted])
    for (draw, _, _), entry in zip(wanted, found, strict=True):
        generations[draw.request_id].logprobs[draw.branch].append(entry)


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of a token per row of logits `[rows, vocab]`, and of the row's `counts` most likely ones."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    own = logprobs.gather(1, chosen)
    ranks = (logprobs > own).sum(dim=1) + 1
    widest = min(max(counts), logits.shape[1])
    best, ids = logprobs.topk(widest, dim=1) if widest else (logprobs[:, :0], chosen[:, :0])
    columns = zip(
        tokens, counts, own.flatten().tolist(), ranks.tolist(), ids.tolist(), best.tolist(), strict=True
    )
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(top[:count], values[:count], strict=True)))
        for token, count, logprob, rank, top, values in columns
    ]


def note_prompt_logprobs(
    spans: Sequence[ScoredSpan], logits: torch.Tensor, generations: Mapping[int, Generation]
) -> None:
    """Record the log-probabilities of prompt tokens; logits `[tokens of all spans, vocab]`."""
    start = 0
    for span in spans:
        generation = generations[span.request_id]
        tokens = generation.tokens[0, span.position : span.position + span.tokens].tolist()
        counts = [generation.rules.prompt_logprobs or 0] * span.tokens
        generation.prompt_logprobs += token_logprobs(logits[start : start + span.tokens], tokens, counts)
        start += span.tokens


def advance_searches(
    wanted: Sequence[int], rows: Sequence[Row], logits: torch.Tensor, generations: Mapping[int, Generation]
) -> dict[int, list[int]]:
    """Advance every beam search among the `wanted` rows. Returns the parents of its new hypotheses by request.

    Requests of one kind with equally many hypotheses and candidates are computed together.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for index in wanted:
        members[rows[index].request_id].append(index)
    alike: dict[tuple[int, int, bool], list[int]] = defaultdict(list)
    for request_id, mine in members.items():
        mine.sort(key=lambda index: rows[index].branch)
        generation = generations[request_id]
        count = candidates_of(generation.rules, generation.request.width)
        alike[len(mine), count, generation.rules.every_end].append(request_id)
    parents: dict[int, list[int]] = {}
    for (_, count, _), request_ids in alike.items():
        places = torch.tensor([members[request_id] for request_id in request_ids], device=logits.device)
        chosen = [generations[request_id] for request_id in request_ids]
        parents.update(zip(request_ids, _advance_alike(logits[places], chosen, count), strict=True))
    return parents


def _advance_alike(logits: torch.Tensor, generations: Sequence[Generation], count: int) -> list[list[int]]:
    """Advance requests with equally many hypotheses, logits `[requests, hypotheses, vocab]`. Returns their parents."""
    hypotheses = logits.shape[1]
    known = np.stack([one.search.scores[:hypotheses] for one in generations if one.search])
    find = own_continuations if generations[0].rules.every_end else best_continuations
    best = find(logits, torch.from_numpy(known).to(logits.device), count)
    columns = (column.cpu().numpy() for column in (best.parents, best.tokens, best.scores))
    return [
        _advance_one(generation, hypotheses, *candidates)
        for generation, *candidates in zip(generations, *columns, strict=True)
    ]


def _advance_one(
    generation: Generation, hypotheses: int, parents: np.ndarray, tokens: np.ndarray, scores: np.ndarray
) -> list[int]:
    """Advance one request by its candidates `[M]`. The hypotheses of a search that is over do not change."""
    assert generation.search is not None
    outputs = [generation.output_ids(branch) for branch in range(hypotheses)]
    chosen = generation.search.advance(parents, tokens, scores, outputs)
    if chosen.stop:
        return chosen.parents
    generation.reparent(chosen.parents)
    position = generation.known[0]
    for branch, token in enumerate(chosen.tokens):
        generation.append(branch, position, token)
    return chosen.parents


@dataclass(slots=True)
class ChosenTokens:
    """The outcome of a step, by request id."""

    parents: dict[int, list[int]] = field(default_factory=dict)  # of beam hypotheses
    accepted: dict[int, int] = field(default_factory=dict)  # draft tokens that were right
    finished: set[int] = field(default_factory=set)
    # branches that ended before the others of their request
    ended: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    failed: dict[int, NaNLogitsError] = field(default_factory=dict)  # requests with NaN logits


@dataclass(frozen=True, slots=True)
class TokenChooser:
    """Chooses the next tokens of a step. `seed` and `temperature` hold for requests that set none."""

    seed: int
    temperature: float

    def choose(
        self, step: int, rows: Sequence[Row], output: ForwardOutput, generations: Mapping[int, Generation]
    ) -> ChosenTokens:
        """Choose tokens for the sampled `rows` from the output of their pass, and append them to the generations.

        A request with NaN logits gets no token; it is in `failed`, with an error that names step and sequence.
        """
        logits, tokens = output.logits, output.tokens.tolist()
        choice = ChosenTokens(failed=nan_rows(step, rows, tokens))
        kinds: dict[Decoding, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            if row.request_id not in choice.failed:
                kinds[generations[row.request_id].request.decoding].append(index)
        draws = [
            Draw(index, rows[index].request_id, 0, rows[index].context_len + rows[index].query_len)
            for index in kinds[Decoding.greedy]
        ]
        chosen = [_greedy(draw, tokens, logits, generations) for draw in draws]
        if kinds[Decoding.sample]:
            sampled, drawn = draw_all(
                self.seed, self.temperature, kinds[Decoding.sample], rows, logits, generations
            )
            draws += sampled
            chosen += drawn
        self._append(draws, chosen, logits, generations, choice)
        if kinds[Decoding.beam]:
            choice.parents = advance_searches(kinds[Decoding.beam], rows, logits, generations)
            choice.finished.update(request for request in choice.parents if generations[request].ended)
        for request_id in choice.failed:
            choice.parents[request_id] = list(range(generations[request_id].request.width))
        for request_id in choice.finished:
            choice.ended.pop(request_id, None)
        return choice

    @staticmethod
    def _append(
        draws: Sequence[Draw],
        tokens: Sequence[int],
        logits: torch.Tensor,
        generations: Mapping[int, Generation],
        choice: ChosenTokens,
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


def _greedy(
    draw: Draw, tokens: Sequence[int], logits: torch.Tensor, generations: Mapping[int, Generation]
) -> int:
    """The best token of a row, after the changes that its request asks for."""
    generation = generations[draw.request_id]
    if generation.rules.changes is None:
        return tokens[draw.row]
    own = logits[draw.row].float().clone()
    change_logits(own, generation, draw.branch, draw.position)
    return int(own.argmax())


def _verified(
    draws: Sequence[Draw], tokens: Sequence[int], generations: Mapping[int, Generation], choice: ChosenTokens
) -> tuple[Sequence[Draw], Sequence[int]]:
    """Verify draft tokens: keep the model's tokens up to the first that differs from its draft or ends the sequence.

    Drafts past the last token of a request may be right too, but are not kept.
    """
    if not any(generations[draw.request_id].proposed for draw in draws):
        return draws, tokens
    kept: list[tuple[Draw, int]] = []
    closed: set[int] = set()
    for draw, token in sorted(zip(draws, tokens, strict=True), key=lambda pair: pair[0].position):
        if draw.request_id in closed:
            continue
        generation, request_id = generations[draw.request_id], draw.request_id
        request = generation.request
        if draw.position < request.prompt_tokens + request.output_tokens:
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
    """An error for every request that has a row without a token."""
    failed: dict[int, NaNLogitsError] = {}
    for row, token in zip(rows, tokens, strict=True):
        if token != NO_TOKEN:
            continue
        error = NaNLogitsError(
            f"step {step}, request {row.request_id} branch {row.branch}: NaN in the logits after position "
            f"{row.context_len + row.query_len - 1}; it read a slot that was never written, or the model is broken"
        )
        failed.setdefault(row.request_id, error)
    return failed
