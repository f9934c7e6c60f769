"""`reproduce`: published figures, simulated again, printed and ours side by side."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.config.paths import check_out
from harness.console import remark, say

if TYPE_CHECKING:
    from harness.console import Arguments

_OUT, _RUNS = "results/reference/papers", "results/papers"
_MORE = """\
Each figure is a file of conf/reproduce: its workload, model, device, baselines, and the printed values. Finished points
are kept, so the same command goes on after a stop. Figures of GPU kernels need a GPU and are not simulated.
Exit codes: 0 done, 2 the input was wrong, 130 stopped with Ctrl-C (repeat to go on).
example:
  python -m harness reproduce sosp23_fig02 sosp23_fig13"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `reproduce`."""
    parser = commands.add_parser(
        "reproduce",
        help="published figures, printed and ours side by side",
        description="Simulate published figures and compare them with the printed values.",
        usage="python -m harness reproduce [FIGURE ...] [--list] [--out DIR] [--runs DIR]",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("figure", nargs="*", metavar="FIGURE", help="names of --list; default: all")
    parser.add_argument("--list", action="store_true", help="list the figures and run nothing")
    parser.add_argument("--out", metavar="DIR", default=_OUT, help=f"figures, tables, page; default: {_OUT}")
    parser.add_argument("--runs", metavar="DIR", default=_RUNS, help=f"finished points; default: {_RUNS}")


def run(arguments: "Arguments") -> int:
    """List, or run what is left and write figures and page; returns the exit code."""
    from harness.config.groups import list_options, reproductions
    from harness.papers.experiments import experiment

    flags = arguments.flags
    for option in ("out", "runs"):
        for wrong in check_out(getattr(flags, option)):
            raise UserError(f"--{option} {getattr(flags, option)}: {wrong}")
    chosen = [experiment(name) for name in flags.figure or reproductions()]
    if flags.list:
        say(list_options("reproduce"))
        return 0
    from harness.cli.sweep import point_functions, stoppable
    from harness.papers.reproduce import run_experiment
    from harness.papers.reproduce_page import write_results

    page = None
    with stoppable():
        for number, found in enumerate(chosen, start=1):
            remark(f"[{number}/{len(chosen)}] {found.figure}: {found.title}")
            result = run_experiment(found, Path(flags.runs), point_functions(), remark)
            page = write_results([result], Path(flags.out), reproductions())
            say(f"{found.name}: {result.verdict}")
    say(str(page))
    return 0
