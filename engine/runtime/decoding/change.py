"""Changes of the logits of single requests, before a token is chosen: form, penalties, bias, forbidden tokens."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.core.plan import IntArray
from engine.runtime.decoding.generation import Generation
from engine.runtime.params import LogitChanges

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
