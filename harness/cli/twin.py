"""`twin`: fit a simulation to a deployment's log, compare both second by second, and answer what-ifs.

Beside it `calibrate --from-log`, which keeps the fitted device.
"""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli import Arguments, Command, out_folder
from harness.config.errors import UserError
from harness.console import remark, say

if TYPE_CHECKING:
    from harness.twin.log import EngineLog
    from harness.twin.twin import Twin

_MORE = """\
FOLDER holds a log of requests (pagetwin_probe, vllm bench serve --save-detailed, OpenTelemetry spans, SGLang's request
log, GuideLLM, AIPerf, LLMServingSim's recorder, inference-engine-benchmark-system, or a CSV or JSON lines of arrival_s,
prompt_tokens, output_tokens, first_token_s, last_token_s) and may hold the engine's settings (command line, YAML, JSON,
server log), a series of its state, and the workload as a PageTwin trace. Overrides (key=value) say what the files do
not, and win over them: device=h100, model=llama31_8b.
With --metrics the state of a live server is scraped into FOLDER first, while the load that is logged there runs.
With --check the /metrics page of a vLLM server, or a file with one, is compared with the prediction for FOLDER: by the
fit that twin kept in its report's folder, by --device, else by the description of the device. Nothing is fitted.
Exit codes: 0 done, 1 --check found a difference, 2 the input was wrong.
example:
  python -m harness twin logs/ device=rtx_pro_6000"""


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="the log and the settings of the deployment")
    parser.add_argument(
        "--device",
        metavar="FILE",
        help="predict with this device (a file of calibrate --from-log, or a preset), without a fit",
    )
    parser.add_argument("--no-fit", action="store_true", help="predict with the description of the device")
    parser.add_argument(
        "--what-if",
        metavar="KEY=V,V",
        action="append",
        default=[],
        help="answer this alone: a setting (scheduler.max_running=64,96) or the load (load=1.5); may be repeated",
    )
    parser.add_argument("--no-what-ifs", action="store_true", help="leave out the what-ifs")
    parser.add_argument("--first", type=int, metavar="N", help="fit the first N (a quarter, 30 to 400)")
    parser.add_argument("--out", metavar="DIR", help="default: results/twin/NAME")
    parser.add_argument("--metrics", metavar="URL", help="scrape this Prometheus endpoint into FOLDER first")
    parser.add_argument("--seconds", type=float, help="--metrics: how long to scrape; default: 60")
    parser.add_argument("--check", metavar="URL|FILE", help="compare a /metrics page with it, and end")
    parser.add_argument("--tolerance", type=float, metavar="T", help="of --check; default: 0.1")


def _run(arguments: Arguments) -> int:
    """Read, fit, predict, write and print; returns the exit code."""
    from harness.twin.reading import read_engine_log
    from harness.twin.scrape import scrape

    flags = arguments.flags
    if flags.check and (flags.what_if or flags.first is not None or flags.no_what_ifs):
        raise UserError("--check compares and ends: --what-if, --no-what-ifs and --first are not for it")
    for option, whose in (("tolerance", "check"), ("seconds", "metrics")):
        if getattr(flags, option) is not None and not getattr(flags, whose):
            raise UserError(f"--{option} is of --{whose}, which is not given")
    if flags.what_if and flags.no_what_ifs:
        raise UserError("--what-if and --no-what-ifs: give one of them")
    if flags.first is not None and flags.first < 1:
        raise UserError(f"--first is {flags.first}, must be at least 1")
    if flags.first is not None and (flags.no_fit or flags.device):
        raise UserError("--first says what is fitted, and nothing is with --no-fit or --device")
    folder = Path(flags.folder).expanduser()
    out = out_folder(flags.out or f"results/twin/{folder.resolve().name}")
    if flags.metrics and not folder.is_dir():
        raise UserError(f"--metrics writes into FOLDER, and there is no such folder: '{folder}'")
    if flags.metrics:
        seconds = 60.0 if flags.seconds is None else flags.seconds
        remark(f"scraping {flags.metrics} for {seconds:g} s")
        for note in scrape(flags.metrics, seconds, folder):
            remark(f"note: {note}")
    log = read_engine_log(folder)
    say(log.scope)
    words = tuple(arguments.overrides) + ((f"device={flags.device}",) if flags.device else ())
    if flags.check:
        return _check(flags, log, words, out)
    from harness.twin.page import notes, write_twin
    from harness.twin.twin import finding, verdict

    twin = _twin(arguments, log, words, out)
    if flags.what_if:
        for answer in twin.changes[0 if twin.base.settings[1:] else 1 :]:
            say(str(answer))
        say(verdict(twin))
        return 2 if any(one.figures is None for one in twin.changes) else 0
    page = write_twin(twin, out)
    for note in notes(twin):
        remark(f"note: {note}")
    for line in filter(None, (finding(twin), verdict(twin))):
        say(line)
    for name, (mean, bias, top) in twin.series_errors().items():
        say(f"  {name:8} mean absolute error {mean:.2f} (bias {bias:+.2f}) of at most {top:.1f}")
    hits, expected = twin.hits
    if hits is not None:
        say(f"  prompt tokens from the prefix cache: {100 * hits:.1f} %, predicted {100 * expected:.1f} %")
    say(str(page))
    return 0


