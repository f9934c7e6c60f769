"""Commands beside the main job, each in a room of its own: `harness.cli.<name>_command`.

Such a module offers `add(commands)`, which describes the command to argparse and imports nothing heavy, and
`run(arguments)`, which returns the exit code. A command that takes Hydra overrides sets `takes_overrides=True` as a
default of its parser.
"""

import argparse
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.cli.parser import Arguments

COMMANDS: tuple[str, ...] = ("trace", "serve", "bench", "gate", "calibrate", "capacity")
"""Names of the commands, in the order of `--help`."""


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Let every command describe itself."""
    for name in COMMANDS:
        import_module(f"harness.cli.{name}_command").add(commands)


def run_command(arguments: "Arguments") -> int:
    """Hand over to the command's room; returns its exit code."""
    code: int = import_module(f"harness.cli.{arguments.command}_command").run(arguments)
    return code
