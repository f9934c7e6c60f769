"""What ten hostile clients do to the latency of the others, and to the memory of the server.

    python tests/nightly/hostile_clients.py [--requests 60]

A server of a small random model runs in a process of its own. Short requests are timed alone, then beside the hostile
clients, all at once. Ends with 1 where the others' p99 is above three times its quiet value, the longest wait beside
one long text is above twice the quiet one, or the memory grows by half.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from itertools import repeat
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
    """A server in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "harness", "serve", f"model.path={folder}", "--port", "0"]
        command += ["cache.max_model_len=8192", "cache.pool_tokens=65536", "engine.audit=off"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"http://[\d.]+:\d+", line):
                self.address = found[0]
                break
        self.host, self.port = self.address.removeprefix("http://").split(":")

    def post(self, body: dict[str, object], path: str = "/v1/completions") -> httpx.Response:
        """The answer to a body."""
        return httpx.post(self.address + path, json=body, timeout=600)

    def memory(self) -> int:
        """Bytes of memory at most so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found
        return int(found[1]) * 1024

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

    def half_open(self, head: bytes, count: int, over: threading.Event) -> None:
        """Connections that send a part of a request and nothing more."""
        held = [socket.create_connection((self.host, int(self.port))) for _ in range(count)]
        for one in held:
            one.sendall(head)
        over.wait()
        for one in held:
            one.close()


def hostile(server: Served, over: threading.Event) -> list[tuple[str, object]]:
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
        part = b"a" * 2**20  # a client that makes JSON of it would hold this process, which takes the times
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
        server = Served(Path(name))
        try:
            server.latencies(10)
            quiet, memory = server.latencies(requests), server.memory()
            text = {"prompt": WORDS * (5 * 2**20 // len(WORDS)), "max_tokens": 1}
            beside = threading.Thread(target=server.post, args=(text,))
            beside.start()
            long = max(server.latencies(requests)) / max(quiet)
            beside.join()
            over = threading.Event()
            clients = hostile(server, over)
            threads = [threading.Thread(target=work, name=name, daemon=True) for name, work in clients]
            for thread in threads:
                thread.start()
            loud = server.latencies(requests)
            over.set()
            for thread in threads:
                thread.join()
            found = {"p99": p99(loud) / p99(quiet), "longest beside one long text": long}
            found["memory"] = server.memory() / memory
        finally:
            server.process.terminate()
            server.process.wait()
    said = {
        "quiet_p99_s": round(p99(quiet), 4),
        "answered": len(loud),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    sys.stdout.write(json.dumps(said | {name: round(value, 2) for name, value in found.items()}) + "\n")
    broken = [name for name, value in found.items() if value > LIMITS[name]]
    sys.stdout.write(f"above its limit: {', '.join(broken)}\n" if broken else "all within their limits\n")
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
