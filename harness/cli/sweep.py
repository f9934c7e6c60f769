"""`run` and `sweep`: plan, execute, commit, report.

SIGTERM and SIGHUP stop a sweep as Ctrl-C does: finished points are kept, and a message says how to continue.
"""

import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from harness.cli import INTERRUPTED, Arguments
from harness.cli.report import finish, known_manifest, same_sweep, show_problems
from harness.cluster import backend_for
from harness.config.errors import ConfigError, UserError
from harness.config.memory import point_memory
from harness.config.paths import is_url
from harness.console import counted, numbered, planning, remark, say
from harness.store import StoreError
from harness.store.atomic import check_writable, exclusive, remove_leftovers
from harness.store.commit import Layout, StoreContent, forget_runs
from harness.store.manifest import Manifest, SweepPoint, keep_report, still_there, write_manifest
from harness.store.remote import RemoteStore, shown
from harness.store.survey import survey
from harness.sweep import plan
from harness.sweep.execute import SweepOutcome, execute
from harness.sweep.progress import WORTH_SAYING_S, TimeModel, at_once, duration, time_model

if TYPE_CHECKING:
    from harness.point import PointSession

_STOPPING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt inside the block. An ignored signal (nohup) stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals only in the main thread
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


def sweep_command(arguments: Arguments) -> int:
    """Run the points of the command line that are not done yet, and write the report; returns the exit code."""
    request, session = _request(arguments), arguments.session or new_session()
    sweep = plan.plan_sweep(request, session, progress=planning)
    _announce(sweep)
    remote = remote_store(sweep.points[0].config.out)
    if arguments.flags.dry_run:
        if remote is not None:
            remote.refresh(remark)
        content = _read(sweep.out)
        return _dry_run(sweep, _left(sweep, content, arguments), content)
    with stoppable(), locked(sweep.out), exchanging(remote):
        return _run(sweep, arguments, session, remote)


def new_session() -> "PointSession":
    """What the points of one command share, imported when it is needed."""
    from harness.point import PointSession

    return PointSession()


def remote_store(out: str) -> RemoteStore | None:
    """The store on object storage at `out`; None where it is a folder. Raises ConfigError where s3fs is missing."""
    return RemoteStore.at(out) if is_url(out) else None


def exchanging(remote: RemoteStore | None) -> AbstractContextManager[None]:
    """Inside the block the local copy is written; a store that is a folder needs nothing."""
    return nullcontext() if remote is None else remote.writing(remark)


def _run(
    sweep: plan.SweepPlan, arguments: Arguments, session: "PointSession", remote: RemoteStore | None
) -> int:
    """Execute the points that are left and report. The caller holds the lock of the store."""
    manifest, known = _manifest(sweep, arguments), known_manifest(sweep.out)
    content = _read(sweep.out)
    todo, times = _left(sweep, content, arguments), time_model(content.records.values())
    del content
    for planned in todo if arguments.flags.force else ():
        forget_runs(sweep.out, planned.fingerprint)
    backend = backend_for(sweep, session, force=arguments.flags.force) if todo else None
    if todo or not same_sweep(known, manifest):
        _open_store(sweep.out, manifest, known)
        if remote is not None:
            remote.push_rest()
    if not todo:
        remove_leftovers(sweep.out)  # of jobs of a cluster, which finished all while no command ran
        say(f"nothing left to do: all {len(sweep.points)} points are in {shown(sweep.out)}")
        return _finish(sweep, manifest, SweepOutcome(len(sweep.points), (), interrupted=False), arguments)
    expected = times.duration(todo, min(at_once(sweep), len(todo)))
    if expected is not None and expected.seconds >= WORTH_SAYING_S:
        remark(_how_long(sweep, todo, times))
    try:
        committed = remote.push_point if remote is not None else None
        outcome = execute(sweep, todo, session, backend=backend, times=times, committed=committed)
    finally:
        remove_leftovers(sweep.out)
    if outcome.interrupted and (runs := len([*sweep.out.glob(".open/*/*.run")])):
        remark(f"{numbered(runs, 'measured run')} of points that had not ended are kept too")
    return _finish(sweep, manifest, outcome, arguments)


def _finish(sweep: plan.SweepPlan, manifest: Manifest, outcome: SweepOutcome, arguments: Arguments) -> int:
    try:
        return finish(sweep.out, manifest, outcome, arguments.report)
    except KeyboardInterrupt:
        remark(f"stopped while the report was written; the points are kept in {shown(sweep.out)}.")
        remark(f"Go on with the same command: {manifest.command}")
        return INTERRUPTED


