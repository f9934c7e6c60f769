"""What a store holds: `status`, `doctor`, which repairs it, and `logs`."""

import shlex
from pathlib import Path

from harness.cli import Arguments, report
from harness.cli.sweep import exchanging, locked, new_session, stoppable
from harness.cluster import refuse_beside_jobs
from harness.cluster.book import Book
from harness.cluster.slurm import log_of
from harness.config.errors import UserError
from harness.config.foreign import Foreign
from harness.config.overrides import of_a_file, parse_override, quoted
from harness.config.paths import is_url
from harness.config.schema import RunConfig
from harness.console import numbered, one_line, remark, say, shortened
from harness.store import ForeignFileError
from harness.store.atomic import remove_leftovers
from harness.store.commit import Layout, StoreContent
from harness.store.manifest import Manifest, derived_faults, read_manifest, without_digest
from harness.store.remote import RemoteStore, shown
from harness.store.survey import SURVEY, Health, examine, is_survey_damaged, set_aside, survey
from harness.sweep.execute import execute
from harness.sweep.plan import FIXED, SweepRequest, plan_sweep, run_request, sweep_request

# Settings that say nothing of a point, but where it runs and what is written where: a repair has its own.
_OF_PLACES = (*(key for key in FIXED if key != "name"), "cost.cache_dir")
_LONGEST_COMMAND = 20_000  # characters; a longer one was not typed


def status_command(arguments: Arguments) -> int:
    """Print which points of a store are done, which failed and where the traceback is, and which are left."""
    root, _ = report.opened_store(arguments.flags.store)
    manifest, content = report.read_or_none(root), survey(root)
    report.show_problems(content.problems, say)
    if manifest is None:
        done, failed = numbered(len(content.records), "point"), len(content.failures)
        say(f"{shown(root)}: {done} done, {failed} failed; no sweep.json that says of which sweep")
        return 0
    _say_status(root, manifest, content)
    return 0


def _say_status(root: Path, manifest: Manifest, content: StoreContent) -> None:
    names = [point.fingerprint for point in manifest.points]
    done = [name for name in names if name in content.records]
    broken = content.failures.keys() - content.records.keys()
    failed = [point for point in manifest.points if point.fingerprint in broken]
    left = len(names) - len(done) - len(failed)
    say(f"{shown(root)}: sweep '{one_line(manifest.name)}', {len(done)} of {len(names)} points done")
    if failed:
        say(f"{len(failed)} failed:")
    for point in failed[: report.MOST_LISTED]:
        failure = content.failures[point.fingerprint]
        label = failure.get("label", " ".join(point.overrides))
        say(shortened(one_line(f"  {label}: {failure.get('error')}")))
        say(f"    traceback: {Layout(root).failure(point.fingerprint)}")
    report.say_more(len(failed))
    if left or failed:
        say(f"{left} not run yet. Go on with: {one_line(command_for(root, manifest), _LONGEST_COMMAND)}")
        if doubt := _doubt(root, manifest):
            say(f"read that command before you type it: {one_line(doubt)}")
    others = len(content.records) - len(done)
    if others:
        say(f"{numbered(others, 'other point')} of earlier sweeps kept in the same folder")
    if manifest.report:
        say(f"report: {one_line(root / manifest.report)}")


def _doubt(root: Path, manifest: Manifest) -> str:
    """What in the manifest's command no file may ask for; empty where nothing."""
    try:
        _request_of(root, manifest)
    except UserError as error:
        return str(error)
    return ""


def command_for(root: Path, manifest: Manifest) -> str:
    """The command that goes on with a store where it lies now, which may be a copy of where it was written."""
    recorded = [text.partition("=")[2] for text in manifest.overrides if text.startswith("out=")]
    written = parse_override(f"out={recorded[-1]}").settings[0].value if recorded else RunConfig().out
    here = shown(root) if is_url(str(written)) else root.resolve()
    what, words = _command_of(root, manifest)
    there = str(written).rstrip("/") if is_url(str(written)) else Path(str(written)).expanduser().resolve()
    if there != here:
        words = [*(word for word in words if not word.startswith("out=")), f"out={quoted(shown(root))}"]
    return shlex.join(["python", "-m", "harness", what, *words])


def doctor_command(arguments: Arguments) -> int:
    """Examine, say what was found, and repair if asked; returns the exit code."""
    root, remote = report.opened_store(arguments.flags.store, fresh=True)
    health = examine(root)
    manifest = _say_health(root, health)
    missing = [] if manifest is None else _missing(root, manifest)
    derived = [] if manifest is None else _say_derived(root, manifest)
    if missing:
        is_lost = manifest is not None and manifest.report
        why = "missing, as they were deleted or not run" if is_lost else "not run yet"
        say(
            f"{numbered(len(missing), 'point')} of the sweep {why}: {', '.join(missing[: report.MOST_LISTED])}"
        )
        missing = missing if is_lost else []
    if not (health.damage or derived or missing):
        return int(_say_earlier(root) or (manifest is None and Layout(root).manifest.exists()))
    _say_earlier(root)
    if not arguments.flags.repair:
        say(f"repair with: python -m harness doctor {shlex.quote(shown(root))} --repair")
        return 1
    return _repair(root, remote, list(health.damage), missing, manifest, arguments)


