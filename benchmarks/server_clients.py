"""Throughput of our server with many clients at once, beside an older checkout of ours or beside vLLM, in turns.

    python benchmarks/server_clients.py --tree FOLDER
    python benchmarks/server_clients.py --vllm /opt/vllm-cpu/bin/python

All servers serve one small random model with a tokenizer of 512 tokens, so that HTTP is a large part of the work. Each
starts once. Clients are a process of their own: they stream completions, each the next as soon as the last has ended.
Printed are output tokens a second of wall time and per CPU-second of the server's process tree, of every round.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from harness.console import say

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "nightly")]


def main(words: Sequence[str] | None = None) -> int:
    """Serve the rounds and print the rates; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", metavar="FOLDER", help="another checkout of ours")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM and its server")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256, help="of a round; default: %(default)s")
    parser.add_argument(
        "--tokens", type=int, default=32, help="output tokens of a request; default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args(words)
    checkpoint = import_module("hostile_clients").checkpoint

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        checkpoint(Path(folder))
        servers = {"this tree": ours(folder, ROOT)}
        if flags.tree:
            servers[flags.tree] = ours(folder, Path(flags.tree))
        if flags.vllm:
            servers["vLLM"] = vllm(folder, flags.vllm)
        running = {name: stack.enter_context(started(*how)) for name, how in servers.items()}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in running}
        for number in range(-1, flags.rounds):
            for name, (process, address) in running.items():
                before, sizes = tree_seconds(process), (flags.clients, flags.requests, flags.tokens)
                command = [sys.executable, __file__, "clients", address, *map(str, sizes)]
                tokens, wall = json.loads(subprocess.check_output(command))
                rates = tokens / wall, tokens / (tree_seconds(process) - before)
                if number >= 0:
                    found[name].append(rates)
                    say(f"round {number + 1}, {name}: {rates[0]:.0f} tokens/s, {rates[1]:.0f} per CPU-second")
    for name, rounds in found.items():
        wall, cpu = (sorted(column) for column in zip(*rounds, strict=True))
        say(
            f"{name}: median {median(wall):.0f} tokens/s ({wall[0]:.0f}-{wall[-1]:.0f}), "
            f"{median(cpu):.0f} per CPU-second ({cpu[0]:.0f}-{cpu[-1]:.0f})"
        )
    return 0


def ours(folder: str, tree: Path) -> tuple[list[str], Mapping[str, str]]:
    """Command and environment of our server in a checkout."""
    words = f"serve model.path={folder} --port {free_port()} cache.max_model_len=1024"
    command = [
        sys.executable,
        "-P",  # not from the folder that this runs in
        "-m",
        "harness",
        *words.split(),
        "cache.pool_tokens=65536",
        "cache.block_size=16",
    ]
    return command, {"PYTHONPATH": f"{tree}:{tree / 'kernels'}"}


def vllm(folder: str, python: str) -> tuple[list[str], Mapping[str, str]]:
    """Command and environment of vLLM's server."""
    words = f"--model {folder} --port {free_port()} --max-model-len 1024 --enforce-eager"
    more = "--dtype float32 --kv-cache-memory-bytes 268435456 --max-num-seqs 256"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *words.split(), *more.split()]
    own = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    return command, {**own, "PYTHONPATH": ""}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def started(command: list[str], environment: Mapping[str, str]) -> Iterator[tuple[Any, str]]:
    """A server that answers, and its address."""
    port = re.search(r"--port (\d+)", " ".join(command))
    assert port
    address = f"http://127.0.0.1:{port[1]}"
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, stdout=subprocess.DEVNULL
    )
    try:
        while not answers(address):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(0.2)
        yield import_module("psutil").Process(process.pid), address
    finally:
        process.terminate()
        process.wait()


def answers(address: str) -> bool:
    """Whether a server is up."""
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def tree_seconds(process: Any) -> float:
    """CPU-seconds of a process and of those that it started."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


async def clients(address: str, count: int, requests: int, tokens: int) -> tuple[int, float]:
    """Output tokens that the clients were sent, and the seconds that it took."""
    left, said, name = iter(range(requests)), [], ""
    limits = httpx.Limits(max_connections=count)

    async def one(client: httpx.AsyncClient) -> None:
        for number in left:
            body = {
                "model": name,
                "prompt": f"{number} the cat sat on a mat",
                "max_tokens": tokens,
                "temperature": 0,
            }
            body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
                assert answer.status_code == 200, lines
            said.append(json.loads(lines[-1].removeprefix("data: "))["usage"]["completion_tokens"])

    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        begun = time.perf_counter()
        await asyncio.gather(*(one(client) for _ in range(count)))
        return sum(said), time.perf_counter() - begun


if __name__ == "__main__":
    if sys.argv[1:2] == ["clients"]:
        sys.stdout.write(json.dumps(asyncio.run(clients(sys.argv[2], *map(int, sys.argv[3:])))))
    else:
        sys.exit(main())
