"""Commands and flags. Overrides (`key=value`) and flags may stand in any order."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from harness.cli.commands import add_commands
from harness.config.errors import UserError

_OVERRIDES = """\
An override is key=value; `show` prints every key, `show --groups` every option of every group.
A list makes a sweep: cache.block_size=8,16,32 or range(8,33,8). Choose a group's option with cache=contiguous_max,
a ready-made experiment with experiment=NAME. Without any list `sweep` runs the default experiment.
Exit codes: 0 all points are done, 1 some failed, 2 the input was wrong, 130 stopped
with Ctrl-C or SIGTERM (repeat to go on)."""

EXAMPLE = """\
example:
  python -m harness sweep cache.block_size=8,16,32 workload.prefix_share=0,0.5,0.9 decoding.beam_width=1,2,4"""


@dataclass(frozen=True)
class Arguments:
    """What the user wrote, sorted: the command, its flags, its overrides."""

    command: str
    flags: argparse.Namespace
    overrides: tuple[str, ...]


def parse_arguments(words: Sequence[str]) -> Arguments:
    """Sort the words of a command line.

    Raises:
        UserError: a word is neither a flag nor an override.
        SystemExit: after `--help` (0), or when a flag is used wrongly (2).
    """
    flags, rest = build_parser().parse_known_args(list(words))
    takes_overrides = flags.command in ("run", "sweep", "show") or getattr(flags, "takes_overrides", False)
    for word in rest:
        if not takes_overrides or not _is_override(word):
            raise UserError(_refusal(word, flags.command, takes_overrides))
    return Arguments(flags.command, flags, tuple(rest))


def build_parser() -> argparse.ArgumentParser:
    """The parser of `python -m harness`."""
    parser = argparse.ArgumentParser(
        prog="python -m harness",
        description="Predict a paged KV cache, then prove it on the engine.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_running(commands, "run", "predict and measure one point", "run [key=value ...]")
    _add_running(
        commands, "sweep", "predict and measure every point of a grid", "sweep [key=value,value ...]"
    )
    show = _add(
        commands, "show", "print the composed, checked configuration", "show [key=value ...]", _OVERRIDES
    )
    show.add_argument("--groups", action="store_true", help="list the options of every group instead")
    report = _add(commands, "report", "write the report of a store", "report [FOLDER]", "")
    _add_store(report)
    report.add_argument("--out", metavar="DIR", help="write the report here; default: beside the results")
    report.add_argument(
        "--kernels",
        metavar="DIR",
        help="show this run of bench kernels too; default: the sweep's, or one beside the results; none: leave out",
    )
    status = _add(commands, "status", "say what a store has done, and what is left", "status [FOLDER]", "")
    _add_store(status)
    add_commands(commands)
    return parser


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    what: str,
    usage: str,
    more: str,
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        usage=f"python -m harness {usage}",
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_running(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, what: str, usage: str
) -> None:
    parser = _add(commands, name, what, f"{usage} [--dry-run] [--force]", _OVERRIDES)
    parser.add_argument("--dry-run", action="store_true", help="check and list the points, run nothing")
    parser.add_argument("--force", action="store_true", help="run points again that are done already")


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "store", nargs="?", metavar="FOLDER", help="results folder; default: the newest under results/"
    )


def _is_override(word: str) -> bool:
    return word.startswith(("+", "~")) or ("=" in word and not word.startswith("-"))


def _refusal(word: str, command: str, takes_overrides: bool) -> str:
    if word.startswith("-"):
        return f"'{command}' has no option '{word}'; see: python -m harness {command} --help"
    if takes_overrides:
        return f"'{word}' is not an override (key=value); see: python -m harness {command} --help"
    return f"'{command}' does not take '{word}'; see: python -m harness {command} --help"