def _say_health(root: Path, health: Health) -> Manifest | None:
    """Print what was found at the points; returns the store's manifest where it can be read."""
    whole, files = numbered(health.records, "record"), numbered(health.files, "file")
    say(f"{shown(root)}: {whole} and {files} beside them are whole")
    if health.undigested:
        say(
            f"{numbered(health.undigested, 'record')} of an older version without digests: checked by form alone"
        )
    report.show_problems([f"damaged: {fault}" for fault in health.damage.values()], say)
    report.show_problems([f"not checked: {text}" for text in health.foreign], say)
    try:
        return read_manifest(root)
    except ForeignFileError as error:
        say(shortened(f"damaged: {error}; the next sweep writes it anew"))
        return None


def _missing(root: Path, manifest: Manifest) -> list[str]:
    """The points of the sweep of which there is neither a record nor a failure, nor anything damaged."""
    return [one.fingerprint for one in manifest.points if not Layout(root).point(one.fingerprint).exists()]


def _say_derived(root: Path, manifest: Manifest) -> list[str]:
    """Print what is wrong with the summary and the report; returns the files at fault."""
    faults, bare = derived_faults(root, manifest), without_digest(root, manifest)
    if manifest.digests:
        sound = numbered(len(manifest.digests) - len(faults), "file")
        say(f"sweep.json, and {sound} of the summary and the report, are whole")
    if is_survey_damaged(root):
        faults[SURVEY] = "it does not match its digest"
    report.show_problems([f"damaged: {root / name}: {fault}" for name, fault in faults.items()], say)
    report.show_problems([f"not compared, as it has no digest: {one_line(name)}" for name in bare], say)
    return list(faults)


def _say_earlier(root: Path) -> bool:
    """Print what is wrong with the reports of earlier sweeps, which no points make again; whether anything is."""
    faults: list[str] = []
    for place in sorted(path.parent for path in root.glob("earlier/*/sweep.json")):
        try:
            kept = read_manifest(place)
            faults += (
                [f"{place / name}: {fault}" for name, fault in derived_faults(place, kept).items()]
                if kept
                else []
            )
        except ForeignFileError as error:
            faults.append(str(error))
    report.show_problems([f"damaged: {fault}; delete that folder" for fault in faults], say)
    return bool(faults)


def _repair(
    root: Path,
    remote: RemoteStore | None,
    damaged: list[str],
    missing: list[str],
    manifest: Manifest | None,
    arguments: Arguments,
) -> int:
    """Set the damaged points aside, run them and those that are missing again, report; returns the exit code."""
    request = None if manifest is None else _request_of(root, manifest)  # refused before anything is moved
    names = [*damaged, *missing]
    with stoppable(), locked(root), exchanging(remote):
        refuse_beside_jobs(root, "doctor --repair")
        if damaged:
            say(f"{numbered(len(damaged), 'damaged point')} moved to {set_aside(root, damaged)}")
        if remote is not None:
            remote.set_aside(damaged)
        remove_leftovers(root)
        (root / SURVEY).unlink(missing_ok=True)  # a cache
        if manifest is None or request is None:
            remark("without sweep.json it is not known how they were made; run the sweep again")
            return 1
        session = arguments.session or new_session()
        sweep = plan_sweep(request, session) if names else None
        todo = [planned for planned in sweep.points if planned.fingerprint in names] if sweep else []
        if len(todo) < len(names):
            lost = numbered(len(names) - len(todo), "point")
            remark(f"{lost} cannot be run again: other code, traces or settings than those of now made them")
        committed = remote.push_point if remote is not None else None
        failed, interrupted = 0, False
        if sweep is not None and todo:
            outcome = execute(sweep, todo, session, committed=committed)
            failed, interrupted = len(outcome.failed), outcome.interrupted
        if not interrupted and any(Layout(root).points.glob("*/record.json")):
            report.write_report(root, manifest, arguments.report)
        repaired = len(todo) - failed
        if names:
            say(f"{repaired} of {numbered(len(names), 'damaged or missing point')} repaired")
        return 0 if repaired == len(names) and not interrupted else 1


def _request_of(root: Path, manifest: Manifest) -> SweepRequest:
    """The request that the manifest's command makes, for the folder in which it lies now."""
    what, words = _command_of(root, manifest)
    request = sweep_request if what == "sweep" else run_request
    own = [word for word in words if word.partition("=")[0] not in _OF_PLACES]
    return request([*of_a_file(own, f"{root}/sweep.json", root), f"out={quoted(shown(root))}"])


def _command_of(root: Path, manifest: Manifest) -> tuple[str, list[str]]:
    """`run` or `sweep`, and the overrides of the manifest's command.

    Raises:
        UserError: it is another command.
    """
    words = Foreign(manifest.command, f"{root}/sweep.json").words()
    if words[:3] != ["python", "-m", "harness"] or len(words) < 4 or words[3] not in ("run", "sweep"):
        raise UserError(f"{root}/sweep.json: its command is no sweep: {one_line(manifest.command)}")
    return words[3], [word for word in words[4:] if "=" in word and not word.startswith("-")]


def logs_command(arguments: Arguments) -> int:
    """Print the job and the log of each point; returns 1 where no point fits."""
    root = report.named_store(arguments.flags.store)
    book = Book.read(root)
    if not book.submissions:
        raise UserError(f"no point of '{root}' ran in Slurm (no jobs.json); other points have no log")
    manifest = report.known_manifest(root)
    labels = {point.fingerprint: " ".join(point.overrides) for point in manifest.points} if manifest else {}
    wanted, found = arguments.flags.point or "", 0
    for name, task, submission in book.newest_of_points():
        label = one_line(labels.get(name, "(a point of an earlier sweep)"))
        if wanted in label or name.startswith(wanted):
            say(f"{name[:12]}  job {task}  {log_of(submission, task)}  {label}")
            found += 1
    return 0 if found else 1
