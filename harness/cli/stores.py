"""`report` and `status`: what a results folder holds."""

from pathlib import Path

from harness.cli.finishing import kernels_of, write_report
from harness.cli.parser import Arguments
from harness.cli.say import numbered, remark, say
from harness.config.errors import UserError
from harness.config.paths import NO_KERNELS, check_kernels
from harness.store.errors import ForeignFileError
from harness.store.layout import Layout
from harness.store.manifest import Manifest, read_manifest
from harness.store.reading import StoreContent, read_store

RESULTS = Path("results")


def report_command(arguments: Arguments, report: str) -> int:
    """Write the report of a store again, from its records."""
    root = _store(arguments.flags.store)
    target = Path(arguments.flags.out) if arguments.flags.out else None
    manifest = _manifest(root)
    write_report(root, manifest, report, target, _kernels(arguments.flags.kernels, root, manifest))
    return 0


def _kernels(named: str | None, root: Path, manifest: Manifest | None) -> Path | None:
    """The run of `bench kernels` that gets a section: the one named now, else as the sweep itself would have it."""
    if named is None:
        return kernels_of(root, manifest)
    errors = list(check_kernels("report.kernels", named))
    if errors:
        raise UserError(f"--kernels: {errors[0].message}")
    return None if named == NO_KERNELS else Path(named).expanduser()


def status_command(arguments: Arguments) -> int:
    """Say what a store has done, what failed and where that is written, and what is left."""
    root = _store(arguments.flags.store)
    manifest, content = _manifest(root), read_store(root)
    for problem in content.problems:
        say(problem)
    if manifest is None:
        done, failed = numbered(len(content.records), "point"), len(content.failures)
        say(f"{root}: {done} done, {failed} failed; no sweep.json that says of which sweep")
        return 0
    _say_status(root, manifest, content)
    return 0


def _say_status(root: Path, manifest: Manifest, content: StoreContent) -> None:
    names = [point.fingerprint for point in manifest.points]
    done = [name for name in names if name in content.records]
    failed = [point for point in manifest.points if _has_failed(point.fingerprint, content)]
    left = len(names) - len(done) - len(failed)
    say(f"{root}: sweep '{manifest.name}', {len(done)} of {len(names)} points done")
    if failed:
        say(f"{len(failed)} failed:")
    for point in failed:
        failure = content.failures[point.fingerprint]
        say(f"  {failure.get('label', ' '.join(point.overrides))}: {failure.get('error')}")
        say(f"    traceback: {Layout(root).failure(point.fingerprint)}")
    if left or failed:
        say(f"{left} not run yet. Go on with: {manifest.command}")
    others = len(content.records) - len(done)
    if others:
        say(f"{numbered(others, 'other point')} of earlier sweeps kept in the same folder")
    if manifest.report:
        say(f"report: {root / manifest.report}")


def _has_failed(name: str, content: StoreContent) -> bool:
    return name in content.failures and name not in content.records


def _store(named: str | None) -> Path:
    """The store that was named, or the newest one, saying which."""
    if named is not None:
        root = Path(named)
        if not Layout(root).points.is_dir() and not Layout(root).manifest.exists():
            raise UserError(f"no results in '{named}' (no sweep.json, no points/); name a results folder")
        return root
    manifests = sorted(RESULTS.glob("*/sweep.json"), key=lambda path: path.stat().st_mtime_ns)
    if not manifests:
        raise UserError("no results under results/; run 'python -m harness sweep' first or name a folder")
    remark(f"newest store: {manifests[-1].parent}")
    return manifests[-1].parent


def _manifest(root: Path) -> Manifest | None:
    try:
        return read_manifest(root)
    except ForeignFileError as error:
        remark(f"skipped {error}")
        return None
