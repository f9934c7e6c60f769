"""The trade between throughput and latency: every point, the Pareto front, and latency against the request rate."""

from typing import TYPE_CHECKING, Any

from harness.report.axes import POLICY, Axes, comparison_table
from harness.report.figures.series import axis_scale, policies, policy_style
from harness.report.study import Study
from harness.report.style import PAGE_IN, Drawing, Missing, Picture, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel


NAME = "tradeoff"
RATE = "workload.request_rate"
_X, _Y = "request_throughput", "norm_latency_mean"


def draw(study: Study, axes: Axes) -> Picture:
    """Left: normalized latency against requests/s served, with the front; right: against the rate asked for."""
    table = _wide(comparison_table(study.records, axes, (_X, _Y)), axes)
    if len(table) < 2:
        return Missing(
            NAME, "Fewer than two points have a throughput and a latency, so there is no trade to draw."
        )
    rates = RATE in axes.numeric
    figure, grid = panels(PAGE_IN, 2.8, 1, 2 if rates else 1)
    scale, unit = axis_scale(_Y, float(table["latency"].max()))
    _front(grid[0], table, scale, unit)
    if rates:
        _against_rate(grid[1], table, scale, unit)
    for policy in policies(study.records):
        grid[0].scatter([], [], s=12, label=policy, **policy_style(policy))
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    side = "measured" if table["measured"].any() else "predicted"
    caption = (
        "Every mark is one point "
        f"({side}{' where it was measured, else predicted' if side == 'measured' else ''}). On the "
        "front no other point serves more requests with a lower normalized latency (E2E latency / output tokens)."
    )
    if rates:
        caption += " Right: the axes of the PagedAttention paper (SOSP'23, figure 12)."
    return Drawing(NAME, caption, figure, table)


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


def _front(panel: "Panel", table: "pd.DataFrame", scale: float, unit: str) -> None:
    _marks(panel, table, "throughput", scale)
    ordered = table.sort_values(["throughput", "latency"], ascending=[False, True])
    best = ordered[ordered["latency"] <= ordered["latency"].cummin()]
    best = best[best["latency"].diff().fillna(-1.0) < 0]
    panel.plot(best["throughput"], scale * best["latency"], color="#444444", linewidth=0.9, drawstyle="steps-post",
               label="Pareto front")  # fmt: skip
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
        panel.scatter(
            mine[x].astype(float),
            scale * mine["latency"],
            s=12,
            alpha=0.7,
            linewidths=0,
            **look,
        )
