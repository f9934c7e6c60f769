"""`twin`: fit a simulation to a deployment's log, compare both second by second, and answer what-ifs."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.config.paths import check_out
from harness.console import remark, say

if TYPE_CHECKING:
    from harness.console import Arguments
    from harness.deployment.log import Deployment
    from harness.deployment.twin import Twin

_MORE = """\
FOLDER holds a log of requests (vllm bench serve --save-detailed, OpenTelemetry spans, SGLang's request log, GuideLLM,
AIPerf, LLMServingSim's recorder, or a CSV of arrival_s, prompt_tokens, output_tokens, first_token_s, last_token_s) and
may hold the engine's settings (command line, YAML, JSON, server log), a series of its state, its KV events (trace
capture), and the workload as a PageTwin trace. Overrides (key=value) say what the files do not, and win over them:
device=h100, model=llama31_8b.
With --metrics the state of a live server is scraped into FOLDER first, while the load that is logged there runs.
Exit codes: 0 done, 2 the input was wrong.
example:
  python -m harness twin logs/ device=rtx_pro_6000"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `twin`."""
    parser = commands.add_parser(
        "twin",
        help="simulate a deployment from its log, and ask what if",
        description="Fit a simulation to a deployment's log, compare both, and answer what-ifs.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", help="the log and the settings of the deployment")
    parser.add_argument(
        "--device",
        metavar="FILE",
        help="predict with this device (a file of calibrate --from-log, or a preset), without a fit",
    )
    parser.add_argument("--no-fit", action="store_true", help="predict with the description of the device")
    parser.add_argument("--no-what-ifs", action="store_true", help="leave out the what-ifs")
    parser.add_argument("--first", type=int, metavar="N", help="requests to fit; default: a quarter")
    parser.add_argument("--out", metavar="DIR", help="default: results/twin/NAME")
    parser.add_argument("--metrics", metavar="URL", help="scrape this Prometheus endpoint into FOLDER first")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to scrape; default: 60")
    parser.set_defaults(takes_overrides=True)


def run(arguments: "Arguments") -> int:
    """Read, fit, predict, write and print; returns the exit code."""
    from harness.deployment.reading import read_deployment
    from harness.deployment.twin import verdict
    from harness.deployment.twin_page import notes, write_twin

    flags = arguments.flags
    folder = Path(flags.folder).expanduser()
    out = flags.out or f"results/twin/{folder.resolve().name}"
    for wrong in check_out(out):
        raise UserError(f"--out {out}: {wrong}")
    if flags.metrics:
        _scrape(flags, folder)
    deployment = read_deployment(folder)
    words = tuple(arguments.overrides) + ((f"device={flags.device}",) if flags.device else ())
    twin = _twin(arguments, deployment, words)
    page = write_twin(twin, Path(out))
    for note in notes(twin):
        remark(f"note: {note}")
    say(verdict(twin))
    for name, (mean, bias, top) in twin.series_errors().items():
        say(f"  {name:8} mean absolute error {mean:.2f} (bias {bias:+.2f}) of at most {top:.1f}")
    hits, expected = twin.hits
    if hits is not None:
        say(
            f"  prompt tokens found in the prefix cache: {100 * hits:.1f} %, predicted {100 * expected:.1f} %"
        )
    say(str(page))
    return 0


def _twin(arguments: "Arguments", deployment: "Deployment", overrides: tuple[str, ...]) -> "Twin":
    from dataclasses import replace

    from harness.deployment.configured import configured
    from harness.deployment.device_file import fitted_device
    from harness.deployment.fit import fit_schedule
    from harness.deployment.prediction import predictor
    from harness.deployment.twin import Twin
    from harness.deployment.what_ifs import what_ifs

    flags = arguments.flags
    found = configured(deployment, overrides)
    config, fit = found.config, None
    if flags.no_fit or flags.device:
        prediction = predictor(config, deployment.workload)(config.device)
    else:
        found, fit = fit_schedule(deployment, found, first=flags.first, progress=_progress)
        config, prediction = replace(found.config, device=fitted_device(fit, deployment)), fit.prediction
    changes = (
        []
        if flags.no_what_ifs
        else what_ifs(deployment, config, prediction, lambda one: remark(f"what if {one}"))
    )
    return Twin(deployment, found, config, prediction, fit, changes, command_of("twin", arguments))


def command_of(name: str, arguments: "Arguments") -> str:
    """The command line that makes the same again."""
    flags = arguments.flags
    words = ["python -m harness", name]
    if name == "twin":
        words.append(shlex.quote(flags.folder))
        words += [f"--device {shlex.quote(flags.device)}"] if flags.device else []
        words += ["--no-fit"] if flags.no_fit else []
    else:
        words += ["--from-log", shlex.quote(flags.from_log)]
    words += [f"--first {flags.first}"] if flags.first else []
    return " ".join([*words, *map(shlex.quote, arguments.overrides)])


def _progress(simulations: int, cost: float) -> None:
    if simulations % 10 == 1:
        remark(f"fit: {simulations} simulations, cost {cost:.3g}")


def _scrape(flags: argparse.Namespace, folder: Path) -> None:
    from harness.deployment.scrape import scrape

    remark(f"scraping {flags.metrics} for {flags.seconds:g} s")
    for note in scrape(flags.metrics, flags.seconds, folder):
        remark(f"note: {note}")


def calibrate_from_log(arguments: "Arguments") -> int:
    """`calibrate --from-log`: fit a device to a log, write it as a file, print what it is worth."""
    from harness.deployment.configured import configured
    from harness.deployment.device_file import errors_text, write_device
    from harness.deployment.fit import doubts, explains_nothing, fit_schedule
    from harness.deployment.reading import read_deployment

    flags = arguments.flags
    deployment = read_deployment(Path(flags.from_log).expanduser())
    found = configured(deployment, arguments.overrides)
    path = Path(flags.out or f"results/devices/{found.config.device.name}.yaml").expanduser()
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {path}: a device's file ends in .yaml")
    for note in deployment.notes:
        remark(f"note: {note}")
    if flags.dry_run:
        for note in found.notes:
            remark(f"note: {note}")
        say(
            f"{len(deployment.requests)} requests of {deployment.name}; would be kept in {path}; nothing was fitted"
        )
        return 0
    found, fit = fit_schedule(deployment, found, first=flags.first, progress=_progress)
    for note in found.notes:
        remark(f"note: {note}")
    for doubt in doubts(fit):
        remark(f"warning: {doubt}")
    if explains_nothing(fit):
        raise UserError(
            f"the simulation cannot be fitted to this log: on the requests that were fitted, "
            f"{errors_text(fit.fitted)}. Nothing was kept; check model, device, settings and the units of its times"
        )
    write_device(fit, deployment, found.settings, command_of("calibrate", arguments), path)
    say(
        f"{fit.device.name}, {found.config.model.name}: fitted to the first {fit.fitted_on} of {fit.requests} requests"
    )
    say(f"  with {fit.simulations} simulations, {fit.cpu_s:.0f} s of CPU")
    say(f"error on the other {fit.held_out.requests}, which the fit never saw: {errors_text(fit.held_out)}")
    say(f"  before the fit: {errors_text(fit.before)}")
    for one in fit.constants:
        how = "learned" if one.learned else "mostly the prior"
        say(
            f"  {one.key:24} {one.prior:10.4g} -> {one.value:10.4g}  ({how}, spread {100 * one.spread:.0f} %)"
        )
    say(f"kept in {path}; use it with device={path}")
    return 0