def _check(flags: argparse.Namespace, log: "EngineLog", words: tuple[str, ...], out: Path) -> int:
    """Print a server's page beside the prediction; returns 1 where they differ."""
    from harness.twin.check import POOL, compared, pages
    from harness.twin.configured import configured
    from harness.twin.prediction import predictor
    from harness.workload.deployment import model_shape

    tolerance = 0.1 if flags.tolerance is None else flags.tolerance
    if not 0 <= tolerance < 1:
        raise UserError(f"--tolerance is {tolerance:g}, must be at least 0 and below 1")
    found = pages(flags.check)
    if not (flags.no_fit or flags.device):
        log, words = _kept_fit(log, words, out)
    asked = configured(log, words)
    shape, run = model_shape(asked.config.model), predictor(asked.config, log.workload)(asked.config.device)
    plain = not (shape.windowed_layers or shape.state_layers)
    rows = compared(run, found, log.notes, plain=plain)
    for line in (log.client, *asked.warnings):
        say(line)
    fitted_from = asked.config.device.fitted_from
    constants = f"constants fitted to {fitted_from}" if fitted_from else "its device's description"
    say(f"Predicted with {constants}. {found.said(len(log.requests))}")
    say(f"{'figure':34}  {'predicted':>20}  {'real':>9}")
    for row in rows:
        say(row.line(tolerance))
    known = [row for row in rows if row.real is not None]
    if all(row.name == POOL for row in known):
        raise UserError(
            f"--check {flags.check}: no figure of its load can be compared; the server has served nothing"
        )
    differ = [row.name for row in known if not row.agrees(tolerance)]
    said = f"differ by more than {tolerance:.0%}: {', '.join(differ)}" if differ else "none differs"
    say(f"Of {len(known)} figures {said}.")
    return 1 if differ else 0


def _twin(arguments: Arguments, log: "EngineLog", overrides: tuple[str, ...], out: Path) -> "Twin":
    from harness.twin.configured import configured
    from harness.twin.fit import explains_nothing, fit_log, fitted_device, write_device
    from harness.twin.prediction import predictor
    from harness.twin.twin import Twin
    from harness.twin.what_ifs import questions, what_ifs

    flags = arguments.flags
    fits = not (flags.no_fit or flags.device)
    log, words = _kept_fit(log, overrides, out) if fits and flags.what_if else (log, overrides)
    found = configured(log, words)
    config, fit = found.config, None
    if words != overrides or not fits:
        prediction = predictor(config, log.workload)(config.device)
    else:
        log, found, fit = fit_log(log, found, first=flags.first, progress=_progress)
        config, prediction = replace(found.config, device=fitted_device(fit, log)), fit.prediction
        if not explains_nothing(fit):
            write_device(fit, log, found, command_of("twin", arguments), out / FIT)
    asked = flags.what_if or ([] if flags.no_what_ifs else questions(config, prediction))
    changes = what_ifs(log, config, prediction, asked, lambda one: remark(f"what if {one}"))
    return Twin(log, found, config, prediction, fit, changes, command_of("twin", arguments))


