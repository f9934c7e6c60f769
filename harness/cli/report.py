"""`report` and `status`, and the end of every sweep: summary, report, verdict, failures, exit code."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from harness.config.errors import UserError
from harness.config.overrides import parse_override, quoted
from harness.config.paths import NO_KERNELS, check_kernels, is_url
from harness.config.schema import Figures, Paper, ReportConfig, RunConfig
from harness.console import Arguments, numbered, remark, say, shortened
from harness.store.atomic import exclusive
from harness.store.commit import Layout
from harness.store.errors import ForeignFileError
from harness.store.manifest import Manifest, read_manifest, with_report, write_manifest
from harness.store.reading import StoreContent, read_store
from harness.store.remote import RemoteStore, shown
from harness.store.summary import SummaryRows, write_summary
from harness.store.survey import survey
from harness.sweep.execute import Outcome

INTERRUPTED = 130
MOST_LISTED = 10  # failed or damaged points that are named one by one
RESULTS = Path("results")
MOST_UNNAMED = 5000  # points of a store without a manifest; their whole records take some 1 GB
MOST_AT_ONCE = 2000  # points whose records are held in memory together; the page shows some of more


class ReportFunctions(Protocol):
    """The functions of `harness.report` that a command calls. A test passes a module or an object of its own."""

    @property
    def ReportError(self) -> type[Exception]:  # noqa: N802 - the name of the class in the package
        """Raised by the two functions where there is nothing to report on."""
        ...

    def write_report(
        self,
        store_root: Path,
        *,
        out: Path | None = None,
        additions: Sequence[Any] = (),
        rows: SummaryRows | None = None,
        figures: Figures = Figures.all,
        options: ReportConfig | None = None,
    ) -> Path:
        """Write the report of a store and return its page; `rows` gets the rows of a large sweep."""
        ...

    def verdict_lines(self, store_root: Path) -> Sequence[str]:
        """The difference between prediction and measurement, in a few lines."""
        ...


def finish(out: Path, manifest: Manifest, outcome: Outcome, report: ReportFunctions | None = None) -> int:
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


def _try_to_report(out: Path, manifest: Manifest, report: ReportFunctions | None) -> bool:
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
    report: ReportFunctions | None = None,
    target: Path | None = None,
    kernels: Path | None = None,
    figures: Figures = Figures.all,
    options: ReportConfig | None = None,
) -> Path:
    """Write summary and report of a store again, print the verdict, and note both in the manifest.

    Args:
        out: the store.
        manifest: what the store was last asked for; None reports on all its records.
        report: takes the place of `harness.report`, which is slow to import.
        target: folder of the report; None takes the store's own.
        kernels: a run of `bench kernels` that gets a section; None leaves it out.
        figures: what is drawn.
        options: further wishes for figures and tables; None takes the sweep's.

    Raises:
        UserError: there is nothing to report on.
    """
    report = report or _report_functions()
    large, rows = manifest is not None and len(manifest.points) > MOST_AT_ONCE, SummaryRows()
    if manifest is None:
        _check_unnamed(out)
    if not large:
        content = read_store(out)
        asked = [point.fingerprint for point in manifest.points] if manifest else list(content.records)
        write_summary(target or out, [content.records[name] for name in asked if name in content.records])
    try:
        more: dict[str, Any] = {"rows": rows} if large else {}
        if figures is not Figures.all:
            more["figures"] = figures
        options = options or options_of(manifest)
        if options != ReportConfig():
            more["options"] = options
        path = report.write_report(out, out=target, additions=_additions(kernels), **more)
        if large:
            rows.write(target or out)
        verdict = report.verdict_lines(out)
    except report.ReportError as error:
        raise UserError(str(error)) from error
    if manifest is not None and path.is_relative_to(out):
        write_manifest(out, with_report(manifest, out, path, verdict))
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


def _report_functions() -> ReportFunctions:
    from harness import report

    return report


def _additions(kernels: Path | None) -> list[Any]:
    if kernels is None:
        return []
    from harness.bench.kernels.section import kernel_section

    make = kernel_section(kernels)

    def with_warnings_printed(study: Any) -> Any:
        added = make(study)
        for line in added.warnings:
            remark(f"warning: {line}")
        return added

    return [with_warnings_printed]


def _report_if_outdated(out: Path, manifest: Manifest, report: ReportFunctions | None) -> None:
    """Write the report, unless the existing one was written from exactly these points and kernels."""
    known, kernels = known_manifest(out), kernels_of(out, manifest)
    if known is not None and known.report and same_sweep(known, manifest):
        path = out / known.report
        if path.exists() and path.stat().st_mtime_ns >= _newest_input(out, kernels):
            _say_report(path, known.verdict)
            return
    write_report(out, manifest, report, kernels=kernels, figures=figures_of(manifest))


def kernels_of(out: Path, manifest: Manifest | None) -> Path | None:
    """The run of `bench kernels` for a sweep's report: the one that the sweep names, or the one beside its results."""
    from harness.cost.timings import found_run

    named = _asked("report.kernels", manifest)
    if named is None:
        return found_run(out)
    return None if named == NO_KERNELS else Path(str(named)).expanduser()


