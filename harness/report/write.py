"""Writing the report: the page, and every figure as SVG, PDF and CSV beside it."""

import csv
import io
import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.schema import Figures, ReportConfig
from harness.report import verdict_text
from harness.report.axes import POLICY, VALUES, Axes, comparison_lines, find_axes, point_cells
from harness.report.page import ExtraSection, SectionMaker, build_page
from harness.report.paper import WIDTHS_IN, latex_of_csv, latex_table, panel_files
from harness.report.study import EveryRecord, Record, ReportError, Study, asked_points, read_study
from harness.report.style import Drawing, Missing, Picture, pdf_bytes, style, svg_bytes
from harness.store.atomic import growing, write_files
from harness.store.errors import StoreError
from harness.store.summary import SummaryRows
from harness.store.survey import keep_survey
from harness.workers import in_workers

if TYPE_CHECKING:
    import pandas as pd


PAGE, PAPER = "index.html", "paper"
LONG, WIDE = (
    "points.csv",
    "points_wide.csv",
)  # a line for each point and metric; of a large sweep one for each point
_SUFFIXES = (".svg", ".pdf", ".csv", ".tex")
_PANEL_ENDS = tuple(f"-{width.value}" for width in WIDTHS_IN)
_MOST_CURVES = 6
_PART = 1000  # points that are read at a time
_WORTH_WORKERS = 5  # parts; of fewer, processes would take longer to start than they save
_MOST_WORKERS = 8  # processes that read points; each takes some 0.3 GB
FIGURES = (
    *("errors", "agreement", "memory", "pool_over_time", "kernel"),
    *("levels", "tradeoff", "heat", "waste"),
)
"""The figures that every page has a place for, as their modules name them."""


def write_report(
    store_root: Path,
    *,
    out: Path | None = None,
    additions: Sequence[SectionMaker] = (),
    rows: SummaryRows | None = None,
    figures: Figures = Figures.all,
    options: ReportConfig | None = None,
) -> Path:
    """Write the report of a store to `out` (default: the store's folder `report`); returns the page's path.

    `additions` make further sections, which other packages provide. `rows` gets the row of every point of a sweep
    that is too large to be shown whole; its records are read in several processes. `figures` says what is drawn;
    without any, matplotlib is not imported. `options` has the further wishes of `report.…`: panels for a paper, serifs,
    tables in LaTeX.

    The page needs no other file and no network. The folder `figures` beside it holds each figure as SVG, as PDF at the
    width of a page, and its data as CSV. Equal stores give equal bytes.

    Raises:
        ReportError: the store has no point, or the report cannot be written. An earlier report then stays.
        StoreVersionError: a file was written by another version of PageTwin.
    """
    study = read_study(store_root, shown_only=rows is not None)
    folder = out or store_root / "report"
    try:
        return _write(study, folder, additions, rows, replace(options or ReportConfig(), figures=figures))
    except StoreError as error:
        raise _unwritable(folder, error) from error


def _write(
    study: Study,
    folder: Path,
    additions: Sequence[SectionMaker],
    rows: SummaryRows | None,
    options: ReportConfig,
) -> Path:
    axes = find_axes(study.records)
    pictures, added, files, panels = _drawn(study, axes, additions, options)
    streamed = study.is_thinned or rows is not None
    if not streamed:
        files[LONG] = _points_csv(study.records, axes)
        if options.latex:
            files["points.tex"] = latex_of_csv(files[LONG])
    svgs = {name: files[f"{name}.svg"] for name, picture in pictures.items() if isinstance(picture, Drawing)}
    write_files(folder / "figures", files)
    if streamed:
        rows = SummaryRows() if rows is None else rows
        study = _write_points(study, axes, folder / "figures", rows, keep=folder == study.root / "report")
    verdict_text.remember(study)
    text = build_page(study, axes, pictures, svgs, added)
    write_files(folder, {PAGE: text.encode()})
    _remove_old_figures(folder / "figures", {*pictures}, files)
    if panels:
        write_files(folder / "figures" / PAPER, panels)
    if (folder / "figures" / PAPER).is_dir():
        _remove_old_panels(folder / "figures" / PAPER, panels)
    return folder / PAGE


