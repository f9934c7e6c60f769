"""What runs the engine or the kernels on this machine: `serve`, `bench kernels`, `gate`, `calibrate`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.bench.cases import add_options, chosen_cases
from harness.cli import Arguments, Command
from harness.config.errors import UserError
from harness.console import numbered, remark, say
from harness.gate.findings import LAYERS

if TYPE_CHECKING:
    from harness.calibrate.run import Calibration
    from harness.config.schema import RunConfig
    from harness.gate.findings import LayerResult
    from harness.gate.settings import GateSettings
    from harness.workload.deployment import Deployment

_BUDGET_S = 120.0  # of a calibration
_SERVE = """\
The model, the pool and the limits come from the same keys as everywhere, e.g.
  python -m harness serve model.path=/models/llama cache.block_size=32 scheduler.max_running=128
A model without a tokenizer (random weights) takes and gives bytes: one token per byte."""

_BENCH = """\
A list makes a grid: --batch 1,8,32 --block-size 16,64. Without any axis the preset of the device runs.
Every provider's output is compared with the float64 reference before it is timed. On a GPU the calls of a round
are captured in one CUDA graph and their inputs rotated past the L2 cache; on a CPU the figure is CPU time.
Exit codes: 0 done, 1 our own kernels failed or were wrong somewhere, 2 the input was wrong.
example:
  python -m harness bench kernels --context 4096 --block-size 16,32,64 --function mine:attention"""

_GATE = """\
layers:
  resource  every kernel compiled for sm_80 to sm_120: registers, spills, shared memory, 16-byte loads,
            instructions, pipeline depth. Needs no GPU and times nothing.
  latency   kernels on a GPU, as ratios to a copy and to contiguous attention timed in the same rounds.
  policy    block manager and scheduler, as ratios to the accepted version of the same core, timed beside it.
  cpu       attention on this CPU (decode and prefill, compiled and by torch), as ratios to the accepted version
            of the same code, compiled and timed beside it.
