"""`report`, and the end of every sweep: summary, report, verdict, failures, exit code."""

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.cli import INTERRUPTED, Arguments
from harness.config.errors import UserError
from harness.config.overrides import parse_override
from harness.config.paths import NO_KERNELS, check_kernels, is_url
from harness.config.schema import ReportConfig, RunConfig
from harness.config.values import converted, replaced
from harness.console import one_line, remark, say, shortened
from harness.store import ForeignFileError
from harness.store.atomic import exclusive, refuse_links
from harness.store.commit import Layout, read_store
from harness.store.manifest import Manifest, derived_faults, read_manifest, with_report, write_manifest
from harness.store.remote import RemoteStore, shown
from harness.store.summary import SummaryRows, write_summary
from harness.sweep.execute import SweepOutcome

MOST_LISTED = 10  # failed or damaged points that are named one by one
RESULTS = Path("results")
_LONGEST_LINE = 4000  # characters of a verdict, which a manifest may hold
MOST_UNNAMED = 5000  # points of a store without a manifest; their whole records take some 1 GB
MOST_AT_ONCE = 2000  # points whose records are held in memory together; the page shows some of more


def finish(out: Path, manifest: Manifest, outcome: SweepOutcome, report: ModuleType | None = None) -> int:
    """Write summary and report of a sweep and print its outcome; returns the exit code.

    `report` takes the place of `harness.report`.
    """
    total = len(manifest.points)
    if outcome.interrupted:
        _say_failures(outcome)
        remark(
            f"stopped: {outcome.done} of {total} points are done and kept in {shown(out)}.\n"
            f"Go on with the same command: {manifest.command}"
        )
        return INTERRUPTED
    written = not outcome.done or _try_to_report(out, manifest, report)
    if outcome.failed:
        say(f"{outcome.done} of {total} points are done, {len(outcome.failed)} failed:")
        _say_failures(outcome)
        say("the same command tries the failed points again")
    return 0 if written and not outcome.failed else 1


def _try_to_report(out: Path, manifest: Manifest, report: ModuleType | None) -> bool:
    """Write the report; returns whether that was possible. The points are kept in any case."""
    try:
        _report_if_outdated(out, manifest, report)
    except UserError as error:
        remark(f"error: {error}\nThe points are kept. Write the report elsewhere with:")
        remark(f"  python -m harness report {shlex.quote(str(out))} --out FOLDER")
        return False
    return True


def write_report(
    out: Path,
    manifest: Manifest | None,
    report: ModuleType | None = None,
    target: Path | None = None,
    options: ReportConfig | None = None,
    against: Path | None = None,
) -> Path:
    """Write summary and report of a store again, print the verdict, and note both in the manifest.

    Args:
        out: the store.
        manifest: what the store was last asked for; None reports on all its records.
        report: takes the place of `harness.report`, which is slow to import.
        target: folder of the report; None takes the store's own.
        options: what the report shows; None takes the sweep's wishes.
        against: another store; a section says what changed.

    Raises:
        UserError: there is nothing to report on.
    """
    if report is None:
        from harness import report as package

        report = package
    large, rows = manifest is not None and len(manifest.points) > MOST_AT_ONCE, SummaryRows()
    if manifest is None:
        _check_unnamed(out)
    if not large:
        content = read_store(out)
        asked = [point.fingerprint for point in manifest.points] if manifest else list(content.records)
        write_summary(target or out, [content.records[name] for name in asked if name in content.records])
    options = options or options_of(manifest)
    verdict: list[str] = []
    try:
        path: Path = report.write_report(
            out,
            out=target,
            additions=_additions(kernels_of(out, options.kernels), out, against),
            rows=rows if large else None,
            options=options,
            tell=verdict.append,
        )
        if large:
            rows.write(target or out)
    except report.ReportError as error:
        raise UserError(str(error)) from error
    if manifest is not None and path.is_relative_to(out):
        summary = Layout(target or out).summary
        write_manifest(out, with_report(manifest, out, path, verdict, summary))
    _say_report(path, verdict)
    return path


def _check_unnamed(out: Path) -> None:
    """Raise UserError where a store without a manifest holds more points than fit the memory together."""
    points = Layout(out).points
    count = sum(1 for _ in points.iterdir()) if points.is_dir() else 0
    if count > MOST_UNNAMED:
        raise UserError(
            f"{shown(out)} holds {count:,} points and no sweep.json that tells how they differ; "
            f"{MOST_UNNAMED:,} can be reported on so. Give the sweep's command again: it runs nothing twice"
        )


