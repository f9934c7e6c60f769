"""What writes or reads the store of a sweep: `run`, `sweep`, `show`, `report`, `status`, `doctor`, `logs`."""

import argparse

from harness.cli import Command

_OVERRIDES = """\
An override is key=value; `show` prints every key, `show --groups` every option of every group.
A list makes a sweep: cache.block_size=8,16,32 or range(8,33,8). Choose a group's option with cache=contiguous_max,
a prepared experiment with experiment=NAME. Without any list `sweep` runs the default experiment.
Exit codes: 0 all points are done, 1 some failed, 2 the input was wrong, 130 stopped
with Ctrl-C or SIGTERM (repeat to go on)."""
_DOCTOR = """\
Every record and sweep.json are compared with their own digests, every table with the digest in its record, the summary
and the report with those in sweep.json. Points of the sweep that are missing and files without a digest are named.
Nothing is deleted: with --repair the folder of a damaged point moves to FOLDER/damaged, it and missing points run again
if the sweep of the folder still plans them (same code, traces and settings), and summary and report are written anew.
Exit codes: 0 all is whole, 1 something is damaged and not repaired, 2 the input was wrong."""
_LOGS = """\
One line a point: the beginning of its folder's name under points/, the job of Slurm that ran it last, the log of that
job (its errors lie beside it, in ..._log.err), and the settings of the point. A log holds all points of its job; a line
with the folder's name stands where a point begins and ends."""


def _add_running(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="check and list the points, run nothing")
    parser.add_argument("--force", action="store_true", help="run points again that are done already")


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", action="store_true", help="list the options of every group instead")


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "store", nargs="?", metavar="FOLDER", help="results folder; default: the newest under results/"
    )


def _add_report(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    add = parser.add_argument
    add(
        "against",
        nargs="?",
        metavar="OTHER",
        help="a store to compare with; exit code 1 if a metric is worse beyond doubt",
    )
    add("--out", metavar="DIR", help="write the report here; default: beside the results")
    add(
        "--kernels",
        metavar="DIR",
        help="show this run of bench kernels too; default: the sweep's, or one beside the results; none: leave out",
    )
    add(
        "--figures",
        choices=["all", "svg", "none"],
        help="all: also as PDF; svg: no PDF; none: sentences and tables alone; default: the sweep's report.figures",
    )
    add(
        "--paper",
        choices=["column", "page", "both"],
        help="also every panel in a file of its own, 3.33 or 7.0 inches wide (figures/paper)",
    )
    add("--serif", action="store_true", help="figures with serif letters")
    add(
        "--latex",
        action="store_true",
        help="two tables for a paper in LaTeX: the points and the errors (booktabs)",
    )
    add("--markdown", metavar="FILE", help="append the answers to FILE as Markdown, e.g. for a pull request")
    figure = parser.add_argument_group("one figure of your own choice, instead of the report")
    figure.add_argument("--x", metavar="KEY", help="swept setting along x; writes this figure alone")
    figure.add_argument("--hue", metavar="KEY", help="swept setting whose values are lines")
    figure.add_argument("--col", metavar="KEY", help="swept setting whose values are columns")
    only = "only points of this value; repeatable"
    figure.add_argument("--where", metavar="KEY=VALUE", action="append", default=[], help=only)
    figure.add_argument(
        "--metric", metavar="NAME,...", help="rows of the figure; default: the six of the report"
    )


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="FOLDER", help="results folder")
    parser.add_argument("--repair", action="store_true", help="set damage aside and run its points again")


def _add_logs(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    parser.add_argument("--point", metavar="TEXT", help="points with this text in settings or name alone")


COMMANDS = (
    Command("run", "predict and measure one point", _add_running, "harness.cli.sweep:sweep_command",
            usage="[key=value ...] [--dry-run] [--force]", more=_OVERRIDES),
    Command("sweep", "predict and measure every point of a grid", _add_running,
            "harness.cli.sweep:sweep_command", usage="[key=value,value ...] [--dry-run] [--force]",
            more=_OVERRIDES),
    Command("show", "print the composed, checked configuration", _add_show, "harness.cli.show:show_command",
            usage="[key=value ...]", more=_OVERRIDES),
    Command("report", "write the report of a store", _add_report, "harness.cli.report:report_command",
            usage="[FOLDER [OTHER]]", takes_overrides=False),
    Command("status", "say what a store has done, and what is left", _add_store,
            "harness.cli.doctor:status_command", usage="[FOLDER]", takes_overrides=False),
    Command("doctor", "check a store against its digests, and repair it", _add_doctor,
            "harness.cli.doctor:doctor_command",
            about="Check every record and table of a store against its digest.", usage="FOLDER [--repair]",
            more=_DOCTOR, takes_overrides=False),
    Command("logs", "find the log of a point that ran in Slurm", _add_logs, "harness.cli.doctor:logs_command",
            about="List the job and the log of each point that ran in Slurm.",
            usage="[FOLDER] [--point TEXT]", more=_LOGS, takes_overrides=False),
)  # fmt: skip
