"""`trace slice`: a window of a trace by rows or by time, that keeps conversations whole and the reuse inside it."""

import argparse
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.trace.flags import add_output, add_source, answers, chosen_trace, describe

if TYPE_CHECKING:
    from harness.trace.flags import Actions


def add(actions: "Actions") -> None:
    """Describe `slice`."""
    more = "Rows and times count from 0; the end is not part of the window. Segments keep their keys."
    parser = describe(
        actions,
        "slice",
        "cut a window out of a trace",
        "slice TRACE --rows A:B | --time A:B --out FILE",
        more,
    )
    add_source(parser)
    add_output(parser)
    window = parser.add_mutually_exclusive_group(required=True)
    window.add_argument("--rows", metavar="A:B", help="requests A to B - 1 in order of arrival")
    window.add_argument("--time", metavar="A:B", help="arrivals from A to before B, in seconds")
    parser.add_argument(
        "--whole-sessions",
        action="store_true",
        help="take every turn of a conversation that begins in the window, and no turn of another",
    )


@answers
def run(flags: argparse.Namespace) -> int:
    """Read, cut, write."""
    from harness.trace.output import checked_output, write_trace
    from traces.reshape import slice_rows, slice_time

    path = checked_output(flags.out, flags.overwrite)
    first, last = _ends(flags.rows or flags.time, "--rows" if flags.rows else "--time")
    trace = chosen_trace(flags)
    cut = slice_rows if flags.rows else slice_time
    write_trace(cut(trace, first, last, whole_sessions=flags.whole_sessions), path)
    return 0


def _ends(text: str, flag: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    try:
        ends = float(low or 0), float(high) if high else float("inf")
    except ValueError:
        ends = (0.0, -1.0)
    if not colon or not 0 <= ends[0] < ends[1]:
        raise UserError(f"{flag}: A:B with 0 <= A < B expected, found '{text[:40]}'")
    return ends
