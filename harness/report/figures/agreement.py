"""Predicted against measured, point by point, with the line on which they are equal."""

from typing import TYPE_CHECKING

from harness.metrics import METRICS
from harness.report.axes import Axes, comparison_table
from harness.report.figures.series import axis_scale, policies, policy_style
from harness.report.study import Study
from harness.report.style import PAGE_IN, Drawing, Missing, Picture, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel


NAME = "agreement"
_SHOWN = (
    "output_throughput",
    "ttft_p50",
    "tpot_p50",
    "internal_share",
    "hit_ratio",
    "attention_per_decode_step",
)


def draw(study: Study, axes: Axes) -> Picture:
    """One panel for each metric; x: measured, with the range of its runs; y: predicted."""
    table = comparison_table(study.records, axes, _SHOWN).dropna(subset=["measured", "simulated"])
    if table.empty:
        return Missing(
            NAME, "No point was measured (measure=false), so there is nothing to compare the prediction with."
        )
    figure, grid = panels(PAGE_IN, 4.4, 2, 3)
    for panel, name in zip(grid, _SHOWN, strict=True):
        found = table[table["metric"] == name]
        if found.empty:
            panel.set_visible(False)
        else:
            _panel(panel, name, found, policies(study.records))
    handles, labels = next(panel for panel in grid if panel.get_visible()).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    caption = (
        "Every mark is one point: measured (median, bar: range of runs) and predicted; equal on the line."
    )
    return Drawing(NAME, caption, figure, table)


def _panel(panel: "Panel", name: str, found: "pd.DataFrame", names: list[str]) -> None:
    scale, unit = axis_scale(name, float(found["measured"].max()))
    low = scale * float(found[["low", "simulated"]].min().min())
    high = scale * float(found[["high", "simulated"]].max().max())
    wide = low > 0 and high > 12 * low
    # do not enlarge a single point, or points that agree to many digits, until noise looks like disagreement
    margin = max(0.06 * (high - low), 0.05 * abs(high), 1.0 if METRICS[name].is_share else 0.0)
    ends = (low / 1.3, high * 1.3) if wide else (low - margin, high + margin)
    panel.plot(ends, ends, color="#999999", linewidth=0.8, label="predicted = measured")
    for policy in names:
        mine = found[found["cache.policy"] == policy]
        bars = scale * (mine["measured"] - mine["low"]), scale * (mine["high"] - mine["measured"])
        look = policy_style(policy)
        panel.errorbar(
            scale * mine["measured"], scale * mine["simulated"], xerr=bars, fmt=look["marker"],
            color=look["color"], alpha=0.75, markersize=3, markeredgewidth=0, elinewidth=0.6, label=policy,
        )  # fmt: skip
    panel.set(xlim=ends, ylim=ends, xlabel=f"measured ({unit})", ylabel=f"predicted ({unit})")
    panel.set_title(METRICS[name].label)
    panel.set_aspect("equal", adjustable="box")
    if wide:
        panel.set(xscale="log", yscale="log")
    else:
        panel.locator_params(nbins=5)
