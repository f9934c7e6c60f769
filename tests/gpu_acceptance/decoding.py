"""Program: decode steps of one model with and without CUDA graphs, then the same requests through transformers.

The model has random weights, made on the device. A step is `Engine.step()`, with outputs for every request. The time of
the device is the sum of its kernels as torch's profiler reports them, measured in other steps, because the profiler
costs host time. The rest of a step is the host's. Figures are written after every row, so that they stay if time is up.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.engines import BenchRequest, Outputs, Serve, ours, reference_requests, transformers_cb
from engine.core.options import SchedulerLimits
from engine.runtime.engine import Engine
from engine.runtime.models.load import LoadedModel, wrap_model
from engine.runtime.models.spec import ModelSpec, config_values
from engine.runtime.options import EngineOptions
from engine.runtime.params import OutputKind, SamplingParams
from harness.console import remark, say
from harness.environment import gpu_names, versions
from harness.store.atomic import write_files

MODELS = {
    # Shapes of Llama 3.2 1B and Llama 3 8B (their published config.json); weights are random.
    "1b": ModelSpec(
        name="llama-1b-class", layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, intermediate=8192,
        vocab=128_256, max_position=8192, dtype="bfloat16", initializer_range=0.02,
    ),
    "8b": ModelSpec(
        name="llama-8b-class", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14_336,
        vocab=128_256, max_position=8192, dtype="bfloat16", initializer_range=0.02,
    ),
    "tiny": ModelSpec(
        name="rehearsal", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=256,
        max_position=512, dtype="float32",
    ),
}  # fmt: skip
WARM_UP, TIMED, PROFILED = 4, 24, 6  # decode steps
OURS, PEER = "pagetwin", "transformers_cb"
REQUESTS, REPEATS, POOL_TOKENS, BLOCK_SIZE = 64, 2, 65_536, 16
LEAST_PEER_S = 30.0  # with less time left the peer does not start


def made_model(spec: ModelSpec, device: str) -> LoadedModel:
    """A model with random weights, adapted to paged KV."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(spec.family, **config_values(spec))
    torch.manual_seed(spec.seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, spec.dtype))
    return wrap_model(model.to(device), name=spec.name)


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a decode step reads: all except an input embedding that is not tied to the output."""
    total = sum(parameter.nbytes for parameter in model.parameters())  # a tied weight is counted once
    inner, outer = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return int(total if inner is outer else total - inner.nbytes)


@dataclass(frozen=True)
class Load:
    """The decoded work: batch sizes, and prompt tokens of each sequence."""

    batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    prompt: int = 512
    budget: int = 8192  # tokens of a step, while prompts are computed

    @property
    def output(self) -> int:
        """Output tokens of each sequence. The first sequences already decode while the last prompts are computed."""
        filling = -(-max(self.batches) * self.prompt // self.budget)
        return 2 * filling + 4 + WARM_UP + TIMED + PROFILED

    @property
    def longest(self) -> int:
        """Tokens of a finished sequence."""
        return self.prompt + self.output


def decode_engine(loaded: LoadedModel, load: Load, *, graphs: bool) -> Engine:
    """An engine with room for the largest batch. Its CUDA graphs are recorded here."""
    slots = max(load.batches) * (load.longest + 16)
    return Engine(
        loaded,
        EngineOptions(
            pool_tokens=slots,
            prefix_caching=False,
            audit="off",
            cuda_graphs=graphs,
            limits=SchedulerLimits(load.budget, max(load.batches), max_model_len=load.longest),
        ),
    )


def measured_steps(engine: Engine, load: Load, *, graphs: bool) -> Iterator[dict[str, Any]]:
    """One row for each batch size. The largest batch comes first; the others use its buffers."""
    weights = weight_bytes(engine.loaded.model)
    for batch in sorted(load.batches, reverse=True):
        _fill(engine, load, batch)
        _steps(engine, WARM_UP, batch)
        seconds = _timed(engine, TIMED, batch)
        device_s = _device_s(engine, PROFILED, batch)
        _drain(engine)
        context = (
            load.prompt + WARM_UP + TIMED // 2
        )  # of the last sequence that began; a few tokens more of others
        step_s = median(seconds)
        moved = weights + batch * context * engine.loaded.kv_bytes_per_token
        yield {
            "graphs": graphs,
            "batch": batch,
            "context": context,
            "step_s": step_s,
            "device_s": device_s,
            "host_share": None if device_s is None else 1 - device_s / step_s,
            "tokens_s": batch / step_s,
            "bytes_s": moved / step_s,
            "steps_s": seconds,
        }


def _fill(engine: Engine, load: Load, batch: int) -> None:
    """Compute every prompt. The prompts differ, so no block is shared."""
    vocabulary = engine.loaded.vocab_size
    for number in range(batch):
        prompt = [(7 * number + place) % vocabulary for place in range(load.prompt)]
        engine.add_request(f"{number}", prompt, _params(load))
    while len(engine.step()) < batch:
        if not engine.has_unfinished_requests:
            raise RuntimeError(f"the first of {batch} sequences ended before the last had begun")


def _params(load: Load) -> SamplingParams:
    return SamplingParams(
        max_tokens=load.output, temperature=0, ignore_eos=True, output_kind=OutputKind.DELTA
    )


def _steps(engine: Engine, count: int, batch: int) -> None:
    for _ in range(count):
        _step(engine, batch)


def _step(engine: Engine, batch: int) -> None:
    """One decode step. Raises RuntimeError if it did not decode the whole batch, since its time would be wrong."""
    told = len(engine.step())
    if told != batch:
        raise RuntimeError(f"a step decoded {told} of {batch} sequences")


def _timed(engine: Engine, count: int, batch: int) -> list[float]:
    """Wall seconds of each step. A step ends when its tokens are known, so the device has finished."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        _step(engine, batch)
        seconds.append(time.perf_counter() - start)
    return seconds