def figures_of(manifest: Manifest | None) -> Figures:
    """What the sweep wants to be drawn (`report.figures`); all, where it does not say."""
    return Figures(str(_asked("report.figures", manifest) or Figures.all))


def options_of(manifest: Manifest | None) -> ReportConfig:
    """What the sweep wants of its figures and tables beside that (`report.paper`, `.serif`, `.latex`)."""
    given = ReportConfig()
    return ReportConfig(
        paper=Paper(str(_asked("report.paper", manifest) or given.paper)),
        serif=bool(_asked("report.serif", manifest)),
        latex=bool(_asked("report.latex", manifest)),
    )


def _asked(key: str, manifest: Manifest | None) -> object:
    """The value that a sweep's command gave to a key of its report; None where it gave none."""
    texts = [text for text in (manifest.overrides if manifest else ()) if text.startswith(f"{key}=")]
    return parse_override(texts[-1]).settings[0].value if texts else None


def known_manifest(out: Path) -> Manifest | None:
    """The store's manifest. None where it is missing or cannot be read, since a new one will replace it."""
    try:
        return read_manifest(out)
    except ForeignFileError:
        return None


def same_sweep(known: Manifest | None, manifest: Manifest) -> bool:
    """Whether two manifests ask for the same sweep. Their reports and verdicts may differ."""
    return known is not None and replace(known, report=None, verdict=()) == manifest


def _newest_input(out: Path, kernels: Path | None) -> int:
    files = [*out.glob("points/*/*.json")]
    if kernels is not None:
        files += [file for file in (kernels, kernels / "kernels.parquet") if file.is_file()]
    return max((file.stat().st_mtime_ns for file in files), default=0)


def _say_report(path: Path, verdict: Sequence[str]) -> None:
    for line in verdict:
        say(line)
    say(f"report: {path}")


def _say_failures(outcome: Outcome) -> None:
    for failed in outcome.failed[:MOST_LISTED]:
        say(shortened(f"  {failed.label}: {failed.error}\n    traceback: {failed.file}"))
    _say_more(len(outcome.failed))


def _say_more(failed: int) -> None:
    if failed > MOST_LISTED:
        say(f"  ... and {failed - MOST_LISTED:,} more, each with a failure.json in its folder under points/")


def show_problems(problems: Sequence[str], write: Callable[[str], None] = remark) -> None:
    """Print what was skipped in a store: the first few, and how many more there are."""
    for problem in problems[:MOST_LISTED]:
        write(shortened(problem))
    if len(problems) > MOST_LISTED:
        write(f"... and {len(problems) - MOST_LISTED:,} more; see: python -m harness doctor FOLDER")


def report_command(arguments: Arguments, report: ReportFunctions | None = None) -> int:
    """Write the report of a store again, from its records. `report` takes the place of `harness.report`."""
    _refuse_url("--out", arguments.flags.out)
    root, remote = opened_store(arguments.flags.store)
    target = Path(arguments.flags.out) if arguments.flags.out else None
    if _asks_for_a_figure(arguments):
        return _write_figure(arguments, root, target)
    manifest = _manifest(root)
    figures = Figures(arguments.flags.figures) if arguments.flags.figures else figures_of(manifest)
    kernels, options = _kernels(arguments.flags.kernels, root, manifest), options_of(manifest)
    options.paper = Paper(arguments.flags.paper) if arguments.flags.paper else options.paper
    options.serif |= arguments.flags.serif
    options.latex |= arguments.flags.latex
    write_report(root, manifest, report, target, kernels, figures, options)
    _summarise(root, arguments.flags.against, arguments.flags.markdown)
    if remote is not None and target is None:
        with exclusive(root), remote.writing(remark):
            say(f"sent to {remote.url}")
    return 0


def _asks_for_a_figure(arguments: Arguments) -> bool:
    """Whether `--x` is there.

    Raises:
        UserError: another option of the figure is there without it, or one of the report beside it.
    """
    flags = arguments.flags
    parts = {"--hue": flags.hue, "--col": flags.col, "--where": flags.where, "--metric": flags.metric}
    given = [name for name, value in parts.items() if value]
    if flags.x is None and given:
        raise UserError(f"{given[0]} needs --x KEY: the setting along the figure's x axis")
    report = {
        "--kernels": flags.kernels,
        "--against": flags.against,
        "--markdown": flags.markdown,
        "--figures": flags.figures,
        "--paper": flags.paper,
        "--serif": flags.serif or None,
        "--latex": flags.latex or None,
    }
    others = [name for name, value in report.items() if value is not None]
    if flags.x is not None and others:
        raise UserError(f"{others[0]} belongs to the whole report; --x writes one figure alone")
    return flags.x is not None


