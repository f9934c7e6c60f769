"""A run of `bench engine`: the model is loaded once, and every engine serves the requests in turn.

The engines are ours and the peers that are installed. Each returns its outputs in the order of the requests.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine.core.options import SchedulerLimits
from engine.runtime.engine import Engine
from engine.runtime.errors import ModelError
from engine.runtime.models.load import LoadedModel, load_model, original_model
from engine.runtime.models.spec import ModelSpec
from engine.runtime.options import EngineOptions
from engine.runtime.params import OutputKind, SamplingParams
from harness.bench.engine.process_time import tree_seconds
from harness.bench.engine.workload import BenchRequest, bench_requests, chosen_peers
from harness.config.errors import UserError
from harness.config.schema import EngineDevice
from harness.console import remark, say
from harness.environment import device_identity, versions
from harness.store.atomic import write_files

Outputs = list[list[int]]
Serve = Callable[[Sequence[BenchRequest]], Outputs]

MAX_TOKENS, MAX_RUNNING, MAX_LEN = 512, 64, 1024
OURS, VLLM = "pagetwin", "vllm"


class PeerError(Exception):
    """A peer cannot run here, or failed. The message says why."""


def ours(
    loaded: LoadedModel, *, block_size: int, pool_tokens: int, step_tokens: int = MAX_TOKENS
) -> tuple[Serve, str]:
    """Our engine, and the capacity of its pool in words. Prefix caching is off, since no two prompts share a prefix."""
    options = EngineOptions(
        block_size=block_size,
        pool_tokens=pool_tokens,
        prefix_caching=False,
        audit="off",
        limits=SchedulerLimits(step_tokens, MAX_RUNNING, max_model_len=min(MAX_LEN, loaded.max_position)),
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


def vllm_offline(loaded: LoadedModel, *, block_size: int) -> Serve:
    """vLLM on a saved copy of the model. Raises PeerError if it is not installed."""
    if find_spec("vllm") is None:
        raise PeerError("vllm is not installed")
    if find_spec("psutil") is None and loaded.device.type == "cpu":
        raise PeerError("it works in a process of its own, whose CPU time psutil reads: pip install psutil")
    vllm = import_module("vllm")

    folder = TemporaryDirectory(prefix="pagetwin-vllm-")
    with original_model(loaded) as model:
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
        found = [list(output.outputs[0].token_ids) for output in outputs]
        for request, ids in zip(requests, found, strict=True):
            if len(ids) != request.output_tokens:
                raise PeerError(f"a request gave {len(ids)} tokens, {request.output_tokens} were asked for")
        return found

    return serve


@dataclass
class Figures:
    """The results of one engine: seconds of each round, and the number of outputs that equal ours."""

    name: str
    seconds: list[float] = field(default_factory=list)
    equal: int = 0
    error: str | None = None

    def rate(self, tokens: int) -> float:
        """Requested output tokens per second, from the median round."""
        return tokens / median(self.seconds)


def run_bench(flags: argparse.Namespace) -> int:
    """Run and print the comparison; returns the exit code."""
    import torch

    if flags.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    loaded = _load(flags)
    requests = bench_requests(flags.requests, loaded.vocab_size, flags.seed)
    serve, capacity = ours(loaded, block_size=flags.block_size, pool_tokens=flags.pool_tokens)
    engines = {OURS: serve, **{name: _lazy(name, loaded, flags) for name in chosen_peers(flags.peers)}}
    on_cpu = flags.device == "cpu"
    clocks = dict.fromkeys(engines, time.process_time if on_cpu else time.perf_counter)
    if on_cpu and VLLM in clocks:
        clocks[VLLM] = tree_seconds
    figures = compare(engines, requests, flags.repeats, clocks)
    tokens = sum(request.output_tokens for request in requests)
    exact = flags.dtype == "float32"
    _print(figures, requests, tokens, capacity, flags)
    if flags.out:
        _write(Path(flags.out), figures, tokens, capacity, flags)
    failed = [one for one in figures if one.error or (exact and one.equal < len(requests))]
    return 1 if failed else 0


def _load(flags: argparse.Namespace) -> LoadedModel:
    shape = {
        "layers": flags.layers,
        "hidden": 512,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 64,
        "vocab": 32_000,
    }
    spec = ModelSpec(
        name="bench-llama",
        path=flags.model_path,
        dtype=flags.dtype,
        intermediate=1408,
        initializer_range=0.05,
        **shape,
    )
    try:
        return load_model(spec, device=flags.device)
    except (ModelError, RuntimeError) as error:
        raise UserError(f"the model cannot be loaded on {flags.device}: {error}") from error


def _lazy(name: str, loaded: LoadedModel, flags: argparse.Namespace) -> Serve:
    """A peer that is set up in its first round, so that the others run even if this one cannot."""
    ready: list[Serve] = []

    def serve(requests: Sequence[BenchRequest]) -> Outputs:
        if not ready:
            ready.append(_peer(name, loaded, flags))
        return ready[0](requests)

    return serve


def _peer(name: str, loaded: LoadedModel, flags: argparse.Namespace) -> Serve:
    if name == "transformers":
        return transformers_one_by_one(loaded)
    if name == "transformers_cb":
        return transformers_cb(loaded, block_size=flags.block_size, pool_tokens=flags.pool_tokens)
    return vllm_offline(loaded, block_size=flags.block_size)


def compare(
    engines: dict[str, Serve],
    requests: Sequence[BenchRequest],
    repeats: int,
    clocks: Mapping[str, Callable[[], float]],
) -> list[Figures]:
    """Rounds of all engines in turn, after a warm-up of two requests each. Outputs are compared with the first.

    `clocks` has the clock of each engine. That of an engine with child processes sees them too; the others' do not,
    so that what an idle peer burns in its processes is not charged to the engine whose turn it is.
    """
    figures = {name: Figures(name) for name in engines}
    said: dict[str, Outputs] = {}
    for number in range(-1, repeats):
        for name, serve in engines.items():
            if figures[name].error is not None:
                continue
            try:
                began = clocks[name]()
                outputs = serve(requests if number >= 0 else requests[:2])
            except Exception as error:  # any error of a peer's library is that peer's result
                figures[name].error = f"{type(error).__name__}: {error}"
                continue
            if number >= 0:
                figures[name].seconds.append(clocks[name]() - began)
                said[name] = outputs
    reference = said.get(next(iter(engines)), [])
    for name, outputs in said.items():
        figures[name].equal = sum(one == other for one, other in zip(outputs, reference, strict=True))
    return list(figures.values())


def _print(
    figures: Sequence[Figures],
    requests: Sequence[BenchRequest],
    tokens: int,
    capacity: str,
    flags: argparse.Namespace,
) -> None:
    unit = "CPU-second" if flags.device == "cpu" else "second"
    prompt = sum(len(request.prompt) for request in requests)
    say(
        f"{len(requests)} requests, {prompt:,} prompt and {tokens:,} output tokens, {flags.dtype} on {flags.device}"
    )
    say(f"{capacity}; load average {os.getloadavg()[0]:.1f}")
    table = Table(box=None)
    for column in ("engine", f"output tokens / {unit}", "ratio to ours", "rounds (s)", "equal outputs"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    ours = figures[0].rate(tokens) if figures[0].seconds else None
    for one in figures:
        if one.error or not one.seconds:
            remark(f"{one.name}: {one.error}")
            continue
        rounds = " ".join(f"{seconds:.1f}" for seconds in one.seconds)
        ratio = f"{one.rate(tokens) / ours:.2f}" if ours else "-"
        table.add_row(one.name, f"{one.rate(tokens):.1f}", ratio, rounds, f"{one.equal}/{len(requests)}")
    Console(width=110).print(table)


def _write(
    path: Path, figures: Sequence[Figures], tokens: int, capacity: str, flags: argparse.Namespace
) -> None:
    document = {
        "flags": {key: value for key, value in vars(flags).items() if key not in ("command", "bench", "out")},
        "device": device_identity(EngineDevice(flags.device)),
        "versions": versions(),
        "output_tokens": tokens,
        "capacity": capacity,
        "load_average": os.getloadavg()[0],
        "engines": [asdict(one) for one in figures],
    }
    write_files(path.parent, {path.name: json.dumps(document, indent=1).encode()})
