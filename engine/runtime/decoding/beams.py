"""Beam search with the results of transformers' `generate(num_beams=k)`, one request at a time.

Scores are float32 sums of log-probabilities, and the same `topk` runs on the same tensor, so ties are decided in the
same way. The rules follow `_beam_search` of transformers 5.17 (generation/utils.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.core.plan import IntArray
from engine.runtime.params import DecodingRules

FloatArray = npt.NDArray[np.float32]

_NEVER = np.float32(-1.0e9)  # transformers adds this to a score that must not win


class Candidates(NamedTuple):
    """The best M continuations of the hypotheses of each request, best first; each tensor is `[requests, M]`."""

    parents: torch.Tensor  # int64, the hypothesis that is continued
    tokens: torch.Tensor  # int64
    scores: torch.Tensor  # float32


class Selection(NamedTuple):
    """The hypotheses that continue, best first. With `stop` the search is over."""

    parents: list[int]
    tokens: list[int]
    stop: bool


def candidates_of(rules: DecodingRules, width: int) -> int:
    """How many continuations to look at, so that `width` are left even if end tokens are the best ones."""
    return max(2, 1 + len(rules.end_ids)) * width


def best_continuations(logits: torch.Tensor, scores: torch.Tensor, count: int) -> Candidates:
    """The best `count` continuations per request.

    Logits are `[requests, hypotheses, vocab]`; scores `[requests, hypotheses]` are those of the tokens before. On the
    step that finishes the prompt there is one hypothesis with score 0. If `count` exceeds the vocabulary then, copies
    of this hypothesis that cannot win are added, as in transformers.
    """
    vocab = logits.shape[2]
    total = torch.log_softmax(logits.float(), dim=-1) + scores.unsqueeze(2)
    if total.shape[1] == 1 and count > vocab:
        copies = -(-count // vocab) - 1
        total = torch.cat([total, (total + float(_NEVER)).expand(-1, copies, -1)], dim=1)
    best, index = torch.topk(total.flatten(1), min(count, total.shape[1] * vocab), dim=1)
    parents = torch.div(index, vocab, rounding_mode="floor")
    return Candidates(parents.clamp_max(logits.shape[1] - 1), index % vocab, best)


def length_normalised(score: FloatArray, generated: int, length_penalty: float) -> FloatArray:
    """Log-probability divided by (length without the prompt) to the power of the penalty."""
    return np.asarray(score / np.float32(float(generated) ** length_penalty), dtype=np.float32)


class BeamSearch:
    """The beam search of one request: scores of the running hypotheses, and the best finished ones with their tokens.

    Call `advance` with the candidates of each step until `stopped`. An entry of `finished` is None until a hypothesis
    has taken it. `limit` is the largest number of generated tokens.
    """

    def __init__(self, width: int, limit: int, rules: DecodingRules) -> None:
        self.scores = np.zeros(width, dtype=np.float32)
        self.finished: list[IntArray | None] = [None] * width
        self.finished_scores = np.full(width, _NEVER, dtype=np.float32)
        self.stopped = False
        self._width, self._limit, self._rules = width, limit, rules
        self._improvable = True
        self._ends = np.fromiter(rules.end_ids, dtype=np.int64)

    def advance(
        self, parents: IntArray, tokens: IntArray, scores: FloatArray, outputs: Sequence[IntArray]
    ) -> Selection:
        """Take the candidates `[M]`, best first; `outputs` are the ids that each hypothesis has generated so far."""
        generated = len(outputs[0]) + 1
        if not len(self._ends) and generated < self._limit:
            return self._continue(parents, tokens, scores)
        hits = np.isin(tokens, self._ends) | (generated >= self._limit)
        lowered = (scores + hits * _NEVER).astype(np.float32)
        chosen = np.argsort(-lowered, kind="stable")[: self._width]
        self._finish(parents, tokens, scores, hits, outputs)
        self._update_improvable(lowered[chosen], generated)
        full = all(ids is not None for ids in self.finished)
        self.stopped = bool(
            not self._improvable or (self._rules.early_stopping is True and full) or hits.all()
        )
        self.scores[: len(chosen)] = lowered[chosen]
        return Selection(parents[chosen].tolist(), tokens[chosen].tolist(), self.stopped)

    def _continue(self, parents: IntArray, tokens: IntArray, scores: FloatArray) -> Selection:
        """Without end tokens no hypothesis can finish before the limit: the best candidates continue."""
        width = self._width
        self.scores[: len(scores[:width])] = scores[:width]
        return Selection(parents[:width].tolist(), tokens[:width].tolist(), stop=False)

    def _finish(
        self,
        parents: IntArray,
        tokens: IntArray,
        scores: FloatArray,
        hits: npt.NDArray[np.bool_],
        outputs: Sequence[IntArray],
    ) -> None:
        """Merge the first `width` candidates that end (`hits`) into `finished`; on a tie the older one wins."""
        ranked = hits[: self._width]
        full = all(ids is not None for ids in self.finished)
        closed = not self._improvable or (self._rules.early_stopping is True and full)
        if (
            not ranked.any() or closed
        ):  # transformers lowers scores after closing, so that no candidate can win
            return
        new = length_normalised(scores[: self._width], len(outputs[0]) + 1, self._rules.length_penalty)
        entries: list[IntArray | None] = list(self.finished)
        merged = np.concatenate([self.finished_scores, np.where(ranked, new, new + _NEVER)])
        for rank in range(len(ranked)):
            ids = np.append(outputs[int(parents[rank])], tokens[rank]) if ranked[rank] else None
            entries.append(ids)
        best = np.argsort(-merged, kind="stable")[: self._width]
        self.finished = [entries[int(index)] for index in best]
        self.finished_scores = merged[best].astype(np.float32)

    def _update_improvable(self, running: FloatArray, generated: int) -> None:
        """Note whether the best running hypothesis can still beat the worst finished one. False is final.

        An empty entry of `finished` can always be beaten.
        """
        rules = self._rules
        longest = rules.early_stopping == "never" and rules.length_penalty > 0.0
        best = length_normalised(running[:1], self._limit if longest else generated, rules.length_penalty)
        worst = self.finished_scores.min()
        floors = [worst if ids is not None else _NEVER for ids in self.finished]
        self._improvable = self._improvable and any(bool(best[0] > floor) for floor in floors)
