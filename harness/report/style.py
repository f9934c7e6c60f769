"""The style of figures, and their way into the page.

Paper column widths, 8 pt, a colour-blind palette. The bytes of a figure depend on its data alone. `Drawing` is what a
figure module returns; `Missing` says why there is none.

For a paper each panel is written to a file of its own, as wide as a column, and tables in LaTeX. That comes after the
figure itself was written: it is taken apart.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.schema import Paper

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Width of one column of a two-column paper, inches.
COLUMN_IN = 3.5

# Width of both columns, inches.
PAGE_IN = 7.16

# seaborn's "colorblind" palette, by name, so that a setting keeps its colour from figure to figure
PALETTE = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#949494")
GREY = "#6f6f6f"
WARNING = "#a8201a"

# The most marks that a drawing holds one by one, at some 100 bytes each in a page; more become a picture of dots.
MOST_DRAWN_MARKS = 600

# Neighbours in a stack differ in lightness too, so that they can be told apart in grey and with red-green blindness.
STATE_COLOURS: Mapping[str, str] = {
    "token": "#0173b2",
    "cached": "#8ec7e8",
    "reserved": "#004d3a",
    "internal": "#ee8833",
    "external": "#8a3a6e",
    "free": "#ececec",
}

RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same layout on every machine
    # the first ships with matplotlib, all are as wide
    "font.serif": ["STIXGeneral", "Times New Roman", "Liberation Serif"],
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": "#444444",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "text.parse_math": False,  # a name may hold dollars
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}
_PROLOGUE = re.compile(r"^.*?(?=<svg\b)", re.DOTALL)
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_NAMES = re.compile(r'(\bid="|href="#|url\(#)')
_SIZE = re.compile(r'(<svg\b[^>]*?)\s+width="[^"]*"', re.DOTALL)
_HEIGHT = re.compile(r'(<svg\b[^>]*?)\s+height="[^"]*"', re.DOTALL)


def new_figure(width_in: float, height_in: float) -> "Figure":
    """An empty figure outside pyplot's global state; call under `style()`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained")


def panels(width_in: float, height_in: float, rows: int, columns: int) -> "tuple[Figure, list[Axes]]":
    """A figure with a grid of panels, row by row; call under `style()`."""
    figure = new_figure(width_in, height_in)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def style(*, serif: bool = False) -> Any:
    """The context in which figures are drawn and written."""
    import matplotlib as mpl

    return mpl.rc_context({**RC, "font.family": "serif", "mathtext.fontset": "stix"} if serif else RC)


