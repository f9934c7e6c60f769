"""The command line: what a command is, and what all commands share.

A module has the `Command`s of one subject, and `main` lists them. None of these modules imports Hydra, torch or pandas
at start, so that `--help` is fast: the function of a command imports what it needs.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from harness.config.errors import UserError

if TYPE_CHECKING:
    from harness.point import PointSession

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True)
class Arguments:
    """The parsed command line, and what takes the place of a session and of `harness.report`, if anything."""

    command: str
    flags: argparse.Namespace
    overrides: tuple[str, ...]
    session: "PointSession | None" = None
    report: ModuleType | None = None


@dataclass(frozen=True)
class Command:
    """A command: its name, its lines of help, a function that adds its flags, and one that runs it.

    `run` returns the exit code; it may be the function's `module:name`, which is imported when it is called. `about` is
    the first sentence of the command's own help; where it is empty, `help` is.
    """

    name: str
    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Arguments], int] | str
    about: str = ""
    usage: str = ""
    more: str = ""
    takes_overrides: bool = True

    def add_to(
        self, commands: "argparse._SubParsersAction[argparse.ArgumentParser]", asked: str
    ) -> argparse.ArgumentParser:
        """Add the command's parser, with its flags unless another command is asked for; an empty name asks for all."""
        parser = commands.add_parser(
            self.name,
            help=self.help,
            description=self.about or f"{self.help[0].upper()}{self.help[1:]}.",
            usage=f"python -m harness {self.name} {self.usage}" if self.usage else None,
            epilog=self.more,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if asked not in ("", self.name):
            return parser
        parser.set_defaults(run=self.run, takes_overrides=self.takes_overrides)
        self.add(parser)
        if self.takes_overrides:
            parser.add_argument(
                "--config-dir",
                metavar="DIR",
                help="options of your own: device=mine chooses DIR/device/mine.yaml, and so for each group",
            )
        return parser


def add_out(parser: argparse.ArgumentParser, default: str, what: str = "") -> None:
    """Add `--out` with its default, and what lies there."""
    parser.add_argument("--out", metavar="DIR", default=default, help=f"{what}default: {default}")


def out_folder(named: str, option: str = "--out") -> Path:
    """The folder that an option names. Raises UserError where it cannot be written."""
    from harness.config.paths import check_out  # which reads traces

    for wrong in check_out(named):
        raise UserError(f"{option} {named}: {wrong}")
    return Path(named)
