"""`doctor`: compare a store with its digests, say what is damaged, and repair what can be run again."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.console import numbered, remark, say, shortened

if TYPE_CHECKING:
    from harness.cli.report import ReportFunctions
    from harness.cli.sweep import PointFunctions
    from harness.console import Arguments
    from harness.store.health import Health
    from harness.store.manifest import Manifest
    from harness.store.remote import RemoteStore
    from harness.sweep.plan import SweepRequest

_MORE = """\
Every record is compared with its own digest, and every table with the digest in its record. Nothing is deleted: with
--repair the folder of a damaged point moves to FOLDER/damaged, and the point runs again if the sweep of the folder
still plans it (same code, traces and settings).
Exit codes: 0 all is whole, 1 something is damaged and not repaired, 2 the input was wrong."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="check a store against its digests, and repair it",
        description="Check every record and table of a store against its digest.",
        usage="python -m harness doctor FOLDER [--repair]",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("store", metavar="FOLDER", help="results folder")
    parser.add_argument("--repair", action="store_true", help="set damage aside and run its points again")


def run(
    arguments: "Arguments", point: "PointFunctions | None" = None, report: "ReportFunctions | None" = None
) -> int:
    """Examine, say what was found, and repair if asked; `point` and `report` as in `harness.cli.sweep`."""
    from harness.cli.report import opened_store
    from harness.store.commit import Layout
    from harness.store.health import examine
    from harness.store.remote import shown

    root, remote = opened_store(arguments.flags.store, fresh=True)
    health = examine(root)
    manifest = _say_health(root, health)
    if not health.damage:
        return int(manifest is None and Layout(root).manifest.exists())
    if not arguments.flags.repair:
        say(f"repair with: python -m harness doctor {shlex.quote(shown(root))} --repair")
        return 1
    return _repair(root, remote, list(health.damage), manifest, point, report)


def _say_health(root: Path, health: "Health") -> "Manifest | None":
    """Print what was found; returns the store's manifest where it can be read."""
    from harness.cli.report import show_problems
    from harness.store.errors import ForeignFileError
    from harness.store.manifest import read_manifest
    from harness.store.remote import shown

    whole, files = numbered(health.records, "record"), numbered(health.files, "file")
    say(f"{shown(root)}: {whole} and {files} beside them are whole")
    if health.undigested:
        say(
            f"{numbered(health.undigested, 'record')} of an older version without digests: checked by form alone"
        )
    show_problems([f"damaged: {fault}" for fault in health.damage.values()], say)
    show_problems([f"not checked: {text}" for text in health.foreign], say)
    try:
        return read_manifest(root)
    except ForeignFileError as error:
        say(shortened(f"damaged: {error}; the next sweep writes it anew"))
        return None


def _repair(
    root: Path,
    remote: "RemoteStore | None",
    names: list[str],
    manifest: "Manifest | None",
    point: "PointFunctions | None",
    report: "ReportFunctions | None",
) -> int:
    """Set the damaged points aside and run them again; returns the exit code."""
    from harness.cli.report import write_report
    from harness.cli.sweep import exchanging, locked, point_functions, stoppable
    from harness.cluster import refuse_beside_jobs
    from harness.store.atomic import remove_leftovers
    from harness.store.health import set_aside
    from harness.sweep.execute import execute
    from harness.sweep.plan import plan_sweep

    with stoppable(), locked(root), exchanging(remote):
        refuse_beside_jobs(root, "doctor --repair")
        aside = set_aside(root, names)
        if remote is not None:
            remote.set_aside(names)
        remove_leftovers(root)
        say(f"{numbered(len(names), 'damaged point')} moved to {aside}")
        if manifest is None:
            remark("without sweep.json it is not known how they were made; run the sweep again")
            return 1
        functions = point or point_functions()
        sweep = plan_sweep(_request_of(root, manifest), functions)
        todo = [planned for planned in sweep.points if planned.fingerprint in names]
        if len(todo) < len(names):
            lost = numbered(len(names) - len(todo), "point")
            remark(f"{lost} cannot be run again: other code, traces or settings than those of now made them")
        committed = remote.push_point if remote is not None else None
        outcome = execute(sweep, todo, runner=functions.run_point, committed=committed)
        if todo and outcome.done:
            write_report(root, manifest, report)
        repaired = len(todo) - len(outcome.failed)
        say(f"{repaired} of {numbered(len(names), 'damaged point')} repaired")
        return 0 if repaired == len(names) and not outcome.interrupted else 1


def _request_of(root: Path, manifest: "Manifest") -> "SweepRequest":
    """The request that the manifest's command makes, for the folder in which it lies now."""
    from harness.config.overrides import quoted
    from harness.sweep.plan import run_request, sweep_request

    words = shlex.split(manifest.command)
    if words[:3] != ["python", "-m", "harness"] or len(words) < 4 or words[3] not in ("run", "sweep"):
        raise UserError(f"{root}/sweep.json: its command is no sweep: {manifest.command}")
    overrides = [word for word in words[4:] if "=" in word and not word.startswith(("out=", "-"))]
    request = sweep_request if words[3] == "sweep" else run_request
    from harness.store.remote import shown

    return request([*overrides, f"out={quoted(shown(root))}"])
