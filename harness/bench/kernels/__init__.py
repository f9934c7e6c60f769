"""`bench kernels`: attention over paged KV, compared with the speed of the memory and with other providers.

This module has the command line and imports nothing heavy.
"""

import argparse

from harness.bench.kernels.cases import add_options, chosen_cases
from harness.console import numbered, say

_MORE = """\
A list makes a grid: --batch 1,8,32 --block-size 16,64. Without any axis the preset of the device runs.
Every provider's output is compared with the float64 reference before it is timed. On a GPU the calls of a round
are captured in one CUDA graph and their inputs rotated past the L2 cache; on a CPU the figure is CPU time.
Exit codes: 0 done, 1 our own kernels failed or were wrong somewhere, 2 the input was wrong.
example:
  python -m harness bench kernels --context 4096 --block-size 16,32,64 --function mine:attention"""


def add(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `bench kernels`."""
    parser = benches.add_parser(
        "kernels",
        help="paged attention against copy bandwidth and other providers",
        description="Time attention over paged KV, by us and by every other provider there is.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser)


def run(flags: argparse.Namespace) -> int:
    """Time the grid that the flags describe; returns the exit code."""
    cases = chosen_cases(flags)
    if flags.dry_run:
        for case in cases:
            say(f"{case.name}  {case.kv_bytes / 1e6:,.1f} MB")
        say(f"{numbered(len(cases), 'case')}; nothing was timed")
        return 0
    from harness.bench.kernels.runner import run_cases

    return run_cases(cases, flags)
