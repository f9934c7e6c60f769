"""The sweep's curves: predicted lines and measured points along one swept setting, for every point of the sweep.

Rows are metrics, lines differ in a second setting and columns in a third. Settings beyond the third are held at the
middle of their values, and the caption says how many points a figure shows then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from harness.metrics import METRICS
from harness.metrics.record import PointRecord
from harness.report.axes import (
    BLOCK,
    POLICY,
    Axes,
    alike,
    comparison_table,
    held,
    label,
    reference,
    short_label,
)
from harness.report.figures.series import (
    MOST_SERIES,
    axis_scale,
    policies,
    policy_line,
    series_colours,
    side_legend,
    value_axis,
    zero_based,
)
from harness.report.study import Study, spread
from harness.report.style import COLUMN_IN, GREY, PAGE_IN, WARNING, Drawing, Missing, Picture, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel
    from matplotlib.figure import Figure


SHOWN = (
    "request_throughput",
    "output_throughput",
    "ttft_p50",
    "tpot_p50",
    "internal_share",
    "sharing_saving",
)
# What the first screen shows: fragmentation, throughput, latency of attention.
OVERVIEW = ("internal_of_allocated", "request_throughput", "attention_per_decode_step")
_PLAIN = {
    "internal_of_allocated": "fragmentation",
    "request_throughput": "throughput",
    "attention_per_decode_step": "attention per decode step",
}
_MOST_COLUMNS = 4
_MOST_NARROW = 2  # columns that a single column of a paper has room for


@dataclass(frozen=True)
class FacetLayout:
    """The settings along x, of the lines and of the columns, and the metrics of the rows.

    With `across` the metrics are the columns and the values of `col` the rows.
    """

    x: str
    hue: str | None
    col: str | None
    metrics: Sequence[str] = SHOWN
    across: bool = False
    width_in: float = PAGE_IN

    @property
    def free(self) -> list[str]:
        """The settings that vary within the figure."""
        return [key for key in (self.x, self.hue, self.col) if key]


def layout_of(axes: Axes, key: str) -> FacetLayout:
    """The layout along `key`: of the other swept settings, the first makes the lines, the second the columns."""
    others = [other for other in axes.values if other != key]
    hue, col, *_ = [*others, None, None]
    return FacetLayout(key, hue, col)


def draw_overview(study: Study, axes: Axes, *, narrow: bool = False) -> Picture:
    """Fragmentation, throughput and attention latency along the block size, or else the first swept number.

    `narrow` is the same for one column of a paper, or a telephone: a metric a row.
    """
    name = "overview_narrow" if narrow else "overview"
    key = next(iter(sorted(axes.numeric, key=lambda key: key != BLOCK)), None)
    if key is None:
        return Missing(
            name, "No number was swept. Give one several values, for example cache.block_size=8,16,32."
        )
    first = layout_of(axes, key)
    layout = replace(first, metrics=OVERVIEW, across=not narrow, width_in=COLUMN_IN if narrow else PAGE_IN)
    return draw(study, axes, layout, name=name, baselines=False)


def draw(
    study: Study,
    axes: Axes,
    layout: FacetLayout,
    *,
    name: str = "",
    like: PointRecord | None = None,
    baselines: bool = True,
) -> Picture:
    """The metrics along `layout.x`; settings outside the layout are those of `like`, by default the middle point."""
    key = layout.x
    name = name or "curve_" + key.replace(".", "_")
    main = [record for record in study.records if record.setting(key) is not None]
    policy = main_policy(main, key)
    main = [record for record in main if record.policy == policy]
    like = like or reference(main, axes, "middle")
    if like is None:
        return Missing(name, f"No point has a value of {label(key)}.")
    table = _series(alike(main, like, axes, free=layout.free), axes, layout)
    if table["x"].nunique() < 2:
        return Missing(name, f"No two points differ in {label(key)} alone.")
    shown = table["point"].nunique()
    if baselines:
        table = _with_others(study, table, like, axes, layout)
    figure, panel = _draw_grid(table, axes, layout)
    _legend(panel, table, layout)
    columns = 2 if layout.width_in < PAGE_IN else 4
    figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=columns)
    warning = study.block_size_caution
    if warning and BLOCK in layout.free:
        figure.supxlabel(warning, fontsize=7.5, color=WARNING, wrap=True)
    return Drawing(name, _caption(study, like, axes, layout, table, shown), figure, table)


def _draw_grid(table: "pd.DataFrame", axes: Axes, layout: FacetLayout) -> "tuple[Figure, Panel]":
    """The panels, metrics by values of `col`; gives the figure and its first panel."""
    known = set(table["column"].dropna())
    values = [value for value in axes.values[layout.col] if value in known] if layout.col else [""]
    rows, columns = (values, layout.metrics) if layout.across else (layout.metrics, values)
    height = 0.7 + (1.12 if layout.across else 1.25) * len(rows)
    figure, grid = panels(layout.width_in, height, len(rows), max(1, len(columns)))
    small = len(columns) > 2 or layout.width_in < PAGE_IN
    for panel, (row, column) in zip(grid, product(rows, columns), strict=True):
        metric, value = (column, row) if layout.across else (row, column)
        whole = table[table["metric"] == metric]
        unit = _panel(panel, metric, whole, whole[whole["column"] == value], layout, len(columns))
        named = f"{_PLAIN.get(metric, METRICS[metric].label)} ({unit})"
        at = f"{short_label(layout.col)} {value}" if layout.col else ""
        top, left = row == rows[0], column == columns[0]
        if layout.across:
            panel.set_title(named if top else "", fontsize=7.5)
            panel.set_ylabel(at if left else "", fontsize=7)
        else:
            panel.set_title(at if top else "", fontsize=8)
            panel.set_ylabel(named.replace(" (", "\n(") if left else "", fontsize=6.5)
        panel.set_xlabel(panel.get_xlabel() if row == rows[-1] else "", fontsize=6.5 if small else 8)
        panel.tick_params(labelsize=6.5)
    return figure, grid[0]


def main_policy(records: Sequence[PointRecord], key: str) -> str | None:
    """The policy in which the setting has the most values. Block sizes, for example, vary only with paged memory."""
    seen: dict[str, set[Any]] = {}
    for record in records:
        seen.setdefault(record.policy, set()).add(record.setting(key))
    return max(seen, key=lambda policy: (len(seen[policy]), policy == "paged"), default=None)


def _series(records: Sequence[PointRecord], axes: Axes, layout: FacetLayout) -> "pd.DataFrame":
    table = comparison_table(records, axes, layout.metrics)
    most_columns = _MOST_COLUMNS if layout.width_in == PAGE_IN else _MOST_NARROW
    for key, most in ((layout.hue, MOST_SERIES), (layout.col, most_columns)):
        if key:
            known = [value for value in axes.values[key] if (table[key] == value).any()]
            table = table[table[key].isin(spread(known, most))]
    return table.assign(
        x=table[layout.x].astype(float),
        series=table[layout.hue].astype(str) if layout.hue else "",
        column=table[layout.col] if layout.col else "",
    )


def _with_others(
    study: Study, table: "pd.DataFrame", like: PointRecord, axes: Axes, layout: FacetLayout
) -> "pd.DataFrame":
    """Add the points of the other policies that match in all settings that they have in common."""
    import pandas as pd

    fixed = [key for key in axes.values if key not in (layout.x, layout.col, BLOCK)]
    same = [
        record
        for record in study.records
        if record.policy != like.policy and all(record.setting(key) == like.setting(key) for key in fixed)
    ]
    if not same:
        return table
    others = comparison_table(same, axes, layout.metrics)
    x = float("nan") if layout.x == BLOCK else others[layout.x].astype(float)
    column = (others[layout.col] if layout.col != BLOCK else None) if layout.col else ""
    others = others.assign(x=x, series=others[POLICY], column=column)
    if layout.col and layout.col != BLOCK:  # only beside columns that the figure has
        others = others[others["column"].isin(set(table["column"]))]
    return pd.concat([table, others], ignore_index=True)


def _panel(
    panel: "Panel",
    metric: str,
    whole: "pd.DataFrame",
    found: "pd.DataFrame",
    layout: FacetLayout,
    columns: int,
) -> str:
    """Draw one panel and return its unit; all panels of a row (`whole`) have one scale."""
    unit = ""
    if found["simulated"].notna().any():
        largest = float(whole[["simulated", "high"]].max().max())
        scale, unit = axis_scale(metric, largest)
        _lines(panel, found, scale, _looks(whole))
        zero_based(panel, scale * float(whole[["simulated", "low"]].min().min()), scale * largest)
    else:
        panel.text(0.5, 0.5, "no figure at these points", transform=panel.transAxes, ha="center", color=GREY)
    if whole["x"].notna().any():
        value_axis(panel, layout.x, sorted(whole["x"].dropna().unique()), most=7 if columns < 3 else 5)
    panel.locator_params(axis="y", nbins=4)
    return unit


def _lines(
    panel: "Panel", found: "pd.DataFrame", scale: float, looks: Mapping[str, Mapping[str, Any]]
) -> None:
    """Draw all series of a panel at once; one without the swept setting is a level, with a band of its runs."""
    import seaborn as sns

    swept = found[found["x"].notna()]
    for series, one in found[found["x"].isna()].groupby("series", sort=False).first().iterrows():
        look = looks[str(series)]
        panel.axhline(scale * one["simulated"], color=look["color"], linestyle=look["linestyle"], zorder=1)
        panel.axhspan(scale * one["low"], scale * one["high"], color=look["color"], alpha=0.25)
    if swept.empty:
        return
    shown = [series for series in looks if series in set(swept["series"])]
    common: dict[str, Any] = {
        "x": "x", "hue": "series", "style": "series", "hue_order": shown, "style_order": shown, "legend": False,
        "palette": {series: looks[series]["color"] for series in shown}, "ax": panel,
    }  # fmt: skip
    dashes = {series: "" if looks[series]["linestyle"] == "solid" else (4, 1.5) for series in shown}
    drawn = swept.assign(predicted=scale * swept["simulated"])
    sns.lineplot(drawn, y="predicted", dashes=dashes, zorder=2, **common)
    runs = swept.melt(["x", "series"], ("low", "measured", "high"), value_name="run").dropna()
    if not runs.empty:  # the median of the runs, and their range
        sns.lineplot(
            runs.assign(run=scale * runs["run"]), y="run", estimator="median", errorbar=("pi", 100),
            err_style="bars", linestyle="", dashes=False, markers={one: looks[one]["marker"] for one in shown},
            markersize=4, markeredgewidth=0, err_kws={"capsize": 2, "elinewidth": 0.8}, **common,
        )  # fmt: skip
    panel.set(ylabel="")


def _looks(table: "pd.DataFrame") -> Mapping[str, Mapping[str, Any]]:
    """Colour, dashes and marker of each line: the swept values of the main policy, and each other policy its own."""
    series = list(dict.fromkeys(table["series"]))
    others = [name for name in series if name in set(table[POLICY])]
    colours = series_colours([name for name in series if name not in others])
    found = {name: {"color": colour, "linestyle": "solid", "marker": "o"} for name, colour in colours.items()}
    return found | {name: policy_line(name) for name in others}


def _legend(panel: "Panel", table: "pd.DataFrame", layout: FacetLayout) -> None:
    side_legend(panel, measured=bool(table["measured"].notna().any()))
    for series, look in _looks(table).items():
        if series in set(table[POLICY]):
            panel.plot([], [], **look, label=series)
        elif layout.hue:
            panel.plot([], [], color=look["color"], linewidth=3, label=f"{short_label(layout.hue)} {series}")


def _caption(
    study: Study, like: PointRecord, axes: Axes, layout: FacetLayout, table: "pd.DataFrame", shown: int
) -> str:
    fixed = held(like, axes, free=layout.free)
    measured = table["measured"].notna().any()
    text = "Lines are predicted, marks measured" if measured else "Lines are predicted"
    if layout.metrics is OVERVIEW:
        text += "; fragmentation: allocated KV slots whose owner never fills them"
    text += f"; cache policy {like.policy}" + (f", {fixed}" if fixed else "")
    same = [record for record in study.records if record.policy == like.policy]
    text += f": {'all' if shown == len(same) else shown} of its {len(same):,} points."
    others = [
        name for name in policies(study.records) if name != like.policy and (table[POLICY] == name).any()
    ]
    if others:
        hue = layout.hue if layout.hue and layout.hue != BLOCK else None
        at = f" at {hue}={like.setting(hue)}" if hue else ""
        text += f" Dashed: {', '.join(others)} with the same settings where they apply{at}"
        text += " (band: measured)." if table["x"].isna().any() else "."
    return text
