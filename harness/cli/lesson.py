"""`lesson`: write a page that teaches by touching, one file that works offline."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.config.paths import check_out
from harness.console import say

if TYPE_CHECKING:
    from harness.console import Arguments

_OUT = "results/lessons"
_MORE = """\
pool        a block pool to touch: prompts, forks, copy on write, prefix cache, eviction, challenges
accountant  lengths in; blocks, waste, tables, bytes, and how many sequences fit, out
replay      the pool of a simulated run, block by block; overrides (key=value) choose the run, as for `run`
Each page is one file that asks for nothing from elsewhere. Open it in a browser.
Exit codes: 0 done, 2 the input was wrong.
example:
  python -m harness lesson replay cache.block_size=32 workload.request_rate=40"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `lesson`."""
    parser = commands.add_parser(
        "lesson",
        help="a page that teaches by touching",
        description="Write a lesson: one HTML file that works offline.",
        usage="python -m harness lesson {pool,accountant,replay} [key=value ...] [--out DIR]",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("lesson", choices=("pool", "accountant", "replay"), help="which page")
    parser.add_argument("--out", metavar="DIR", default=_OUT, help=f"default: {_OUT}")
    parser.set_defaults(takes_overrides=True)


def run(arguments: "Arguments") -> int:
    """Write the page and say where it is; returns the exit code."""
    from harness.lessons.pages import page
    from harness.lessons.recording import record
    from harness.store.atomic import write_files

    flags = arguments.flags
    if arguments.overrides and flags.lesson != "replay":
        raise UserError(f"'{arguments.overrides[0]}': overrides choose the run of the lesson replay alone")
    for wrong in check_out(flags.out):
        raise UserError(f"--out {flags.out}: {wrong}")
    folder, name = Path(flags.out), f"{flags.lesson}.html"
    recording = record(arguments.overrides) if flags.lesson == "replay" else None
    write_files(folder, {name: page(flags.lesson, recording).encode()})
    say(str(folder / name))
    return 0
