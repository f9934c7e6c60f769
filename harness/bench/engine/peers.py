"""Engines that serve the workload: ours, and the peers that are installed. Each gives its outputs in order."""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import torch

from engine.core.options import SchedulerLimits
from engine.runtime.engine import Engine
from engine.runtime.models.load import LoadedModel, native_attention
from engine.runtime.options import EngineOptions
from engine.runtime.params import OutputKind, SamplingParams
from harness.bench.engine.workload import BenchRequest

Outputs = list[list[int]]
Serve = Callable[[Sequence[BenchRequest]], Outputs]

MAX_TOKENS, MAX_RUNNING, MAX_LEN = 512, 64, 1024


class PeerError(Exception):
    """A peer that cannot run here, or failed; says why."""


def ours(loaded: LoadedModel, *, block_size: int, pool_tokens: int) -> tuple[Serve, str]:
    """Our engine, and what its pool holds. Prefix caching is off: no two prompts share a prefix."""
    options = EngineOptions(
        block_size=block_size,
        pool_tokens=pool_tokens,
        prefix_caching=False,
        audit="off",
        limits=SchedulerLimits(MAX_TOKENS, MAX_RUNNING, min(MAX_LEN, loaded.max_position)),
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

    return serve, str(engine.capacity)


def transformers_one_by_one(loaded: LoadedModel) -> Serve:
    """`model.generate()`, request after request, with the attention that the model came with."""

    def serve(requests: Sequence[BenchRequest]) -> Outputs:
        with native_attention(loaded) as model:
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
    """transformers' own continuous batching. Raises PeerError where it cannot run, or requests fail."""
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
        with native_attention(loaded) as model:
            done = _continuous(model, requests, config, batching)
        for request, output in zip(requests, done, strict=True):
            if output.error or len(output.generated_tokens) != request.output_tokens:
                raise PeerError(f"a request gave {len(output.generated_tokens)} tokens: {output.error}")
        return [list(output.generated_tokens) for output in done]

    return serve


def _continuous(model: Any, requests: Sequence[BenchRequest], config: Any, batching: Any) -> list[Any]:
    """Every request with a limit of its own, through the manager that `generate_batch` uses."""
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


def vllm_offline(loaded: LoadedModel, *, block_size: int) -> Serve:
    """vLLM on a saved copy of the model. Raises PeerError where it is not installed."""
    if find_spec("vllm") is None:
        raise PeerError("vllm is not installed")
    vllm = import_module("vllm")

    folder = TemporaryDirectory(prefix="pagetwin-vllm-")
    with native_attention(loaded) as model:
        model.save_pretrained(folder.name)
    engine = vllm.LLM(
        folder.name,
        skip_tokenizer_init=True,
        block_size=block_size if loaded.device.type == "cuda" else max(32, block_size // 32 * 32),
        dtype=str(loaded.dtype).removeprefix("torch."),
        max_model_len=min(MAX_LEN, loaded.max_position),
        max_num_seqs=MAX_RUNNING,
        enforce_eager=loaded.device.type == "cpu",
        enable_prefix_caching=False,
    )

    def serve(requests: Sequence[BenchRequest]) -> Outputs:
        assert folder.name  # lives as long as the engine
        params = [
            vllm.SamplingParams(
                temperature=0, max_tokens=request.output_tokens, ignore_eos=True, detokenize=False
            )
            for request in requests
        ]
        outputs = engine.generate(
            [{"prompt_token_ids": list(request.prompt)} for request in requests], params
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    return serve
