"""Writing the report: the page, and every figure as SVG, PDF and CSV beside it.

Or one figure whose axes the user chooses: `report --x cache.block_size --hue decoding.beam_width --where ...`.
"""

import csv
import io
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from harness.config.schema import Figures, ReportConfig
from harness.metrics import METRICS
from harness.metrics.record import PointRecord
from harness.report import style, tables
from harness.report.axes import BLOCK, POLICY, VALUES, Axes, comparison_lines, find_axes, point_cells
from harness.report.figures import curves, errors, memory
from harness.report.page import Section, SectionMaker, build_page
from harness.report.study import EveryRecord, ReportError, Study, asked_points, read_study
from harness.report.verdict_text import console_lines, judged, thinned
from harness.store import StoreError
from harness.store.atomic import growing, write_files
from harness.store.summary import SummaryRows
from harness.store.survey import keep_survey
from harness.workers import in_workers

PAGE, PAPER = "index.html", "paper"
# a line for each point and metric; of a large sweep one for each point
LONG, WIDE = "points.csv", "points_wide.csv"
_SUFFIXES = (".svg", ".pdf", ".csv", ".tex")
_PANEL_ENDS = tuple(f"-{width.value}" for width in style.WIDTHS_IN)
_MOST_CURVES = 6
_PART = 1000  # points that are read at a time
_WORTH_WORKERS = 5  # parts; of fewer, processes would take longer to start than they save
_MOST_WORKERS = 8  # processes that read points; each takes some 0.3 GB
# The figures that every page has a place for, by name.
FIGURES: Mapping[str, Callable[[Study, Axes], style.Picture]] = {
    "overview": curves.draw_overview,
    "overview_narrow": partial(curves.draw_overview, narrow=True),
    "errors": errors.draw_errors,
    "agreement": errors.draw_agreement,
    "memory": memory.draw_memory,
    "pool_over_time": memory.draw_pool,
    "kernel": curves.draw_kernel,
    "levels": errors.draw_levels,
    "tradeoff": curves.draw_tradeoff,
    "heat": curves.draw_heat,
    "waste": memory.draw_waste,
}
_WHERE_KNOWN = (memory.draw_causes, memory.draw_groups, memory.draw_hits)


def write_report(
    store_root: Path,
    *,
    out: Path | None = None,
    additions: Sequence[SectionMaker] = (),
    rows: SummaryRows | None = None,
    options: ReportConfig | None = None,
    tell: Callable[[str], None] | None = None,
) -> Path:
    """Write the report of a store to `out` (default: the store's folder `report`); returns the page's path.

    `additions` make further sections, which other packages provide. `rows` gets the row of every point of a sweep
    that is too large to be shown whole; its records are read in several processes. `options` has the wishes of
    `report.…`: what is drawn (matplotlib is imported for figures alone), panels for a paper, serifs, tables in LaTeX.
    `tell` hears the verdict, line by line.

    The page needs no other file and no network. The folder `figures` beside it holds each figure as SVG, as PDF at the
    width of a page, and its data as CSV. Equal stores give equal bytes.

    Raises:
        ReportError: the store has no point, or the report cannot be written. An earlier report then stays.
        StoreVersionError: a file was written by another version of PageTwin.
    """
    study = read_study(store_root, shown_only=rows is not None)
    folder = out or store_root / "report"
    try:
        study = _write(study, folder, additions, rows, options or ReportConfig())
    except StoreError as error:
        raise _unwritable(folder, error) from error
    if tell is not None:
        for line in console_lines(study):
            tell(line)
    return folder / PAGE


def _write(
    study: Study,
    folder: Path,
    additions: Sequence[SectionMaker],
    rows: SummaryRows | None,
    options: ReportConfig,
) -> Study:
    """Write all files; returns the study with what was found in points that are not shown."""
    axes = find_axes(study.records)
    pictures, added, files, panels = _drawn(study, axes, additions, options)
    if options.latex:
        files |= tables.latex_files(study.records, axes, judged(study))
    streamed = study.is_thinned or rows is not None
    if not streamed:
        files[LONG] = _points_csv(study.records, axes)
    svgs = {
        name: files[f"{name}.svg"] for name, picture in pictures.items() if isinstance(picture, style.Drawing)
    }
    write_files(folder / "figures", files)
    if streamed:
        rows = SummaryRows() if rows is None else rows
        study = _write_points(study, axes, folder / "figures", rows, keep=folder == study.root / "report")
    text = build_page(study, axes, pictures, svgs, added, pdf=options.figures is Figures.all)
    write_files(folder, {PAGE: text.encode()})
    _remove_old_figures(folder / "figures", {*pictures}, files)
    if panels:
        write_files(folder / "figures" / PAPER, panels)
    if (folder / "figures" / PAPER).is_dir():
        _remove_old_panels(folder / "figures" / PAPER, panels)
    return study


