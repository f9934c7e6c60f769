"""`logs`: the job and the log of each point that ran in Slurm."""

import argparse
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.console import say

if TYPE_CHECKING:
    from harness.console import Arguments

_MORE = """\
One line a point: the beginning of its folder's name under points/, the job of Slurm that ran it last, the log of that
job (its errors lie beside it, in ..._log.err), and the settings of the point. A log holds all points of its job; a line
with the folder's name stands where a point begins and ends."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `logs`."""
    parser = commands.add_parser(
        "logs",
        help="find the log of a point that ran in Slurm",
        description="List the job and the log of each point that ran in Slurm.",
        usage="python -m harness logs [FOLDER] [--point TEXT]",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "store", nargs="?", metavar="FOLDER", help="results folder; default: the newest under results/"
    )
    parser.add_argument(
        "--point", metavar="TEXT", help="only points with this text in their settings or name"
    )


def run(arguments: "Arguments") -> int:
    """Print the lines; returns 1 where no point fits."""
    from harness.cli.report import known_manifest, named_store
    from harness.cluster.book import Book
    from harness.cluster.slurm import log_of

    root = named_store(arguments.flags.store)
    book = Book.read(root)
    if not book.submissions:
        raise UserError(f"no point of '{root}' ran in Slurm (no jobs.json); other points have no log")
    manifest = known_manifest(root)
    labels = {point.fingerprint: " ".join(point.overrides) for point in manifest.points} if manifest else {}
    wanted, found = arguments.flags.point or "", 0
    for name, task, submission in book.newest_of_points():
        label = labels.get(name, "(a point of an earlier sweep)")
        if wanted in label or name.startswith(wanted):
            say(f"{name[:12]}  job {task}  {log_of(submission, task)}  {label}")
            found += 1
    return 0 if found else 1
