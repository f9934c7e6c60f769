"""The error of every point, metric by metric, over the spread of repeated runs."""

from statistics import median
from typing import TYPE_CHECKING

from harness.metrics import HEADLINE, METRICS
from harness.metrics.verdict import RELATIVE_BAND
from harness.report.axes import Axes, comparison_table
from harness.report.figures.series import policies, policy_style, side_by_side
from harness.report.study import Study
from harness.report.style import PAGE_IN, Drawing, Missing, Picture, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel


NAME = "errors"
_SPREAD = "#c9ced4"
_CAPTION = (
    "Every dot is the error of one point; the grey bar is the median spread of its repeated runs, "
    f"the pale band ±{100 * RELATIVE_BAND:g} %. The scale is linear up to ±20 and logarithmic beyond."
)


def draw(study: Study, axes: Axes) -> Picture:
    """One dot for each point and metric; a grey bar as wide as the median spread of repeats."""
    table = comparison_table(study.records, axes, HEADLINE).dropna(subset=["error"])
    if table.empty:
        return Missing(NAME, "No point was measured (measure=false), so there is no error to show.")
    names = [name for name in HEADLINE if (table["metric"] == name).any()]
    shown = policies(study.records)
    figure, (panel,) = panels(PAGE_IN, 0.7 + 0.24 * len(names), 1, 1)
    panel.axvspan(-100 * RELATIVE_BAND, 100 * RELATIVE_BAND, color="#f3f6f9", zorder=0)
    panel.axvline(0, color="#444444", linewidth=0.8, zorder=1)
    for row, name in enumerate(names):
        _row(panel, row, table[table["metric"] == name], shown)
    panel.set_yticks(range(len(names)), [_tick(name) for name in names])
    panel.invert_yaxis()
    _error_axis(panel, table)
    for policy in shown:
        panel.scatter([], [], s=9, label=policy, **policy_style(policy))
    panel.barh(0, 0, color=_SPREAD, label="median spread of repeats")
    figure.legend(loc="outside upper right", ncols=4)
    return Drawing(NAME, _CAPTION, figure, table)


def _row(panel: "Panel", row: int, found: "pd.DataFrame", shown: list[str]) -> None:
    spreads = found["spread"].dropna().tolist()
    half = 100 * median(spreads) if spreads else 0.0
    panel.barh(row, 2 * half, left=-half, height=0.7, color=_SPREAD, linewidth=0, zorder=1)
    for offset, policy in zip(side_by_side(len(shown), 0.32), shown, strict=True):
        mine = found[found["cache.policy"] == policy]
        at = [row + offset] * len(mine)
        panel.scatter(100 * mine["error"], at, s=9, alpha=0.7, linewidths=0, **policy_style(policy), zorder=2)


def _error_axis(panel: "Panel", table: "pd.DataFrame") -> None:
    panel.set_xscale("symlog", linthresh=20, linscale=2.0)
    ticks = [tick for tick in (-100, -20, -10, -5, 0, 5, 10, 20, 100) if _near(tick, 100 * table["error"])]
    panel.set_xticks(ticks, [f"{tick:+d}".replace("-", "−") if tick else "0" for tick in ticks])
    panel.minorticks_off()
    panel.grid(visible=False, axis="y")
    panel.set_xlabel("predicted against measured: error (%; shares: points of 100)")


def _tick(name: str) -> str:
    metric = METRICS[name]
    return f"{metric.label} (pts)" if metric.is_share else metric.label


def _near(tick: float, errors: object) -> bool:
    import numpy as np

    values = np.asarray(errors, dtype=np.float64)
    return bool(abs(tick) <= 20 or (values.min() <= tick / 2 < 0) or (values.max() >= tick / 2 > 0))
