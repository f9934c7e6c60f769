"""Entry point: parse the command line, run the command, turn every error into a message and an exit code.

Options and overrides (`key=value`) may stand in any order.

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
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from harness.cli import (
    FAILED,
    INTERRUPTED,
    WRONG_INPUT,
    Arguments,
    completion,
    engine,
    pages,
    store,
    twin,
    workload,
)
from harness.config.errors import UserError
from harness.console import OutputError, remark, shortened

if TYPE_CHECKING:
    from types import ModuleType

    from harness.point import PointSession

COMMANDS = (
    *store.COMMANDS,
    *engine.COMMANDS,
    *workload.COMMANDS,
    twin.COMMAND,
    *pages.COMMANDS,
    completion.COMMAND,
)
_WRONG_NAMES = (
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
)
_OUR_PACKAGES = ("harness", "engine", "traces", "paged_kernels")
EXAMPLE = """\
example:
  python -m harness sweep cache.block_size=8,16,32 workload.prefix_share=0,0.3,0.6 decoding.beam_width=1,2,4"""


def parse_arguments(words: Sequence[str]) -> Arguments:
    """Split a command line into command, options and overrides.

    Raises:
        UserError: a word is neither an option nor an override.
        SystemExit: after `--help` (0), or when an option is used wrongly (2).
    """
    flags, rest = build_parser(_asked(words)).parse_known_args(list(words))
    takes_overrides = getattr(flags, "takes_overrides", False)
    for word in rest:
        if not takes_overrides or not _is_override(word):
            raise UserError(_refusal(word, flags.command, takes_overrides))
    folder = getattr(flags, "config_dir", None)
    if folder is not None:
        from harness.config.overrides import with_own_options

        rest = with_own_options(rest, Path(folder))
    return Arguments(flags.command, flags, tuple(rest))


def _asked(words: Sequence[str]) -> str:
    """The command that the words begin with; empty where they begin with none."""
    first = words[0] if words else ""
    return first if any(command.name == first for command in COMMANDS) else ""


def build_parser(asked: str = "", *, completes: bool = False) -> argparse.ArgumentParser:
    """The parser of `python -m harness`; with `asked` it knows the flags of that command alone.

    With `completes` it is for the Tab key: overrides are an argument then.
    """
    parser = argparse.ArgumentParser(
        prog="python -m harness",
        description="Predict a paged KV cache, then prove it on the engine.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in COMMANDS:
        made = command.add_to(commands, asked)
        if completes and command.takes_overrides:
            completion.add_overrides(made)
    return parser


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
    point: "PointSession | None" = None,
    report: "ModuleType | None" = None,
) -> int:
    """Run a command line and return its exit code.

    Args:
        words: the command line without the program's name; None takes that of this process.
        point: plans and runs the points of a sweep; None takes a session of `harness.point`.
        report: writes reports; None takes `harness.report`.
    """
    if completion.ASKED in os.environ:
        completion.answer(build_parser(completes=True))
    try:
        arguments = parse_arguments(sys.argv[1:] if words is None else words)
        run = arguments.flags.run
        command = resolve_name(run) if isinstance(run, str) else run
        code: int = command(replace(arguments, session=point, report=report))
        return code
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


def _drop_output() -> None:
    """Discard the buffered output. Nobody can read it, and Python would complain about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fault(error: Exception) -> int:
    """Report an unusable file, a full store or a missing package. Any other error is a bug; its traceback is filed."""
    from harness.store import StoreError

    if isinstance(error, OSError) and error.filename is not None:  # a file that the user named, or the disk
        remark(shortened(f"error: cannot use '{error.filename}': {error.strerror or error}"))
        return WRONG_INPUT if error.errno in _WRONG_NAMES else FAILED
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # while a file was open
        remark(f"error: cannot write: {error.strerror}; free some space and repeat the command")
        return FAILED
    if isinstance(error, MemoryError):
        remark("error: the machine's memory is full; take fewer requests, a smaller model or a smaller pool")
        return FAILED
    if isinstance(error, StoreError):
        remark(shortened(f"error: {error}\nPoints that were committed before are kept."))
        return FAILED
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in _OUR_PACKAGES:
        remark(
            f"error: the package '{error.name}' is not installed for {sys.executable}; "
            "install it, or set up a clone with 'make setup'"
        )
        return FAILED
    with tempfile.NamedTemporaryFile("w", prefix="pagetwin-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    remark(shortened(f"internal error: {type(error).__name__}: {error}"))
    remark(f"This is a bug in PageTwin, not a mistake of yours. The traceback is in {file.name}")
    return FAILED
