"""The tokens of a request while it runs: the ids of each branch, and where each branch ends.

A branch is one of the parallel samples, or one hypothesis of a beam search.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.core.errors import CoreError
from engine.core.options import Decoding
from engine.core.plan import IntArray
from engine.core.request import Request
from engine.runtime.decoding.beams import BeamSearch
from engine.runtime.params import DEFAULT_RULES, DecodingRules


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: of the chosen token, and of the most likely tokens."""

    token: int
    logprob: float
    rank: int  # 1: the most likely token
    best: tuple[tuple[int, float], ...]  # (token, log-probability), best first


class ScoredSpan(NamedTuple):
    """Prompt tokens of a request whose log-probabilities are wanted: their number, and the position of the first."""

    request_id: int
    position: int
    tokens: int


class Generation:
    """Token ids `[width, prompt + output]` of one request. The first `known[branch]` ids of a branch are valid.

    `ends[branch]` is the number of generated tokens including the end token, or None while the branch goes on.
    `reparent` reorders beam hypotheses; `search` keeps the finished ones.
    """

    def __init__(self, request: Request, prompt_ids: IntArray, rules: DecodingRules = DEFAULT_RULES) -> None:
        if len(prompt_ids) != request.prompt_tokens:
            raise CoreError(
                f"request {request.request_id}: {len(prompt_ids)} prompt ids for {request.prompt_tokens} prompt tokens"
            )
        self.request = request
        self.rules = rules
        self.tokens = np.zeros((request.width, request.prompt_tokens + request.output_tokens), dtype=np.int64)
        self.tokens[:, : request.prompt_tokens] = prompt_ids
        self.known = [request.prompt_tokens] * request.width
        self.ends: list[int | None] = [None] * request.width
        self.proposed: list[int] = []  # draft tokens of the current step, after the last known token
        self.prompt_logprobs: list[
            TokenLogprobs
        ] = []  # of the second prompt token on, where the rules ask for them
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in range(request.width)]
        is_beam = request.decoding is Decoding.beam
        self.search = BeamSearch(request.width, request.output_tokens, rules) if is_beam else None

    @property
    def ended(self) -> bool:
        """Whether every branch has ended before the token limit, or the beam search has stopped."""
        if self.search is not None:
            return self.search.stopped
        return None not in self.ends

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
        if position != self.known[branch] or position >= self.tokens.shape[1]:
            raise CoreError(
                f"request {self.request.request_id} branch {branch}: sampled position {position}, "
                f"the next one is {self.known[branch]} of {self.tokens.shape[1]}"
            )
        self.tokens[branch, position] = token
        self.known[branch] = position + 1
        if token in self.rules.end_ids and self.ends[branch] is None and self.search is None:
            self.ends[branch] = position + 1 - self.request.prompt_tokens

    def propose(self, position: int, token: int) -> None:
        """Write a draft token to `position`. It stays there until it is verified or replaced."""
        self.proposed.append(token)
        self.tokens[0, position] = token

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