def _write_figure(arguments: Arguments, root: Path, target: Path | None) -> int:
    from harness.report import ReportError
    from harness.report.chosen_figure import FigureChoice, write_chosen_figure

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
        for path in write_chosen_figure(root, choice, out=target):
            say(f"figure: {path}")
    except ReportError as error:
        raise UserError(str(error)) from error
    return 0


def _summarise(root: Path, against: str | None, markdown: str | None) -> None:
    """Print what changed against another store, and append the answers to a Markdown file, where that is asked for."""
    if against is None and markdown is None:
        return
    from harness.report import ReportError
    from harness.report.summary import change_lines, summary_markdown

    other = None if against is None else opened_store(against)[0]
    try:
        for line in change_lines(root, other) if other else ():
            say(line)
        if markdown is not None:
            with Path(markdown).open("a", encoding="utf-8") as file:
                file.write(summary_markdown(root, other))
    except ReportError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"--markdown: cannot write '{markdown}': {error.strerror or error}") from error


def _kernels(named: str | None, root: Path, manifest: Manifest | None) -> Path | None:
    """The run of `bench kernels` that gets a section: the one named here, or else the one of the sweep."""
    if named is None:
        return kernels_of(root, manifest)
    errors = list(check_kernels("report.kernels", named))
    if errors:
        raise UserError(f"--kernels: {errors[0].message}")
    return None if named == NO_KERNELS else Path(named).expanduser()


def status_command(arguments: Arguments) -> int:
    """Print which points of a store are done, which failed and where the traceback is, and which are left."""
    root, _ = opened_store(arguments.flags.store)
    manifest, content = _manifest(root), survey(root)
    show_problems(content.problems, say)
    if manifest is None:
        done, failed = numbered(len(content.records), "point"), len(content.failures)
        say(f"{shown(root)}: {done} done, {failed} failed; no sweep.json that says of which sweep")
        return 0
    _say_status(root, manifest, content)
    return 0


def _say_status(root: Path, manifest: Manifest, content: StoreContent) -> None:
    names = [point.fingerprint for point in manifest.points]
    done = [name for name in names if name in content.records]
    failed = [point for point in manifest.points if _has_failed(point.fingerprint, content)]
    left = len(names) - len(done) - len(failed)
    say(f"{shown(root)}: sweep '{manifest.name}', {len(done)} of {len(names)} points done")
    if failed:
        say(f"{len(failed)} failed:")
    for point in failed[:MOST_LISTED]:
        failure = content.failures[point.fingerprint]
        say(shortened(f"  {failure.get('label', ' '.join(point.overrides))}: {failure.get('error')}"))
        say(f"    traceback: {Layout(root).failure(point.fingerprint)}")
    _say_more(len(failed))
    if left or failed:
        say(f"{left} not run yet. Go on with: {command_for(root, manifest)}")
    others = len(content.records) - len(done)
    if others:
        say(f"{numbered(others, 'other point')} of earlier sweeps kept in the same folder")
    if manifest.report:
        say(f"report: {root / manifest.report}")


def command_for(root: Path, manifest: Manifest) -> str:
    """The command that goes on with a store where it lies now, which may be a copy of where it was written."""
    recorded = [text.partition("=")[2] for text in manifest.overrides if text.startswith("out=")]
    written = parse_override(f"out={recorded[-1]}").settings[0].value if recorded else RunConfig().out
    here = shown(root) if is_url(str(written)) else root.resolve()
    if (
        str(written).rstrip("/") if is_url(str(written)) else Path(str(written)).expanduser().resolve()
    ) == here:
        return manifest.command
    words = [word for word in shlex.split(manifest.command) if not word.startswith("out=")]
    return shlex.join([*words, f"out={quoted(shown(root))}"])


def _has_failed(name: str, content: StoreContent) -> bool:
    return name in content.failures and name not in content.records


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


def _refuse_url(option: str, value: str | None) -> None:
    if value is not None and is_url(value):
        raise UserError(
            f"{option} {value}: name a folder; only the store of a sweep may lie on object storage"
        )


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


def _manifest(root: Path) -> Manifest | None:
    try:
        return read_manifest(root)
    except ForeignFileError as error:
        remark(f"skipped {error}")
        return None
