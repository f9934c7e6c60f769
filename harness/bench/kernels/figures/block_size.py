"""Latency against block size, everything else equal."""

from typing import TYPE_CHECKING

from harness.report.drawing import Drawing, Missing, Picture
from harness.report.style import PAGE_IN, PALETTE, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

NAME = "kernel_block_size"
MOST_PANELS = 3
_SAME = ["batch", "context", "heads", "kv_heads", "head_dim", "dtype", "ragged", "shared_prefix", "queries"]


def draw(table: "pd.DataFrame") -> Picture:
    """A panel for each set of cases that differ in block size alone, widest set first."""
    sets = [part for _, part in table.groupby(_SAME, sort=True) if part["block_size"].nunique() > 1]
    sets.sort(key=lambda part: -int(part["block_size"].nunique()))
    if not sets:
        return Missing(NAME, "No two cases differ in block size alone.")
    shown = sets[:MOST_PANELS]
    figure, grid = panels(min(PAGE_IN, 2.6 + 2.2 * len(shown)), 2.6, 1, len(shown))
    for panel, part in zip(grid, shown, strict=True):
        _panel(panel, part)
    handles, labels = max(
        (panel.get_legend_handles_labels() for panel in grid), key=lambda pair: len(pair[1])
    )
    figure.legend(handles, labels, loc="outside right upper")
    caption = (
        "Time of one call by block size: median of the rounds, bars from the fastest to the slowest. Our GPU kernels "
        "take as many keys per tile at every block size, so that the figure shows blocks and not tiles."
    )
    import pandas as pd

    columns = [*_SAME, "layout", "block_size", "provider", "median_us", "least_us", "most_us"]
    return Drawing(NAME, caption, figure, pd.concat(shown)[columns])


def _panel(panel: "Axes", part: "pd.DataFrame") -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    for place, ((name, layout), line) in enumerate(part.groupby(["provider", "layout"], sort=False)):
        line = line.sort_values("block_size")
        bars = [line["median_us"] - line["least_us"], line["most_us"] - line["median_us"]]
        label = name if layout == "NHD" else f"{name}, {layout}"
        colour = PALETTE[place % len(PALETTE)]
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
    panel.set_title(f"{first['batch']} × {first['context']:,} tokens, {heads}, {first['dtype']}")
