"""The client of a measured beam search (`harness.workload.beam_requests`): it chooses beams by the engine's tokens.

The best 2 x width log-probabilities of each beam are asked for, as vLLM does. Scores and the choice are those of
`engine.runtime.decoding.generation`, so the beams are those of transformers' `generate(num_beams)`.
The client works between the steps, outside of their time.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from engine.core.identity import BlockIdentity, TokenIdentity
from engine.core.options import HashAlgorithm
from engine.core.plan import IntArray
from engine.core.request import Request
from engine.runtime.decoding.generation import BeamSearch, FloatArray, candidates_of
from engine.runtime.params import DecodingRules
from engine.runtime.runner import Runner
from harness.workload.beam_requests import BeamClient

_RULES = DecodingRules()  # no end tokens: lengths are those of the trace


class TokenBeams(BeamClient):
    """The client of a runner. `prompts` are ids `[prompt_tokens]` by request, `salts` its tenants by request.

    `outputs` has the generated ids of each beam by request when its search is over, best first.
    """

    def __init__(
        self,
        stride: int,
        runner: Runner,
        prompts: Mapping[int, IntArray],
        salts: Mapping[int, str],
        algorithm: HashAlgorithm,
    ) -> None:
        super().__init__(stride)
        self.outputs: dict[int, list[list[int]]] = {}
        self._runner = runner
        self._prompts = prompts
        self._salts = salts
        self._algorithm = algorithm
        self._searches: dict[int, BeamSearch] = {}
        self._tokens: dict[int, list[IntArray]] = {}  # generated ids of each beam, by request

    def sent(self, request: Request, generated: int, beam: int) -> Request:
        """The request, which the runner knows from now on."""
        if not generated:
            self._searches[request.request_id] = BeamSearch(request.width, request.output_tokens, _RULES)
            self._tokens[request.request_id] = [np.empty(0, dtype=np.int64)]
        made = super().sent(request, generated, beam)
        rules = DecodingRules(logprobs=candidates_of(_RULES, request.width))
        self._runner.add(made, self._text(request, beam), rules)
        return made

    def choose(self, request: Request, generated: int) -> Sequence[int]:
        """Continue the beams of which the sum of log-probabilities is greatest."""
        search, before = self._searches[request.request_id], self._tokens[request.request_id]
        parents, tokens, scores = self._candidates(request, generated, search)
        chosen = search.advance(parents, tokens, scores, before)
        self._tokens[request.request_id] = [
            np.append(before[parent], token)
            for parent, token in zip(chosen.parents, chosen.tokens, strict=True)
        ]
        return chosen.parents

    def identity(self, request: Request, generated: int, beam: int) -> BlockIdentity:
        """The ids of the beam."""
        return TokenIdentity(
            self.number(request, generated, beam),
            self._text(request, beam),
            self._salts[request.request_id],
            algorithm=self._algorithm,
        )

    def close(self, request: Request) -> None:
        """Keep the ids of its beams."""
        finished = self._searches.pop(request.request_id).finished
        self.outputs[request.request_id] = [ids.tolist() for ids in finished if ids is not None]
        del self._tokens[request.request_id]

    def _text(self, request: Request, beam: int) -> IntArray:
        return np.concatenate([self._prompts[request.request_id], self._tokens[request.request_id][beam]])

    def _candidates(
        self, request: Request, generated: int, search: BeamSearch
    ) -> tuple[IntArray, IntArray, FloatArray]:
        """The best continuations of all beams: parents, tokens and scores, each `[candidates]`, best first."""
        parents, tokens, scores = [], [], []
        for beam in range(request.width if generated else 1):
            number = self.number(request, generated, beam)
            (best,) = (found.best for found in self._runner.generation(number).logprobs[0])
            self._runner.forget(number)
            parents += [beam] * len(best)
            tokens += [token for token, _ in best]
            scores.append(np.array([logprob for _, logprob in best], dtype=np.float32) + search.scores[beam])
        total = np.concatenate(scores)
        order = np.argsort(-total, kind="stable")[: candidates_of(_RULES, request.width)]
        return np.array(parents)[order], np.array(tokens)[order], total[order]