FIT = "fit.yaml"  # in the folder of the report: the fitted device, and beside it its deployment and the load


def _kept_fit(log: "EngineLog", words: tuple[str, ...], out: Path) -> tuple["EngineLog", tuple[str, ...]]:
    """The log and the words with the deployment that was fitted to it before; the same where there is none.

    The fit is in the place of the device that the words name, if that is the one which was fitted.
    """
    from harness.twin.configured import configured
    from harness.twin.fit import deployment_file, logs_of_a_fit, trace_bytes, workload_file

    load, deployment = workload_file(out / FIT), deployment_file(out / FIT)
    found = configured(log, words)
    if not (load.is_file() and deployment.is_file()) or found.config.device.fitted_from:
        return log, words
    of_fit = (f"deployment={deployment}", *(word for word in words if not word.startswith("device=")))
    is_its_device = configured(log, of_fit).config.device.name == found.config.device.name
    for one in logs_of_a_fit(log, found) if is_its_device else ():
        if load.read_bytes() == trace_bytes(one.workload):
            remark(f"the fit of {deployment} is taken; remove it to fit again")
            return one, of_fit
    return log, words


def command_of(name: str, arguments: Arguments) -> str:
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


def calibrate_from_log(arguments: Arguments) -> int:
    """`calibrate --from-log`: fit a device to a log, write it as a file, print what it is worth."""
    from harness.twin.configured import configured
    from harness.twin.fit import (
        deployment_file,
        doubts,
        explains_nothing,
        fit_log,
        workload_file,
        write_device,
    )
    from harness.twin.reading import read_engine_log

    flags = arguments.flags
    log = read_engine_log(Path(flags.from_log).expanduser())
    found = configured(log, arguments.overrides)
    say(log.scope)
    say(log.client)
    for warning in found.warnings:
        remark(warning)
    path = Path(flags.out or f"results/devices/{found.config.device.name}.yaml").expanduser()
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {path}: a device's file ends in .yaml")
    for note in log.notes:
        remark(f"note: {note}")
    if flags.dry_run:
        for note in found.notes:
            remark(f"note: {note}")
        say(f"{len(log.requests)} requests of {log.name}; would be kept in {path}; nothing was fitted")
        return 0
    log, found, fit = fit_log(log, found, first=flags.first, progress=_progress)
    for note in found.notes:
        remark(f"note: {note}")
    if fit.said:
        remark(f"note: {fit.said}")
    for doubt in doubts(fit):
        remark(f"warning: {doubt}")
    if explains_nothing(fit):
        raise UserError(
            f"the simulation cannot be fitted to this log: on the requests that were fitted, "
            f"{fit.fitted}. Nothing was kept; check model, device, settings and the units of its times"
        )
    write_device(fit, log, found, command_of("calibrate", arguments), path)
    say(f"{fit.device.name}, {found.config.model.name}: fitted to the {fit.which}")
    say(f"  with {fit.simulations} simulations, {fit.cpu_s:.0f} s of CPU")
    say(f"error on {fit.others_are}: {fit.held_out}")
    say(f"  before the fit: {fit.before}")
    for one in fit.constants:
        say(f"  {one.key:24} {one.prior:10.4g} -> {one.value:10.4g}  ({one.how})")
    say(f"kept in {path} and {deployment_file(path).name}; start from this deployment with")
    say(f"  deployment={deployment_file(path)} (device={path} is the hardware without the settings)")
    say(f"  trace=pagetwin trace.path={workload_file(path)} is its load, sent as its client did")
    return 0


COMMAND = Command(
    "twin",
    "simulate a deployment from its log, and ask what if",
    _add,
    _run,
    about="Fit a simulation to a deployment's log, compare both, and answer what-ifs.",
    more=_MORE,
)