def _additions(kernels: Path | None, root: Path, against: Path | None) -> list[Any]:
    added = [] if against is None else [partial(_changes_section, root, against)]
    if kernels is None:
        return added
    from harness.bench.page import kernel_section

    make = kernel_section(kernels)

    def with_warnings_printed(study: Any) -> Any:
        added = make(study)
        for line in added.warnings:
            remark(f"warning: {line}")
        return added

    return [*added, with_warnings_printed]


def _changes_section(root: Path, against: Path, _: Any) -> Any:
    from harness.report.page import Section
    from harness.report.tables import Table
    from harness.report.verdict_text import CHANGE_HEAD, changes

    rows, largest = changes(root, against)
    worse = ", ".join(one.metric.label for one in rows if one.worse)
    said = f"Worse beyond doubt: {worse}." if worse else "No metric became worse beyond doubt."
    tables = [Table(CHANGE_HEAD, [one.cells for one in rows])]
    return Section("changes", "What changed", text=[said], tables=tables, notes=largest)


def _report_if_outdated(out: Path, manifest: Manifest, report: ModuleType | None) -> None:
    """Write the report, unless the existing one was written from exactly these points and kernels."""
    known, kernels = known_manifest(out), kernels_of(out, options_of(manifest).kernels)
    if known is not None and known.report and same_sweep(known, manifest):
        path = out / known.report
        is_whole = path.exists() and not derived_faults(out, known)
        if is_whole and path.stat().st_mtime_ns >= _newest_input(out, kernels):
            _say_report(path, known.verdict)
            return
    write_report(out, manifest, report)


def kernels_of(out: Path, named: str | None) -> Path | None:
    """The run of `bench kernels` that gets a section: the named one, or else the one beside the results."""
    from harness.cost.timings import SEARCHED_FOLDERS, TABLE

    if named is None:
        return next((out / place for place in SEARCHED_FOLDERS if (out / place / TABLE).is_file()), None)
    return None if named == NO_KERNELS else Path(named).expanduser()


def options_of(manifest: Manifest | None) -> ReportConfig:
    """What the sweep wants its report to show (`report.…`)."""
    texts = [text for text in (manifest.overrides if manifest else ()) if text.startswith("report.")]
    settings = [parse_override(text).settings[0] for text in texts]
    return replaced(RunConfig(), {one.key: converted(one.key, one.value) for one in settings}).report


def known_manifest(out: Path) -> Manifest | None:
    """The store's manifest. None where it is missing or cannot be read, since a new one will replace it."""
    try:
        return read_manifest(out)
    except ForeignFileError:
        return None


def same_sweep(known: Manifest | None, manifest: Manifest) -> bool:
    """Whether two manifests ask for the same sweep. Their reports and verdicts may differ."""
    return known is not None and replace(known, report=None, verdict=(), digests={}) == manifest


def _newest_input(out: Path, kernels: Path | None) -> int:
    files = [*out.glob("points/*/*.json")]
    if kernels is not None:
        files += [file for file in (kernels, kernels / "kernels.parquet") if file.is_file()]
    return max((file.stat().st_mtime_ns for file in files), default=0)


def _say_report(path: Path, verdict: Sequence[str]) -> None:
    for line in verdict:
        say(one_line(line, _LONGEST_LINE))
    say(f"report: {path}")


def _say_failures(outcome: SweepOutcome) -> None:
    for failed in outcome.failed[:MOST_LISTED]:
        say(shortened(f"  {failed.label}: {failed.error}\n    traceback: {failed.file}"))
    say_more(len(outcome.failed))


def say_more(failed: int) -> None:
    """Print how many failures were not named."""
    if failed > MOST_LISTED:
        say(f"  ... and {failed - MOST_LISTED:,} more, each with a failure.json in its folder under points/")


def show_problems(problems: Sequence[str], write: Callable[[str], None] = remark) -> None:
    """Print what was skipped in a store: the first few, and how many more there are."""
    for problem in problems[:MOST_LISTED]:
        write(shortened(problem))
    if len(problems) > MOST_LISTED:
        write(f"... and {len(problems) - MOST_LISTED:,} more; see: python -m harness doctor FOLDER")


def report_command(arguments: Arguments) -> int:
    """Write the report of a store again, from its records."""
    if (out := arguments.flags.out) is not None and is_url(out):
        raise UserError(f"--out {out}: name a folder; only the store of a sweep may lie on object storage")
    root, remote = opened_store(arguments.flags.store)
    target = Path(out) if out else None
    if _asks_for_a_figure(arguments):
        return _write_figure(arguments, root, target)
    manifest = read_or_none(root)
    options = _chosen_options(arguments.flags, options_of(manifest))
    if target is None:
        refuse_links(root)
    other = None if arguments.flags.against is None else opened_store(arguments.flags.against)[0]
    write_report(root, manifest, arguments.report, target, options, other)
    worse = _summarise(root, other, arguments.flags.markdown)
    if remote is not None and target is None:
        with exclusive(root), remote.writing(remark):
            say(f"sent to {remote.url}")
    return 1 if worse else 0


