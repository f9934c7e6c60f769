"""`bench`: time one part of PageTwin on this machine. The benchmarks describe themselves in `harness.bench`."""

import argparse
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.console import Arguments


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `bench` and all its benchmarks."""
    parser = commands.add_parser(
        "bench",
        help="time kernels, policy, simulator or engine on this machine",
        description="Time one part of PageTwin on this machine; the end of the output names the files.",
        allow_abbrev=False,
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for bench in _benches().values():
        bench.add(benches)


def run(arguments: "Arguments") -> int:
    """Run the chosen benchmark; returns its exit code."""
    code: int = _benches()[arguments.flags.bench].run(arguments.flags)
    return code


def _benches() -> dict[str, ModuleType]:
    """The packages of the benchmarks, in the order of `bench --help`. Their `__init__` imports nothing heavy."""
    from harness.bench import engine, kernels, policy, sim

    return {"engine": engine, "kernels": kernels, "policy": policy, "sim": sim}
