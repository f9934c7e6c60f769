"""Latency against block size, everything else equal."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.report.drawing import Drawing, Missing, Picture
from harness.report.style import PAGE_IN, PALETTE, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

NAME = "kernel_block_size"
MOST_PANELS = 3
_SAME = ["batch", "context", "heads", "kv_heads", "head_dim", "dtype", "ragged", "shared_prefix", "queries"]


def draw(table: "pd.DataFrame") -> Picture:
    """A panel for each set of cases that differ in block size alone: the widest sets, of them the largest calls."""
    sets = [part for _, part in table.groupby(_SAME, sort=True) if part["block_size"].nunique() > 1]
    sets.sort(key=lambda part: (-int(part["block_size"].nunique()), -int(part["flat_bytes"].max())))
    if not sets:
        return Missing(NAME, "No two cases differ in block size alone.")
    shown = sets[:MOST_PANELS]
    figure, grid = panels(PAGE_IN, 2.8, 1, len(shown))
    names = dict.fromkeys(label for part in shown for label in _labels(part))
    colours = {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(names)}
    entries: dict[str, Any] = {}
    for panel, part in zip(grid, shown, strict=True):
        _panel(panel, part, colours)
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend([entries[name] for name in names], list(names), loc="outside upper center", ncols=4)
    caption = (
        "Time of one call by block size: median of the rounds, bars from the fastest to the slowest. Our GPU kernels "
        "take as many keys per tile at every block size, so that the figure shows blocks and not tiles."
    )
    import pandas as pd

    columns = [*_SAME, "layout", "block_size", "provider", "median_us", "least_us", "most_us"]
    return Drawing(NAME, caption, figure, pd.concat(shown)[columns])


def _labels(part: "pd.DataFrame") -> "pd.Series[str]":
    """The line that each row belongs to."""
    return part["provider"] + part["layout"].map(lambda layout: "" if layout == "NHD" else f", {layout}")


def _panel(panel: "Axes", part: "pd.DataFrame", colours: Mapping[str, str]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    for label, line in part.groupby(_labels(part), sort=False):
        line = line.sort_values("block_size")
        bars = [line["median_us"] - line["least_us"], line["most_us"] - line["median_us"]]
        colour = colours[str(label)]
        panel.errorbar(
            line["block_size"], line["median_us"], bars, marker="o", capsize=2, color=colour, label=label
        )
    first = part.iloc[0]
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticks(sorted(part["block_size"].unique()))
    panel.set_ylim(bottom=0)
    panel.set(xlabel="block size, tokens", ylabel="µs per call")
    heads = f"{first['heads']}/{first['kv_heads']} heads of {first['head_dim']}"
    extra = "".join(
        [
            f", {first['queries']} queries" if first["queries"] > 1 else "",
            f", {first['shared_prefix']:,} shared" if first["shared_prefix"] else "",
            ", ragged" if first["ragged"] else "",
        ]
    )
    panel.set_title(f"{first['batch']} × {first['context']:,} tokens{extra}\n{heads}, {first['dtype']}")
