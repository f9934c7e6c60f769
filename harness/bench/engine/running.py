"""Load the model once, let every engine serve the workload in turn, compare what they said, print what it took."""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from engine.runtime.errors import ModelError
from engine.runtime.models.load import LoadedModel, load_model
from engine.runtime.models.spec import ModelSpec
from harness.bench.engine import chosen_peers, peers
from harness.bench.engine.peers import Outputs, Serve
from harness.bench.engine.workload import BenchRequest, bench_requests
from harness.cli.say import remark, say
from harness.config.errors import UserError
from harness.config.schema import EngineDevice
from harness.environment import device_identity, versions
from harness.store.atomic import write_files

OURS = "pagetwin"


@dataclass
class Figures:
    """What one engine did: seconds of each round, and how many of its outputs equal ours."""

    name: str
    seconds: list[float] = field(default_factory=list)
    equal: int = 0
    error: str | None = None

    def rate(self, tokens: int) -> float:
        """Requested output tokens a second, by the median round."""
        return tokens / median(self.seconds)


def run_bench(flags: argparse.Namespace) -> int:
    """Run and print the comparison; returns the exit code."""
    import torch

    if flags.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    loaded = _load(flags)
    requests = bench_requests(flags.requests, loaded.vocab_size, flags.seed)
    serve, capacity = peers.ours(loaded, block_size=flags.block_size, pool_tokens=flags.pool_tokens)
    engines = {OURS: serve, **{name: _lazy(name, loaded, flags) for name in chosen_peers(flags.peers)}}
    clock = time.process_time if flags.device == "cpu" else time.perf_counter
    figures = compare(engines, requests, flags.repeats, clock)
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
    """A peer is set up in its first round, so that one that cannot run here does not keep the others from running."""
    ready: list[Serve] = []

    def serve(requests: Sequence[BenchRequest]) -> Outputs:
        if not ready:
            ready.append(_peer(name, loaded, flags))
        return ready[0](requests)

    return serve


def _peer(name: str, loaded: LoadedModel, flags: argparse.Namespace) -> Serve:
    if name == "transformers":
        return peers.transformers_one_by_one(loaded)
    if name == "transformers_cb":
        return peers.transformers_cb(loaded, block_size=flags.block_size, pool_tokens=flags.pool_tokens)
    return peers.vllm_offline(loaded, block_size=flags.block_size)


def compare(
    engines: dict[str, Serve], requests: Sequence[BenchRequest], repeats: int, clock: Callable[[], float]
) -> list[Figures]:
    """Rounds of all engines in turn, after two requests each to warm up. The first engine is what others must equal."""
    figures = {name: Figures(name) for name in engines}
    said: dict[str, Outputs] = {}
    for number in range(-1, repeats):
        for name, serve in engines.items():
            if figures[name].error is not None:
                continue
            try:
                began = clock()
                outputs = serve(requests if number >= 0 else requests[:2])
            except Exception as error:  # whatever a peer's library raises is that peer's result
                figures[name].error = f"{type(error).__name__}: {error}"
                continue
            if number >= 0:
                figures[name].seconds.append(clock() - began)
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
