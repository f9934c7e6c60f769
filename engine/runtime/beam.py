"""Beam selection as transformers' `generate(num_beams=k)` does it, for outputs of pinned length (no EOS).

Scores are float32 sums of log-probabilities. Candidates are the best 2k of k x vocabulary, of which the best k go on:
the same `topk` on the same tensor settles ties the same way. Pure functions on tensors.
"""

from typing import NamedTuple

import torch


class Beams(NamedTuple):
    """The hypotheses after a selection, best first; each `[requests, k]`."""

    parents: torch.Tensor  # int64, which hypothesis each one continues
    tokens: torch.Tensor  # int64
    scores: torch.Tensor  # float32


def select_beams(logits: torch.Tensor, scores: torch.Tensor, width: int) -> Beams:
    """Choose `width` continuations per request: logits `[requests, hypotheses, vocab]`, scores without the last.

    On the step that finishes the prompt there is one hypothesis with score 0, after it there are `width`. `width` must
    not exceed the vocabulary.
    """
    vocab = logits.shape[2]
    total = torch.log_softmax(logits.float(), dim=-1) + scores.unsqueeze(2)
    candidates = min(2 * width, total.shape[1] * vocab)
    best, index = torch.topk(total.flatten(1), candidates, dim=1)
    index = index[:, :width]
    return Beams(torch.div(index, vocab, rounding_mode="floor"), index % vocab, best[:, :width])


def final_score(score: float, generated: int, length_penalty: float = 1.0) -> float:
    """Log-probability over (length without the prompt) to the power of the penalty, as transformers ranks them."""
    return score / float(generated**length_penalty)