def _device_s(engine: Engine, count: int, batch: int) -> float | None:
    """Seconds of a step in which the device computed or copied; None without a CUDA device."""
    if engine.loaded.device.type != "cuda":
        _steps(engine, count, batch)
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        _steps(engine, count, batch)
        torch.cuda.synchronize()
    return union_s(_spans(watched.events() or ())) / count


def _spans(events: Iterable[Any]) -> list[tuple[float, float]]:
    """(start, end) in µs of everything that ran on the device."""
    on_device = (one for one in events if "CUDA" in str(one.device_type))
    return [(float(one.time_range.start), float(one.time_range.end)) for one in on_device]


def union_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that the spans (in µs) cover together. Overlapping time counts once."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / 1e6


def _drain(engine: Engine) -> None:
    while engine.has_unfinished_requests:
        engine.step()


REHEARSED = Load(batches=(1, 4), prompt=12, budget=16)


def main(words: Sequence[str] | None = None) -> int:
    """Measure one model; returns the exit code."""
    parser = argparse.ArgumentParser(description="Decode steps of one model, beside transformers.")
    parser.add_argument("--model", choices=[name for name in MODELS if name != "tiny"], required=True)
    parser.add_argument("--out", required=True, metavar="FILE", help="JSON")
    parser.add_argument("--seconds", type=float, default=300.0, help="begin nothing after that; default: 300")
    parser.add_argument("--dry-run", action="store_true", help="the same with a tiny model on the CPU")
    flags = parser.parse_args(words)
    if flags.dry_run:
        document = measure("tiny", "cpu", REHEARSED, flags.seconds, lambda document: None, requests=2)
        say(f"{len(document['steps'])} batch sizes rehearsed; nothing was timed")
        return 1 if _failed(document) else 0
    file = Path(flags.out)

    def keep(document: dict[str, Any]) -> None:
        write_files(file.parent, {file.name: (json.dumps(document, indent=1) + "\n").encode()})

    return 1 if _failed(measure(flags.model, "cuda", Load(), flags.seconds, keep)) else 0