def _drawn(
    study: Study, axes: Axes, additions: Sequence[SectionMaker], options: ReportConfig
) -> tuple[dict[str, style.Picture], list[Section], dict[str, bytes], dict[str, bytes]]:
    """The pictures by name, the sections of other packages, the files of the pictures, and those of single panels."""
    figures, panels = options.figures, dict[str, bytes]()
    if figures is Figures.none and not additions:
        return _not_drawn(), [], {}, {}
    with style.style(serif=options.serif):
        added = [make(study) for make in additions]
        if figures is Figures.none:
            added = [
                replace(one, pictures=[_missing(picture.name) for picture in one.pictures]) for one in added
            ]
        pictures = _not_drawn() if figures is Figures.none else dict(_pictures(study, axes))
        pictures |= {picture.name: picture for one in added for picture in one.pictures}
        pdf = figures is Figures.all
        files = {
            name: data
            for picture in pictures.values()
            for name, data in _figure_files(picture, pdf=pdf).items()
        }
        for picture in pictures.values():
            if isinstance(picture, style.Drawing):
                panels |= style.panel_files(picture, options.paper, pdf=pdf)
    return pictures, added, files, panels


def _not_drawn() -> dict[str, style.Picture]:
    return {name: _missing(name) for name in FIGURES}


def _missing(name: str) -> style.Missing:
    return style.Missing(
        name, "Not drawn (report.figures=none). To draw it: python -m harness report FOLDER --figures all"
    )


def _rows_of(part: tuple[EveryRecord, Axes]) -> tuple[list[Sequence[str]], list[bytes], EveryRecord]:
    """Columns of settings, rows of the summary, and what was found while the points were read."""
    every, axes = part
    cells, rows = [], SummaryRows()
    for stored, record in every:
        cells.append(point_cells(record, axes))
        rows.add(stored)
    return list(zip(*cells, strict=True)), rows.parts(), replace(every, asked={})


def _write_points(study: Study, axes: Axes, folder: Path, rows: SummaryRows, *, keep: bool) -> Study:
    """Write `points_wide.csv` of all points; returns the study with what was found in them.

    Many points are read in several processes. `rows` gets the row of every point. With `keep` the store gets what a
    survey of it needs.
    """
    import pyarrow as pa

    asked = list(asked_points(study).items())
    parts = [
        (EveryRecord(study.root, dict(asked[first : first + _PART])), axes)
        for first in range(0, len(asked), _PART)
    ]
    workers = min(os.cpu_count() or 1, _MOST_WORKERS) if len(parts) >= _WORTH_WORKERS else 1
    all_found = EveryRecord(study.root, {})
    names = ["point", POLICY, *axes.values]
    heads = [pa.table({name: pa.array([], pa.string()) for name in names})]
    for columns, packed, found in in_workers(_rows_of, parts, workers):
        heads += [pa.table([pa.array(each, pa.string()) for each in columns], names)] if columns else []
        all_found.add(found)
        for part in packed:
            rows.add_part(part)
    _write_wide(folder, pa.concat_tables(heads), rows)
    if keep:
        keep_survey(study.root, all_found.seen)
    return all_found.corrected(study)


def _write_wide(folder: Path, heads: Any, rows: SummaryRows) -> None:
    """One line for each point: its settings, and a column for each figure that any point has.

    The column of a predicted figure has the name of its metric, any other `METRIC.SIDE`.
    """
    import pyarrow as pa
    from pyarrow.csv import CSVWriter

    place, writer = 0, None
    with growing(folder, WIDE) as file:
        for table in rows.tables():
            figures = {one: table[one] for one in table.column_names if _is_figure(table.schema.field(one))}
            own = heads.slice(place, table.num_rows)
            place += table.num_rows
            names = (each.removeprefix("comparison.").removesuffix(".simulated") for each in figures)
            whole = pa.table([*own.columns, *figures.values()], [*own.column_names, *names])
            writer = writer or CSVWriter(file.buffer, whole.schema)
            writer.write_table(whole)


