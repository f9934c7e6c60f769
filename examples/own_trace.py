"""Replay a trace of your own: write it as CSV, read it back, simulate it.

Run it with `python examples/own_trace.py`. Needed columns are `arrival_s`, `prompt_tokens` and `output_tokens`.
Optional columns (session, prefix, priority and others) are listed in `traces/README.md`; JSONL takes the same names.
"""

import csv
import tempfile
from pathlib import Path

from harness.config.schema import CostKind, RunConfig, TraceFormat
from harness.point import run_point
from traces.reading import read_trace


def write_trace(path: Path, requests: int = 60) -> None:
    """Requests 50 ms apart. Each prompt begins with one of three system prompts of 200 tokens."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["arrival_s", "prompt_tokens", "output_tokens", "prefix", "prefix_tokens"])
        for number in range(requests):
            rows.writerow(
                [0.05 * number, 250 + number % 7 * 10, 20 + number % 5, f"system-{number % 3}", 200]
            )


def simulate(path: Path, *, prefix_caching: bool) -> dict[str, float]:
    """The simulated metrics of the trace as it was recorded."""
    config = RunConfig(measure=False)
    config.trace.name, config.trace.path, config.trace.format = path.stem, str(path), TraceFormat.auto
    config.workload.num_requests = None  # all rows
    config.cache.pool_tokens = 8192
    config.cache.prefix_caching = prefix_caching
    config.cost.kind = CostKind.roofline
    metrics: dict[str, float] = run_point(config).record.simulated
    return metrics


def main() -> None:
    """Say what was read, and what the prefix cache is worth on it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.csv"
        write_trace(path)
        trace = read_trace(path)  # a wrong row raises TraceError, which names file, line and field
        tokens = sum(request.prompt_tokens for request in trace.requests)
        print(f"format {trace.header.format}: {len(trace.requests)} requests, {tokens} prompt tokens")
        for prefix_caching in (False, True):
            found = simulate(path, prefix_caching=prefix_caching)
            hits = found.get("hit_ratio", 0.0)  # without prefix caching there is no such ratio
            print(
                f"prefix caching {'on ' if prefix_caching else 'off'}: {hits:5.1%} of prompt tokens hit,"
                f" mean TTFT {found['ttft_mean'] * 1000:5.1f} ms"
            )


if __name__ == "__main__":
    main()
