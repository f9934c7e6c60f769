"""What the runner knows of a request: the token ids of each branch, and where each branch ends.

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
    """Log-probabilities at one position: of the chosen token, and of the best ones, best first."""

    token: int
    logprob: float
    rank: int  # 1: the most likely token
    best: tuple[tuple[int, float], ...]


class Generation:
    """Token ids `[width, prompt + output]` of one request. The first `known[branch]` ids of a branch are valid.

    `ends[branch]` is how many tokens a branch has generated up to and including its end token, None before. Beam
    hypotheses change places by `reparent`, and their search keeps the finished ones.
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
        self.proposed: list[int] = []  # draft tokens of the step under way, behind the last known token
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in range(request.width)]
        is_beam = request.decoding is Decoding.beam
        self.search = BeamSearch(request.width, request.output_tokens, rules) if is_beam else None

    @property
    def ended(self) -> bool:
        """Whether nothing more is to come, though tokens were left: every branch said an end token."""
        if self.search is not None:
            return self.search.stopped
        return None not in self.ends

    @property
    def ended_branches(self) -> set[int]:
        """Branches that have said their last token before the limit."""
        return {branch for branch, end in enumerate(self.ends) if end is not None}

    @property
    def growing(self) -> int:
        """How many sequences got a token in the step just run: those that have not ended before."""
        if self.search is not None:
            return self.request.width
        start = self.request.prompt_tokens
        return sum(
            end is None or end == known - start for end, known in zip(self.ends, self.known, strict=True)
        )

    def append(self, branch: int, position: int, token: int) -> None:
        """Note the token at `position` of a branch. A position that is known or leaves a gap is a planning bug."""
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
        """Note a draft token for `position`; it stands there until it is verified or replaced."""
        self.proposed.append(token)
        self.tokens[0, position] = token

    def reparent(self, parents: Sequence[int]) -> None:
        """Let branch i continue what branch `parents[i]` generated."""
        start = self.request.prompt_tokens
        self.tokens[:, start:] = self.tokens[list(parents), start:]

    def text(self, branch: int) -> IntArray:
        """Ids that a running branch has generated so far."""
        return self.tokens[branch, self.request.prompt_tokens : self.known[branch]]

    def outputs(self) -> list[list[int]]:
        """Generated ids of each branch, its end token included; of beams, best first and finished ones if over."""
        if self.search is not None and self.search.stopped:
            return [text.tolist() for text in self.search.finished if text is not None]
        return [self.text(branch)[: self.ends[branch]].tolist() for branch in range(self.request.width)]

    def scores(self) -> list[float]:
        """Of a beam search the hypotheses' scores, best first; 0 for every other sequence."""
        if self.search is None:
            return [0.0] * self.request.width
        if not self.search.stopped:
            return [float(score) for score in self.search.scores]
        pairs = zip(self.search.finished, self.search.finished_scores, strict=True)
        return [float(score) for text, score in pairs if text is not None]
