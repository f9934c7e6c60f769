"""Heat maps: one metric over two swept settings, the median over all points with these values."""

from typing import TYPE_CHECKING

from harness.metrics import METRICS
from harness.report.axes import POLICY, Axes, comparison_table, label, policy_of
from harness.report.figures.series import axis_scale, evenly
from harness.report.study import Study
from harness.report.style import PAGE_IN, Drawing, Missing, Picture, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel


NAME = "heat"
_SHOWN = ("request_throughput", "norm_latency_mean", "sharing_saving")
_MOST_NUMBERED = 60  # cells that have room for their number; more get a colour bar
_MOST_TICKS = 9


def draw(study: Study, axes: Axes) -> Picture:
    """One map for each metric, over the first two numeric settings of the paged points."""
    keys = axes.numeric[:2]
    if len(keys) < 2:
        return Missing(
            NAME, "Fewer than two numeric settings were swept, so there is no map of two settings."
        )
    policy = "paged" if any(policy_of(r) == "paged" for r in study.records) else policy_of(study.records[0])
    table = comparison_table([r for r in study.records if policy_of(r) == policy], axes, _SHOWN)
    table = table.assign(best=table["measured"].fillna(table["simulated"])).dropna(subset=["best", *keys])
    shown = [name for name in _SHOWN if (table["metric"] == name).any()]
    if not shown:
        return Missing(NAME, "No point has the figures of the maps.")
    figure, grid = panels(PAGE_IN, 2.3, 1, len(shown))
    for panel, name in zip(grid, shown, strict=True):
        _map(panel, name, table[table["metric"] == name], *keys)
    rest = [key for key in axes.values if key not in keys]
    caption = f"Cache policy {policy}. Each cell is the median over its points, measured where they were"
    caption += f"; within a cell vary {', '.join(map(label, rest))}." if rest else "."
    return Drawing(NAME, caption, figure, table[["point", POLICY, *axes.values, "metric", "unit", "best"]])


def _map(panel: "Panel", name: str, found: "pd.DataFrame", x: str, y: str) -> None:
    cells = found.pivot_table(index=y, columns=x, values="best", aggfunc="median")
    scale, unit = axis_scale(name, float(cells.max().max()))
    values = scale * cells.to_numpy(float)
    image = panel.imshow(values, cmap="viridis", aspect="auto", origin="lower")
    numbered = values.size <= _MOST_NUMBERED
    if not numbered and panel.figure is not None:
        bar = panel.figure.colorbar(image, ax=panel, pad=0.02)
        bar.ax.tick_params(labelsize=6)
        bar.outline.set_visible(False)
    low, high = float(values[values == values].min()), float(values[values == values].max())
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            value = values[row, column]
            if value == value and numbered:
                dark = value < (low + high) / 2
                panel.text(
                    column,
                    row,
                    f"{value:.3g}",
                    ha="center",
                    va="center",
                    size=6.5,
                    color="white" if dark else "black",
                )
    for ticks, places in ((panel.set_xticks, cells.columns), (panel.set_yticks, cells.index)):
        shown = evenly(list(enumerate(places)), _MOST_TICKS)
        ticks([at for at, _ in shown], [f"{value:g}" for _, value in shown])
    panel.set(xlabel=label(x), ylabel=label(y), title=f"{METRICS[name].label} ({unit})")
    panel.title.set_fontsize(7)
    panel.grid(visible=False)
