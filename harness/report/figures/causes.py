"""Where the bytes of a pool go: waste by cause, a bar for each point whose layers are in groups, and vLLM's gauge."""

from typing import TYPE_CHECKING

from harness.metrics.log import WASTE_COLUMNS
from harness.report.axes import Axes, comparison_table
from harness.report.figures.series import evenly
from harness.report.study import Study
from harness.report.style import PAGE_IN, Drawing, Missing, Picture, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Panel


NAME = "causes"
_MOST_BARS = 12
_COLOURS = {
    "token": "#0072b2",
    "behind_window": "#d55e00",
    "duplicate": "#cc79a7",
    "reserved": "#56b4e9",
    "tail": "#e69f00",
    "padding": "#8c564b",
    "imbalance": "#b8860b",
    "cached": "#009e73",
    "external": "#444444",
    "free": "#dddddd",
}


def draw(study: Study, axes: Axes) -> Picture:
    """One stacked bar for each point; the mark is the share of blocks in use."""
    metrics = [*(f"waste_{name}" for name in WASTE_COLUMNS), "gauge"]
    grouped = [record for record in study.records if "waste_token" in (record.get("simulated") or {})]
    if not grouped:
        return Missing(NAME, "No point has layers in groups (cache.groups=uniform), so causes are not drawn.")
    table = comparison_table(evenly(grouped, _MOST_BARS), axes, metrics)
    points = list(dict.fromkeys(table["point"]))
    figure, (panel,) = panels(PAGE_IN, 1.1 + 0.34 * len(points), 1, 1)
    wide = table.pivot_table(index="point", columns="metric", values="simulated", sort=False)
    for row, point in enumerate(points):
        _bar(panel, row, {name: float(wide.loc[point].get(f"waste_{name}", 0.0)) for name in WASTE_COLUMNS})
        panel.plot(
            100 * float(wide.loc[point]["gauge"]), row, "|", color="black", markersize=14, markeredgewidth=2
        )
    for name, colour in _COLOURS.items():
        panel.barh(0, 0, color=colour, label=name.replace("_", " "))
    panel.plot([], [], "|", color="black", markersize=10, markeredgewidth=2, label="gauge of vLLM")
    panel.set_yticks(range(len(points)), points, fontsize=6)
    panel.set(
        xlim=(0, 100), ylim=(len(points) - 0.5, -0.5), xlabel="% of the bytes of all pools, time-weighted"
    )
    panel.grid(visible=False, axis="y")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=6, fontsize=6)
    caption = (
        "Predicted bytes of the pools by what they hold, weighted by the seconds of steps; the parts add up to the "
        "pools. The mark is the share of blocks that sequences refer to, which vLLM's gauge kv_cache_usage_perc shows: "
        "what lies left of it and is not token is in use and holds nothing that a next token needs."
    )
    return Drawing(NAME, caption, figure, table)


def _bar(panel: "Panel", row: int, shares: dict[str, float]) -> None:
    left = 0.0
    for name, share in shares.items():
        panel.barh(row, 100 * share, left=left, height=0.7, color=_COLOURS[name], linewidth=0)
        left += 100 * share
