"""`bench gpu`: everything worth knowing about a GPU, in parts of ten minutes, each in one folder. `make gpu` runs it.

Nothing is built by hand and no step can take the others down: each runs in a process of its own, against the clock,
and what it left is kept. `--dry-run` rehearses every step without a GPU. docs/gpu.md tells how to use little time well.
"""

import argparse

from harness.bench.gpu.parts import PARTS

MINUTES = 9.5  # of a call of ten: starting and packing take the rest

_MORE = """\
parts:
  quick       GPU tests, kernels by every provider, latency gate, calibration, a small sweep
  kernels     tests, memory checker, the full grid of attention calls, hardware counters
  engine      decode steps of 1B- and 8B-class models, graphs on and off, beside transformers
  prediction  predicted against measured, contiguous memory beside paged, a trial of the latency gate
Exit codes: 0 every step gave an answer, 1 one did not or a test failed, 2 it cannot run here."""


def add(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `bench gpu`."""
    parser = benches.add_parser(
        "gpu",
        help="GPU tests, kernels by every provider, latency gate, calibration and sweeps, in parts of ten minutes",
        description="Run one part of what a GPU is asked, within ten minutes; one folder, one page of goals.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--part", choices=PARTS, default=PARTS[0], help="default: %(default)s")
    parser.add_argument(
        "--out", metavar="DIR", help="its folder <part> takes all; default: results/reference/<device>"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="stop then; default: %(default)s")
    parser.add_argument("--only", metavar="A,B", help="only these steps; they share the whole time")
    parser.add_argument("--trace", metavar="CSV", help="prediction: an Azure LLM inference trace")
    parser.add_argument(
        "--pack", metavar="FILE.tar.gz", help="pack the part's folder into this file at the end"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="rehearse every step; needs no GPU, times nothing"
    )
    parser.add_argument(
        "--judge", action="store_true", help="write the page again from the raw data there; needs no GPU"
    )


def run(flags: argparse.Namespace) -> int:
    """Run the steps; returns the exit code."""
    from harness.bench.gpu.running import run_part

    return run_part(flags)