def _asks_for_a_figure(arguments: Arguments) -> bool:
    """Whether `--x` is there.

    Raises:
        UserError: another option of the figure is there without it, or one of the report beside it.
    """
    flags = arguments.flags
    given = [f"--{name}" for name in ("hue", "col", "where", "metric") if getattr(flags, name)]
    if flags.x is None and given:
        raise UserError(f"{given[0]} needs --x KEY: the setting along the figure's x axis")
    if flags.x is not None and flags.against is not None:
        reason = f"'{flags.against}': a second store belongs to the whole report; --x writes one figure alone"
        raise UserError(reason)
    whole = ("kernels", "markdown", "figures", "paper", "serif", "latex")
    others = [f"--{name}" for name in whole if getattr(flags, name) not in (None, False)]
    if flags.x is not None and others:
        raise UserError(f"{others[0]} belongs to the whole report; --x writes one figure alone")
    return flags.x is not None


def _write_figure(arguments: Arguments, root: Path, target: Path | None) -> int:
    from harness.report import ReportError
    from harness.report.write import FigureChoice, write_chosen_figure

    flags = arguments.flags
    where: dict[str, str] = {}
    for text in flags.where:
        key, sign, value = text.partition("=")
        if not sign or not key or not value:
            raise UserError(f"--where: '{text}' is not KEY=VALUE")
        if where.setdefault(key, value) != value:
            raise UserError(f"--where: '{key}' is named twice, as {where[key]} and {value}")
    choice = FigureChoice(flags.x, flags.hue, flags.col, where)
    if flags.metric is not None:
        metrics = tuple(dict.fromkeys(name.strip() for name in flags.metric.split(",") if name.strip()))
        choice = replace(choice, metrics=metrics)
    try:
        for path in write_chosen_figure(root, choice, out=target, tell=say):
            say(f"figure: {path}")
    except ReportError as error:
        raise UserError(str(error)) from error
    return 0


def _summarise(root: Path, other: Path | None, markdown: str | None) -> bool:
    """Print what changed against another store, and append the answers to a Markdown file, where that is asked for.

    Returns whether a metric became worse beyond doubt.
    """
    if other is None and markdown is None:
        return False
    from harness.report import ReportError
    from harness.report.verdict_text import change_lines, changes, summary_markdown

    try:
        for line in change_lines(root, other) if other else ():
            say(line)
        if markdown is not None:
            with Path(markdown).open("a", encoding="utf-8") as file:
                file.write(summary_markdown(root, other))
        return other is not None and any(one.worse for one in changes(root, other)[0])
    except ReportError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"--markdown: cannot write '{markdown}': {error.strerror or error}") from error


def _chosen_options(flags: argparse.Namespace, wished: ReportConfig) -> ReportConfig:
    """What the report shows: what a flag says, and where none does, what the sweep wants. Raises UserError."""
    if flags.kernels is not None:
        for wrong in check_kernels("report.kernels", flags.kernels):
            raise UserError(f"--kernels: {wrong.message}")
    given = {one.name: getattr(flags, one.name) for one in fields(wished) if getattr(flags, one.name)}
    words = {f"report.{name}": converted(f"report.{name}", value) for name, value in given.items()}
    return replaced(RunConfig(report=wished), words).report


def opened_store(named: str | None, *, fresh: bool = False) -> tuple[Path, RemoteStore | None]:
    """The folder of the named store, and where it lies on object storage: its local copy, brought up to date.

    `fresh`: fetch everything again, and not only what has changed.
    """
    if named is None or not is_url(named):
        return named_store(named), None
    remote = RemoteStore.at(named)
    remote.refresh(remark, fresh=fresh)
    if not remote.there and not Layout(remote.folder).manifest.exists():
        raise UserError(f"no results in '{named}' (no sweep.json, no points/); name the store of a sweep")
    return remote.folder, remote


def named_store(named: str | None) -> Path:
    """The named store, or the newest one under `results/`, whose name is then printed."""
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


def read_or_none(root: Path) -> Manifest | None:
    """The store's manifest; None, and a remark, where it cannot be read."""
    try:
        return read_manifest(root)
    except ForeignFileError as error:
        remark(f"skipped {error}")
        return None
