"""`trace`: work on request traces. The actions describe themselves (`harness.trace`)."""

import argparse
from importlib import import_module
from typing import TYPE_CHECKING

from harness.trace import ACTIONS

if TYPE_CHECKING:
    from harness.cli.parser import Arguments


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `trace` and everything that it can do."""
    parser = commands.add_parser(
        "trace",
        help="list, fetch, look into, convert, cut, scale, make or check traces",
        description="Work on request traces.",
        usage="python -m harness trace ACTION ...",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", prog="python -m harness trace"
    )
    for name in ACTIONS:
        import_module(f"harness.trace.{name}_action").add(actions)


def run(arguments: "Arguments") -> int:
    """Run the chosen action; returns its exit code."""
    code: int = import_module(f"harness.trace.{arguments.flags.action}_action").run(arguments.flags)
    return code
