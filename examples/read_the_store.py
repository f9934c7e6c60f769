"""Read the results of a sweep with pandas.

Run it with `python examples/read_the_store.py [FOLDER]`. Without a folder it simulates a small sweep first.
A sweep's folder holds `summary.parquet`, one row for each point with dotted columns, and for each point
`points/<fingerprint>/` with `record.json` (all of it), `steps.parquet` and `requests.parquet`.
`checked_summary` compares the summary with its digest: some damage by a disk loads as other numbers.
"""

import sys
import tempfile
from pathlib import Path

import pandas as pd

from harness.cli.main import main as pagetwin
from harness.store.manifest import checked_summary

SWEEP = "sweep measure=false cost=roofline cache.block_size=8,32 workload.prefix_share=0.5 workload.num_requests=50"
COLUMNS = {
    "config.cache.block_size": "block size",
    "config.cache.prefix_caching": "caching",
    "simulated.hit_ratio": "hit ratio",
    "simulated.internal_of_allocated": "never filled",  # of the slots in use, time-weighted
    "simulated.request_throughput": "requests/s",
    "simulated.ttft_p99": "TTFT p99 (s)",
    "comparison.ttft_p99.error": "error",  # against the measured side; empty without one
}


def summary(folder: Path) -> pd.DataFrame:
    """Some columns of every point, with shorter names."""
    points = pd.read_parquet(checked_summary(folder))
    return points[list(COLUMNS)].rename(columns=COLUMNS).sort_values("block size")


def slowest_requests(folder: Path) -> pd.DataFrame:
    """The five requests of the first point of the summary with the largest time to the first token."""
    first = pd.read_parquet(checked_summary(folder))["fingerprint"][0]
    table = pd.read_parquet(folder / "points" / first / "requests.parquet")
    table["ttft_ms"] = (table["first_token_s"] - table["arrival_s"]) * 1000
    return table.nlargest(5, "ttft_ms")[["request_id", "prompt_tokens", "ttft_ms"]]


def main() -> None:
    """Print both tables."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch)
        if len(sys.argv) == 1:
            pagetwin([*SWEEP.split(), f"out={folder}"])
        print(summary(folder).to_string(index=False, float_format="{:.3f}".format))
        print(slowest_requests(folder).to_string(index=False, float_format="{:.1f}".format))


if __name__ == "__main__":
    main()
