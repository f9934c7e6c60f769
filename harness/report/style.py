"""The style of figures, and their way into the page.

Paper column widths, 8 pt, a colour-blind palette. The bytes of a figure depend on its data alone. `Drawing` is what a
figure module returns; `Missing` says why there is none.
"""

import io
import re
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLUMN_IN = 3.5
"""Width of one column of a two-column paper, inches."""

PAGE_IN = 7.16
"""Width of both columns, inches."""

# seaborn's "colorblind" palette, by name, so that a setting keeps its colour from figure to figure
PALETTE = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#949494")
GREY = "#6f6f6f"
WARNING = "#a8201a"

MOST_DRAWN_MARKS = 600
"""The most marks that a drawing holds one by one, at some 100 bytes each in a page; more become a picture of dots."""

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
    "font.serif": [
        "STIXGeneral",
        "Times New Roman",
        "Liberation Serif",
    ],  # the first ships with matplotlib, all are as wide
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
_PROLOGUE = re.compile(r"^.*?(?=<svg\b)", re.DOTALL)
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_PLACES = re.compile(r'\b(?:d|x|y|transform)="[^"]*"')
_DIGITS = re.compile(r"(\.\d\d)\d+")  # a hundredth of a point is fine enough for any screen
_STYLE = re.compile(r'\bstyle="([^"]*)"')
_BETWEEN = re.compile(r">\n\s*<")
_REPEATED = 4  # equal styles of so many elements become one class
_UPRIGHT = re.compile(r' transform="rotate\(-?0 [^"]*"')
_BARE = re.compile(r"<g>((?:[^<]|<(?!/?g\b))*)</g>")
_ID = re.compile(r'\s*\bid="([^"]+)"')
_USE = re.compile(r'(href="#|url\(#)([^")]+)')
_SIZE = re.compile(r'(<svg\b[^>]*?)\s+width="[^"]*"', re.DOTALL)
_HEIGHT = re.compile(r'(<svg\b[^>]*?)\s+height="[^"]*"', re.DOTALL)


def new_figure(width_in: float, height_in: float) -> "Figure":
    """An empty figure outside pyplot's global state; call under `style()`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained")


def panels(width_in: float, height_in: float, rows: int, columns: int) -> "tuple[Figure, list[Axes]]":
    """A figure with a grid of panels, row by row; call under `style()`."""
    figure = new_figure(width_in, height_in)
    grid = figure.subplots(rows, columns, squeeze=False)
    return figure, list(grid.flat)


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
    figure.set_layout_engine(
        "none"
    )  # its parts have their places; to solve for them again takes as long as drawing
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

    It is a fraction of the file's size: places have two decimals, repeated styles are classes, and ids that nothing
    refers to are left out. What is drawn is the same.
    """
    from markupsafe import escape

    text = _METADATA.sub("", _PROLOGUE.sub("", svg.decode(), count=1))
    text = _PLACES.sub(lambda found: " ".join(_DIGITS.sub(r"\1", found[0]).split()).replace(' "', '"'), text)
    used = {found[2] for found in _USE.finditer(text)}
    short = f"f{zlib.crc32(name.encode()) & 0xFFFFF:x}"  # apart from the other drawings of the page
    ids = {one: f"{short}-{number}" for number, one in enumerate(sorted(used))}
    text = _ID.sub(lambda found: f' id="{ids[found[1]]}"' if found[1] in ids else "", text)
    text = _USE.sub(lambda found: found[1] + ids[found[2]], text)
    text = _UPRIGHT.sub("", _BETWEEN.sub("><", text))
    unwrapped = 1
    while unwrapped:  # from the inside to the outside
        text, unwrapped = _BARE.subn(r"\1", text)
    text = _with_classes(text, short)
    text = _HEIGHT.sub(r"\1", _SIZE.sub(r"\1", text, count=1), count=1)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1).strip()


def _with_classes(svg: str, prefix: str) -> str:
    """The drawing with the styles that many elements have as classes, whose names start with `prefix`."""
    counted = Counter(_STYLE.findall(svg))
    classes = {
        style: f"{prefix}s{number}"
        for number, (style, count) in enumerate(counted.most_common())
        if count >= _REPEATED
    }
    rules = "".join(f".{label}{{{style}}}" for style, label in classes.items())
    text = _STYLE.sub(lambda found: f'class="{classes[found[1]]}"' if found[1] in classes else found[0], svg)
    first = text.index(">") + 1
    return f"{text[:first]}<style>{rules}</style>{text[first:]}" if rules else text


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
