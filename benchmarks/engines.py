"""The engines that are compared in our own process: ours, and transformers with and without continuous batching.

Each is a function of requests that returns its outputs in their order. `reference_requests` is the reference workload.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from engine.core.options import SchedulerLimits
from engine.runtime.engine import Engine
from engine.runtime.models.load import LoadedModel, original_model
from engine.runtime.options import EngineOptions
from engine.runtime.params import OutputKind, SamplingParams

MAX_TOKENS, MAX_RUNNING, MAX_LEN = 512, 64, 1024
PROMPT = (32, 512)  # tokens, uniform
OUTPUT = (16, 128)


@dataclass(frozen=True)
class BenchRequest:
    """One request: token ids in, so many tokens out."""

    prompt: tuple[int, ...]
    output_tokens: int


Outputs = list[list[int]]
Serve = Callable[[Sequence[BenchRequest]], Outputs]


def reference_requests(count: int, vocab: int, seed: int = 0) -> list[BenchRequest]:
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


class PeerError(Exception):
    """A peer cannot run here, or failed. The message says why."""


def ours(
    loaded: LoadedModel,
    *,
    block_size: int,
    pool_tokens: int,
    step_tokens: int = MAX_TOKENS,
    model_len: int = MAX_LEN,
    prefix_caching: bool = False,
) -> Serve:
    """Our engine, with its audit as users get it. Without prefix caching, the same requests may be served again."""
    options = EngineOptions(
        block_size=block_size,
        pool_tokens=pool_tokens,
        prefix_caching=prefix_caching,
        limits=SchedulerLimits(step_tokens, MAX_RUNNING, max_model_len=min(model_len, loaded.max_position)),
    )
    engine = Engine(loaded, options)

    def serve(requests: Sequence[BenchRequest]) -> Outputs:
        for number, request in enumerate(requests):
            params = SamplingParams(
                max_tokens=request.output_tokens, temperature=0, ignore_eos=True, output_kind=OutputKind.FINAL
            )
            engine.add_request(str(number), request.prompt, params)
        done = {output.request_id: output for output in engine.run() if output.finished}
        for output in done.values():
            if output.error is not None:
                raise output.error
        return [done[str(number)].outputs[0].token_ids for number in range(len(requests))]

    return serve


def transformers_one_by_one(loaded: LoadedModel) -> Serve:
    """`model.generate()`, one request after another, with the model's original attention."""

    def serve(requests: Sequence[BenchRequest]) -> Outputs:
        with original_model(loaded) as model:
            return [_generated(model, request) for request in requests]

    return serve


def _generated(model: Any, request: BenchRequest) -> list[int]:
    prompt = torch.tensor([request.prompt], device=model.device)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=request.output_tokens,
        min_new_tokens=request.output_tokens,
        do_sample=False,
    )
    generated: list[int] = out[0, prompt.shape[1] :].tolist()
    return generated


def transformers_cb(loaded: LoadedModel, *, block_size: int, pool_tokens: int) -> Serve:
    """transformers' own continuous batching. Raises PeerError if it cannot run, or if a request fails."""
    if find_spec("psutil") is None and loaded.device.type == "cpu":
        raise PeerError("on a CPU it asks psutil for the memory: pip install psutil")
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    def serve(requests: Sequence[BenchRequest]) -> Outputs:
        longest = max(request.output_tokens for request in requests)
        config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(
            block_size=max(4, block_size),
            num_blocks=pool_tokens // max(4, block_size),
            max_batch_tokens=MAX_TOKENS,
        )
        with original_model(loaded) as model:
            done = _continuous(model, requests, config, batching)
        for request, output in zip(requests, done, strict=True):
            if output.error or len(output.generated_tokens) != request.output_tokens:
                raise PeerError(f"a request gave {len(output.generated_tokens)} tokens: {output.error}")
        return [list(output.generated_tokens) for output in done]

    return serve


def _continuous(model: Any, requests: Sequence[BenchRequest], config: Any, batching: Any) -> list[Any]:
    """The outputs of all requests, each with its own limit, through the manager that `generate_batch` uses."""
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching
    ) as manager:
        names = [
            manager.add_request(list(request.prompt), max_new_tokens=request.output_tokens)
            for request in requests
        ]
        found: dict[str, Any] = {}
        while len(found) < len(names):
            output = manager.get_result(timeout=1)
            if output is not None:
                found[output.request_id] = output
            elif not manager.is_running():
                raise PeerError("its thread has ended before the requests were done")
    return [found[name] for name in names]
