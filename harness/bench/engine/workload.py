"""What `bench engine` compares: the requests that every engine serves, and the names of the other engines (peers)."""

import random
from dataclasses import dataclass

from harness.config.errors import UserError

PEERS = ("transformers", "transformers_cb", "vllm")
PROMPT = (32, 512)  # tokens, uniform
OUTPUT = (16, 128)


def chosen_peers(text: str) -> tuple[str, ...]:
    """The named peers. Raises UserError for one that does not exist."""
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in PEERS:
            raise UserError(f"--peers: there is no peer {name!r}; choose of {', '.join(PEERS)}")
    return names


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
