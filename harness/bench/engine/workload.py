"""The requests that every engine of a comparison serves."""

import random
from dataclasses import dataclass

PROMPT = (32, 512)  # tokens, uniform
OUTPUT = (16, 128)


@dataclass(frozen=True)
class BenchRequest:
    """One request: token ids in, so many tokens out."""

    prompt: tuple[int, ...]
    output_tokens: int


def bench_requests(count: int, vocab: int, seed: int) -> list[BenchRequest]:
    """Requests that all arrive at once; the same for the same arguments.

    Sixty-four of seed 0 are the reference workload: 20,202 prompt and 4,583 output tokens, on which all figures of the
    documentation were taken.
    """
    draw = random.Random(seed)
    return [_request(draw, vocab) for _ in range(count)]


def _request(draw: random.Random, vocab: int) -> BenchRequest:
    length = draw.randint(*PROMPT)
    prompt = tuple(draw.randrange(vocab) for _ in range(length))
    return BenchRequest(prompt, draw.randint(*OUTPUT))
