"""`run` and `sweep`: plan, execute, commit, report."""

import importlib
import shlex
from pathlib import Path

from harness.cli.finishing import finish
from harness.cli.parser import Arguments
from harness.cli.rooms import Rooms
from harness.cli.say import planning, remark, say
from harness.config.errors import ConfigError, UserError
from harness.execute.executing import Outcome, execute
from harness.plan.planning import Plan, PlannedPoint, make_plan
from harness.plan.request import SweepRequest, run_request, sweep_request
from harness.store.atomic import check_writable, remove_leftovers
from harness.store.errors import StoreError
from harness.store.manifest import Manifest, SweepPoint, write_manifest
from harness.store.reading import StoreContent, read_store


def sweep_command(arguments: Arguments, rooms: Rooms) -> int:
    """Run what the command line asks for and is not done yet; returns the exit code."""
    request = _request(arguments)
    plan = make_plan(request, importlib.import_module(rooms.point), progress=planning)
    _announce(plan)
    content = read_store(plan.out)
    for problem in content.problems:
        remark(problem)
    todo = [
        planned
        for planned in plan.points
        if arguments.flags.force or planned.fingerprint not in content.records
    ]
    if arguments.flags.dry_run:
        return _dry_run(plan, todo, content)
    manifest = _manifest(plan, arguments)
    if not todo:
        say(f"nothing left to do: all {len(plan.points)} points are in {plan.out}")
        return finish(plan.out, manifest, Outcome(len(plan.points), (), interrupted=False), rooms.report)
    _open_store(plan.out, manifest)
    try:
        outcome = execute(plan, todo, runner=f"{rooms.point}:run_point")
    finally:
        remove_leftovers(plan.out)
    return finish(plan.out, manifest, outcome, rooms.report)


def _request(arguments: Arguments) -> SweepRequest:
    if arguments.command == "sweep":
        return sweep_request(arguments.overrides)
    request = run_request(arguments.overrides)
    if request.varying:
        raise UserError(
            f"'run' takes one point, but there are several values of {', '.join(request.varying)}; use 'sweep'"
        )
    return request


def _announce(plan: Plan) -> None:
    if plan.experiment is not None:
        remark(f"experiment {plan.experiment}: {' '.join(plan.overrides)}")
    if plan.same:
        remark(
            f"{len(plan.same)} combinations are the same run as another, because a setting does not apply there "
            f"(e.g. {plan.same[0][0]} = {plan.same[0][1]}); each run is done once"
        )


def _dry_run(plan: Plan, todo: list[PlannedPoint], content: StoreContent) -> int:
    for planned in plan.points:
        state = "todo" if planned in todo else "done"
        if planned.fingerprint in content.failures and state == "todo":
            state = "failed before"
        say(f"{planned.fingerprint[:12]}  {state:<13}  {planned.label}")
    say(f"{len(plan.points)} points, {len(todo)} to run, results in {plan.out}")
    return 0


def _manifest(plan: Plan, arguments: Arguments) -> Manifest:
    words = [arguments.command, *arguments.overrides]
    return Manifest(
        name=plan.name,
        command=f"python -m harness {shlex.join(words)}",
        overrides=plan.overrides,
        points=tuple(SweepPoint(point.fingerprint, point.varying) for point in plan.points),
    )


def _open_store(out: Path, manifest: Manifest) -> None:
    """Prove that the folder can be written before any point costs time."""
    try:
        check_writable(out)
        remove_leftovers(out)
        write_manifest(out, manifest)
    except StoreError as error:
        raise ConfigError("out", str(error)) from error
