"""How figures look: paper column widths, 8 pt, a colour-blind palette, bytes that depend on the input alone."""

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN_IN = 3.5
"""Width of one column of a two-column paper, inches."""

PAGE_IN = 7.16
"""Width of both columns, inches."""

# seaborn's "colorblind" palette, by name, so that a setting keeps its colour from figure to figure
PALETTE = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#949494")
GREY = "#6f6f6f"

STATE_COLOURS: Mapping[str, str] = {
    "token": "#0173b2",
    "cached": "#8ec7e8",
    "reserved": "#029e73",
    "internal": "#d55e00",
    "external": "#cc78bc",
    "free": "#ececec",
}

RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same layout on every machine
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
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}


def new_figure(width_in: float, height_in: float) -> "Figure":
    """An empty figure outside pyplot's global state; call under `style()`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained")


def panels(width_in: float, height_in: float, rows: int, columns: int) -> "tuple[Figure, list[Axes]]":
    """A figure with a grid of panels, row by row; call under `style()`."""
    figure = new_figure(width_in, height_in)
    grid = figure.subplots(rows, columns, squeeze=False)
    return figure, list(grid.flat)


def style() -> Any:
    """The context in which figures are drawn and written."""
    import matplotlib as mpl

    return mpl.rc_context(RC)


def svg_bytes(figure: "Figure", name: str) -> bytes:
    """The figure as SVG with selectable text; `name` salts its ids, so that equal input gives equal bytes."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context({**RC, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "PageTwin"})
    return buffer.getvalue()


def pdf_bytes(figure: "Figure") -> bytes:
    """The figure as PDF with embedded TrueType fonts and no date."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context(RC):
        figure.savefig(buffer, format="pdf", metadata={"CreationDate": None, "Creator": "PageTwin"})
    return buffer.getvalue()
