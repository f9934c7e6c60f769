"""Entry point: parse, hand over to the command, and turn every error into a message and an exit code.

0 everything asked for is done, 1 some points failed (or the disk did), 2 the user's input was wrong, 130 stopped with
Ctrl-C: the shell's code for it, so that a script can tell it from a failure.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence

from harness.cli.commands import COMMANDS, run_command
from harness.cli.parser import Arguments, parse_arguments
from harness.cli.rooms import Rooms
from harness.cli.say import OutputError, remark
from harness.config.errors import UserError

_OURS = ("harness", "engine", "traces", "paged_kernels")
FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130


def main(words: Sequence[str] | None = None, rooms: Rooms | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        words: without the program's name; None takes those of this process.
        rooms: the modules that do the work; None takes our own.
    """
    try:
        arguments = parse_arguments(sys.argv[1:] if words is None else words)
        return _command(arguments, rooms or Rooms())
    except UserError as error:
        remark(f"error: {error}")
        return WRONG_INPUT
    except KeyboardInterrupt:
        remark("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone, e.g. `| head`
        _drop_output()
        return FAILED
    except OutputError as error:
        _drop_output()
        remark(f"error: {error}")
        return FAILED
    except Exception as error:
        return _fault(error)


def _command(arguments: Arguments, rooms: Rooms) -> int:
    """Import and run the command. Its module is imported here, so that `--help` stays instant."""
    if arguments.command in ("run", "sweep"):
        from harness.cli.sweeping import sweep_command

        return sweep_command(arguments, rooms or Rooms())
    if arguments.command == "show":
        from harness.cli.showing import show_command

        return show_command(arguments)
    if arguments.command in COMMANDS:
        return run_command(arguments)
    from harness.cli.stores import report_command, status_command

    if arguments.command == "report":
        return report_command(arguments, rooms.report)
    return status_command(arguments)


def _drop_output() -> None:
    """What is left in the buffer has nowhere to go; Python would complain about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fault(error: Exception) -> int:
    """A store that cannot be written says so itself; anything else is a bug, whose traceback goes to a file."""
    from harness.store.errors import StoreError

    if isinstance(error, StoreError):
        remark(f"error: {error}\nPoints that were committed before are kept.")
        return FAILED
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in _OURS:
        remark(
            f"error: the package '{error.name}' is not installed for {sys.executable}; set up with 'make setup'"
        )
        return FAILED
    with tempfile.NamedTemporaryFile("w", prefix="pagetwin-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    remark(
        f"internal error: {type(error).__name__}: {error}\n"
        f"This is a bug in PageTwin, not a mistake of yours. Its traceback is in {file.name}"
    )
    return FAILED