def svg_bytes(figure: "Figure", name: str, *, outlines: bool = False) -> bytes:
    """The figure as SVG with selectable text; `name` salts its ids, so that equal input gives equal bytes.

    With `outlines` letters are drawn as shapes, so that a program without the font shows the same.
    """
    import matplotlib as mpl

    _rasterise_many_marks(figure)
    buffer = io.BytesIO()
    with mpl.rc_context({**RC, "svg.hashsalt": name, "svg.fonttype": "path" if outlines else "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "PageTwin"})
    # its parts have their places; to solve for them again takes as long as drawing
    figure.set_layout_engine("none")
    return buffer.getvalue()


def _rasterise_many_marks(figure: "Figure") -> None:
    """Make the marks and bars of a figure that has very many a picture of dots; its text and axes stay vectors."""
    import numpy as np
    from matplotlib.collections import Collection, LineCollection, PathCollection
    from matplotlib.lines import Line2D

    marks: list[tuple[Line2D | Collection, int]] = []
    for panel in figure.axes:
        marked = [line for line in panel.lines if line.get_marker() not in (None, "None", "", " ")]
        dots = [drawn for drawn in panel.collections if isinstance(drawn, PathCollection)]
        bars = [drawn for drawn in panel.collections if isinstance(drawn, LineCollection)]
        marks += [(line, len(np.asarray(line.get_xdata()))) for line in marked]
        marks += [(drawn, len(np.asarray(drawn.get_offsets()))) for drawn in dots]
        marks += [(drawn, len(drawn.get_segments())) for drawn in bars]
    if sum(count for _, count in marks) > MOST_DRAWN_MARKS:
        for artist, _ in marks:
            artist.set_rasterized(True)


def pdf_bytes(figure: "Figure") -> bytes:
    """The figure as PDF with embedded TrueType fonts and no date."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context(RC):
        figure.savefig(buffer, format="pdf", metadata={"CreationDate": None, "Creator": "PageTwin"})
    return buffer.getvalue()


def inline(svg: bytes, name: str, title: str) -> str:
    """The `<svg>` element for a page, sized by the page's style sheet, with `title` as its accessible name.

    Its ids begin with `name`, apart from those of the other drawings of the page.
    """
    from markupsafe import escape

    text = _METADATA.sub("", _PROLOGUE.sub("", svg.decode(), count=1))
    text = _NAMES.sub(rf"\1{name}-", text)
    text = _HEIGHT.sub(r"\1", _SIZE.sub(r"\1", text, count=1), count=1)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1).strip()


@dataclass(frozen=True)
class Drawing:
    """A figure, its file name without suffix, the sentence below it, and the data that it shows."""

    name: str
    caption: str
    figure: "Figure"
    data: "pd.DataFrame"


@dataclass(frozen=True)
class Missing:
    """A figure without data: the sentence says why."""

    name: str
    reason: str


Picture = Drawing | Missing


def csv_bytes(table: "pd.DataFrame", digits: int = 9) -> bytes:
    """A table as CSV, its numbers with so many digits."""
    return table.to_csv(index=False, float_format=f"%.{digits}g", lineterminator="\n").encode()


def drawing_files(drawing: Drawing, *, pdf: bool = True, digits: int = 9) -> dict[str, bytes]:
    """The drawing as SVG, PDF and CSV by file name."""
    files = {f"{drawing.name}.svg": svg_bytes(drawing.figure, drawing.name)}
    if pdf:  # its fonts take as long as the rest of the drawing
        files[f"{drawing.name}.pdf"] = pdf_bytes(drawing.figure)
    return {**files, f"{drawing.name}.csv": csv_bytes(drawing.data, digits)}


def filled(template: Path, **values: Any) -> str:
    """A page: the template with these values, and with the style sheet of all pages as `style` unless it is given.

    Values are escaped in HTML alone.

    Raises:
        jinja2.UndefinedError: the template has a name that no value was given for.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=".html" in template.suffixes,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render({"style": Markup(page_css()), **values})


def page_css() -> str:
    """The style sheet of all pages."""
    return Path(__file__).with_name("page.css").read_text(encoding="utf-8")


# Inches of one column and of both, as conferences with two columns have them.
WIDTHS_IN = {Paper.column: 3.33, Paper.page: 7.0}

_LEAST_HEIGHT_IN, _LEGEND_IN = 2.2, 0.5
_SIGNS = {
    "≤": r"$\le$", "≥": r"$\ge$", "×": r"$\times$", "−": "$-$", "µ": r"\textmu{}", "±": r"$\pm$", "…": r"\dots{}",
    "–": "--", "→": r"$\to$",
}  # fmt: skip


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


def latex_table(head: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], words: int) -> bytes:
    """A table in LaTeX with the rules of booktabs, ready to be pasted.

    `head` has for each column the title of its group (may be empty) and its own; groups span columns. The first `words`
    columns are words, on the left.
    """
    import pandas as pd

    grouped = any(group for group, _ in head)
    columns = pd.MultiIndex.from_tuples(head) if grouped else [name for _, name in head]
    table = pd.DataFrame(list(rows), columns=columns)
    text = table.to_latex(
        index=False,
        escape=True,
        multicolumn_format="c",
        column_format="l" * words + "r" * (len(head) - words),
    )
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    return f"% \\usepackage{{booktabs}}\n{text}".encode()
