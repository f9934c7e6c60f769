"""`lesson`: write a page that teaches by touching, one file that works offline."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.config.paths import check_out
from harness.console import remark, say

if TYPE_CHECKING:
    from harness.console import Arguments
    from traces.trace import Trace

_OUT = "results/lessons"
_MOST_LENGTHS, _GENERATED = (
    20_000,
    1_000,
)  # requests of a trace, of which more make the page slow; of a generator
_MORE = """\
pool        a block pool to touch: prompts, forks, copy on write, prefix cache, eviction, challenges
accountant  lengths in (typed, or --trace FILE); blocks, waste, tables, bytes, and how many sequences fit, out
replay      the pool of a run, block by block; overrides (key=value) choose the run, as for `run`: simulated, or with
            measure=true on the engine too, side by side
Each page is one file that asks for nothing from elsewhere. Open it in a browser.
Exit codes: 0 done, 2 the input was wrong.
example:
  python -m harness lesson accountant --trace AzureLLMInferenceTrace_conv.csv
  python -m harness lesson replay cache.block_size=32 workload.request_rate=40"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `lesson`."""
    parser = commands.add_parser(
        "lesson",
        help="a page that teaches by touching",
        description="Write a lesson: one HTML file that works offline.",
        usage="python -m harness lesson {pool,accountant,replay} [key=value ...] [--out DIR]",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("lesson", choices=("pool", "accountant", "replay"), help="which page")
    parser.add_argument(
        "--trace", metavar="TRACE", help="accountant: lengths of this trace file or generator"
    )
    parser.add_argument(
        "--requests", metavar="N", type=int, default=None, help=f"its first N; default: {_MOST_LENGTHS:,}"
    )
    parser.add_argument("--out", metavar="DIR", default=_OUT, help=f"default: {_OUT}")
    parser.set_defaults(takes_overrides=True)


def run(arguments: "Arguments") -> int:
    """Write the page and say where it is; returns the exit code."""
    from harness.lessons.pages import page
    from harness.lessons.recording import record
    from harness.store.atomic import write_files

    flags = arguments.flags
    if arguments.overrides and flags.lesson != "replay":
        raise UserError(f"'{arguments.overrides[0]}': overrides choose the run of the lesson replay alone")
    if flags.lesson != "accountant" and (flags.trace or flags.requests):
        raise UserError("--trace and --requests choose the lengths of the lesson accountant alone")
    if flags.requests is not None and not (flags.trace and 1 <= flags.requests <= _MOST_LENGTHS):
        raise UserError(f"--requests: found {flags.requests}, must be 1 to {_MOST_LENGTHS:,}, beside --trace")
    for wrong in check_out(flags.out):
        raise UserError(f"--out {flags.out}: {wrong}")
    folder, name = Path(flags.out), f"{flags.lesson}.html"
    recording = record(arguments.overrides, _progress) if flags.lesson == "replay" else None
    lengths = _lengths(flags) if flags.trace else None
    write_files(folder, {name: page(flags.lesson, recording, lengths).encode()})
    say(str(folder / name))
    return 0


def _lengths(flags: argparse.Namespace) -> tuple[str, list[tuple[int, int]]]:
    """The name of the trace, and prompt and output tokens of its requests. Raises UserError."""
    from harness.trace.flags import add_source, chosen_trace, user_errors_explained
    from traces.errors import ParameterError

    source = argparse.ArgumentParser()
    found: list[Trace] = []
    add_source(source)
    wanted = flags.requests or (_MOST_LENGTHS if Path(flags.trace).exists() else _GENERATED)
    words = [flags.trace, "--requests", str(wanted + 1), "--sort"]

    def read(_: argparse.Namespace) -> int:
        try:
            found.append(
                chosen_trace(source.parse_args([*words, "--arrivals", "even"]))
            )  # some have lengths alone
        except ParameterError as error:
            if error.parameter != "arrivals":
                raise
            found.append(chosen_trace(source.parse_args(words)))
        return 0

    user_errors_explained(read)(flags)
    (trace,), name = found, Path(flags.trace).name
    if len(trace.requests) > wanted:
        remark(f"the first {wanted:,} requests of {name}")
    return name, [(one.prompt_tokens, one.output_tokens) for one in trace.requests[:wanted]]


def _progress(stage: str, done: int, total: int) -> None:
    remark(f"{stage}, {done} of {total}")
