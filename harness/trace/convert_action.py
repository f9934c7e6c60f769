"""`trace convert`: any trace as our own form (JSONL or Parquet, exact), or as Mooncake JSONL for other tools."""

import argparse
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.trace.flags import add_output, add_source, answers, chosen_trace, describe

if TYPE_CHECKING:
    from harness.trace.flags import Actions


def add(actions: "Actions") -> None:
    """Describe `convert`."""
    parser = describe(
        actions, "convert", "write a trace in our own form, or as Mooncake JSONL", "convert TRACE --out FILE"
    )
    add_source(parser)
    add_output(parser)
    parser.add_argument(
        "--to", choices=("pagetwin", "mooncake"), default="pagetwin", help="default: pagetwin"
    )


@answers
def run(flags: argparse.Namespace) -> int:
    """Read, then write."""
    from harness.trace.output import checked_output, write_trace
    from traces.formats.mooncake import write_mooncake

    path = checked_output(flags.out, flags.overwrite)
    if flags.to == "mooncake" and flags.out.endswith(".parquet"):
        raise UserError("--out: Mooncake is JSONL; let the name end in .jsonl")
    write_trace(chosen_trace(flags), path, write_mooncake if flags.to == "mooncake" else None)
    return 0