def measure(
    name: str,
    device: str,
    load: Load,
    seconds: float,
    keep: Callable[[dict[str, Any]], None],
    *,
    requests: int = REQUESTS,
) -> dict[str, Any]:
    """All measurements of one model. `keep` is called after every row, with everything measured so far."""
    until = time.monotonic() + seconds
    loaded = made_model(MODELS[name], device)
    document: dict[str, Any] = {
        "model": asdict(MODELS[name]),
        "device": ", ".join(gpu_names()) or device,
        "versions": versions(),
        "steps": [],
        "peers": [],
    }
    for row in _rows(loaded, load, until):
        document["steps"].append(row)
        keep(document)
        _say_row(row)
    if until - time.monotonic() >= LEAST_PEER_S:
        document["peers"] = _peers(loaded, requests)
        keep(document)
    else:
        remark("no time was left for transformers' continuous batching")
    return document


def _rows(loaded: LoadedModel, load: Load, until: float) -> Iterator[dict[str, Any]]:
    """The rows with CUDA graphs come first, since the engine normally uses them."""
    for graphs in (True, False):
        engine = decode_engine(loaded, load, graphs=graphs)
        for row in measured_steps(engine, load, graphs=graphs):
            yield row
            if time.monotonic() > until:
                return
        del engine
        gc.collect()
        if loaded.device.type == "cuda":
            torch.cuda.empty_cache()


def _peers(loaded: LoadedModel, count: int) -> list[dict[str, Any]]:
    """Our engine and transformers in turn on the same requests, output tokens a second of wall time."""
    requests = reference_requests(count, loaded.vocab_size)

    def other(
        some: Sequence[BenchRequest],
    ) -> Outputs:  # set up inside the call, so that an error is the peer's result
        return transformers_cb(loaded, block_size=BLOCK_SIZE, pool_tokens=POOL_TOKENS)(some)

    engines = {OURS: ours(loaded, block_size=BLOCK_SIZE, pool_tokens=POOL_TOKENS), PEER: other}
    tokens = sum(request.output_tokens for request in requests)
    return [
        {
            "name": one.name,
            "seconds": one.seconds,
            "error": one.error,
            "equal": one.equal,
            "tokens_s": tokens / median(one.seconds) if one.seconds else None,
        }
        for one in compared(engines, requests, REPEATS)
    ]


@dataclass
class Compared:
    """The rounds of one engine, in seconds of wall time, and how many of its outputs equal those of the first."""

    name: str
    seconds: list[float]
    equal: int = 0
    error: str | None = None


def compared(engines: dict[str, Serve], requests: Sequence[BenchRequest], repeats: int) -> list[Compared]:
    """Rounds of all engines in turn, after a warm-up of two requests each."""
    found = {name: Compared(name, []) for name in engines}
    said: dict[str, Outputs] = {}
    for number in range(-1, repeats):
        for name, serve in engines.items():
            if found[name].error is not None:
                continue
            began = time.perf_counter()
            try:
                outputs = serve(requests if number >= 0 else requests[:2])
            except Exception as error:  # any error of a peer's library is that peer's result
                found[name].error = f"{type(error).__name__}: {error}"
                continue
            if number >= 0:
                found[name].seconds.append(time.perf_counter() - began)
                said[name] = outputs
    reference = said.get(next(iter(engines)), [])
    for name, outputs in said.items():
        found[name].equal = sum(one == other for one, other in zip(outputs, reference, strict=True))
    return list(found.values())


def _say_row(row: dict[str, Any]) -> None:
    share = "unknown" if row["host_share"] is None else f"{row['host_share']:.1%}"
    graphs = "graphs" if row["graphs"] else "no graphs"
    say(
        f"batch {row['batch']:>3}, {graphs}: {1e3 * row['step_s']:.2f} ms, host {share}, "
        f"{row['tokens_s']:.0f} tokens/s, {row['bytes_s'] / 1e9:.0f} GB/s"
    )


def _failed(document: dict[str, Any]) -> bool:
    for one in document["peers"]:
        if one["error"]:
            remark(f"{one['name']}: {one['error']}")
    return not document["steps"] or any(one["name"] == OURS and one["error"] for one in document["peers"])


if __name__ == "__main__":
    raise SystemExit(main())
