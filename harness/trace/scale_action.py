"""`trace scale`: another arrival rate, by scaling time, or other lengths."""

import argparse
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.trace.flags import add_output, add_source, answers, chosen_trace, describe

if TYPE_CHECKING:
    from harness.trace.flags import Actions


def add(actions: "Actions") -> None:
    """Describe `scale`."""
    usage = "scale TRACE [--to-rate R] [--lengths F] --out FILE"
    parser = describe(actions, "scale", "change a trace's arrival rate or lengths", usage)
    add_source(parser)
    add_output(parser)
    parser.add_argument(
        "--to-rate", type=float, metavar="R", help="mean requests per second, by scaling time"
    )
    parser.add_argument(
        "--lengths", type=float, metavar="F", help="factor on prompt, output and shared lengths"
    )


@answers
def run(flags: argparse.Namespace) -> int:
    """Read, scale, write."""
    from harness.trace.output import checked_output, write_trace
    from traces.reshape import scale_lengths, set_rate

    if flags.to_rate is None and flags.lengths is None:
        raise UserError("nothing to scale: give --to-rate R or --lengths F")
    path = checked_output(flags.out, flags.overwrite)
    trace = chosen_trace(flags)
    if flags.lengths is not None:
        trace = scale_lengths(trace, flags.lengths)
    if flags.to_rate is not None:
        trace = set_rate(trace, flags.to_rate)
    write_trace(trace, path)
    return 0
