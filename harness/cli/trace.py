"""`trace`: work on request traces. The actions describe themselves in `harness.trace`."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.console import Arguments
    from harness.trace.flags import Actions


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `trace` and everything that it can do."""
    parser = commands.add_parser(
        "trace",
        help="list, fetch, look into, convert, cut, scale, capture, make or check traces",
        description="Work on request traces.",
        usage="python -m harness trace ACTION ...",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", prog="python -m harness trace"
    )
    for add_action, _ in _actions().values():
        add_action(actions)


def run(arguments: "Arguments") -> int:
    """Run the chosen action; returns its exit code."""
    _, run_action = _actions()[arguments.flags.action]
    return run_action(arguments.flags)


def _actions() -> "dict[str, tuple[Callable[[Actions], None], Callable[[argparse.Namespace], int]]]":
    """How each action describes itself and how it runs, in the order of `trace --help`."""
    from harness.trace import capture, catalogue, inspect, make

    return {
        "ls": (catalogue.add_ls, catalogue.run_ls),
        "get": (catalogue.add_get, catalogue.run_get),
        "inspect": (inspect.add_inspect, inspect.run_inspect),
        "convert": (make.add_convert, make.run_convert),
        "slice": (make.add_slice, make.run_slice),
        "scale": (make.add_scale, make.run_scale),
        "capture": (capture.add_capture, capture.run_capture),
        "synth": (make.add_synth, make.run_synth),
        "validate": (inspect.add_validate, inspect.run_validate),
    }
