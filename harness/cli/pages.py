"""What writes a page to read: `scoreboard`, `claims`, `reproduce`, `lesson`."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli import Arguments, Command, add_out, out_folder
from harness.config.errors import UserError
from harness.console import install_hint, remark, say

if TYPE_CHECKING:
    from traces.trace import Trace

_SCOREBOARD = f"""\
Published runs and timings are those of the package aiconfigurator-core:
{install_hint("gpu-tables")}.
Overrides (key=value) say what the logs of --deployments do not, as for twin.
Exit codes: 0 done, 2 the input was wrong.
example:
  python -m harness scoreboard --deployments logs/ device=rtx_pro_6000"""

_CLAIMS = """\
Every claim is computed now, by the code that simulates. A claim that needs a GPU or that no source supports says so.
Exit codes: 0 every row holds, 1 our code computes something else than a row says, 2 the input was wrong.
example:
  python -m harness claims --verdict wrong"""

_REPRODUCE = """\
Each figure is a file of conf/reproduce: its workload, model, device, baselines, and the printed values. Finished points
are kept, so the same command goes on after a stop. Figures of GPU kernels need a GPU and are not simulated.
Exit codes: 0 done, 2 the input was wrong, 130 stopped with Ctrl-C (repeat to go on).
example:
  python -m harness reproduce sosp23_fig02 sosp23_fig13"""

_LESSON = """\
pool        a block pool to touch: prompts, forks, copy on write, prefix cache, eviction, challenges
accountant  lengths in (typed, or --trace FILE); blocks, waste, tables, bytes, and how many sequences fit, out
replay      the pool of a run, block by block; overrides (key=value) choose the run, as for `run`: simulated, or with
            measure=true on the engine too, side by side