def _read(out: Path) -> StoreContent:
    content = survey(out)
    show_problems(content.problems)
    return content


def _left(sweep: plan.SweepPlan, content: StoreContent, arguments: Arguments) -> list[plan.PlannedPoint]:
    """The points without a complete record; with `--force`, all points."""
    done = set() if arguments.flags.force else content.records.keys()
    return [planned for planned in sweep.points if planned.fingerprint not in done]


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Create the results folder if needed, and lock it against other sweeps inside the block."""
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive(out))
        except StoreError as error:
            raise ConfigError("out", str(error)) from error
        yield


def _request(arguments: Arguments) -> plan.SweepRequest:
    is_sweep = arguments.command == "sweep"
    request = (plan.sweep_request if is_sweep else plan.run_request)(arguments.overrides)
    if request.replaced:
        remark(f"not used of {request.deployment}: {', '.join(request.replaced)}; the run names these groups")
    if is_sweep:
        return request
    request = plan.in_its_own_place(request)
    if request.varying:
        reason = f"'run' takes one point, but there are several values of {', '.join(request.varying)}; use 'sweep'"
        raise UserError(reason)
    return request


def _announce(sweep: plan.SweepPlan) -> None:
    if sweep.experiment is not None:
        remark(f"experiment {sweep.experiment}: {' '.join(sweep.overrides)}")
    if sweep.same:
        label, other = sweep.same[0]
        why = "a value was given twice" if label == other else "a setting does not apply there"
        remark(
            f"{counted(len(sweep.same), 'combination')} the same run as another, because {why} "
            f"(e.g. {label} = {other}); each run is done once"
        )
    if sweep.idle:
        remark(f"without effect beside the other settings: {', '.join(sweep.idle)}")


def _dry_run(sweep: plan.SweepPlan, todo: list[plan.PlannedPoint], content: StoreContent) -> int:
    left = {planned.fingerprint for planned in todo}
    for planned in sweep.points:
        state = "todo" if planned.fingerprint in left else "done"
        if planned.fingerprint in content.failures and state == "todo":
            state = "failed before"
        say(f"{planned.fingerprint[:12]}  {state:<13}  {planned.label}")
    say(f"{numbered(len(sweep.points), 'point')}, {len(todo)} to run, results in {shown(sweep.out)}")
    if todo:
        say(_how_long(sweep, todo, time_model(content.records.values())))
    return 0


def _how_long(sweep: plan.SweepPlan, todo: list[plan.PlannedPoint], times: TimeModel) -> str:
    """The time and memory that the points will take, as far as earlier points and the settings tell."""
    workers = min(at_once(sweep), len(todo))
    span = times.duration(todo, workers)
    memory = max(point_memory(point.config) for point in todo) / 1e9
    if span is None:
        return f"time: not known before such a point has run in this folder; memory: about {memory:,.1f} GB a process"
    source = f"learned from {numbered(times.points, 'earlier point')}"
    between = "its error is not known from so few"
    if span.low is not None and span.high is not None:
        between = f"95 % interval {duration(span.low)} to {duration(span.high)}"
    takes = f"time: about {duration(span.seconds)} with {numbered(workers, 'worker')} ({between}), {source}"
    return f"{takes}; memory: about {memory:,.1f} GB a process"


def _manifest(sweep: plan.SweepPlan, arguments: Arguments) -> Manifest:
    words = [arguments.command, *arguments.overrides]
    return Manifest(
        name=sweep.name,
        command=f"python -m harness {shlex.join(words)}",
        overrides=sweep.overrides,
        points=tuple(SweepPoint(point.fingerprint, point.varying) for point in sweep.points),
    )


def _open_store(out: Path, manifest: Manifest, known: Manifest | None) -> None:
    """Check that the folder can be written before any point costs time, and write the manifest into it.

    The report on another question that the store holds is moved aside, not replaced.
    """
    try:
        check_writable(out)
        check_writable(Layout(out).points)
        remove_leftovers(out)
        if known is not None and known.overrides != manifest.overrides and (kept := keep_report(out, known)):
            remark(f"the report of '{known.command}' is kept in {kept}")
        write_manifest(out, replace(manifest, digests=still_there(out, known)) if known else manifest)
    except StoreError as error:
        raise ConfigError("out", str(error)) from error
