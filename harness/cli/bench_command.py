"""`bench`: time one part of PageTwin on this machine. The benchmarks describe themselves (`harness.bench`)."""

import argparse
from importlib import import_module
from typing import TYPE_CHECKING

from harness.bench import BENCHES

if TYPE_CHECKING:
    from harness.cli.parser import Arguments


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `bench` and everything that it can time."""
    parser = commands.add_parser(
        "bench",
        help="time kernels, policy, simulator or engine on this machine",
        description="Time one part of PageTwin on this machine; what it wrote is named at the end.",
        allow_abbrev=False,
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name in BENCHES:
        import_module(f"harness.bench.{name}").add(benches)


def run(arguments: "Arguments") -> int:
    """Run the chosen benchmark; returns its exit code."""
    code: int = import_module(f"harness.bench.{arguments.flags.bench}").run(arguments.flags)
    return code