def _is_figure(column: Any) -> bool:
    section, _, name = column.name.partition(".")
    return section == "comparison" and name.rpartition(".")[2] in VALUES and str(column.type) != "null"


def _figure_files(picture: style.Picture, *, pdf: bool = True) -> dict[str, bytes]:
    return style.drawing_files(picture, pdf=pdf) if isinstance(picture, style.Drawing) else {}


def write_figure_files(folder: Path, drawing: style.Drawing) -> list[Path]:
    """Write one figure as SVG, PDF and CSV; call under `style()`. Returns the files.

    Raises:
        ReportError: the folder cannot be written.
    """
    files = _figure_files(drawing)
    try:
        write_files(folder, files)
    except StoreError as error:
        raise _unwritable(folder, error) from error
    return [folder / name for name in files]


def _unwritable(folder: Path, error: StoreError) -> ReportError:
    cause = error.__cause__
    reason = cause.strerror if isinstance(cause, OSError) else None
    return ReportError(f"cannot write the report to {folder}: {reason or error}")


def _remove_old_figures(folder: Path, names: Container[str], files: Container[str]) -> None:
    """Remove figures of an earlier report that this one does not have. Files of other names stay."""
    (folder / (WIDE if LONG in files else LONG)).unlink(missing_ok=True)
    for path in folder.iterdir():
        ours = path.stem in names or path.stem.startswith(("curve_", "kernel_")) or path.name in tables.LATEX
        if ours and path.suffix in _SUFFIXES and path.name not in files:
            path.unlink()


def _remove_old_panels(folder: Path, files: Container[str]) -> None:
    """Remove panels of an earlier report, and the folder if nothing is left in it."""
    for path in folder.iterdir():
        if path.stem.endswith(_PANEL_ENDS) and path.suffix in _SUFFIXES and path.name not in files:
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _pictures(study: Study, axes: Axes) -> Iterator[tuple[str, style.Picture]]:
    for draw in (*FIGURES.values(), *_WHERE_KNOWN):
        picture = draw(study, axes)
        yield picture.name, picture
    for key in axes.numeric[:_MOST_CURVES]:
        picture = curves.draw(study, axes, curves.layout_of(axes, key))
        yield picture.name, picture


