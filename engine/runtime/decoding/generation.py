"""The tokens of a request while it runs: the ids of each branch, and where each branch ends.

A branch is one of the parallel samples, or one hypothesis of a beam search.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.core.errors import CoreError
from engine.core.options import Decoding
from engine.core.plan import IntArray
from engine.core.request import Request
from engine.runtime.params import DEFAULT_RULES, DecodingRules

FloatArray = npt.NDArray[np.floating[Any]]

_NEVER = np.float32(-1.0e9)  # transformers adds this to a score that must not win


class Candidates(NamedTuple):
    """The best M continuations of the hypotheses of each request, best first; each tensor is `[requests, M]`."""

    parents: torch.Tensor  # int64, the hypothesis that is continued
    tokens: torch.Tensor  # int64
    scores: torch.Tensor  # float32; float64 where every end counts


class Selection(NamedTuple):
    """The hypotheses that continue, best first. With `stop` the search is over."""

    parents: list[int]
    tokens: list[int]
    stop: bool


def candidates_of(rules: DecodingRules, width: int) -> int:
    """How many continuations to look at: so many that `width` are left even if end tokens are the best ones.

    Where every end counts they are those of each hypothesis.
    """
    return 2 * width if rules.every_end else max(2, 1 + len(rules.end_ids)) * width


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


def own_continuations(logits: torch.Tensor, scores: torch.Tensor, count: int) -> Candidates:
    """The best `count` continuations of each hypothesis, as `best_continuations` has those of all of them.

    `scores` are float64. On a tie the better hypothesis is first.
    """
    best, tokens = torch.log_softmax(logits.float(), dim=-1).topk(min(count, logits.shape[2]), dim=2)
    ordered = (best + scores.unsqueeze(2)).flatten(1).sort(dim=1, descending=True, stable=True)
    parents = torch.div(ordered.indices, best.shape[2], rounding_mode="floor")
    return Candidates(parents, tokens.flatten(1).gather(1, ordered.indices), ordered.values)


def length_normalised(score: FloatArray, generated: int, length_penalty: float) -> npt.NDArray[np.float64]:
    """Log-probability divided by (length without the prompt) to the power of the penalty, which float32 cannot hold."""
    return np.asarray(score.astype(np.float64) / float(generated) ** length_penalty)


class BeamSearch:
    """The beam search of one request: scores of the running hypotheses, and the best finished ones with their tokens.

    Call `advance` with the candidates of each step until `stopped`. An entry of `finished` is None until a hypothesis
    has taken it. `limit` is the largest number of generated tokens.
    """

    def __init__(self, width: int, limit: int, rules: DecodingRules) -> None:
        self.scores: FloatArray = np.zeros(width, dtype=np.float32)
        self.finished: list[IntArray | None] = [None] * width
        self.finished_scores = np.full(width, -np.inf)
        self.stopped = False
        self._width, self._limit, self._rules = width, limit, rules
        self._improvable = True
        self._ends = np.fromiter(rules.end_ids, dtype=np.int64)

    def advance(
        self, parents: IntArray, tokens: IntArray, scores: FloatArray, outputs: Sequence[IntArray]
    ) -> Selection:
        """Take the candidates `[M]`, best first; `outputs` are the ids that each hypothesis has generated so far."""
        generated = len(outputs[0]) + 1
        hits = np.isin(tokens, self._ends) | (generated >= self._limit)
        lowered = (scores + hits * _NEVER).astype(np.float32)
        chosen = np.argsort(-lowered, kind="stable")[: self._width]
        full = all(ids is not None for ids in self.finished)
        # transformers lowers scores after closing, so that no candidate can win
        if self._improvable and not (self._rules.early_stopping is True and full):
            self._finish(np.flatnonzero(hits[: self._width]), parents, tokens, scores, outputs)
        self._update_improvable(lowered[chosen], generated)
        full = all(ids is not None for ids in self.finished)
        self.stopped = bool(
            not self._improvable or (self._rules.early_stopping is True and full) or hits.all()
        )
        self.scores[: len(chosen)] = lowered[chosen]
        return Selection(parents[chosen].tolist(), tokens[chosen].tolist(), self.stopped)

    def _finish(
        self,
        ended: IntArray,
        parents: IntArray,
        tokens: IntArray,
        scores: FloatArray,
        outputs: Sequence[IntArray],
    ) -> None:
        """Merge the candidates `ended` into `finished`; on a tie the older one wins."""
        new = length_normalised(scores[ended], len(outputs[0]) + 1, self._rules.length_penalty)
        pairs = zip(parents[ended], tokens[ended], strict=True)
        entries = [*self.finished, *(np.append(outputs[int(parent)], token) for parent, token in pairs)]
        merged = np.concatenate([self.finished_scores, new])
        best = np.argsort(-merged, kind="stable")[: self._width]
        self.finished = [entries[int(index)] for index in best]
        self.finished_scores = merged[best]

    def _update_improvable(self, running: FloatArray, generated: int) -> None:
        """Note whether the best running hypothesis can still beat the worst finished one. False is final.

        An empty entry of `finished` can always be beaten.
        """
        rules = self._rules
        longest = rules.early_stopping == "never" and rules.length_penalty > 0.0
        best = length_normalised(running[:1], self._limit if longest else generated, rules.length_penalty)
        floors = [self.finished_scores.min() if ids is not None else -np.inf for ids in self.finished]
        self._improvable = self._improvable and any(bool(best[0] > floor) for floor in floors)


class EveryEndSearch(BeamSearch):
    """Beam search in which each end token counts that is among the best continuations of its own hypothesis.

    It is that of vLLM 0.33 (`BeamSearchOfflineMixin` in vllm/entrypoints/generate/beam_search/offline.py), which adds
    up float32 log-probabilities in float64. It stops where no hypothesis can become one of the best any more; vLLM goes
    on, for the same beams. Places of hypotheses without a continuation have the score -inf.
    """

    def __init__(self, width: int, limit: int, rules: DecodingRules) -> None:
        super().__init__(width, limit, rules)
        self.scores = np.zeros(width)

    def advance(
        self, parents: IntArray, tokens: IntArray, scores: FloatArray, outputs: Sequence[IntArray]
    ) -> Selection:
        """Take the candidates `[M]`, best first, as `BeamSearch.advance`."""
        generated, ends = len(outputs[0]) + 1, np.isin(tokens, self._ends)
        alive = scores > -np.inf
        ended, going = np.flatnonzero(alive & ends), np.flatnonzero(alive & ~ends)[: self._width]
        last = generated >= self._limit or not len(going)
        self._finish(np.append(ended, going) if last else ended, parents, tokens, scores, outputs)
        if not last:
            self._update_improvable(scores[going], generated)
        self.stopped = last or not self._improvable
        lost = self._width - len(going)
        self.scores = np.append(scores[going], np.full(lost, -np.inf))
        chosen = [*parents[going].tolist(), *[0] * lost], [*tokens[going].tolist(), *[0] * lost]
        return Selection(*chosen, self.stopped)


class Logprob(NamedTuple):
    """The log-probability of one token, its rank (1: the most likely), and its text where a tokenizer is known."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs(Mapping[int, Logprob]):
    """Log-probabilities at one position: of the chosen token, and of the most likely tokens.

    As a mapping it is vLLM's: token ids to `Logprob`, the chosen token first.
    """

    token: int
    logprob: float
    rank: int  # 1: the most likely token
    best: tuple[tuple[int, float], ...]  # (token, log-probability), best first
    decode: Callable[[Sequence[int]], str] | None = field(default=None, compare=False, repr=False)

    def __getitem__(self, token: int) -> Logprob:
        """The entry of a token id. Raises KeyError for one that was not asked for."""
        if token == self.token:
            found = self.logprob, self.rank
        else:
            values = {each: (value, rank) for rank, (each, value) in enumerate(self.best, start=1)}
            found = values[token]
        return Logprob(*found, None if self.decode is None else self.decode([token]))

    def __iter__(self) -> Iterator[int]:
        yield self.token
        yield from (token for token, _ in self.best if token != self.token)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Without the tokenizer, for another process."""
        return type(self), (self.token, self.logprob, self.rank, self.best)


class ScoredSpan(NamedTuple):
    """Prompt tokens of a request whose log-probabilities are wanted: their number, and the position of the first."""

    request_id: int
    position: int
    tokens: int


class Generation:
    """Token ids `[width, prompt + output]` of one request. The first `known[branch]` ids of a branch are valid.

    `ends[branch]` is the number of generated tokens including the end token, or None while the branch goes on.
    With `forced`, ids `[output]`, these stand in the place of what is chosen, for replays that say what was answered.
    `reparent` reorders beam hypotheses; `search` keeps the finished ones.
    """

    def __init__(self, request: Request, prompt_ids: IntArray, rules: DecodingRules = DEFAULT_RULES) -> None:
        if len(prompt_ids) != request.prompt_tokens:
            raise CoreError(
                f"request {request.request_id}: {len(prompt_ids)} prompt ids for {request.prompt_tokens} prompt tokens"
            )
        self.request = request
        self.rules = rules
        self.tokens = np.zeros((request.width, request.most_kv_tokens + 1), dtype=np.int64)
        self.tokens[:, : request.prompt_tokens] = prompt_ids
        self.known = [request.prompt_tokens] * request.width
        self.forced: IntArray | None = None
        self.ends: list[int | None] = [None] * request.width
        self.proposed: list[int] = []  # draft tokens of the current step, after the last known token
        # from the second token on, where the rules ask for them
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in range(request.width)]
        self.search: BeamSearch | None = None
        if request.decoding is Decoding.beam:
            kind = EveryEndSearch if rules.every_end else BeamSearch
            self.search = kind(request.width, request.output_tokens, rules)

    @property
    def ended(self) -> bool:
        """Whether every branch has ended before the token limit, or the beam search has stopped."""
        return None not in self.ends if self.search is None else self.search.stopped

    @property
    def ended_branches(self) -> set[int]:
        """Branches that have ended before the token limit."""
        return {branch for branch, end in enumerate(self.ends) if end is not None}

    @property
    def growing(self) -> int:
        """Number of sequences that got a token in the last step: those that had not ended before it."""
        if self.search is not None:
            return self.request.width
        start = self.request.prompt_tokens
        return sum(
            end is None or end == known - start for end, known in zip(self.ends, self.known, strict=True)
        )

    def append(self, branch: int, position: int, token: int) -> None:
        """Append a token to a branch. Raises CoreError if `position` is not the next one, a bug of the scheduler."""
        most = self.request.prompt_tokens + self.request.output_tokens
        if position != self.known[branch] or position >= most:
            raise CoreError(
                f"request {self.request.request_id} branch {branch}: sampled position {position}, "
                f"the next one is {self.known[branch]} of {most}"
            )
        if self.forced is not None:
            token = int(self.forced[position - self.request.prompt_tokens])
        self.tokens[branch, position] = token
        self.known[branch] = position + 1
        if token in self.rules.end_ids and self.ends[branch] is None and self.search is None:
            self.ends[branch] = position + 1 - self.request.prompt_tokens

    def propose(self, position: int, token: int) -> None:
        """Write a draft token to `position`. It stays there until it is verified or replaced."""
        self.proposed.append(token)
        self.tokens[0, position] = token

    def fill(self) -> None:
        """What was proposed only fills the row: no token is equal to it."""
        self.proposed = [-1] * len(self.proposed)

    def reparent(self, parents: Sequence[int]) -> None:
        """Let branch i continue the generated tokens of branch `parents[i]`."""
        start = self.request.prompt_tokens
        self.tokens[:, start:] = self.tokens[list(parents), start:]

    def output_ids(self, branch: int) -> IntArray:
        """Token ids that a branch has generated so far."""
        return self.tokens[branch, self.request.prompt_tokens : self.known[branch]]

    def outputs(self) -> list[list[int]]:
        """Generated ids of each branch with its end token. Beams: best first; after the search, the finished ones."""
        if self.search is not None and self.search.stopped:
            return [ids.tolist() for ids in self.search.finished if ids is not None]
        return [self.output_ids(branch)[: self.ends[branch]].tolist() for branch in range(self.request.width)]

    def scores(self) -> list[float]:
        """Scores of beam hypotheses, best first; 0 for every other sequence."""
        if self.search is None:
            return [0.0] * self.request.width
        if not self.search.stopped:
            return [float(score) for score in self.search.scores]
        pairs = zip(self.search.finished, self.search.finished_scores, strict=True)
        return [float(score) for ids, score in pairs if ids is not None]