With --changed, a kernel whose sources, constants and compiler are those of the baseline is not compiled again.
Without --layer, all layers run that can run here. Overrides change the margins: with gate.latency.material=0.03
nothing that is 3 % slower passes; gate=NAME takes another file of conf/gate. --dry-run prints every margin.
Exit codes: 0 pass, 1 regressed, 2 the input was wrong, 3 inconclusive."""

_CALIBRATE = """\
Overrides (key=value) choose the model, the engine and the scheduler, as for `run`. The coefficients are stored under a
fingerprint of model, engine, device, versions and code. Every sweep with cost=fitted or cost=table finds them there.
The printed errors are those on steps and whole workloads that the fit never saw.
With --from-log FOLDER the constants of a device elsewhere are fitted to the log of its engine, by simulation. The first
requests are fitted, the others judge. The file that is written is a device: device=FILE.
Exit codes: 0 done, 1 it could not be measured, 2 the input was wrong."""


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; default: this machine alone")
    add("--port", type=int, default=8000, help="port to listen on; default: 8000")
    add(
        "--model-name",
        metavar="NAME",
        help="name for clients; default: the directory of model.path, or model.name",
    )
    add("--generation-config", metavar="auto|vllm|FOLDER", default="auto",
        help="sampling parameters of requests that leave them out: auto, those of the checkpoint's "
        "generation_config.json; vllm, neutral ones; or a folder's, whose max_new_tokens bounds all")  # fmt: skip
    add("--max-requests", type=int, default=1024, metavar="N",
        help="requests under way at once, more get 503; default: 1024")  # fmt: skip
    add("--api-key", metavar="KEY", action="append", default=[],
        help="ask clients for this key; may be given several times; default: the "
        "environment variable PAGETWIN_API_KEY, or none")  # fmt: skip
    add("--kv-events", metavar="ENDPOINT",
        help="publish changes of the prefix cache as vLLM does, e.g. tcp://*:5557; needs "
        "the extra events; read them with `trace capture`")  # fmt: skip
    add("--kv-events-topic", metavar="TOPIC", default="", help="topic of the messages; default: ''")


def _run_serve(arguments: Arguments) -> int:
    from harness.serve import serve

    serve(arguments.flags, arguments.overrides)
    return 0


def _add_bench(parser: argparse.ArgumentParser) -> None:
    kernels = parser.add_subparsers(dest="bench", required=True, metavar="WHAT").add_parser(
        "kernels",
        help="paged attention against copy bandwidth and other providers",
        description="Time attention over paged KV, by us and by every other provider there is.",
        epilog=_BENCH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(kernels)


def _run_bench(arguments: Arguments) -> int:
    """Time the grid that the flags describe; returns the exit code."""
    cases = chosen_cases(arguments.flags)
    if arguments.flags.dry_run:
        for case in cases:
            say(f"{case.name}  {case.kv_bytes / 1e6:,.1f} MB")
        say(f"{numbered(len(cases), 'case')}; nothing was timed")
        return 0
    from harness.environment import ENGINE, check_installed

    check_installed("engine", ENGINE)
    from harness.bench.runner import run_cases

    return run_cases(cases, arguments.flags)


def _add_gate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--layer", action="append", choices=LAYERS, help="run this layer; may be repeated")
    add("--update", action="store_true", help="accept what is measured as the new baseline")
    add("--reason", default="", metavar="TEXT", help="why the baseline may change (--update)")
    add("--changed", action="store_true", help="compile only kernels that have changed (resource)")
    add("--baselines", metavar="DIR", help="folder of the baselines; default: results/baselines")
    add("--markdown", metavar="FILE", help="append the answer to FILE, e.g. a CI job's page")
    add("--save", metavar="FILE", help="keep a latency run as a record, whatever the verdict")
    add("--dry-run", action="store_true", help="list the cases, measure nothing")
    add("--record", metavar="FILE", help="judge a recorded latency run instead of measuring")


def _run_gate(arguments: Arguments) -> int:
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
    if layers != ["policy"]:
        from harness.environment import ENGINE, check_installed

        check_installed("engine", ENGINE)
    if flags.update:
        if flags.changed:
            raise UserError("--changed: a new baseline is measured whole; leave out --changed or --update")
        return _update(layers, folder, flags.reason, settings)
    from harness.gate import run_layers

    save = Path(flags.save) if flags.save else None
    return _answer(run_layers(layers, folder, save, settings, changed=flags.changed), flags.markdown)


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
    from harness.gate import case_names

    for layer in layers:
        for name in case_names(layer):
            say(f"{layer}: {name}")
    for section, margins in settings.margins().items():
        say(" ".join(f"gate.{section}.{name}={value:g}" for name, value in vars(margins).items()))
    say("nothing was measured")
    return 0


def _update(layers: list[str], folder: Path, reason: str, settings: "GateSettings") -> int:
    from harness.gate import update_layers

    for file in update_layers(layers, folder, reason, settings):
        say(f"baseline written: {file}")
    return 0


def _judge_record(file: Path, folder: Path, flags: argparse.Namespace, settings: "GateSettings") -> int:
    from harness.gate import accept, judge_layer
    from harness.gate.latency import read_record, stale_finding

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


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    budget = f"about how long it may take; default: {_BUDGET_S:g}"
    parser.add_argument("--budget", type=float, metavar="SECONDS", help=budget)
    parser.add_argument("--no-grid", action="store_true", help="leave out the grid that cost=table needs")
    parser.add_argument("--dry-run", action="store_true", help="check and print the plan, measure nothing")
    log = "fit a device to the log of an engine that ran on it, and measure nothing here; see twin --help"
    parser.add_argument("--from-log", metavar="FOLDER", help=log)
    parser.add_argument("--first", type=int, metavar="N", help="--from-log: N to fit (a quarter, 30 to 400)")
    out = "--from-log: where the device is written; default: results/devices/NAME.yaml"
    parser.add_argument("--out", metavar="FILE", help=out)


def _run_calibrate(arguments: Arguments) -> int:
    """Calibrate and print; returns the exit code."""
    flags, budget_s = arguments.flags, arguments.flags.budget
    with_log, without = ("first", "out"), ("budget", "no_grid")
    unread = [name for name in (without if flags.from_log else with_log) if getattr(flags, name)]
    if unread:
        reason = "measures nothing here" if flags.from_log else "is needed: a calibration fits its own steps"
        raise UserError(f"calibrate: --{unread[0].replace('_', '-')}: --from-log {reason}")
    if flags.from_log:
        from harness.cli.twin import calibrate_from_log

        return calibrate_from_log(arguments)
    budget_s = _BUDGET_S if budget_s is None else budget_s
    if not budget_s >= 1:  # nan is refused too
        raise UserError(f"calibrate: --budget is {budget_s:g}, must be at least 1 second")
    from harness.workload.deployment import deployment_of

    deployment = deployment_of(calibrated_config(arguments.overrides))
    if flags.dry_run:
        return _dry_run(deployment, budget_s)
    from harness.calibrate.run import calibrate
    from harness.calibrate.store import calibration_path

    found = calibrate(
        deployment, _progress, budget_s=budget_s, grid=not (flags.no_grid or deployment.engine.on_vllm)
    )
    _print_errors(found)
    say(f"kept in {calibration_path(deployment)}")
    return 0


def _dry_run(deployment: "Deployment", budget_s: float) -> int:
    """Print where the coefficients would be stored, and whether some exist. Nothing is measured."""
    from harness.calibrate.store import calibration_path, is_calibrated

    state = "in place of what is there" if is_calibrated(deployment) else "where nothing is yet"
    say(f"{deployment.model.name}: about {budget_s:g} s, kept in {calibration_path(deployment)}, {state}")
    say("nothing was measured")
    return 0


def calibrated_config(overrides: tuple[str, ...]) -> "RunConfig":
    """The one configured point, checked as a measured one. Raises UserError."""
    from harness.config.checks import checked
    from harness.config.compose import normalise
    from harness.environment import check_engine
    from harness.point.run import check_model
    from harness.sweep.plan import one_configuration

    config = checked(normalise(one_configuration(overrides, "calibrate takes")))
    check_engine(config.engine)
    check_model(config.model, config.engine, config.decoding.draft_path)
    return config


def _progress(case: str, done: int, total: int) -> None:
    remark(f"{done + 1}/{total} {case}")


def _print_errors(found: "Calibration") -> None:
    source = found.fitted.source
    facts = source.provenance
    say(f"{source.name} on {facts['device']} ({facts['clock']} clock), {facts['seconds']:.0f} s")
    say(f"fitted to {facts['steps_fitted']:,} steps; error on steps held out:")
    for part, errors in source.heldout.items():
        say(f"  {part:10} {_errors(errors)}")
    if "repeatability" in facts:
        say(
            f"its passes repeat the level of all steps within ±{165 * facts['repeatability']:.1f} % (nine of ten)"
        )
    say("free-running error on held-out workloads (spread of repeats):")
    for workload, metrics in source.validation.items():
        say(f"  {workload:32} {_metrics(metrics)}")
    if found.table:
        cells = sum(cell == cell for row in found.table.decode.seconds for cell in row)
        say(f"grid for cost=table: {cells} decode shapes; error without every other value of an axis:")
        for part, errors in found.table.source.heldout.items():
            if part not in source.heldout:
                say(f"  {part:30} {_errors(errors)}")
    elif found.grid_asked:
        remark("no time was left for the grid of cost=table: raise --budget")
    if found.left_out:
        names = ", ".join(found.left_out)
        remark(f"warning: no time was left for {names}: what they alone hold has no price; raise --budget")
    for warning in found.stability.warnings():
        remark(f"warning: {warning}")


def _errors(errors: dict[str, float]) -> str:
    shown = {"mean": errors["mape"], "bias": errors["bias"], "95th percentile": errors["p95"]}
    cells = ", ".join(f"{name} {100 * value:+.1f} %" for name, value in shown.items())
    return f"{cells} of {errors['n']:,.0f}; sum {100 * errors['total_error']:+.1f} %"


def _metrics(metrics: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {100 * found['error']:+.1f} % ({100 * found['spread']:.1f} %)"
        for name, found in metrics.items()
    )


COMMANDS = (
    Command("serve", "answer OpenAI clients: completions, chat, metrics", _add_serve, _run_serve,
            about="Serve completions and chat completions as OpenAI's API does, until Ctrl-C.",
            usage="[--host H] [--port P] [--api-key KEY] [--kv-events ENDPOINT] [key=value ...]",
            more=_SERVE),
    Command("bench", "time the attention kernels on this machine", _add_bench, _run_bench,
            about="Time the attention kernels on this machine; the end of the output names the files.",
            takes_overrides=False),
    Command("gate", "compare kernels and policy with their baselines", _add_gate, _run_gate, more=_GATE),
    Command("calibrate", "measure this device, and fit the cost model to it", _add_calibrate, _run_calibrate,
            about="Measure this device with the configured model, fit the cost model, and validate it.",
            more=_CALIBRATE),
)  # fmt: skip
