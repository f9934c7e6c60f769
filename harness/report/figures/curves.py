"""The sweep's curves: predicted lines and measured points along one swept setting; throughput against latency.

Rows of curves are metrics, lines differ in a second setting and columns in a third. Settings beyond the third are held
at the middle of their values, and the caption says how many points a figure shows then. Here are also maps over two
settings, and the attention of a step at equal load.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from harness.metrics import METRICS
from harness.metrics.record import PointRecord, Side
from harness.report.axes import (
    BLOCK,
    POLICY,
    RATE,
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
    policy_style,
    series_colours,
    side_legend,
    value_axis,
    zero_based,
)
from harness.report.study import Study, spread
from harness.report.style import (
    COLUMN_IN,
    GREY,
    PAGE_IN,
    PALETTE,
    WARNING,
    Drawing,
    Missing,
    Picture,
    new_figure,
    panels,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel
    from matplotlib.figure import Figure

SHOWN = (
    "request_throughput", "output_throughput", "ttft_p50", "tpot_p50", "internal_share", "sharing_saving",
)  # fmt: skip
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
    hue, col, *_ = [*(other for other in axes.values if other != key), None, None]
    return FacetLayout(key, hue, col)


def draw_overview(study: Study, axes: Axes, *, narrow: bool = False) -> Picture:
    """Fragmentation, throughput and attention latency along the block size, or else the first swept number.

    `narrow` is the same for one column of a paper, or a telephone: a metric a row.
    """
    name = "overview_narrow" if narrow else "overview"
    key = next(iter(sorted(axes.numeric, key=lambda key: key != BLOCK)), None)
    if key is None:
        return Missing(name, "No number was swept: the choices above and the points below compare the rest.")
    first = layout_of(axes, key)
    layout = replace(first, metrics=OVERVIEW, across=not narrow, width_in=COLUMN_IN if narrow else PAGE_IN)
    return draw(study, axes, layout, name=name, baselines=False)


def draw(study: Study, axes: Axes, layout: FacetLayout, *, name: str = "", baselines: bool = True) -> Picture:
    """The metrics along `layout.x`; settings outside the layout are those of the middle point."""
    key = layout.x
    name = name or "curve_" + key.replace(".", "_")
    main = [record for record in study.records if record.setting(key) is not None]
    policy = main_policy(main, key)
    main = [record for record in main if record.policy == policy]
    like = reference(main, axes, "middle")
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
    values = [name for name in map(_name, axes.values[layout.col]) if name in known] if layout.col else [""]
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
    most_columns = _MOST_COLUMNS if layout.width_in == PAGE_IN else _MOST_NARROW
    for key, most in ((layout.hue, MOST_SERIES), (layout.col, most_columns)):
        if key:
            held = {record.setting(key) for record in records}
            shown = spread([value for value in axes.values[key] if value in held], most)
            records = [record for record in records if record.setting(key) in shown]
    table = comparison_table(records, axes, layout.metrics)
    series, column = (_names(table, records, key) for key in (layout.hue, layout.col))
    return table.assign(x=table[layout.x].astype(float), series=series, column=column)


def _name(value: Any) -> str:
    return "null" if value is None else str(value)


def _names(table: "pd.DataFrame", records: Sequence[PointRecord], key: str | None) -> Any:
    """A setting of the point of each row in words: a column of numbers would hold no null. Empty without a key."""
    return table["point"].map({one.point_label: _name(one.setting(key)) for one in records}) if key else ""


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
    others = others.assign(x=x, series=others[POLICY])
    columns = table[["column"]].drop_duplicates()
    if layout.col == BLOCK:  # what has no blocks of its own stands beside each size
        others = others.merge(columns, how="cross")
    else:  # only beside columns that the figure has
        others = others.assign(column=_names(others, same, layout.col)).merge(columns)
    return pd.concat([table, others], ignore_index=True)


def _panel(
    panel: "Panel", metric: str, whole: "pd.DataFrame", found: "pd.DataFrame", layout: FacetLayout, columns: int
) -> str:  # fmt: skip
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
        text += "; fragmentation: allocated KV slots whose owner never fills them, time-weighted"
    text += f"; cache policy {like.policy}" + (f", {fixed}" if fixed else "")
    same = [record for record in study.records if record.policy == like.policy]
    text += f": {'all' if shown == len(same) else shown} of its {len(same):,} points."
    others = [one for one in policies(study.records) if one != like.policy and (table[POLICY] == one).any()]
    if others:
        hue = layout.hue if layout.hue and layout.hue != BLOCK else None
        at = f" at {hue}={like.setting(hue)}" if hue else ""
        text += f" Dashed: {', '.join(others)} with the same settings where they apply{at}"
        text += " (band: measured)." if table["x"].isna().any() else "."
    return text


_X, _Y = "request_throughput", "norm_latency_mean"
_MOST_NAMED = 5  # points of the front that are named


def draw_tradeoff(study: Study, axes: Axes) -> Picture:
    """Left: normalized latency against requests/s served, with the front; right: against the rate asked for."""
    table = _wide(comparison_table(study.records, axes, (_X, _Y)), axes)
    if len(table) < 2:
        return Missing(
            "tradeoff", "Fewer than two points have a throughput and a latency, so there is no trade to draw."
        )
    rates = RATE in axes.numeric
    figure, grid = panels(PAGE_IN, 2.8, 1, 2 if rates else 1)
    scale, unit = axis_scale(_Y, float(table["latency"].max()))
    _front(grid[0], table, axes, scale, unit)
    if rates:
        _against_rate(grid[1], table, scale, unit)
    for policy in policies(study.records):
        grid[0].scatter([], [], s=12, label=policy, **policy_style(policy))
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    side = "measured" if table["measured"].any() else "predicted"
    where = " where it was measured, else predicted" if side == "measured" else ""
    best = "No other point serves more requests than those named with a lower normalized latency"
    caption = f"Every mark is one point ({side}{where}). {best} (E2E latency / output tokens)."
    if rates:
        caption += (
            " Right: the axes of the PagedAttention paper (SOSP'23, figure 12); lines: medians of the marks."
        )
    return Drawing("tradeoff", caption, figure, table)


def _wide(table: "pd.DataFrame", axes: Axes) -> "pd.DataFrame":
    """One row for each point: settings, throughput, latency, and whether they were measured."""
    import pandas as pd

    table = table.assign(best=table["measured"].fillna(table["simulated"]))
    rows: list[dict[str, Any]] = []
    for point, mine in table.groupby("point", sort=False):
        values = mine.set_index("metric")["best"]
        if {_X, _Y} <= set(values.index):
            first = mine.iloc[0]
            rows.append(
                {"point": point, POLICY: first[POLICY], **{key: first[key] for key in axes.values}}
                | {
                    "throughput": values[_X],
                    "latency": values[_Y],
                    "measured": bool(mine["measured"].notna().any()),
                }
            )
    columns = ["point", POLICY, *axes.values, "throughput", "latency", "measured"]
    return pd.DataFrame(rows, columns=columns)


def _front(panel: "Panel", table: "pd.DataFrame", axes: Axes, scale: float, unit: str) -> None:
    _marks(panel, table, "throughput", scale)
    ordered = table.sort_values(["throughput", "latency"], ascending=[False, True])
    best = ordered[ordered["latency"] <= ordered["latency"].cummin()]
    best = best[best["latency"].diff().fillna(-1.0) < 0]
    if len(best) > 1:
        panel.plot(best["throughput"], scale * best["latency"], color="#444444", linewidth=0.9,
                   drawstyle="steps-post", label="Pareto front")  # fmt: skip
    for _, one in spread(list(best.iterrows()), _MOST_NAMED):
        settings = ", ".join(f"{short_label(of)} {one[of]:g}" for of in axes.numeric if one[of] == one[of])
        panel.annotate(
            settings, (one["throughput"], scale * one["latency"]), (0, 7), textcoords="offset points", ha="right",
            fontsize=5.5, color=GREY,
        )  # fmt: skip
    panel.set(xlabel="requests/s served", ylabel=f"normalized latency ({unit})")
    panel.set_ylim(bottom=0)


def _against_rate(panel: "Panel", table: "pd.DataFrame", scale: float, unit: str) -> None:
    _marks(panel, table.dropna(subset=[RATE]), RATE, scale)
    for policy, mine in table.dropna(subset=[RATE]).groupby(POLICY):
        middle = mine.groupby(RATE)["latency"].median()
        panel.plot(
            middle.index.astype(float), scale * middle, color=policy_style(str(policy))["color"], linewidth=1
        )
    panel.set(xlabel="request rate (1/s)", ylabel=f"normalized latency ({unit})")
    panel.set_ylim(bottom=0)


def _marks(panel: "Panel", table: "pd.DataFrame", x: str, scale: float) -> None:
    for policy, mine in table.groupby(POLICY):
        look = policy_style(str(policy))
        panel.scatter(mine[x].astype(float), scale * mine["latency"], s=12, alpha=0.7, linewidths=0, **look)


_MAPPED = ("request_throughput", "norm_latency_mean", "sharing_saving")
_MOST_NUMBERED = 60  # cells that have room for their number; more get a colour bar
_MOST_TICKS = 9


def draw_heat(study: Study, axes: Axes) -> Picture:
    """One map for each metric, over the first two numeric settings of the paged points, the others held low."""
    keys = axes.numeric[:2]
    if len(keys) < 2:
        return Missing("heat", "Fewer than two numeric settings were swept: there is no map of two.")
    policy = "paged" if any(r.policy == "paged" for r in study.records) else study.records[0].policy
    own = [record for record in study.records if record.policy == policy]
    like = reference(own, axes, "low") or own[0]
    table = comparison_table(alike(own, like, axes, free=keys), axes, _MAPPED)
    table = table.assign(best=table["measured"].fillna(table["simulated"])).dropna(subset=["best", *keys])
    shown = [name for name in _MAPPED if (table["metric"] == name).any()]
    if not shown:
        return Missing("heat", "No point has the figures of the maps.")
    figure, grid = panels(PAGE_IN, 2.3, 1, len(shown))
    for panel, name in zip(grid, shown, strict=True):
        _map(panel, name, table[table["metric"] == name], *keys)
    at = held(like, axes, free=keys)
    caption = (
        f"Cache policy {policy}{f', {at}' if at else ''}. Each cell is one point, measured where it was."
    )
    return Drawing("heat", caption, figure, table[["point", POLICY, *axes.values, "metric", "unit", "best"]])


def _map(panel: "Panel", name: str, found: "pd.DataFrame", x: str, y: str) -> None:
    import seaborn as sns

    scale, unit = axis_scale(name, float(found["best"].max()))
    cells = scale * found.pivot_table(index=y, columns=x, values="best").iloc[::-1]
    numbered = cells.size <= _MOST_NUMBERED
    sns.heatmap(
        cells, cmap="viridis", annot=numbered, fmt=".3g", cbar=not numbered, annot_kws={"size": 6.5}, ax=panel,
        xticklabels=max(1, len(cells.columns) // _MOST_TICKS), yticklabels=max(1, len(cells) // _MOST_TICKS),
    )  # fmt: skip
    panel.tick_params(rotation=0)
    panel.set(xlabel=label(x), ylabel=label(y))
    panel.set_title(f"{METRICS[name].label} ({unit})", fontsize=7)


_LOAD, _TIME = "kv_read_per_decode_step", "attention_per_decode_step"
_PER_SLOT = "attention_per_kv_token"


def draw_kernel(study: Study, axes: Axes) -> Picture:
    """Left: attention of a decode step against its load, one mark a point; right: predicted / measured, same steps."""
    del axes  # block sizes come from the points, swept or not
    data = _kernel_table(study)
    if data.empty:
        return Missing("kernel", "No point has attention times.")
    figure = new_figure(PAGE_IN, 2.8)
    ratios = data["ratio"].notna().any()
    panels = figure.subplots(1, 2, width_ratios=(2, 1)) if ratios else [figure.subplots()]
    layouts = sorted(dict.fromkeys(data["layout"]), key=lambda text: (not text.isdigit(), text.zfill(9)))
    colours = series_colours([name for name in layouts if name.isdigit()])
    colours |= {name: PALETTE[1] for name in layouts if not name.isdigit()}
    _by_load(panels[0], data, colours)
    if ratios:
        _ratio(panels[1], data.dropna(subset=["ratio"]), colours)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    if warning := study.block_size_caution:
        figure.supxlabel(warning, fontsize=7.5, color=WARNING)
    caption = (
        "Left: attention over all layers of a step that only decodes, against the KV slots that such a step reads; one "
        "mark for each point. Block sizes are compared at equal load: marks above others at the same place are slower. "
    )
    if ratios:
        caption += "Right: the cost model's price of the attention of exactly the steps that the engine "
        caption += "took, divided by the measured time (level 1 below)."
    return Drawing("kernel", caption, figure, data)


def _kernel_table(study: Study) -> "pd.DataFrame":
    import pandas as pd

    columns = ["point", "policy", "layout", "side", "kv_slots", "seconds", "ratio"]
    rows = [{**_identity(r), **values} for r in study.records for values in _values(r)]
    return pd.DataFrame(rows, columns=columns).astype(
        dict.fromkeys(("kv_slots", "seconds", "ratio"), "float64")
    )


def _identity(record: PointRecord) -> dict[str, Any]:
    paged = record.policy == "paged"
    layout = str(record.setting("cache.block_size")) if paged else "contiguous"
    return {"point": record.point_label, "policy": record.policy, "layout": layout}


def _values(record: PointRecord) -> list[dict[str, Any]]:
    kernel = record.levels.get("kernel") or {}
    measured, predicted = kernel.get("measured_mean_s"), kernel.get("predicted_mean_s")
    ratio = predicted / measured if measured and predicted is not None else None
    found = []
    sides: tuple[tuple[str, Side, float | None], ...]
    sides = ("predicted", "simulated", None), ("measured", "measured", ratio)
    for side, key, shown in sides:
        seconds, load, per_slot = (record.value(name, key) for name in (_TIME, _LOAD, _PER_SLOT))
        if load is None and seconds and per_slot:
            load = seconds / per_slot  # records without the metric of the load hold it as this quotient
        if seconds is not None and load is not None:
            found.append({"side": side, "kv_slots": load, "seconds": seconds, "ratio": shown})
    return found


def _by_load(panel: "Panel", data: "pd.DataFrame", colours: dict[str, str]) -> None:
    scale, unit = axis_scale(_TIME, float(data["seconds"].max()))
    for (side, layout), mine in data.groupby(["side", "layout"]):
        filled = side == "measured"
        panel.plot(
            mine["kv_slots"], scale * mine["seconds"], linestyle="none", marker="o" if filled else "D", markersize=4,
            color=colours[str(layout)], markerfacecolor=colours[str(layout)] if filled else "none", alpha=0.8,
        )  # fmt: skip
    for layout, colour in colours.items():
        name = f"blocks of {layout}" if layout.isdigit() else layout
        panel.plot([], [], linestyle="none", marker="s", color=colour, label=name)
    panel.plot([], [], linestyle="none", marker="D", markerfacecolor="none", color=GREY, label="predicted")
    if (data["side"] == "measured").any():
        panel.plot([], [], linestyle="none", marker="o", color=GREY, label="measured")
    panel.set(xlabel="KV slots read per decode step", ylabel=f"attention per decode step ({unit})")
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)


def _ratio(panel: "Panel", data: "pd.DataFrame", colours: dict[str, str]) -> None:
    shown = [layout for layout in colours if (data["layout"] == layout).any()]
    for at, layout in enumerate(shown):
        values = data[data["layout"] == layout]["ratio"]
        panel.scatter([at] * len(values), values, s=10, alpha=0.6, linewidths=0, color=colours[layout])
        panel.hlines(float(values.median()), at - 0.3, at + 0.3, color="#222222", linewidth=1.2)
    panel.axhline(1, color="#444444", linewidth=0.8)
    panel.set_xticks(range(len(shown)), [text.replace("contiguous", "contig.") for text in shown])
    panel.set(xlabel="block size (tokens)", ylabel="predicted / measured", xlim=(-0.6, len(shown) - 0.4))
    panel.grid(visible=False, axis="x")
