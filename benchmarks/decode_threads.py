"""Is the decode of one long row faster on two threads? `python benchmarks/decode_threads.py [--tokens 32768]`.

A row of bfloat16 with 32 query and 8 KV heads of 128, by the C kernel, on one thread and on two in turns. Prints the
median of nine of each and their ratio. It is of wall time, so it needs two cores that do nothing else.
"""

import argparse
import os
import statistics
import time

import numpy as np
import torch

from harness.console import say
from paged_kernels import Scoring, Workspace
from paged_kernels.native.attention import decode_rows, run_decode

TURNS, BLOCK = 9, 16


def main() -> None:
    """Time one thread and two in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768)
    tokens = parser.parse_args().tokens
    blocks = -(-tokens // BLOCK)
    keys, values = (torch.randn(blocks + 1, BLOCK, 8, 128).bfloat16() for _ in range(2))
    q, table = torch.randn(1, 32, 128).bfloat16(), np.random.default_rng(0).permutation(blocks)[None] + 1
    out, workspace = torch.empty_like(q), Workspace()
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(-2, TURNS):
        for threads, taken in seconds.items():
            torch.set_num_threads(threads)
            rows = decode_rows(table, np.array([tokens]))
            rows.plan(0)
            began = time.perf_counter()
            run_decode(rows, q, keys, values, Scoring(128**-0.5), out, workspace)
            if turn >= 0:
                taken.append(time.perf_counter() - began)
    one, two = (statistics.median(taken) for taken in seconds.values())
    spread = {threads: [round(1e3 * s, 1) for s in (min(t), max(t))] for threads, t in seconds.items()}
    say(
        f"one thread {1e3 * one:.1f} ms, two {1e3 * two:.1f} ms: {one / two:.2f} times (load {os.getloadavg()[0]:.1f})"
    )
    say(f"least and most, ms, by threads: {spread}")


if __name__ == "__main__":
    main()
