"""Which token a row draws: changes of its logits, temperature, top-k, top-p and min-p, and one random number.

The number depends only on (seed, request, branch, position), through a counter-based hash. So a request gets the same
tokens with any other requests in the batch, in any order of execution, and after a preemption.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.core.plan import IntArray, Row
from engine.runtime.decoding.generation import Generation
from engine.runtime.params import DecodingRules, LogitChanges

_NEVER = float("-inf")


def change_logits(logits: torch.Tensor, generation: Generation, branch: int, position: int) -> None:
    """Change the logits `[vocab]` for `position` of a branch, in place, as the request's rules say.

    Output tokens before `position` count, draft tokens among them. Penalties are those of vLLM: the repetition penalty
    (Keskar et al. 2019) divides positive logits of tokens of prompt and output and multiplies negative ones; frequency
    and presence penalties (OpenAI's) are subtracted for tokens of the output.
    """
    changes = generation.rules.changes
    if changes is None:
        return
    start = generation.request.prompt_tokens
    prompt, output = generation.tokens[branch, :start], generation.tokens[branch, start:position]
    if changes.constraint is not None:
        changes.constraint.hide(logits, branch, output.tolist())
    if changes.allowed:
        kept = logits[list(changes.allowed)].clone()
        logits.fill_(_NEVER)
        logits[list(changes.allowed)] = kept
    if len(output) < changes.min_tokens and generation.rules.end_ids:
        logits[sorted(generation.rules.end_ids)] = _NEVER
    for token, bias in changes.bias:
        logits[token] += bias
    for token in _ends_of_bad_words(changes.bad_words, output):
        logits[token] = _NEVER
    _penalise(logits, changes, prompt, output)


def _ends_of_bad_words(words: Sequence[Sequence[int]], output: IntArray) -> list[int]:
    """The tokens that would complete a bad word after this output."""
    return [
        word[-1]
        for word in words
        if len(word) <= len(output) + 1 and output[len(output) + 1 - len(word) :].tolist() == list(word[:-1])
    ]


def _penalise(logits: torch.Tensor, changes: LogitChanges, prompt: IntArray, output: IntArray) -> None:
    if changes.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.concatenate([prompt, output]))).to(logits.device)
        known = logits[seen]
        penalty = changes.repetition_penalty
        logits[seen] = torch.where(known > 0, known / penalty, known * penalty)
    if changes.frequency_penalty or changes.presence_penalty:
        tokens, counts = np.unique(output, return_counts=True)
        less = changes.frequency_penalty * counts + changes.presence_penalty
        logits[torch.from_numpy(tokens).to(logits.device)] -= torch.from_numpy(less).to(logits)


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
    cumulative = torch.softmax(logits.double() / temperature, dim=-1).cumsum(dim=-1)
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
    draws = []
    for index in wanted:
        row = rows[index]
        position, request = row.context_len + row.query_len, generations[row.request_id].request
        branches = range(request.width) if position == request.prompt_tokens else (row.branch,)
        draws += [Draw(index, row.request_id, branch, position) for branch in branches]
    rules = [generations[draw.request_id].rules for draw in draws]
    source = logits[torch.tensor([draw.row for draw in draws], device=logits.device)].float()
    for row, drawn in zip(source, draws, strict=True):
        change_logits(row, generations[drawn.request_id], drawn.branch, drawn.position)
    values = [temperature if rule.temperature is None else rule.temperature for rule in rules]
    temperatures = torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)
    _restrict_rows(source, temperatures, rules)
    # if a request sets a seed, its id is not used, so that its tokens can be repeated
    seeds = [seed if rule.seed is None else rule.seed for rule in rules]
    ids = [drawn.request_id if rule.seed is None else 0 for rule, drawn in zip(rules, draws, strict=True)]
    numbers = uniforms(seeds, ids, [drawn.branch for drawn in draws], [drawn.position for drawn in draws])
    return draws, draw(source, temperatures, numbers).tolist()


def _restrict_rows(source: torch.Tensor, temperatures: torch.Tensor, rules: Sequence[DecodingRules]) -> None:
    """Set logits `[draws, vocab]` of tokens that must not be drawn to -inf, in place. Temperature is applied first."""
    index = [row for row, rule in enumerate(rules) if rule.top_k > 0 or rule.top_p < 1.0 or rule.min_p > 0.0]
    if not index:
        return
    chosen = torch.tensor(index, device=source.device)
    limits = zip(*((rules[row].top_k, rules[row].top_p, rules[row].min_p) for row in index), strict=True)
    top_k, top_p, min_p = (torch.tensor(column, device=source.device) for column in limits)
    scale = temperatures[chosen].float()
    source[chosen] = restrict(source[chosen] / scale, top_k, top_p, min_p) * scale
