"""What blocks cost and find: unfilled slots of a sequence and the hit ratio against the block size."""

from typing import TYPE_CHECKING

import numpy as np

from harness.metrics import METRICS
from harness.metrics.analytic import expected_tail_waste
from harness.report.axes import Axes, comparison_table, label, policy_of
from harness.report.figures.series import axis_scale, side_legend, value_axis
from harness.report.study import Study
from harness.report.style import PAGE_IN, PALETTE, Drawing, Missing, Picture, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel


NAME = "waste"
BLOCK = "cache.block_size"
_SHOWN = ("tail_waste", "hit_ratio")


def draw(study: Study, axes: Axes) -> Picture:
    """Left: unfilled slots per decoding sequence; right: hit ratio. Marks: points; line: (B − 1) / 2."""
    if BLOCK not in axes.values:
        return Missing(
            NAME, "The block size was not swept (cache.block_size=8,16,32), so its cost is not drawn."
        )
    paged = [record for record in study.records if policy_of(record) == "paged"]
    table = comparison_table(paged, axes, _SHOWN)
    if table.empty:
        return Missing(NAME, "No paged point has figures about blocks.")
    figure, grid = panels(PAGE_IN, 2.5, 1, 2)
    for panel, name in zip(grid, _SHOWN, strict=True):
        _panel(panel, name, table[table["metric"] == name])
    side_legend(grid[0], measured=bool(table["measured"].notna().any()))
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    caption = (
        "Every mark is one paged point. Left: reserved and internal slots per sequence that decodes, "
        "with the closed form "
        "(B − 1) / 2 of a length that is uniform modulo the block size. Right: prompt tokens found in the cache, whole "
        "blocks only, so large blocks find less."
    )
    return Drawing(NAME, caption, figure, table)


def _panel(panel: "Panel", name: str, found: "pd.DataFrame") -> None:
    scale, unit = axis_scale(name, float(found["simulated"].max()))
    sizes = sorted(found[BLOCK].astype(float).unique())
    if name == "tail_waste":
        line = np.linspace(min(sizes), max(sizes), 50)
        panel.plot(
            line,
            [expected_tail_waste(size) for size in line],
            color="#444444",
            linestyle="--",
            label="(B − 1) / 2",
        )
    x = found[BLOCK].astype(float)
    panel.plot(x * 0.98, scale * found["simulated"], "D", color=PALETTE[0], markerfacecolor="none")
    panel.plot(x * 1.02, scale * found["measured"], "o", color=PALETTE[3], alpha=0.7)
    value_axis(panel, BLOCK, sizes)
    panel.set(xlabel=label(BLOCK), ylabel=unit, title=METRICS[name].label)
    panel.set_ylim(bottom=0)
