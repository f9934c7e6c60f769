"""Throughput and latency: their trade, maps over two settings, and the attention of a step at equal load."""

from typing import TYPE_CHECKING, Any

from harness.metrics import METRICS
from harness.metrics.record import PointRecord, Side
from harness.report.axes import (
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
from harness.report.figures.series import axis_scale, policies, policy_style, series_colours
from harness.report.study import Study, spread
from harness.report.style import (
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


_X, _Y = "request_throughput", "norm_latency_mean"
_MOST_NAMED = 5  # points of the front that are named


def draw_tradeoff(study: Study, axes: Axes) -> Picture:
    """Left: normalized latency against requests/s served, with the front; right: against the rate asked for."""
    table = _wide(comparison_table(study.records, axes, (_X, _Y)), axes)
    if len(table) < 2:
        return Missing(
            "tradeoff",
            "Fewer than two points have a throughput and a latency, so there is no trade to draw.",
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
    caption = (
        f"Every mark is one point ({side}{where}). No other point serves more requests than those named with a lower "
        "normalized latency (E2E latency / output tokens)."
    )
    if rates:
        caption += " Right: the axes of the PagedAttention paper (SOSP'23, figure 12)."
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
        settings = ", ".join(
            f"{short_label(key)} {one[key]:g}" for key in axes.numeric if one[key] == one[key]
        )
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
        return Missing(
            "heat", "Fewer than two numeric settings were swept, so there is no map of two settings."
        )
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
        caption += (
            "Right: the cost model's price of the attention of exactly the steps that the engine took, divided by the "
            "measured time (level 1 below)."
        )
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
    sides: tuple[tuple[str, Side], ...] = (("predicted", "simulated"), ("measured", "measured"))
    for side, key in sides:
        seconds, load, per_slot = (record.value(name, key) for name in (_TIME, _LOAD, _PER_SLOT))
        if load is None and seconds and per_slot:
            load = seconds / per_slot  # records without the metric of the load hold it as this quotient
        if seconds is not None and load is not None:
            found.append(
                {
                    "side": side,
                    "kv_slots": load,
                    "seconds": seconds,
                    "ratio": ratio if side == "measured" else None,
                }
            )
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
