"""`run` and `sweep`: plan, execute, commit, report.

SIGTERM and SIGHUP stop a sweep as Ctrl-C does: finished points are kept, and the user is told how to continue.
"""

import importlib
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from harness.cli import Rooms
from harness.cli.report import INTERRUPTED, finish, known_manifest, same_sweep
from harness.config.errors import ConfigError, UserError
from harness.console import Arguments, counted, numbered, planning, remark, say
from harness.store.atomic import check_writable, exclusive, remove_leftovers
from harness.store.commit import Layout
from harness.store.errors import StoreError
from harness.store.manifest import Manifest, SweepPoint, write_manifest
from harness.store.reading import StoreContent, read_store
from harness.sweep.execute import Outcome, execute
from harness.sweep.plan import Plan, PlannedPoint, SweepRequest, make_plan, run_request, sweep_request

_STOPPING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn the signals into KeyboardInterrupt inside the block; one that is ignored (nohup) stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread alone
        return
    before = {name: signal.getsignal(name) for name in _STOPPING}
    caught = [name for name, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        for name in caught:
            signal.signal(name, _stop)
        yield
    finally:
        for name in caught:
            signal.signal(name, before[name] or signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def sweep_command(arguments: Arguments, rooms: Rooms) -> int:
    """Run what the command line asks for and is not done yet; returns the exit code."""
    request = _request(arguments)
    plan = make_plan(request, importlib.import_module(rooms.point), progress=planning)
    _announce(plan)
    if arguments.flags.dry_run:
        content = _read(plan.out)
        return _dry_run(plan, _left(plan, content, arguments), content)
    with stoppable(), _held(plan.out):
        return _run(plan, arguments, rooms)


def _run(plan: Plan, arguments: Arguments, rooms: Rooms) -> int:
    """Execute what is left and report; the store is ours alone meanwhile."""
    manifest, known = _manifest(plan, arguments), known_manifest(plan.out)
    todo = _left(plan, _read(plan.out), arguments)
    if todo or not same_sweep(known, manifest):
        _open_store(plan.out, manifest)
    if not todo:
        say(f"nothing left to do: all {len(plan.points)} points are in {plan.out}")
        return _finish(plan, manifest, Outcome(len(plan.points), (), interrupted=False), rooms)
    try:
        outcome = execute(plan, todo, runner=f"{rooms.point}:run_point")
    finally:
        remove_leftovers(plan.out)
    return _finish(plan, manifest, outcome, rooms)


def _finish(plan: Plan, manifest: Manifest, outcome: Outcome, rooms: Rooms) -> int:
    try:
        return finish(plan.out, manifest, outcome, rooms.report)
    except KeyboardInterrupt:
        remark(f"stopped while the report was written; the points are kept in {plan.out}.")
        remark(f"Go on with the same command: {manifest.command}")
        return INTERRUPTED


def _read(out: Path) -> StoreContent:
    content = read_store(out)
    for problem in content.problems:
        remark(problem)
    return content


def _left(plan: Plan, content: StoreContent, arguments: Arguments) -> list[PlannedPoint]:
    """The points without a whole record; with `--force`, all."""
    done = set() if arguments.flags.force else content.records.keys()
    return [planned for planned in plan.points if planned.fingerprint not in done]


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """The results folder, made if need be, and held against other sweeps."""
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive(out))
        except StoreError as error:
            raise ConfigError("out", str(error)) from error
        yield


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
        label, other = plan.same[0]
        why = "a value was given twice" if label == other else "a setting does not apply there"
        remark(
            f"{counted(len(plan.same), 'combination')} the same run as another, because {why} "
            f"(e.g. {label} = {other}); each run is done once"
        )
    if plan.idle:
        remark(f"without effect beside the other settings: {', '.join(plan.idle)}")


def _dry_run(plan: Plan, todo: list[PlannedPoint], content: StoreContent) -> int:
    left = {planned.fingerprint for planned in todo}
    for planned in plan.points:
        state = "todo" if planned.fingerprint in left else "done"
        if planned.fingerprint in content.failures and state == "todo":
            state = "failed before"
        say(f"{planned.fingerprint[:12]}  {state:<13}  {planned.label}")
    say(f"{numbered(len(plan.points), 'point')}, {len(todo)} to run, results in {plan.out}")
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
    """Prove that the folder can be written before any point costs time, and say in it what is asked for."""
    try:
        check_writable(out)
        check_writable(Layout(out).points)
        remove_leftovers(out)
        write_manifest(out, manifest)
    except StoreError as error:
        raise ConfigError("out", str(error)) from error
