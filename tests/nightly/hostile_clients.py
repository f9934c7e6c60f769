"""What ten hostile clients do to the latency of the others, and to the memory of the server.

    python tests/nightly/hostile_clients.py [--requests 60]

A server of a small random model runs in processes of its own, and so do the hostile clients: a client that makes JSON
would hold the one that takes the times. Short requests are timed alone, then beside the hostile clients, all at once.
Ends with 1 where the others' p99 is above three times its quiet value, the longest wait beside one long text is above
twice the quiet one, or the memory grows by half. The machine must be quiet: all of them share its cores. Making ten
requests at once takes the hostile clients 0.7 of the CPU-seconds of all, which are those of other machines: they run at
the lowest priority, and `hostile_cpu_s` says what they got.
"""

import argparse
import json
import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import repeat
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

LIMITS = {"p99": 3.0, "longest beside one long text": 2.0, "memory": 1.5}
WORDS = "the cat sat on a mat and saw the quick brown fox jump over that lazy dog, again; "


def checkpoint(folder: Path) -> None:
    """A model of two layers with a tokenizer of 512 tokens."""
    import torch
    from serve_cases import tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    words = tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": words.eos_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape, **heads, **ends)).save_pretrained(folder)
    words.save_pretrained(folder)


class Served:
    """A server at an address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.host, self.port = self.address.removeprefix("http://").split(":")

    def post(self, body: dict[str, object], path: str = "/v1/completions") -> httpx.Response:
        """The answer to a body."""
        return httpx.post(self.address + path, json=body, timeout=600)

    def latencies(self, requests: int) -> list[float]:
        """Seconds of short requests, one after the other. What is turned away for load (429, 503) does not count."""
        seconds = []
        for number in range(requests):
            begun = time.perf_counter()
            answer = self.post(
                {"prompt": f"{number} the cat", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            )
            assert answer.status_code in (200, 429, 503), answer.text
            if answer.status_code == 200:
                seconds.append(time.perf_counter() - begun)
        return seconds

    def half_open(self, head: bytes, count: int, over: Event | threading.Event) -> None:
        """Connections that send a part of a request and nothing more."""
        held = [socket.create_connection((self.host, int(self.port))) for _ in range(count)]
        for one in held:
            one.sendall(head)
        over.wait()
        for one in held:
            one.close()


def hostile(server: Served, over: Event | threading.Event) -> list[tuple[str, object]]:
    """Ten hostile clients: a name, and what each does until `over` is set."""
    long_text = WORDS * (5 * 2**20 // len(WORDS))
    head, body = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", b"content-length: 999\r\n\r\n{"
    form = {"structured_outputs": {"regex": "((((b{100}){100}){100}){90}"}}

    def again(body: dict[str, object], path: str = "/v1/completions") -> object:
        def work() -> None:
            while not over.is_set():
                server.post(body, path)

        return work

    def leaves() -> None:
        while not over.is_set():
            with suppress(httpx.TimeoutException):
                httpx.post(
                    server.address + "/v1/completions", json={"prompt": "a", "max_tokens": 4000}, timeout=0.05
                )

    def floods() -> None:
        part = b"a" * 2**20
        while not over.is_set():
            with suppress(httpx.TransportError):  # the answer comes before the body ends
                httpx.post(server.address + "/v1/completions", content=repeat(part, 400), timeout=600)

    return [
        ("a body of 400 MB", floods),
        ("a text of 5 MB", again({"prompt": long_text, "max_tokens": 1})),
        (
            "a text of 5 MB to be cut",
            again({"prompt": long_text, "max_tokens": 1, "truncate_prompt_tokens": 8}),
        ),
        ("a text of 5 MB for /tokenize", again({"prompt": long_text}, "/tokenize")),
        ("a form of 90 million parts", again({"prompt": "a", **form})),
        ("3,000 prompts", again({"prompt": ["a"] * 3000})),
        ("a salt of 1 MB", again({"prompt": "a", "cache_salt": "a" * 2**20})),
        ("200 heads without an end", lambda: server.half_open(head, 200, over)),
        ("200 bodies without an end", lambda: server.half_open(head + body, 200, over)),
        ("clients that leave", leaves),
    ]


def attack(address: str, names: Sequence[str], begun: Barrier, over: Event) -> None:
    """The process of hostile clients, at the lowest priority."""
    os.nice(19)
    clients = [work for name, work in hostile(Served(address), over) if name in names]
    threads = [threading.Thread(target=work, daemon=True) for work in clients]
    for thread in threads:
        thread.start()
    begun.wait()
    over.wait()


@contextmanager
def beside(address: str, names: Sequence[str]) -> Iterator[None]:
    """Hostile clients of these names, in a process of their own, while the block runs."""
    context = multiprocessing.get_context("fork")
    begun, over = context.Barrier(2), context.Event()
    process = context.Process(target=attack, args=(address, names, begun, over))
    process.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        process.join()


@contextmanager
def server(folder: Path) -> Iterator[tuple[Served, Callable[[], int]]]:
    """A server, and the bytes of memory that its processes had at most so far."""
    command = [sys.executable, "-m", "harness", "serve", f"model.path={folder}", "--port", "0"]
    command += ["cache.max_model_len=8192", "cache.pool_tokens=65536", "engine.audit=off"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = next(filter(None, (re.search(r"http://[\d.]+:\d+", line) for line in process.stdout)))

    def memory() -> int:
        pids = [
            process.pid,
            *Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text("ascii").split(),
        ]
        texts = [Path(f"/proc/{pid}/status").read_text(encoding="ascii") for pid in pids]
        return 1024 * sum(int(re.findall(r"VmHWM:\s+(\d+) kB", text)[0]) for text in texts)

    try:
        yield Served(found[0]), memory
    finally:
        process.terminate()
        process.wait()


def p99(seconds: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]


def main() -> int:
    """Run the drill. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=int, default=60, help="short requests that are timed (default: 60)"
    )
    requests = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as name:
        checkpoint(Path(name))
        with server(Path(name)) as (served, memory):
            served.latencies(10)
            quiet, before = served.latencies(requests), memory()
            with beside(served.address, ["a text of 5 MB"]):
                long = max(served.latencies(requests)) / max(quiet)
            with beside(served.address, [name for name, _ in hostile(served, threading.Event())]):
                loud = served.latencies(requests)
            found = {"p99": p99(loud) / p99(quiet), "longest beside one long text": long}
            found["memory"] = memory() / before
            hostile_s = sum(os.times()[2:4])  # of the children that have ended
    said = {
        "quiet_p99_s": round(p99(quiet), 4),
        "answered": len(loud),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "hostile_cpu_s": round(hostile_s, 1),
    }
    sys.stdout.write(json.dumps(said | {name: round(value, 2) for name, value in found.items()}) + "\n")
    broken = [name for name, value in found.items() if value > LIMITS[name]]
    sys.stdout.write(f"above its limit: {', '.join(broken)}\n" if broken else "all within their limits\n")
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
