"""`trace synth`: a generated trace: lengths of a table, arrivals, and sharing that is dialled or calibrated."""

import argparse
from typing import TYPE_CHECKING

from harness.cli.say import say
from harness.config.errors import UserError
from harness.trace.flags import (
    add_arrivals,
    add_output,
    answers,
    chosen_arrivals,
    chosen_trace,
    describe,
)

_MODELS = ("system", "few_shot", "tree", "passages")

if TYPE_CHECKING:
    from harness.trace.flags import Actions


def add(actions: "Actions") -> None:
    """Describe `synth`."""
    usage = "synth GENERATOR [--sharing MODEL --share S | --sharing MODEL --like TRACE] --out FILE"
    more = "--like finds the share and popularity whose hit-ratio curve is nearest to that of a trace."
    parser = describe(actions, "synth", "generate a trace", usage, more)
    parser.add_argument("table", metavar="GENERATOR", help="whose lengths; 'trace ls' lists them")
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="default: 1,000")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    add_arrivals(parser)
    parser.add_argument(
        "--sharing", choices=_MODELS, help="how prompts share their beginnings; default: not at all"
    )
    parser.add_argument("--share", type=float, default=0.5, help="about so much of each prompt; default: 0.5")
    parser.add_argument("--count", type=int, default=16, help="shared texts; default: 16")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of their popularity; default: 1")
    parser.add_argument(
        "--like", metavar="TRACE", help="calibrate the sharing to this trace's hit-ratio curve"
    )
    add_output(parser)


@answers
def run(flags: argparse.Namespace) -> int:
    """Generate and write; says what the trace is calibrated on and how well."""
    from harness.trace.output import checked_output, write_trace
    from traces.synth.calibrate import calibrated_trace
    from traces.synth.generator import generate_trace
    from traces.synth.sharing import Sharing

    path = checked_output(flags.out, flags.overwrite)
    if flags.like and not flags.sharing:
        raise UserError(f"--like needs --sharing: one of {', '.join(_MODELS)}")
    arrivals = chosen_arrivals(flags)
    if flags.like:
        target = chosen_trace(_reading(flags))
        trace = calibrated_trace(
            flags.table,
            target,
            flags.sharing,
            num_requests=flags.requests,
            seed=flags.seed,
            arrivals=arrivals,
        )
    else:
        sharing = Sharing(flags.sharing, flags.share, flags.count, flags.zipf) if flags.sharing else None
        trace = generate_trace(
            flags.table, num_requests=flags.requests, seed=flags.seed, arrivals=arrivals, sharing=sharing
        )
    write_trace(trace, path)
    for name, value in trace.header.calibration.items():
        say(f"  {name}: {value}")
    return 0


def _reading(flags: argparse.Namespace) -> argparse.Namespace:
    """Flags that read the trace to be like, whole and as it is."""
    plain = {"format": "auto", "requests": None, "seed": flags.seed, "ticks": "keep", "on_error": "stop"}
    more = {"sort": False, "tokenizer": None, "arrivals": None, "rate": 1.0, "shape": 0.5}
    return argparse.Namespace(trace=flags.like, **plain, **more)
