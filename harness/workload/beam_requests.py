"""Beam search as vLLM serves it: a client sends each beam as a new request for each token.

The engine of vLLM knows no beams since 0.6.2. `LLM.beam_search` and the server (vllm 0.33,
entrypoints/generate/beam_search) send the prompt, take the most likely first tokens, and then send all tokens of each
beam as the prompt of a request that generates one token. The next tokens are chosen when all beams have answered. Full
blocks are found in the prefix cache; what lies behind them is computed again for every token. Here each request
goes on by itself, as on vLLM's server; its offline method waits in each step for the beams of all requests.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.identity import BlockHash, BlockIdentity, ItemKeys
from engine.core.options import Decoding
from engine.core.request import Request
from harness.replay.beams import Genealogy


def requests_sent(request: Request) -> int:
    """How many requests serve this one: one for the prompt, then one for each beam and further token."""
    if request.decoding is not Decoding.beam:
        return 1
    return 1 + (request.output_tokens - 1) * request.width


class BeamClient(ABC):
    """The client of one replay. `stride` is greater than the id of every request that it serves.

    The prompt is sent with the id of its request; beam b of token t gets the id plus `stride` times a number of its
    own. `chosen` has the parents of every selection by request, the first of one parent, as recordings have them.
    """

    def __init__(self, stride: int) -> None:
        self.chosen: dict[int, list[Sequence[int]]] = {}
        self._stride = stride
        self._served: dict[int, Request] = {}

    def begin(self, request: Request) -> list[Request]:
        """The prompt of a request with beams; any other request as it is."""
        if request.decoding is not Decoding.beam:
            return [request]
        self._served[request.request_id] = request
        self.chosen[request.request_id] = []
        return [self.sent(request, 0, 0)]

    def go_on(self, request_id: int) -> list[Request]:
        """All beams have a new token: choose those that continue, and send them."""
        request = self._served.get(request_id)
        if request is None:
            return []
        chosen = self.chosen[request_id]
        chosen.append(self.choose(request, len(chosen)))
        if len(chosen) < request.output_tokens:
            return [self.sent(request, len(chosen), beam) for beam in range(request.width)]
        del self._served[request_id]
        self.close(request)
        return []

    def sent(self, request: Request, generated: int, beam: int) -> Request:
        """The request for the next token of a beam that has `generated` tokens."""
        return Request(
            self.number(request, generated, beam),
            request.prompt_tokens + generated,
            1,
            identity=self.identity(request, generated, beam),
            priority=request.priority,
        )

    def number(self, request: Request, generated: int, beam: int) -> int:
        """The id of what is sent for a beam with `generated` tokens."""
        place = 1 + (generated - 1) * request.width + beam if generated else 0
        return request.request_id + self._stride * place

    @abstractmethod
    def choose(self, request: Request, generated: int) -> Sequence[int]:
        """The parents of the beams with one more token than `generated`."""

    @abstractmethod
    def identity(self, request: Request, generated: int, beam: int) -> BlockIdentity:
        """The text of a beam with `generated` tokens."""

    @abstractmethod
    def close(self, request: Request) -> None:
        """The search is over."""


class KeyedBeams(BeamClient):
    """The client of a prediction: parents from a genealogy; text from the prompt's keys and the line of parents."""

    def __init__(self, stride: int, genealogy: Genealogy) -> None:
        super().__init__(stride)
        self._genealogy = genealogy
        self._texts: dict[int, list[BeamText]] = {}

    def choose(self, request: Request, generated: int) -> Sequence[int]:
        """As drawn or recorded; the first tokens continue the prompt."""
        rid, width = request.request_id, request.width
        parents = self._genealogy.parents(rid, generated, width) if generated else [0] * width
        before = self._texts[rid]
        self._texts[rid] = [BeamText.of_child(before[parent], beam) for beam, parent in enumerate(parents)]
        return parents

    def identity(self, request: Request, generated: int, beam: int) -> BlockIdentity:
        """The line of parents of the beam."""
        if not generated:
            assert request.identity is not None
            self._texts[request.request_id] = [BeamText.of_prompt(request.identity, request.prompt_tokens)]
        return self._texts[request.request_id][beam]

    def close(self, request: Request) -> None:
        """Forget its texts."""
        del self._texts[request.request_id]


@dataclass(frozen=True, slots=True)
class BeamText:
    """A beam's text without token ids: `name` stands for all of its `tokens`.

    Beams of one parent differ in their last token. Requests with the same prompt choose the same beams.
    """

    prompt: BlockIdentity
    tokens: int
    name: bytes
    names: tuple[bytes, ...]  # of its text after each generated token, itself included

    @classmethod
    def of_prompt(cls, prompt: BlockIdentity, tokens: int) -> "BeamText":
        """The prompt of a request, every segment of which has a key."""
        last = prompt.prompt_hashes(1)[-1]
        assert isinstance(last, bytes)
        return cls(prompt, tokens, last, ())

    @classmethod
    def of_child(cls, parent: "BeamText", beam: int) -> "BeamText":
        """Beam number `beam` of a step, one token behind its parent."""
        name = hashlib.blake2b(b"%s%d" % (parent.name, beam), digest_size=16).digest()
        return cls(parent.prompt, parent.tokens + 1, name, (*parent.names, name))

    @property
    def shares_outputs(self) -> bool:
        """No: its one output returns as a prompt."""
        return False

    @property
    def salt(self) -> str:
        """The tenant of the prompt."""
        return self.prompt.salt

    @property
    def adapter(self) -> str | None:
        """The adapter of the prompt."""
        return self.prompt.adapter

    def token_ids(self, branch: int, first: int, end: int) -> Sequence[int]:
        """Always empty: a trace has no tokens."""
        return []

    def item_keys(self, block_size: int) -> ItemKeys:
        """Always empty: keys stand for all that is in a prompt."""
        return {}

    def prompt_hashes(self, block_size: int) -> Sequence[BlockHash]:
        """Those of the request's prompt, then the names of the text at the end of each further block."""
        known = self.prompt.prompt_hashes(block_size)
        start = self.tokens - len(self.names)  # tokens of the request's prompt
        first = (start // block_size + 1) * block_size
        return [*known, *self.names[first - start - 1 :: block_size]]

    def generated_hashes(self, branch: int, block_size: int) -> Sequence[BlockHash]:
        """Empty: its output is private."""
        return ()
