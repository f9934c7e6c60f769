"""One model: decode steps with and without graphs, then the same requests through transformers' continuous batching.

Figures are written after every row: where the time is over, what was measured stays.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engine.runtime.models.load import LoadedModel
from harness.bench.engine import peers
from harness.bench.engine.running import OURS, compare
from harness.bench.engine.workload import BenchRequest, bench_requests
from harness.bench.gpu.programs.decode_steps import Load, decode_engine, measured_steps
from harness.bench.gpu.programs.serving_models import MODELS, made_model
from harness.cli.say import remark, say
from harness.environment import gpu_names, versions
from harness.store.atomic import write_files

PEER = "transformers_cb"
REQUESTS, REPEATS, POOL_TOKENS, BLOCK_SIZE = 64, 2, 65_536, 16
LEAST_PEER_S = 30.0  # a peer is not begun with less left
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
    """Everything that is measured of one model; `keep` is called with all so far after every row."""
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
    """With graphs first: that is how it is run."""
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
    requests = bench_requests(count, loaded.vocab_size, 0)
    serve, _ = peers.ours(loaded, block_size=BLOCK_SIZE, pool_tokens=POOL_TOKENS)

    def other(some: Sequence[BenchRequest]) -> peers.Outputs:  # set up where its errors are its own result
        return peers.transformers_cb(loaded, block_size=BLOCK_SIZE, pool_tokens=POOL_TOKENS)(some)

    tokens = sum(request.output_tokens for request in requests)
    found = compare({OURS: serve, PEER: other}, requests, REPEATS, time.perf_counter)
    return [
        {
            "name": one.name,
            "seconds": one.seconds,
            "error": one.error,
            "equal": one.equal,
            "tokens_s": one.rate(tokens) if one.seconds else None,
        }
        for one in found
    ]


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
