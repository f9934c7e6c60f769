"""How far predictions are off: the error of every point, prediction against measurement, and where errors come from."""

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from harness.metrics import HEADLINE, METRICS
from harness.metrics.record import PointRecord
from harness.metrics.verdict import RELATIVE_BAND
from harness.report.axes import POLICY, Axes, comparison_table
from harness.report.figures.series import axis_scale, policies, policy_style, side_by_side
from harness.report.study import Study
from harness.report.style import PAGE_IN, Drawing, Missing, Picture, new_figure, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel


_LINEAR = (0, 5, 10, 20)
_MOST_LINEAR = 60  # %; with larger errors small ones could not be told apart on a linear axis
# ticks of the logarithmic part, as far as it is used
_BEYOND = (20, 30, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
_SPREAD = "#c9ced4"
_BAND = f"the pale band ±{100 * RELATIVE_BAND:g} %"
_CAPTION = f"Every dot is the error of one point; grey is the median spread of its repeated runs, {_BAND}."


def draw_errors(study: Study, axes: Axes) -> Picture:
    """One dot for each point and metric; a grey bar as wide as the median spread of repeats."""
    table = comparison_table(study.records, axes, HEADLINE).dropna(subset=["error"])
    if table.empty:
        return Missing("errors", "No point was measured (measure=false), so there is no error to show.")
    import seaborn as sns

    names = [name for name in HEADLINE if (table["metric"] == name).any()]
    shown = policies(study.records)
    figure, (panel,) = panels(PAGE_IN, 0.7 + 0.24 * len(names), 1, 1)
    panel.axvspan(-100 * RELATIVE_BAND, 100 * RELATIVE_BAND, color="#f3f6f9", zorder=0)
    panel.axvline(0, color="#444444", linewidth=0.8, zorder=1)
    for row, name in enumerate(names):
        _error_row(panel, row, table[table["metric"] == name])
    looks = {policy: policy_style(policy) for policy in shown}
    sns.stripplot(
        table.assign(error=100 * table["error"]), x="error", y="metric", hue=POLICY, order=names, hue_order=shown,
        palette={policy: look["color"] for policy, look in looks.items()}, dodge=len(shown) > 1, jitter=False,
        size=3.2, alpha=0.7, ax=panel, zorder=2,
    )  # fmt: skip
    panel.set_yticks(range(len(names)), [_tick(name) for name in names])
    panel.set_ylabel("")
    scale = _error_axis(panel, table)
    if legend := panel.get_legend():
        legend.remove()
    panel.barh(0, 0, color=_SPREAD, label="median spread of repeats")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside upper right", ncols=4)
    return Drawing("errors", f"{_CAPTION} {scale}", figure, table)


def _error_row(panel: "Panel", row: int, found: "pd.DataFrame") -> None:
    spreads = found["spread"].dropna().tolist()
    half = 100 * median(spreads) if spreads else 0.0
    panel.barh(row, 2 * half, left=-half, height=0.7, color=_SPREAD, linewidth=0, zorder=1)


def _error_axis(panel: "Panel", table: "pd.DataFrame") -> str:
    """Linear as far as that leaves room for small errors; gives the words on the scale."""
    panel.grid(visible=False, axis="y")
    far = 100 * float(table["error"].abs().max())
    if far <= _MOST_LINEAR:
        panel.set_xlabel("predicted against measured: error (%; shares: points of 100)")
        return "The scale is linear."
    panel.set_xscale("symlog", linthresh=20, linscale=2.0)
    beyond = [tick for before, tick in pairwise(_BEYOND) if far > before]
    ticks = sorted({*_LINEAR, *beyond, *(-tick for tick in (*_LINEAR, *beyond))})
    panel.set_xticks(ticks, [f"{tick:+d}".replace("-", "−") if tick else "0" for tick in ticks])
    panel.minorticks_off()
    panel.set_xlabel("predicted against measured: error (%; shares: points of 100; logarithmic beyond ±20)")
    return "The scale is linear up to ±20 and logarithmic beyond."


def _tick(name: str) -> str:
    metric = METRICS[name]
    return f"{metric.label} (pts)" if metric.is_share else metric.label


_COMPARED = (
    "output_throughput", "ttft_p50", "tpot_p50", "internal_share", "hit_ratio", "attention_per_decode_step",
)  # fmt: skip


def draw_agreement(study: Study, axes: Axes) -> Picture:
    """One panel for each metric; x: measured, with the range of its runs; y: predicted."""
    table = comparison_table(study.records, axes, _COMPARED).dropna(subset=["measured", "simulated"])
    if table.empty:
        return Missing(
            "agreement",
            "No point was measured (measure=false), so there is nothing to compare the prediction with.",
        )
    figure, grid = panels(PAGE_IN, 4.4, 2, 3)
    for panel, name in zip(grid, _COMPARED, strict=True):
        found = table[table["metric"] == name]
        if found.empty:
            panel.set_visible(False)
        else:
            _equal_panel(panel, name, found, policies(study.records))
    handles, labels = next(panel for panel in grid if panel.get_visible()).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    caption = (
        "Every mark is one point: measured (median, bar: range of runs) and predicted; equal on the line."
    )
    return Drawing("agreement", caption, figure, table)


def _equal_panel(panel: "Panel", name: str, found: "pd.DataFrame", names: list[str]) -> None:
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
        panel.minorticks_off()
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")  # plain text: formulas are not set (`RC`)
    else:
        panel.locator_params(nbins=5)


_LEVELS = {
    "kernel": "1 attention,\nMAPE",
    "step": "2 per step,\nMAPE",
    "run_total": "2 total of\nthe run",
    "tpot_p50": "3 TPOT,\np50",
    "ttft_p50": "3 TTFT,\np50",
    "output_throughput": "3 output\nthroughput",
}


def draw_levels(study: Study, axes: Axes) -> Picture:
    """Left: size of the error on each level; right: error of TTFT and of steps against the busy share."""
    del axes
    data = _level_table(study)
    if data.empty:
        return Missing("levels", "No point was measured (measure=false), so no error can be attributed.")
    figure = new_figure(PAGE_IN, 2.8)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    _strip(left, data)
    _against_load(right, data)
    for policy in policies(study.measured):
        left.scatter([], [], s=9, label=policy, **policy_style(policy))
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    caption = (
        "Left: size of the error on each level: (1) the cost model pricing the attention of the steps that the "
        "engine took, (2) pricing those steps whole, (3) the simulator alone, in which errors of steps grow through "
        "queueing. Line: median; dots: points. Right: error of the median TTFT against the measured load."
    )
    return Drawing("levels", caption, figure, data)


def _level_table(study: Study) -> "pd.DataFrame":
    import pandas as pd

    rows = [
        {"point": r.point_label, "policy": r.policy, "busy_share": _busy(r), "level": level, "error": error}
        for r in study.measured
        for level, error in _errors_of(r).items()
        if error is not None
    ]
    return pd.DataFrame(rows, columns=["point", "policy", "busy_share", "level", "error"])


def _errors_of(record: PointRecord) -> dict[str, Any]:
    levels = record.levels
    kernel, forced, free = (levels.get(k) or {} for k in ("kernel", "teacher_forced", "free_running"))
    alone = {row["metric"]: row["error"] for row in record.comparison} | free
    return {
        "kernel": kernel.get("mape"),
        "step": forced.get("mape"),
        "run_total": forced.get("total_error"),
        **{name: alone.get(name) for name in list(_LEVELS)[3:]},
    }


def _busy(record: PointRecord) -> float:
    return record.value("busy_share", "measured") or float("nan")


def _strip(panel: "Panel", data: "pd.DataFrame") -> None:
    names = list(dict.fromkeys(data["policy"]))
    shown = [level for level in _LEVELS if (data["level"] == level).any()]
    for at, level in enumerate(shown):
        found = data[data["level"] == level]
        for offset, policy in zip(side_by_side(len(names), 0.28), names, strict=True):
            mine = found[found["policy"] == policy]
            sizes = 100 * mine["error"].abs()
            panel.scatter(
                [at + offset] * len(mine), sizes, s=9, alpha=0.6, linewidths=0, **policy_style(str(policy))
            )
        panel.hlines(
            100 * float(found["error"].abs().median()), at - 0.32, at + 0.32, color="#222222", linewidth=1.2
        )
    panel.set_xticks(range(len(shown)), [_LEVELS[level] for level in shown], fontsize=6.5)
    panel.set(ylabel="size of the error (%)", xlim=(-0.6, len(shown) - 0.4))
    panel.set_ylim(bottom=0)
    panel.grid(visible=False, axis="x")


def _against_load(panel: "Panel", data: "pd.DataFrame") -> None:
    found = data[data["level"] == "ttft_p50"]
    panel.axhspan(-100 * RELATIVE_BAND, 100 * RELATIVE_BAND, color="#f3f6f9", zorder=0)
    for policy, mine in found.groupby("policy"):
        look = policy_style(str(policy))
        panel.scatter(100 * mine["busy_share"], 100 * mine["error"], s=9, alpha=0.7, linewidths=0, **look)
    panel.axhline(0, color="#444444", linewidth=0.8)
    panel.set(xlabel="busy share, measured (%)", ylabel="error of TTFT p50 (%)")
    panel.locator_params(nbins=5)
