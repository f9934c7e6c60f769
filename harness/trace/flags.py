"""Options that several actions share, and the trace that they choose.

This module is imported for `--help`, so everything heavy is imported inside functions.
"""

import argparse
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from harness.config.errors import UserError

if TYPE_CHECKING:
    from traces.arrivals import ArrivalProcess
    from traces.trace import Trace

    Actions: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]

_ARRIVALS = ("even", "poisson", "gamma", "diurnal", "modulated")
_FLAGS = {
    "format": "--format",
    "ticks": "--ticks",
    "on_error": "--on-error",
    "seed": "--seed",
    "limit": "--requests",
    "num_requests": "--requests",
    "arrivals": "--arrivals",
    "rate_rps": "--rate",
    "requests_per_s": "--to-rate",
    "shape": "--shape",
    "tokenizer": "--tokenizer",
    "share": "--share",
    "num_prefixes": "--count",
    "zipf": "--zipf",
    "factor": "--lengths",
    "vocab_size": "--vocab",
    "first_id": "--first-id",
}


def describe(actions: "Actions", name: str, what: str, usage: str, more: str = "") -> argparse.ArgumentParser:
    """A parser for one action."""
    return actions.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        usage=f"python -m harness trace {usage}",
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options for the source trace and how to read it."""
    parser.add_argument(
        "trace", metavar="TRACE", help="a file or folder, a generator, or a fetched public trace"
    )
    parser.add_argument("--format", default="auto", help="the format; default: recognise it by content")
    parser.add_argument("--requests", type=int, metavar="N", help="the first N requests; generators: 1,000")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn; default: 0")
    parser.add_argument(
        "--ticks", default="keep", help="keep, even or random: arrivals with equal times of a coarse clock"
    )
    parser.add_argument("--on-error", default="stop", help="stop, or skip and count malformed rows")
    parser.add_argument("--sort", action="store_true", help="allow rows out of order, and sort them by time")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="folder with tokenizer.json, for traces that hold text"
    )
    add_arrivals(parser)


def add_arrivals(parser: argparse.ArgumentParser) -> None:
    """Add the options for arrivals, for sources without a clock and for generators."""
    parser.add_argument("--arrivals", choices=_ARRIVALS, help="an arrival process; default: as recorded")
    parser.add_argument(
        "--rate", type=float, default=1.0, help="its requests (conversations) per second; default: 1"
    )
    parser.add_argument("--shape", type=float, default=0.5, help="of gamma arrivals; default: 0.5")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options for the output file."""
    parser.add_argument("--out", metavar="FILE", required=True, help="ends in .jsonl, .jsonl.gz or .parquet")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE where it exists")


def chosen_trace(flags: argparse.Namespace) -> "Trace":
    """The trace that the options name. Raises UserError."""
    from harness.trace.files import cached_trace
    from harness.workload.trace import encoder
    from traces.reading import read_trace
    from traces.synth.generator import GENERATORS, generate_trace

    if flags.trace in GENERATORS and not Path(flags.trace).exists():
        count = 1000 if flags.requests is None else flags.requests
        return generate_trace(
            flags.trace, num_requests=count, seed=flags.seed, arrivals=chosen_arrivals(flags)
        )
    if flags.trace in trace_options() and not Path(flags.trace).exists():
        return _of_option(flags)
    path = cached_trace(flags.trace)
    return read_trace(
        path,
        flags.format,
        ticks=flags.ticks,
        on_error=flags.on_error,
        seed=flags.seed,
        limit=flags.requests,
        sort=flags.sort,
        arrivals=chosen_arrivals(flags),
        encode=encoder(flags.tokenizer) if flags.tokenizer else None,
    )


def trace_options() -> list[str]:
    """The generated traces of `conf/trace/` that a sweep takes as `trace=NAME`."""
    import yaml

    from harness.config.groups import groups, option_file

    files = {name: option_file("trace", name) for name in groups()["trace"]}
    kinds = {
        name: yaml.safe_load(file.read_text(encoding="utf-8")).get("format") for name, file in files.items()
    }
    return [name for name, kind in kinds.items() if kind == "generated"]


def _of_option(flags: argparse.Namespace) -> "Trace":
    """The generated trace of an option of `conf/trace/`, as a sweep with `workload=as_recorded` has it."""
    from harness.config.compose import compose_config
    from harness.config.overrides import parse_overrides
    from harness.workload.trace import reshaped_trace

    count = 1000 if flags.requests is None else flags.requests
    texts = [f"trace={flags.trace}", "workload=as_recorded"]
    texts += [f"workload.num_requests={count}", f"workload.seed={flags.seed}"]
    return reshaped_trace(compose_config(axis.settings[0] for axis in parse_overrides(texts)))


def chosen_arrivals(flags: argparse.Namespace) -> "ArrivalProcess | None":
    """The arrival process that the options name, if any."""
    from traces.arrivals import ArrivalProcess

    return ArrivalProcess(flags.arrivals, flags.rate, shape=flags.shape) if flags.arrivals else None


def user_errors_explained(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Decorate an action so that errors in traces and parameters become UserError with a hint."""

    @wraps(run)
    def wrapped(flags: argparse.Namespace) -> int:
        from traces.errors import ParameterError, TraceError

        try:
            return run(flags)
        except TraceError as error:
            raise UserError(f"{error}{_hint(error)}") from error
        except ParameterError as error:
            raise UserError(_flag_sentence(error.parameter, error.reason)) from error

    return wrapped


def _flag_sentence(parameter: str, reason: str) -> str:
    return f"{_FLAGS.get(parameter, parameter)}: {reason}"


def _hint(error: Exception) -> str:
    if "arrival process is required" in str(error):
        return "; here: --arrivals poisson --rate 1"
    return "; here: --tokenizer FOLDER" if "must be tokenised" in str(error) else ""