Each page is one file that asks for nothing from elsewhere. Open it in a browser.
Exit codes: 0 done, 2 the input was wrong.
example:
  python -m harness lesson accountant --trace AzureLLMInferenceTrace_conv.csv
  python -m harness lesson replay cache.block_size=32 workload.request_rate=40"""

# requests of a trace, of which more make the page slow; of a generator
_MOST_LENGTHS, _GENERATED = 20_000, 1_000


def _add_scoreboard(parser: argparse.ArgumentParser) -> None:
    own = "measured deployments: logs as twin reads them, or the public ones; they get a page of their own, fidelity.md"
    parser.add_argument("--deployments", metavar="FOLDER", nargs="+", default=[], help=own)
    parser.add_argument("--only-deployments", action="store_true", help="write that page alone")
    parser.add_argument(
        "--each",
        metavar="N",
        type=int,
        default=2,
        help="runs of every model, engine, device and precision; 0: all (hours); default: 2 (minutes)",
    )
    add_out(parser, "results/reference/gpu-public")


def _run_scoreboard(arguments: Arguments) -> int:
    """Predict, write the tables, the page and the figure; returns the exit code."""
    from harness.cost.published import VERSION, check_package
    from harness.scoreboard.board import attention_rows, counted, run_rows, write_fidelity, write_page
    from harness.scoreboard.fidelity import fidelity

    flags = arguments.flags
    folder = out_folder(flags.out)
    if flags.each < 0:
        raise UserError(f"--each is {flags.each}, must be 0 or more")
    check_package()
    folder.mkdir(parents=True, exist_ok=True)
    command = _command(flags, arguments.overrides)
    if flags.deployments:
        found = fidelity(flags.deployments, arguments.overrides, remark)
        say(str(write_fidelity(folder, found, command=command)))
    if flags.only_deployments:
        return 0
    runs, reasons = run_rows(flags.each, remark)
    tables = {"runs": runs, "attention": attention_rows(), "not_simulated": list(counted(reasons))}
    say(str(write_page(folder, tables, command=command, version=VERSION, each=flags.each)))
    return 0


def _command(flags: argparse.Namespace, overrides: tuple[str, ...]) -> str:
    """The command that makes the page again; folders of logs by their last name alone."""
    names = " ".join(Path(folder).name for folder in flags.deployments)
    words = [f"--deployments {names}"] if names else []
    words += ["--only-deployments"] if flags.only_deployments else [f"--each {flags.each}"]
    words += overrides
    return " ".join(["python -m harness scoreboard", *words])


def _add_claims(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("claim", nargs="*", metavar="CLAIM", help="S0.21, or S0 for a lesson; default: all")
    parser.add_argument(
        "--verdict",
        choices=("right", "condition", "wrong", "open", "none"),
        help="print only these; the page has all",
    )
    add_out(parser, "results/claims", "folder of the page and the CSV; ")


def _run_claims(arguments: Arguments) -> int:
    """Compute, print, and write the page; returns the exit code."""
    from harness.papers.ledger import VERDICTS, chosen, judge, tally, write_claims

    flags = arguments.flags
    out = out_folder(flags.out)
    judged = [judge(claim) for claim in chosen(flags.claim)]
    for one in judged:
        claim = one.claim
        if flags.verdict in (None, claim.verdict):
            say(f"{claim.id:6} {VERDICTS[claim.verdict]:9} {claim.says}")
            say(f"{'':16} computed: {one.shown or 'nothing'}")
            say(f"{'':16} {claim.right} {claim.why}".rstrip())
    say()
    say(tally(judged))
    say(str(write_claims(judged, out, shlex.join(["python", "-m", "harness", "claims", *flags.claim]))))
    broken = [one for one in judged if not one.holds]
    for one in broken:
        say(f"{one.claim.id} does not hold: {'; '.join(one.faults)}")
    return int(bool(broken))


def _add_reproduce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("figure", nargs="*", metavar="FIGURE", help="names of --list; default: all")
    parser.add_argument("--list", action="store_true", help="list the figures and run nothing")
    add_out(parser, "results/reference/papers", "figures, tables, page; ")
    runs = "results/papers"
    parser.add_argument("--runs", metavar="DIR", default=runs, help=f"finished points; default: {runs}")


def _run_reproduce(arguments: Arguments) -> int:
    """List, or run what is left and write figures and page; returns the exit code."""
    from harness.config.groups import REPRODUCE, list_options, options
    from harness.papers.reproduce import experiment

    flags = arguments.flags
    out, runs = out_folder(flags.out), out_folder(flags.runs, "--runs")
    chosen = [experiment(name) for name in flags.figure or options(REPRODUCE)]
    if flags.list:
        say(list_options("reproduce"))
        return 0
    from harness.cli.sweep import new_session, stoppable
    from harness.papers.reproduce import run_experiment
    from harness.papers.reproduce_page import write_results

    page, session = None, new_session()
    with stoppable():
        for number, found in enumerate(chosen, start=1):
            remark(f"[{number}/{len(chosen)}] {found.figure}: {found.title}")
            result = run_experiment(found, runs, session, remark)
            page = write_results([result], out, options(REPRODUCE))
            say(f"{found.name}: {result.verdict}")
    say(str(page))
    return 0


def _add_lesson(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("lesson", choices=("pool", "accountant", "replay"), help="which page")
    add("--trace", metavar="TRACE", help="accountant: lengths of this trace file or generator")
    add("--requests", metavar="N", type=int, default=None, help=f"its first N; default: {_MOST_LENGTHS:,}")
    add_out(parser, "results/lessons")


def _run_lesson(arguments: Arguments) -> int:
    """Write the page and say where it is; returns the exit code."""
    from harness.lessons.pages import page, record
    from harness.store.atomic import write_files

    flags = arguments.flags
    if arguments.overrides and flags.lesson != "replay":
        raise UserError(f"'{arguments.overrides[0]}': overrides choose the run of the lesson replay alone")
    if flags.lesson != "accountant" and (flags.trace or flags.requests):
        raise UserError("--trace and --requests choose the lengths of the lesson accountant alone")
    if flags.requests is not None and not (flags.trace and 1 <= flags.requests <= _MOST_LENGTHS):
        raise UserError(f"--requests: found {flags.requests}, must be 1 to {_MOST_LENGTHS:,}, beside --trace")
    folder, name = out_folder(flags.out), f"{flags.lesson}.html"
    recording = (
        record(arguments.overrides, lambda stage, done, total: remark(f"{stage}, {done} of {total}"))
        if flags.lesson == "replay"
        else None
    )
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
            # some have lengths alone
            found.append(chosen_trace(source.parse_args([*words, "--arrivals", "even"])))
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


COMMANDS = (
    Command("scoreboard", "predictions of GPUs beside published figures", _add_scoreboard, _run_scoreboard,
            about="Simulate published runs of GPUs and write the errors of the predictions.",
            more=_SCOREBOARD),
    Command("claims", "published claims about PagedAttention, computed", _add_claims, _run_claims,
            about="Compute published claims about PagedAttention and say which are right.",
            usage="[CLAIM ...] [--verdict VERDICT] [--out DIR]", more=_CLAIMS, takes_overrides=False),
    Command("reproduce", "published figures, printed and ours side by side", _add_reproduce, _run_reproduce,
            about="Simulate published figures and compare them with the printed values.",
            usage="[FIGURE ...] [--list] [--out DIR] [--runs DIR]", more=_REPRODUCE, takes_overrides=False),
    Command("lesson", "a page that teaches by touching", _add_lesson, _run_lesson,
            about="Write a lesson: one HTML file that works offline.",
            usage="{pool,accountant,replay} [key=value ...] [--out DIR]", more=_LESSON),
)  # fmt: skip