def _drawn(
    study: Study, axes: Axes, additions: Sequence[SectionMaker], options: ReportConfig
) -> tuple[dict[str, Picture], list[ExtraSection], dict[str, bytes], dict[str, bytes]]:
    """The pictures by name, the sections of other packages, the files of the pictures, and those of single panels."""
    figures, panels = options.figures, dict[str, bytes]()
    if figures is Figures.none and not additions:
        return _not_drawn(), [], {}, {}
    with style(serif=options.serif):
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
            for name, data in _figure_files(picture, pdf=pdf, latex=options.latex).items()
        }
        for picture in pictures.values():
            if isinstance(picture, Drawing):
                panels |= panel_files(picture, options.paper, pdf=pdf)
    return pictures, added, files, panels


def _not_drawn() -> dict[str, Picture]:
    return {name: _missing(name) for name in FIGURES}


def _missing(name: str) -> Missing:
    return Missing(
        name, "Not drawn (report.figures=none). To draw it: python -m harness report FOLDER --figures all"
    )


def _rows_of(part: tuple[EveryRecord, Axes]) -> tuple[list[Sequence[str]], list[bytes], EveryRecord]:
    """Columns of settings, rows of the summary, and what was found while the points were read."""
    every, axes = part
    cells, rows = [], SummaryRows()
    for stored, record in every:
        cells.append(point_cells(record, axes))
        rows.add(dict(stored))
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
            figures = {
                name: table[name] for name in table.column_names if _is_figure(table.schema.field(name))
            }
            own = heads.slice(place, table.num_rows)
            place += table.num_rows
            whole = pa.table([*own.columns, *figures.values()], [*own.column_names, *map(_plain, figures)])
            writer = writer or CSVWriter(file.buffer, whole.schema)
            writer.write_table(whole)


def _is_figure(column: Any) -> bool:
    section, _, name = column.name.partition(".")
    return section == "comparison" and name.rpartition(".")[2] in VALUES and str(column.type) != "null"


def _plain(column: str) -> str:
    return column.removeprefix("comparison.").removesuffix(".simulated")


def _figure_files(picture: Picture, *, pdf: bool = True, latex: bool = False) -> dict[str, bytes]:
    if not isinstance(picture, Drawing):
        return {}
    files = {f"{picture.name}.svg": svg_bytes(picture.figure, picture.name)}
    if pdf:  # its fonts take as long as the rest of the drawing
        files[f"{picture.name}.pdf"] = pdf_bytes(picture.figure)
    if latex:
        files[f"{picture.name}.tex"] = latex_table(picture.data)
    return {**files, f"{picture.name}.csv": _csv_bytes(picture.data)}


def write_figure_files(folder: Path, drawing: Drawing) -> list[Path]:
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
        ours = path.stem in names or path.stem.startswith(("curve_", "kernel_"))
        if (ours or path.name == "points.tex") and path.suffix in _SUFFIXES and path.name not in files:
            path.unlink()


def _remove_old_panels(folder: Path, files: Container[str]) -> None:
    """Remove panels of an earlier report, and the folder if nothing is left in it."""
    for path in folder.iterdir():
        if path.stem.endswith(_PANEL_ENDS) and path.suffix in _SUFFIXES and path.name not in files:
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _pictures(study: Study, axes: Axes) -> Iterator[tuple[str, Picture]]:
    from harness.report.figures import (
        agreement,
        causes,
        curves,
        errors,
        heat,
        hits,
        kernel,
        levels,
        memory,
        timeline,
        tradeoff,
        waste,
    )

    draws: tuple[Callable[[Study, Axes], Picture], ...] = (
        errors.draw,
        agreement.draw,
        memory.draw,
        timeline.draw,
        kernel.draw,
        levels.draw,
        tradeoff.draw,
        heat.draw,
        waste.draw,
        causes.draw,
        causes.draw_over_time,
        hits.draw,
    )
    for draw in draws:
        picture = draw(study, axes)
        yield picture.name, picture
    for key in axes.numeric[:_MOST_CURVES]:
        picture = curves.draw(study, axes, curves.layout_of(axes, key))
        yield picture.name, picture


def _points_csv(records: Sequence[Record], axes: Axes) -> bytes:
    """All metrics of all points."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["point", POLICY, *axes.values, "metric", "unit", *VALUES])
    for record in records:
        lines.writerows(comparison_lines(record, axes))
    return text.getvalue().encode()


def _csv_bytes(table: "pd.DataFrame") -> bytes:
    return table.to_csv(index=False, float_format="%.9g", lineterminator="\n").encode()
