"""`bench policy`: how fast the policy core is, and whether a step costs the same in a pool a thousand times larger.

This module has the command line and imports nothing heavy.
"""

import argparse

_MORE = """\
Every figure is per CPU-second of one core (medians of pytest-benchmark, with garbage collection off). Beside it stand
PageTwin's goal and the published figure of vLLM 0.33's Python core. The yardstick is a fixed loop of plain Python,
timed in the same process. Divide by it to compare runs on machines of different speed or load.
Exit codes: 0 done, 1 an operation's cost grew with the pool or the queue (--curve), or memory went over 1 GB,
2 the input was wrong.
example:
  python -m harness bench policy --curve --out results/policy"""


def add(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command line."""
    parser = benches.add_parser(
        "policy",
        help="blocks, prompts, decode steps and beam tokens a CPU-second; cost from 10^3 to 10^6 blocks",
        description="Time the policy core: block manager and scheduler, no model.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=7, help="samples a line, of which the median counts")
    parser.add_argument(
        "--out", default="results/bench/policy", metavar="FOLDER", help="default: %(default)s"
    )
    parser.add_argument(
        "--against",
        metavar="PYTHON",
        help="interpreter that has vLLM 0.33.0: both sides do the same work in turns, and only that is measured",
    )
    parser.add_argument(
        "--curve", action="store_true", help="the cost an operation by pool and queue size, and peak memory"
    )
    parser.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        default=[1_000, 10_000, 100_000, 1_000_000],
        metavar="N",
        help="pool sizes of the curve; the largest is the one whose memory is measured",
    )
    parser.add_argument(
        "--queued",
        type=int,
        nargs="+",
        default=[1_000, 10_000, 100_000],
        metavar="N",
        help="queue lengths of the curve",
    )


def run(flags: argparse.Namespace) -> int:
    """Measure, print and write; returns the exit code."""
    from harness.bench.policy.runner import bench

    return bench(flags)
