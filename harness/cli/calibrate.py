"""`calibrate`: measure this device with this model, fit the cost model, and print how good it is."""

import argparse
from typing import TYPE_CHECKING, Any

from harness.config.errors import UserError
from harness.console import remark, say

if TYPE_CHECKING:
    from harness.calibrate.run import Calibration
    from harness.config.schema import RunConfig
    from harness.console import Arguments


_MORE = """\
Overrides (key=value) choose the model, the engine and the scheduler, as for `run`. The coefficients are stored under a
fingerprint of model, engine, device, versions and code. Every sweep with cost=fitted or cost=table finds them there.
The printed errors are those on steps and whole workloads that the fit never saw.
With --from-log FOLDER the constants of a device elsewhere are fitted to the log of its engine, by simulation. The first
requests are fitted, the others judge. The file that is written is a device: device=FILE.
Exit codes: 0 done, 1 it could not be measured, 2 the input was wrong."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `calibrate`."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this device, and fit the cost model to it",
        description="Measure this device with the configured model, fit the cost model, and validate it.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="about how long it may take; default: 120",
    )
    parser.add_argument("--no-grid", action="store_true", help="leave out the grid that cost=table needs")
    parser.add_argument("--dry-run", action="store_true", help="check and print the plan, measure nothing")
    parser.add_argument(
        "--from-log",
        metavar="FOLDER",
        help="fit a device to the log of an engine that ran on it, and measure nothing here; see twin --help",
    )
    parser.add_argument(
        "--first", type=int, metavar="N", help="--from-log: requests to fit; default: a quarter"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="--from-log: where the device is written; default: results/devices/NAME.yaml",
    )
    parser.set_defaults(takes_overrides=True)


def run(arguments: "Arguments") -> int:
    """Calibrate and print; returns the exit code."""
    if arguments.flags.from_log:
        from harness.cli.twin import calibrate_from_log

        return calibrate_from_log(arguments)
    if not arguments.flags.budget >= 1:  # nan is refused too
        raise UserError(f"calibrate: --budget is {arguments.flags.budget:g}, must be at least 1 second")
    config = _config(arguments.overrides)
    if arguments.flags.dry_run:
        return _dry_run(config, arguments.flags.budget)
    from harness.calibrate.run import full_calibration
    from harness.calibrate.store import calibration_path

    found = full_calibration(
        config, _progress, budget_s=arguments.flags.budget, grid=not arguments.flags.no_grid
    )
    _print_errors(found)
    say(f"kept in {calibration_path(config)}")
    return 0


def _dry_run(config: "RunConfig", budget_s: float) -> int:
    """Print where the coefficients would be stored, and whether some exist. Nothing is measured."""
    from harness.calibrate.store import calibration_path, is_calibrated

    state = "in place of what is there" if is_calibrated(config) else "where nothing is yet"
    say(f"{config.model.name}: about {budget_s:g} s, kept in {calibration_path(config)}, {state}")
    say("nothing was measured")
    return 0


def _config(overrides: tuple[str, ...]) -> "RunConfig":
    """The one configured point, checked as a measured one. Raises UserError."""
    from harness.config.checks import check_config
    from harness.config.compose import compose_config, normalise
    from harness.point.run import check_model
    from harness.sweep.plan import run_request
    from harness.workload.devices import check_engine

    request = run_request(overrides)
    several = [axis.text for axis in request.axes if len(axis.settings) > 1]
    if several:
        raise UserError(f"calibrate: one setting at a time; '{several[0]}' makes a sweep")
    config = normalise(compose_config(axis.settings[0] for axis in request.axes))
    errors = check_config(config)
    if errors:
        raise UserError("\n".join(map(str, errors)))
    check_engine(config.engine)
    check_model(config)
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
    say("free-running error on held-out workloads (spread of repeats):")
    for workload, metrics in source.validation.items():
        say(f"  {workload:32} {_metrics(metrics)}")
    if found.table:
        cells = sum(cell == cell for row in found.table.decode.seconds for cell in row)
        say(
            f"grid for cost=table: {cells} decode shapes; error where every other value of an axis is left out:"
        )
        for part, errors in found.table.source.heldout.items():
            if part not in source.heldout:
                say(f"  {part:30} {_errors(errors)}")
    elif found.grid_asked:
        remark("no time was left for the grid of cost=table: raise --budget")
    if found.left_out:
        remark(
            f"warning: no time was left to measure {', '.join(found.left_out)}: what they alone hold has no price; "
            "raise --budget"
        )
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
