"""Figures and tables as a paper takes them: each panel in a file of its own, as wide as a column, and tables in LaTeX.

Use it after the figure itself was written: a figure is taken apart here.
"""

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from harness.config.schema import Paper
from harness.report.style import Drawing, pdf_bytes, svg_bytes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTHS_IN = {Paper.column: 3.33, Paper.page: 7.0}
"""Inches of one column and of both, as conferences with two columns have them."""

_LEAST_HEIGHT_IN, _LEGEND_IN = 2.2, 0.5
_LONG = 40  # rows; a longer table may break over pages
_SIGNS = {
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "×": r"$\times$",
    "−": "$-$",
    "µ": r"\textmu{}",
    "±": r"$\pm$",
    "…": r"\dots{}",
}


def panel_files(drawing: Drawing, paper: Paper, *, pdf: bool = True) -> dict[str, bytes]:
    """Each panel of a figure as SVG and PDF, `NAME-1-column.svg` and so on; call under `style()`.

    A panel that has no title or axis label of its own, because a neighbour has it, gets the neighbour's.
    """
    widths = [width for width in WIDTHS_IN if paper in (width, Paper.both)]
    files: dict[str, bytes] = {}
    for number, height in _panel_by_panel(drawing.figure) if widths else ():
        for width in widths:
            name = f"{drawing.name}-{number}-{width.value}"
            drawing.figure.set_layout_engine("constrained")
            drawing.figure.set_size_inches(WIDTHS_IN[width], height)
            _fit_legends(drawing.figure)
            files[f"{name}.svg"] = svg_bytes(drawing.figure, name, outlines=True)
            if pdf:
                files[f"{name}.pdf"] = pdf_bytes(drawing.figure)
    return files


def _panel_by_panel(figure: "Figure") -> Iterator[tuple[int, float]]:
    """Leave one panel after the other in the figure; its number and a height for it, in inches."""
    from matplotlib.gridspec import GridSpec

    bars = {axes for axes in figure.axes if axes.get_label() == "<colorbar>"}
    shown = [axes for axes in figure.axes if axes not in bars and axes.get_visible() and axes.axison]
    _complete(shown)
    whole = float(figure.get_size_inches()[1])
    labels = [label for axes in shown for label in (axes.xaxis.label, axes.yaxis.label, axes.title)]
    for text in (*figure.texts, *labels):
        text.set_wrap(True)
    every = list(figure.axes)
    for axes in every:
        figure.delaxes(axes)
    for number, panel in enumerate(shown, start=1):
        spec = panel.get_subplotspec()
        rows = spec.get_topmost_subplotspec().get_gridspec().nrows if spec else 1
        own = [axes for axes in every if axes in bars and panel in axes._colorbar_info["parents"]]  # type: ignore[attr-defined]
        places = GridSpec(1, 1 + len(own), figure=figure, width_ratios=[1, *[0.05] * len(own)])
        for place, axes in enumerate((panel, *own)):
            axes.set_subplotspec(places[place])
            figure.add_axes(axes)
        yield number, max(_LEAST_HEIGHT_IN, whole / rows + _LEGEND_IN)
        for axes in (panel, *own):
            figure.delaxes(axes)


def _complete(panels: "Sequence[Axes]") -> None:
    """Give each panel the labels and the title that only the outermost ones of a grid have."""
    specs = [(panel, panel.get_subplotspec()) for panel in panels]
    placed = [(panel, spec.get_topmost_subplotspec()) for panel, spec in specs if spec is not None]
    for panel, spec in placed:
        column = [other for other, its in placed if its.colspan == spec.colspan]
        row = [other for other, its in placed if its.rowspan == spec.rowspan]
        panel.set_xlabel(
            panel.get_xlabel() or next(filter(None, (one.get_xlabel() for one in column[::-1])), "")
        )
        panel.set_ylabel(panel.get_ylabel() or next(filter(None, (one.get_ylabel() for one in row)), ""))
        panel.set_title(panel.get_title() or next(filter(None, (one.get_title() for one in column)), ""))


def _fit_legends(figure: "Figure") -> None:
    """Set the figure's legends in as many columns as its width has room for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    for legend in list(figure.legends):
        handles = [handle for handle in legend.legend_handles if handle is not None]
        labels = [text.get_text() for text in legend.get_texts()]
        legend.remove()
        for columns in range(min(4, len(labels)), 0, -1):
            fitted = figure.legend(handles, labels, loc="outside upper center", ncols=columns)
            if columns == 1 or fitted.get_window_extent(renderer).width <= figure.bbox.width:
                break
            fitted.remove()


def latex_table(table: "pd.DataFrame") -> bytes:
    """The table in LaTeX with the rules of booktabs; more than 40 rows as a longtable, which may break over pages."""
    long = len(table) > _LONG
    text = table.to_latex(index=False, escape=True, na_rep="--", float_format="%.6g", longtable=long)
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    packages = "booktabs, longtable" if long else "booktabs"
    return f"% \\usepackage{{{packages}}}\n{text}".encode()


def latex_of_csv(data: bytes) -> bytes:
    """The same of a table that is written as CSV."""
    import pandas as pd

    return latex_table(pd.read_csv(io.BytesIO(data)))
