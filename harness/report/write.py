"""Writing the report: the page, and every figure as SVG, PDF and CSV beside it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.report.axes import Axes, find_axes
from harness.report.drawing import Drawing, Picture
from harness.report.errors import ReportError
from harness.report.page import build_page
from harness.report.study import Study, read_study
from harness.report.style import pdf_bytes, style, svg_bytes
from harness.report.table import comparison_table

if TYPE_CHECKING:
    import pandas as pd

_MOST_CURVES = 6


def write_report(store_root: Path, *, out: Path | None = None) -> Path:
    """Write the report on a store to `out` (default: the store's folder `report`) and give the page's path.

    The page needs no other file and no network; `figures/` beside it holds each figure as SVG, as PDF at paper
    column width, and its data as CSV. Equal stores give equal bytes.

    Raises:
        ReportError: the store has no point, or the report cannot be written.
        StoreVersionError: a file was written by another version of PageTwin.
    """
    study = read_study(store_root)
    folder = out or store_root / "report"
    try:
        return _write(study, folder)
    except OSError as error:
        raise ReportError(f"cannot write the report to {folder}: {error.strerror or error}") from error


def _write(study: Study, folder: Path) -> Path:
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    axes, svgs = find_axes(study.records), {}
    with style():
        pictures = dict(_pictures(study, axes))
        for name, picture in pictures.items():
            if isinstance(picture, Drawing):
                svgs[name] = svg_bytes(picture.figure, name)
                (figures / f"{name}.svg").write_bytes(svgs[name])
                (figures / f"{name}.pdf").write_bytes(pdf_bytes(picture.figure))
                _write_csv(figures / f"{name}.csv", picture.data)
    _write_csv(figures / "points.csv", comparison_table(study.records, axes))
    page = folder / "index.html"
    page.write_text(build_page(study, axes, pictures, svgs), encoding="utf-8")
    return page


def _pictures(study: Study, axes: Axes) -> Iterator[tuple[str, Picture]]:
    from harness.report.figures import agreement, curves, errors, kernel, levels, memory, timeline

    draws: tuple[Callable[[Study, Axes], Picture], ...] = (
        errors.draw,
        agreement.draw,
        memory.draw,
        timeline.draw,
        kernel.draw,
        levels.draw,
    )
    for draw in draws:
        picture = draw(study, axes)
        yield picture.name, picture
    for key in axes.numeric[:_MOST_CURVES]:
        picture = curves.draw(study, axes, key)
        yield picture.name, picture


def _write_csv(path: Path, table: "pd.DataFrame") -> None:
    table.to_csv(path, index=False, float_format="%.9g", lineterminator="\n")
