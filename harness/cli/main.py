"""Entry point: parse the command line, run the command, turn every error into a message and an exit code.

Options and overrides (`key=value`) may stand in any order. A command that takes overrides sets `takes_overrides=True`
as a default of its parser.

Exit codes: 0 everything is done, 1 some points failed or the disk failed, 2 the user's input was wrong, 130 stopped
with Ctrl-C. 130 is the shell's own code for Ctrl-C, so a script can tell it from a failure.
"""

import argparse
import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from harness.cli import completion
from harness.config.errors import UserError
from harness.console import Arguments, OutputError, remark, shortened

if TYPE_CHECKING:
    from harness.cli.report import ReportFunctions
    from harness.cli.sweep import PointFunctions

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130
_WRONG_NAMES = (
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
)
_OUR_PACKAGES = ("harness", "engine", "traces", "paged_kernels")
_OVERRIDES = """\
An override is key=value; `show` prints every key, `show --groups` every option of every group.
A list makes a sweep: cache.block_size=8,16,32 or range(8,33,8). Choose a group's option with cache=contiguous_max,
a prepared experiment with experiment=NAME. Without any list `sweep` runs the default experiment.
Exit codes: 0 all points are done, 1 some failed, 2 the input was wrong, 130 stopped
with Ctrl-C or SIGTERM (repeat to go on)."""

EXAMPLE = """\
example:
  python -m harness sweep cache.block_size=8,16,32 workload.prefix_share=0,0.5,0.9 decoding.beam_width=1,2,4"""


def parse_arguments(words: Sequence[str]) -> Arguments:
    """Split a command line into command, options and overrides.

    Raises:
        UserError: a word is neither an option nor an override.
        SystemExit: after `--help` (0), or when an option is used wrongly (2).
    """
    flags, rest = build_parser().parse_known_args(list(words))
    takes_overrides = getattr(flags, "takes_overrides", False)
    for word in rest:
        if not takes_overrides or not _is_override(word):
            raise UserError(_refusal(word, flags.command, takes_overrides))
    folder = getattr(flags, "config_dir", None)
    if folder is not None:
        from harness.config.overrides import with_own_options

        rest = with_own_options(rest, Path(folder))
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
    show.set_defaults(takes_overrides=True)
    show.add_argument("--groups", action="store_true", help="list the options of every group instead")
    report = _add(commands, "report", "write the report of a store", "report [FOLDER]", "")
    _add_store(report)
    report.add_argument("--out", metavar="DIR", help="write the report here; default: beside the results")
    report.add_argument(
        "--kernels",
        metavar="DIR",
        help="show this run of bench kernels too; default: the sweep's, or one beside the results; none: leave out",
    )
    report.add_argument(
        "--figures",
        choices=["all", "svg", "none"],
        help="all: also as PDF; svg: no PDF; none: sentences and tables alone; default: the sweep's report.figures",
    )
    report.add_argument(
        "--paper",
        choices=["column", "page", "both"],
        help="also every panel in a file of its own, 3.33 or 7.0 inches wide (figures/paper)",
    )
    report.add_argument("--serif", action="store_true", help="figures with serif letters")
    report.add_argument("--latex", action="store_true", help="each table also in LaTeX (booktabs)")
    report.add_argument(
        "--against", metavar="FOLDER", help="also say what changed from this store, with bounds"
    )
    report.add_argument(
        "--markdown", metavar="FILE", help="append the answers to FILE as Markdown, e.g. for a pull request"
    )
    figure = report.add_argument_group("one figure of your own choice, instead of the report")
    figure.add_argument("--x", metavar="KEY", help="swept setting along x; writes this figure alone")
    figure.add_argument("--hue", metavar="KEY", help="swept setting whose values are lines")
    figure.add_argument("--col", metavar="KEY", help="swept setting whose values are columns")
    figure.add_argument(
        "--where",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="only points of this value; repeatable",
    )
    figure.add_argument(
        "--metric", metavar="NAME,...", help="rows of the figure; default: the six of the report"
    )
    status = _add(commands, "status", "say what a store has done, and what is left", "status [FOLDER]", "")
    _add_store(status)
    for command in _command_modules().values():
        command.add(commands)
    for taking in commands.choices.values():
        if taking.get_default("takes_overrides"):
            taking.add_argument(
                "--config-dir",
                metavar="DIR",
                help="options of your own: device=mine chooses DIR/device/mine.yaml, and so for each group",
            )
    return parser


