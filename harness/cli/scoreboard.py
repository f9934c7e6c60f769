"""`scoreboard`: predictions of GPUs beside published measured figures."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.config.paths import check_out
from harness.console import remark, say

if TYPE_CHECKING:
    from harness.console import Arguments

_MORE = """\
Published runs and timings are those of the package aiconfigurator-core: pip install 'pagetwin[gpu-tables]'.
Overrides (key=value) say what the logs of --deployments do not, as for twin.
Exit codes: 0 done, 2 the input was wrong.
example:
  python -m harness scoreboard --deployments logs/ device=rtx_pro_6000"""
_OUT = "results/reference/gpu-public"


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `scoreboard`."""
    parser = commands.add_parser(
        "scoreboard",
        help="predictions of GPUs beside published figures",
        description="Simulate published runs of GPUs and write the errors of the predictions.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--deployments",
        metavar="FOLDER",
        nargs="+",
        default=[],
        help="logs of your own, as twin reads them",
    )
    parser.add_argument(
        "--each",
        metavar="N",
        type=int,
        default=2,
        help="runs of every model, engine, device and precision; 0: all (hours); default: 2 (minutes)",
    )
    parser.add_argument("--out", metavar="DIR", default=_OUT, help=f"default: {_OUT}")
    parser.set_defaults(takes_overrides=True)


def _command(flags: argparse.Namespace, overrides: tuple[str, ...]) -> str:
    """The command that makes the page again; folders of logs by their last name alone."""
    names = " ".join(Path(folder).name for folder in flags.deployments)
    words = [f"--deployments {names}"] if names else []
    words += [f"--each {flags.each}", *overrides]
    return " ".join(["python -m harness scoreboard", *words])


def run(arguments: "Arguments") -> int:
    """Predict, write the tables, the page and the figure; returns the exit code."""
    from harness.cost.aiconfigurator import VERSION, check_package
    from harness.scoreboard.board import attention_rows, counted, deployment_rows, run_rows, write_csv
    from harness.scoreboard.page import write_page

    flags = arguments.flags
    for wrong in check_out(flags.out):
        raise UserError(f"--out {flags.out}: {wrong}")
    if flags.each < 0:
        raise UserError(f"--each is {flags.each}, must be 0 or more")
    check_package()
    folder = Path(flags.out)
    folder.mkdir(parents=True, exist_ok=True)
    deployments = deployment_rows(flags.deployments, arguments.overrides, remark)
    attention = attention_rows()
    runs, reasons = run_rows(flags.each, remark)
    missing = list(counted(reasons))
    tables = {"runs": runs, "attention": attention, "deployments": deployments, "not_simulated": missing}
    for name, rows in tables.items():
        if rows:
            write_csv(folder / f"{name}.csv", rows)
    page = write_page(
        folder,
        command=_command(flags, arguments.overrides),
        version=VERSION,
        each=flags.each,
        runs=runs,
        reasons=missing,
        attention=attention,
        deployments=deployments,
    )
    say(str(page))
    return 0
