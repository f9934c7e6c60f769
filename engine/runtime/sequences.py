"""What the runner knows of a request: the tokens of its branches, and how far each has come."""

from collections.abc import Sequence

import numpy as np

from engine.core.errors import CoreError
from engine.core.plan import IntArray
from engine.core.request import Request


class Generation:
    """Token ids `[width, prompt + output]` of one request. The first `known[branch]` ids of a branch are valid.

    Beam hypotheses change places by `reparent`; their scores are sums of log-probabilities.
    """

    def __init__(self, request: Request, prompt_ids: IntArray) -> None:
        if len(prompt_ids) != request.prompt_tokens:
            raise CoreError(
                f"request {request.request_id}: {len(prompt_ids)} prompt ids for {request.prompt_tokens} prompt tokens"
            )
        self.request = request
        self.tokens = np.zeros((request.width, request.prompt_tokens + request.output_tokens), dtype=np.int64)
        self.tokens[:, : request.prompt_tokens] = prompt_ids
        self.known = [request.prompt_tokens] * request.width
        self.scores = np.zeros(request.width, dtype=np.float32)

    def append(self, branch: int, position: int, token: int) -> None:
        """Note the token at `position` of a branch. A position that is known or leaves a gap is a planning bug."""
        if position != self.known[branch] or position >= self.tokens.shape[1]:
            raise CoreError(
                f"request {self.request.request_id} branch {branch}: sampled position {position}, "
                f"the next one is {self.known[branch]} of {self.tokens.shape[1]}"
            )
        self.tokens[branch, position] = token
        self.known[branch] = position + 1

    def reparent(self, parents: Sequence[int]) -> None:
        """Let branch i continue what branch `parents[i]` generated."""
        start = self.request.prompt_tokens
        self.tokens[:, start:] = self.tokens[list(parents), start:]

    def outputs(self) -> list[list[int]]:
        """Generated ids of each branch; of beams, best hypothesis first."""
        start = self.request.prompt_tokens
        return [row[start:end].tolist() for row, end in zip(self.tokens, self.known, strict=True)]
