"""`bench gpu`: everything worth knowing about a GPU in ten minutes, in one folder. `make gpu` runs it.

Nothing is built by hand and no step can take the others down: each runs in a process of its own, against the clock,
and what it left is kept. `--dry-run` rehearses every step without a GPU.
"""

import argparse

MINUTES = 10


def add(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `bench gpu`."""
    parser = benches.add_parser(
        "gpu",
        help="GPU tests, kernels by every provider, latency gate, calibration and a small sweep in ten minutes",
        description="Run the GPU tests, time the kernels by every provider, gate them, calibrate, sweep; one folder.",
        epilog="Exit codes: 0 every step gave an answer, 1 one did not or a test failed, 2 it cannot run here.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", metavar="DIR", help="default: results/reference/<device>")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="stop then; default: %(default)s")
    parser.add_argument("--only", metavar="A,B", help="only these steps")
    parser.add_argument(
        "--dry-run", action="store_true", help="rehearse every step; needs no GPU, times nothing"
    )


def run(flags: argparse.Namespace) -> int:
    """Run the steps; returns the exit code."""
    from harness.bench.gpu.running import run_steps

    return run_steps(flags)