def _command_modules() -> dict[str, ModuleType]:
    """The commands that have a module with `add` and `run`, in the order of `--help`. None imports anything heavy."""
    from harness.cli import (
        advise,
        bench,
        calibrate,
        capacity,
        claims,
        doctor,
        gate,
        lesson,
        logs,
        reproduce,
        scoreboard,
        serve,
        trace,
        twin,
    )

    return {
        "doctor": doctor,
        "logs": logs,
        "trace": trace,
        "serve": serve,
        "bench": bench,
        "gate": gate,
        "calibrate": calibrate,
        "capacity": capacity,
        "twin": twin,
        "advise": advise,
        "scoreboard": scoreboard,
        "claims": claims,
        "reproduce": reproduce,
        "lesson": lesson,
        "completion": completion,
    }


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
    parser.set_defaults(takes_overrides=True)
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


def main(
    words: Sequence[str] | None = None,
    *,
    point: "PointFunctions | None" = None,
    report: "ReportFunctions | None" = None,
) -> int:
    """Run a command line and return its exit code.

    Args:
        words: the command line without the program's name; None takes that of this process.
        point: plans and runs the points of a sweep; None takes `harness.point`.
        report: writes reports; None takes `harness.report`.
    """
    if completion.asked():
        completion.answer(build_parser())
    try:
        arguments = parse_arguments(sys.argv[1:] if words is None else words)
        return _run(arguments, point, report)
    except UserError as error:
        remark(shortened(f"error: {error}"))
        return WRONG_INPUT
    except KeyboardInterrupt:
        remark("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the program that reads our output has ended, e.g. `| head`
        _drop_output()
        return FAILED
    except OutputError as error:
        _drop_output()
        remark(shortened(f"error: {error}"))
        return FAILED
    except Exception as error:
        return _fault(error)


def _run(arguments: Arguments, point: "PointFunctions | None", report: "ReportFunctions | None") -> int:
    """Import and run the command. The import stands here, so that `--help` stays fast."""
    if arguments.command in ("run", "sweep"):
        from harness.cli.sweep import sweep_command

        return sweep_command(arguments, point, report)
    if arguments.command == "show":
        from harness.cli.show import show_command

        return show_command(arguments)
    if arguments.command in ("report", "status"):
        from harness.cli.report import report_command, status_command

        return (
            status_command(arguments) if arguments.command == "status" else report_command(arguments, report)
        )
    if arguments.command == "doctor":
        from harness.cli.doctor import run

        return run(arguments, point, report)
    code: int = _command_modules()[arguments.command].run(arguments)
    return code


def _drop_output() -> None:
    """Discard the buffered output. Nobody can read it, and Python would complain about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fault(error: Exception) -> int:
    """Report an unusable file, a full store or a missing package. Any other error is a bug; its traceback is filed."""
    from harness.store.errors import StoreError

    if isinstance(error, OSError) and error.filename is not None:  # a file that the user named, or the disk
        remark(shortened(f"error: cannot use '{error.filename}': {error.strerror or error}"))
        return WRONG_INPUT if error.errno in _WRONG_NAMES else FAILED
    if isinstance(error, MemoryError):
        remark("error: the machine's memory is full; take fewer requests, a smaller model or a smaller pool")
        return FAILED
    if isinstance(error, StoreError):
        remark(shortened(f"error: {error}\nPoints that were committed before are kept."))
        return FAILED
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in _OUR_PACKAGES:
        remark(
            f"error: the package '{error.name}' is not installed for {sys.executable}; set up with 'make setup'"
        )
        return FAILED
    with tempfile.NamedTemporaryFile("w", prefix="pagetwin-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    remark(shortened(f"internal error: {type(error).__name__}: {error}"))
    remark(f"This is a bug in PageTwin, not a mistake of yours. The traceback is in {file.name}")
    return FAILED
