"""`bench sim`: how fast the simulator is, and whether its time and memory grow in proportion to the requests.

This module has the command line and imports nothing heavy.
"""

import argparse

SIZES = (1_000, 10_000, 100_000)


def add(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command line."""
    parser = benches.add_parser(
        "sim",
        help="requests and sequence-steps a CPU-second, linearity, memory",
        description="Simulate Azure conversation requests (Llama 3 8B on one A100 80GB, blocks of 16, prefix caching "
        "and metrics on) in fresh processes, and print CPU time and memory at each size.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="an Azure CSV, repeated end to end; default: generated requests of the same statistics",
    )
    parser.add_argument("--rate", type=float, help="requests a second; default: 6.45, with sharing 20")
    parser.add_argument("--requests", type=int, nargs="+", default=list(SIZES), metavar="N", help="sizes")
    parser.add_argument("--million", action="store_true", help="add a million requests")
    parser.add_argument(
        "--core",
        action="store_true",
        help="replay through the policy core, as requests with content, beams or preemptions are; default: compiled",
    )
    parser.add_argument(
        "--share",
        type=float,
        metavar="SHARE",
        help="this share of each prompt comes from one of 8 prefixes (H100, 20 requests/s unless --rate is given)",
    )
    parser.add_argument(
        "--samples", type=int, default=1, metavar="N", help="parallel samples of each request"
    )
    parser.add_argument("--beams", type=int, default=1, metavar="N", help="beams of each request")
    parser.add_argument("--repeats", type=int, default=3, help="runs a size, of which the median counts")
    parser.add_argument("--json", metavar="FILE", help="write the measurements here too")


def run(flags: argparse.Namespace) -> int:
    """Measure and print; returns the exit code."""
    from harness.bench.sim.runner import bench

    return bench(flags)
