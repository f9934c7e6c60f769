"""How far apart: the error of every point, metric by metric, over the spread of repeated runs."""

from statistics import median

from harness.compare.verdict import RELATIVE_BAND
from harness.metrics import HEADLINE, METRICS
from harness.report.axes import Axes
from harness.report.drawing import Drawing, Missing, Picture
from harness.report.figures.series import policies, policy_style
from harness.report.study import Study
from harness.report.style import PAGE_IN, panels
from harness.report.table import comparison_table

NAME = "errors"


def draw(study: Study, axes: Axes) -> Picture:
    """One dot a point and metric; a grey bar as wide as the median spread of repeats."""
    table = comparison_table(study.records, axes, HEADLINE).dropna(subset=["error"])
    if table.empty:
        return Missing(NAME, "No point was measured (measure=false), so there is no error to show.")
    names = [name for name in HEADLINE if (table["metric"] == name).any()]
    figure, (axis,) = panels(PAGE_IN, 0.7 + 0.24 * len(names), 1, 1)
    axis.axvspan(-100 * RELATIVE_BAND, 100 * RELATIVE_BAND, color="#f3f6f9", zorder=0)
    axis.axvline(0, color="#444444", linewidth=0.8, zorder=1)
    for row, name in enumerate(names):
        found = table[table["metric"] == name]
        spreads = found["spread"].dropna().tolist()
        half = 100 * median(spreads) if spreads else 0.0
        axis.barh(row, 2 * half, left=-half, height=0.7, color="#c9ced4", linewidth=0, zorder=1)
        for offset, policy in zip((-0.16, 0.16), policies(study.records), strict=False):
            mine = found[found["cache.policy"] == policy]
            rows = [row + offset] * len(mine)
            axis.scatter(
                100 * mine["error"], rows, s=9, alpha=0.7, linewidths=0, **policy_style(policy), zorder=2
            )
    axis.set_yticks(range(len(names)), [_tick(name) for name in names])
    axis.invert_yaxis()
    axis.set_xscale("symlog", linthresh=20, linscale=2.0)
    ticks = [tick for tick in (-100, -20, -10, -5, 0, 5, 10, 20, 100) if _near(tick, 100 * table["error"])]
    axis.set_xticks(ticks, [f"{tick:+d}".replace("-", "−") if tick else "0" for tick in ticks])
    axis.minorticks_off()
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("predicted against measured: error (%; shares: points of 100)")
    for policy in policies(study.records):
        axis.scatter([], [], s=9, label=policy, **policy_style(policy))
    axis.barh(0, 0, color="#c9ced4", label="median spread of repeats")
    figure.legend(loc="outside upper right", ncols=4)
    caption = (
        "Every dot is the error of one point; the grey bar is the median spread of its repeated runs, "
        f"the pale band ±{100 * RELATIVE_BAND:g} %. The scale is linear up to ±20 and logarithmic beyond."
    )
    return Drawing(NAME, caption, figure, table)


def _tick(name: str) -> str:
    metric = METRICS[name]
    return f"{metric.label} (pts)" if metric.is_share else metric.label


def _near(tick: float, errors: object) -> bool:
    import numpy as np

    values = np.asarray(errors, dtype=np.float64)
    return bool(abs(tick) <= 20 or (values.min() <= tick / 2 < 0) or (values.max() >= tick / 2 > 0))
