"""The requests that every engine of a comparison serves."""

from dataclasses import dataclass

import numpy as np

PROMPT = (32, 512)  # tokens, uniform
OUTPUT = (16, 128)


@dataclass(frozen=True)
class BenchRequest:
    """One request: token ids in, so many tokens out."""

    prompt: tuple[int, ...]
    output_tokens: int


def bench_requests(count: int, vocab: int, seed: int) -> list[BenchRequest]:
    """Requests that all arrive at once; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    prompts, outputs = (
        rng.integers(*PROMPT, count, endpoint=True),
        rng.integers(*OUTPUT, count, endpoint=True),
    )
    return [
        BenchRequest(tuple(rng.integers(0, vocab, size).tolist()), int(output))
        for size, output in zip(prompts, outputs, strict=True)
    ]
