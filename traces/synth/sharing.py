"""Prefix sharing for generated prompts: the shared texts that a prompt begins with. Prompt lengths do not change.

Shared lengths are not rounded to any block size, so these traces show the effect of the block size on hits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
import numpy.typing as npt

from traces.errors import ParameterError
from traces.randomness import uniform
from traces.trace import Segment, TraceRequest

MODELS = ("system", "few_shot", "tree", "passages")
FIRST_KEY = 2**63  # keys of generated texts start here; keys read from files lie below
_CHOICE, _LENGTH, _WALK = 11, 12, 13  # stream numbers; changing one changes every trace with sharing
_EXAMPLES, _DEPTH, _BRANCHES, _PASSAGES = 8, 6, 3, 5
Pieces = list[Segment]
_CDF: dict[tuple[int, float], npt.NDArray[np.float64]] = {}


@dataclass(frozen=True)
class Sharing:
    """How prompts share their beginnings.

    system: one of `count` system prompts with Zipf popularity, about `share` of the mean prompt long.
    few_shot: one of `count` tasks, then as many of its 8 examples, in order, as fit in `share` of the prompt.
    tree: a walk down one of `count` trees (3 branches per node, 6 levels), until `share` of the prompt is shared.
    passages: one of 4 system prompts, then 5 of `count` passages by Zipf, together about `share` of the mean prompt.
    `zipf` is the exponent of the popularity; 0 is uniform.
    """

    model: str
    share: float = 0.5
    count: int = 16
    zipf: float = 1.0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ParameterError("sharing", f'one of {", ".join(MODELS)} expected, found "{self.model}"')
        if not 0 <= self.share <= 1:
            raise ParameterError("share", f"from 0 to 1 expected, found {self.share}")
        if self.count < 1:
            raise ParameterError("num_prefixes", f"at least 1 expected, found {self.count}")
        if not (isfinite(self.zipf) and self.zipf >= 0):
            raise ParameterError("zipf", f"0 or above expected, found {self.zipf}")

    def describe(self) -> str:
        """The model in words, for headers."""
        return f"{self.model}: {self.share:.3g} of prompts, {self.count} shared texts, Zipf exponent {self.zipf:g}"


@dataclass(frozen=True)
class FixedPrefix:
    """Every prompt begins with the same text of `tokens` tokens."""

    tokens: int

    def describe(self) -> str:
        """The model in words, for headers."""
        return f"all prompts begin with the same {self.tokens} tokens"


def share_prompts(
    requests: tuple[TraceRequest, ...], sharing: Sharing | FixedPrefix, seed: int
) -> tuple[TraceRequest, ...]:
    """The same requests with shared beginnings. Draws depend on (seed, request_id) only.

    Lengths of shared texts follow the mean prompt of the first 1,000 requests, so more requests do not change them.
    """
    if isinstance(sharing, FixedPrefix):
        return tuple(_begun_with(request, [Segment(FIRST_KEY, sharing.tokens)]) for request in requests)
    if not sharing.share:
        return requests
    sample = requests[:1000]
    typical = sharing.share * sum(request.prompt_tokens for request in sample) / len(sample)
    numbers = [request.request_id for request in requests]
    drawn = uniform(seed, _CHOICE, max(numbers) + 1)
    make = _MODELS[sharing.model]
    return tuple(
        _begun_with(request, make(sharing, seed, typical, request, float(drawn[request.request_id])))
        for request in requests
    )


def zipf_place(share: float, count: int, exponent: float) -> int:
    """The rank, from 0, of the text at quantile `share` of a Zipf popularity over `count` texts."""
    return min(int(np.searchsorted(_cumulative(count, exponent), share, "right")), count - 1)


def text_tokens(seed: int, key: int, typical: float) -> int:
    """The length of a shared text: uniform from half to one and a half of `typical`."""
    return max(1, round(typical * (0.5 + float(uniform(seed ^ _LENGTH, key, 1)[0]))))


def _system(sharing: Sharing, seed: int, typical: float, request: TraceRequest, drawn: float) -> Pieces:
    key = FIRST_KEY + zipf_place(drawn, sharing.count, sharing.zipf)
    return [Segment(key, text_tokens(seed, key, typical))]


def _few_shot(sharing: Sharing, seed: int, typical: float, request: TraceRequest, drawn: float) -> Pieces:
    task = zipf_place(drawn, sharing.count, sharing.zipf)
    room, pieces = sharing.share * request.prompt_tokens, []
    for example in range(_EXAMPLES):
        key = FIRST_KEY + task * _EXAMPLES + example
        tokens = text_tokens(seed, key, typical / 3)
        if tokens > room:
            break
        pieces.append(Segment(key, tokens))
        room -= tokens
    return pieces


def _tree(sharing: Sharing, seed: int, typical: float, request: TraceRequest, drawn: float) -> Pieces:
    root = zipf_place(drawn, sharing.count, sharing.zipf)
    steps = uniform(seed ^ _WALK, request.request_id, _DEPTH)
    node, room, pieces = 1, sharing.share * request.prompt_tokens, []
    for level in range(_DEPTH):
        key = FIRST_KEY + (root << 20) + node
        tokens = min(text_tokens(seed, key, typical / 2), int(room))
        if tokens < 1:
            break
        pieces.append(Segment(key, tokens))
        room -= tokens
        node = node * _BRANCHES + zipf_place(float(steps[level]), _BRANCHES, sharing.zipf)
    return pieces


def _passages(sharing: Sharing, seed: int, typical: float, request: TraceRequest, drawn: float) -> Pieces:
    system = FIRST_KEY + zipf_place(drawn, 4, sharing.zipf)
    pieces = [Segment(system, text_tokens(seed, system, typical / 3))]
    steps = uniform(seed ^ _WALK, request.request_id, _PASSAGES)
    for step in steps.tolist():
        key = FIRST_KEY + 4 + zipf_place(step, sharing.count, sharing.zipf)
        pieces.append(Segment(key, text_tokens(seed, key, typical * 2 / 3 / _PASSAGES)))
    return pieces


_MODELS: dict[str, Callable[[Sharing, int, float, TraceRequest, float], Pieces]] = {
    "system": _system,
    "few_shot": _few_shot,
    "tree": _tree,
    "passages": _passages,
}


def _cumulative(count: int, exponent: float) -> npt.NDArray[np.float64]:
    if (count, exponent) not in _CDF:
        weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
        _CDF[count, exponent] = np.cumsum(weights) / weights.sum()
    return _CDF[count, exponent]


def _begun_with(request: TraceRequest, pieces: Pieces) -> TraceRequest:
    """The request that begins with the pieces, cut so that at least its last token is unique."""
    kept, room = [], request.prompt_tokens - 1
    for key, tokens in pieces:
        if not room:
            break
        kept.append(Segment(key, min(tokens, room)))
        room -= kept[-1].tokens
    return replace(request, segments=(*kept, Segment(None, room + 1)))