def _points_csv(records: Sequence[PointRecord], axes: Axes) -> bytes:
    """All metrics of all points."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["point", POLICY, *axes.values, "metric", "unit", *VALUES])
    for record in records:
        lines.writerows(comparison_lines(record, axes))
    return text.getvalue().encode()


_POLICIES = (POLICY, "cache")  # every policy has a line of its own already


@dataclass(frozen=True)
class FigureChoice:
    """What a figure shows.

    Attributes:
        x: swept setting along x; it needs two numbers at least.
        hue: swept setting whose values are lines; None draws one line.
        col: swept setting whose values are columns of panels; None draws one column.
        where: values at which settings are held, as text. A swept setting that is neither named here nor drawn
            is held at its middle value, and the caption says so.
        metrics: rows of panels, by name.
    """

    x: str
    hue: str | None = None
    col: str | None = None
    where: Mapping[str, str] = field(default_factory=dict)
    metrics: Sequence[str] = curves.SHOWN

    @property
    def name(self) -> str:
        """The file name without suffix; two different choices have two names."""
        parts = [self.x, *(f"{key}" for key in (self.hue, self.col) if key)]
        parts += [f"{key}={value}" for key, value in self.where.items()]
        parts += () if tuple(self.metrics) == curves.SHOWN else self.metrics
        return "chosen_" + "".join(one if one.isalnum() or one in "=-_" else "_" for one in "_".join(parts))


def write_chosen_figure(
    store_root: Path, choice: FigureChoice, *, out: Path | None = None, tell: Callable[[str], None] | None = None
) -> list[Path]:  # fmt: skip
    """Draw one figure and write it as SVG, PDF and CSV into `figures` of the report's folder; returns the files.

    The report itself stays as it is. `tell` hears the caption, which says what is held, and of how many points it is.

    Raises:
        ReportError: a setting is not swept or a metric is unknown (the message lists what is allowed), no point fits
            `where`, or the files cannot be written.
    """
    study = read_study(store_root, where=[f"{key}={value}" for key, value in choice.where.items()])
    chosen, axes = _check_choice(study, choice)
    layout = curves.FacetLayout(choice.x, choice.hue, choice.col, tuple(choice.metrics))
    if layout.hue in _POLICIES:
        layout = replace(layout, hue=None)
    with style.style():
        picture = curves.draw(chosen, axes, layout, name=choice.name)
        if isinstance(picture, style.Missing):
            raise ReportError(f"--x {choice.x}: {picture.reason}")
        held = ", ".join(f"{key}={value}" for key, value in choice.where.items())
        caption = picture.caption + (f" Chosen: {held}." if held else "")
        named = style.Drawing(picture.name, caption, picture.figure, picture.data)
        if tell is not None:
            for line in (*thinned(study), caption):
                tell(line)
        return write_figure_files((out or store_root / "report") / "figures", named)


def _check_choice(study: Study, choice: FigureChoice) -> tuple[Study, Axes]:
    """The study with the points that fit `where`, and its axes.

    Raises:
        ReportError: a part of the choice does not fit the store.
    """
    whole = find_axes(study.records)
    _check_metrics(choice.metrics)
    if choice.x not in whole.numeric:
        raise ReportError(f"--x: '{choice.x}' is no swept number here; {_allowed(whole.numeric)}")
    for option, key in (("--hue", choice.hue), ("--col", choice.col)):
        allowed = [other for other in whole.values if other != choice.x]
        if key is not None and key not in allowed and not (option == "--hue" and key in _POLICIES):
            raise ReportError(f"{option}: '{key}' is not swept here or drawn already; {_allowed(allowed)}")
    if choice.hue is not None and choice.hue == choice.col:
        raise ReportError(f"--hue and --col are both '{choice.hue}'; name two settings")
    for key in choice.where:
        if key in (choice.x, choice.hue, choice.col):
            raise ReportError(f"--where: '{key}' is drawn already; leave it out of --x, --hue and --col")
    records = _matching(study.records, choice.where, whole, choice.x)
    axes = find_axes(records)
    drawn = [key for key in (choice.x, choice.hue, choice.col) if key and key not in _POLICIES]
    gone = [key for key in drawn if key not in axes.values]
    if gone:
        held = " ".join(f"{key}={value}" for key, value in choice.where.items())
        reason = f"--where {held}: '{gone[0]}' has one value at these points; nothing to draw along it"
        raise ReportError(reason)
    return replace(study, records=tuple(records)), axes


def _check_metrics(metrics: Sequence[str]) -> None:
    for name in metrics:
        if name not in METRICS:
            close = get_close_matches(name, METRICS, n=3, cutoff=0.4)
            hint = f"did you mean {', '.join(close)}?" if close else f"known are {', '.join(METRICS)}"
            raise ReportError(f"--metric: no metric is called '{name}'; {hint}")
    if not metrics:
        raise ReportError("--metric: name at least one metric")


def _matching(
    records: Sequence[PointRecord], where: Mapping[str, str], axes: Axes, x: str
) -> list[PointRecord]:
    """The points that have the values of `where`.

    A policy without blocks has no block size of its own, so its points stay whatever `where` says of the block size.
    """
    found = list(records)
    main = curves.main_policy([record for record in records if record.setting(x) is not None], x)
    for key, text in where.items():
        aim = POLICY if key in _POLICIES else key
        known = list(dict.fromkeys(str(record.setting(aim)) for record in records))
        if aim != POLICY and aim not in axes.values:
            raise ReportError(f"--where: '{key}' is not swept here; {_allowed([POLICY, *axes.values])}")
        if text not in known:
            raise ReportError(f"--where: no point has {key}={text}; {_allowed(known)}")
        found = [
            record
            for record in found
            if str(record.setting(aim)) == text or (aim == BLOCK and record.policy != main)
        ]
    if not found:
        raise ReportError(f"--where: no point has all of {', '.join(f'{k}={v}' for k, v in where.items())}")
    return found


def _allowed(names: Sequence[str]) -> str:
    return f"allowed are {', '.join(names)}" if names else "nothing is swept in this store"
