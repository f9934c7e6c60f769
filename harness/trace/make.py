"""The actions that write a trace: `trace convert`, `slice`, `scale` and `synth`.

`convert` writes our own format or Mooncake JSONL. `slice` cuts a window, `scale` changes rate or lengths, `synth`
generates a trace with chosen or calibrated sharing.
"""

import argparse
from typing import TYPE_CHECKING, Any

from harness.config.errors import UserError
from harness.console import say
from harness.trace.flags import (
    add_arrivals,
    add_output,
    add_source,
    checked_output,
    chosen_arrivals,
    chosen_trace,
    describe,
    refuse_idle,
    write_trace,
)

if TYPE_CHECKING:
    from harness.trace.flags import Actions


_MODELS = ("system", "few_shot", "tree", "passages")


def add_convert(actions: "Actions") -> None:
    """Describe `convert`."""
    does = "write a trace in PageTwin's format, or as Mooncake JSONL"
    parser = describe(actions, run_convert, does, "convert TRACE --out FILE")
    add_source(parser)
    add_output(parser)
    parser.add_argument(
        "--to", choices=("pagetwin", "mooncake"), default="pagetwin", help="default: pagetwin"
    )


def run_convert(flags: argparse.Namespace) -> int:
    """Read the trace and write it in another format."""
    from traces.formats.hash_ids import write_mooncake

    path = checked_output(flags.out, flags.overwrite)
    if flags.to == "mooncake" and flags.out.endswith(".parquet"):
        raise UserError("--out: Mooncake is JSONL; let the name end in .jsonl")
    write_trace(chosen_trace(flags), path, write_mooncake if flags.to == "mooncake" else None)
    return 0


def add_slice(actions: "Actions") -> None:
    """Describe `slice`."""
    more = "Rows and times count from 0; the end is not part of the window. Segments keep their keys."
    usage = "slice TRACE --rows A:B | --time A:B --out FILE"
    parser = describe(actions, run_slice, "cut a window out of a trace", usage, more)
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


def run_slice(flags: argparse.Namespace) -> int:
    """Read the trace, cut the window, and write it."""
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


def add_scale(actions: "Actions") -> None:
    """Describe `scale`."""
    usage = "scale TRACE [--to-rate R] [--lengths F] --out FILE"
    parser = describe(actions, run_scale, "change a trace's arrival rate or lengths", usage)
    add_source(parser)
    add_output(parser)
    parser.add_argument(
        "--to-rate", type=float, metavar="R", help="mean requests per second, by scaling time"
    )
    parser.add_argument(
        "--lengths", type=float, metavar="F", help="factor on prompt, output and shared lengths"
    )


def run_scale(flags: argparse.Namespace) -> int:
    """Read the trace, scale it, and write it."""
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


def add_synth(actions: "Actions") -> None:
    """Describe `synth`."""
    parser = describe(actions, run_synth, "generate a trace", "synth GENERATOR [--sharing MODEL] --out FILE")
    add = parser.add_argument
    add("table", metavar="GENERATOR", help="whose lengths; 'trace ls' lists them")
    add("--requests", type=int, default=1000, metavar="N", help="default: 1,000")
    add("--seed", type=int, default=0, help="default: 0")
    add_arrivals(parser)
    add("--sharing", choices=_MODELS, help="how prompts share their beginnings; default: not at all")
    add("--share", type=float, help="about so much of each prompt; default: 0.5")
    add("--count", type=int, help="shared texts; default: 16")
    add("--zipf", type=float, help="exponent of their popularity; default: 1")
    add_output(parser)


def run_synth(flags: argparse.Namespace) -> int:
    """Generate a trace, write it, and print the result of its calibration."""
    from traces.synth.generator import PrefixSharing, generate_trace

    path = checked_output(flags.out, flags.overwrite)
    asked: dict[str, Any] = {"share": 0.5, "count": 16, "zipf": 1.0}
    if flags.sharing is None:
        refuse_idle(flags, asked, "--sharing: without it prompts share what the table's do")
    told = {name: found for name in asked if (found := getattr(flags, name)) is not None}
    sharing = PrefixSharing(flags.sharing, *(asked | told).values()) if flags.sharing else None
    trace = generate_trace(
        flags.table,
        num_requests=flags.requests,
        seed=flags.seed,
        arrivals=chosen_arrivals(flags),
        sharing=sharing,
    )
    write_trace(trace, path)
    for name, value in trace.header.calibration.items():
        say(f"  {name}: {value}")
    return 0
