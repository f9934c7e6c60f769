"""`gate`: did a change make a kernel or the policy worse?

Exit codes: 0 pass, 1 regressed, 2 wrong input, 3 inconclusive.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from harness.console import say
from harness.gate import LAYERS

if TYPE_CHECKING:
    from harness.console import Arguments
    from harness.gate.findings import LayerResult
    from harness.gate.settings import GateSettings


_MORE = """\
layers:
  resource  every kernel compiled for sm_80 and sm_90: registers, spills, shared memory, 16-byte loads,
            instructions, pipeline depth. Needs no GPU and times nothing.
  latency   kernels on a GPU, as ratios to a copy and to contiguous attention timed in the same rounds.
  policy    block manager and scheduler, as ratios to loops timed in the same process.
  cpu       attention on this CPU (decode and prefill, compiled and by torch), as ratios to the accepted version
            of the same code, compiled and timed beside it.
Without --layer, all layers run that can run here. Overrides change the margins: with gate.latency.material=0.03
nothing that is 3 % slower passes; gate=NAME takes another file of conf/gate. --dry-run prints every margin.
Exit codes: 0 pass, 1 regressed, 2 the input was wrong, 3 inconclusive."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `gate`."""
    parser = commands.add_parser(
        "gate",
        help="compare kernels and policy with their baselines",
        description="Compare kernels and policy with their baselines.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--layer", action="append", choices=LAYERS, help="run this layer; may be repeated")
    parser.add_argument("--update", action="store_true", help="accept what is measured as the new baseline")
    parser.add_argument("--reason", default="", metavar="TEXT", help="why the baseline may change (--update)")
    parser.add_argument(
        "--baselines", metavar="DIR", help="folder of the baselines; default: results/baselines"
    )
    parser.add_argument("--markdown", metavar="FILE", help="append the answer to FILE, e.g. a CI job's page")
    parser.add_argument("--save", metavar="FILE", help="keep a latency run as a record, whatever the verdict")
    parser.add_argument("--dry-run", action="store_true", help="list the cases, measure nothing")
    parser.add_argument("--record", metavar="FILE", help="judge a recorded latency run instead of measuring")
    parser.set_defaults(takes_overrides=True)


def run(arguments: "Arguments") -> int:
    """Run the layers, or update their baselines; returns the exit code."""
    flags = arguments.flags
    folder = Path(flags.baselines) if flags.baselines else default_folder()
    from harness.gate.settings import gate_settings

    settings = gate_settings(arguments.overrides)
    if flags.record:
        return _judge_record(Path(flags.record), folder, flags, settings)
    layers = flags.layer or _possible()
    if flags.dry_run:
        return _list_cases(layers, settings)
    if flags.update:
        return _update(layers, folder, flags.reason, settings)
    from harness.gate.run import run_layers

    save = Path(flags.save) if flags.save else None
    return _answer(run_layers(layers, folder, save, settings), flags.markdown)


def default_folder() -> Path:
    """The folder `results/baselines` here, or in the checkout of this package."""
    import harness

    here = Path("results/baselines")
    return here if here.is_dir() else Path(harness.__file__).resolve().parents[1] / here


def _possible() -> list[str]:
    """The layers that can run on this machine. The answer names the others as not run."""
    from harness.environment import gpu_names

    return [layer for layer in LAYERS if layer != "latency" or gpu_names()]


def _list_cases(layers: list[str], settings: "GateSettings") -> int:
    from harness.gate.run import case_names

    for layer in layers:
        for name in case_names(layer):
            say(f"{layer}: {name}")
    for section, margins in settings.margins().items():
        say(" ".join(f"gate.{section}.{name}={value:g}" for name, value in vars(margins).items()))
    say("nothing was measured")
    return 0


def _update(layers: list[str], folder: Path, reason: str, settings: "GateSettings") -> int:
    from harness.gate.run import update_layers

    for file in update_layers(layers, folder, reason, settings):
        say(f"baseline written: {file}")
    return 0


def _judge_record(file: Path, folder: Path, flags: argparse.Namespace, settings: "GateSettings") -> int:
    from harness.gate.latency import read_record, stale_finding
    from harness.gate.run import accept, judge_layer

    record = read_record(file)
    if flags.update:
        say(f"baseline written: {accept(record, folder, flags.reason, settings)}")
        return 0
    return _answer([stale_finding(record) or judge_layer(record, folder, settings)], flags.markdown)


def _answer(results: "list[LayerResult]", page: str | None) -> int:
    from harness.gate.findings import EXIT_CODES, gravest, lines, markdown

    for line in lines(results):
        say(line)
    if page:
        with Path(page).open("a", encoding="utf-8") as file:
            file.write(markdown(results))
    return EXIT_CODES[gravest(result.verdict for result in results)]
