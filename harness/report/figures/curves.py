"""The sweep's curves: predicted lines and measured points along one swept setting."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.metrics import METRICS
from harness.report.axes import (
    POLICY,
    Axes,
    alike,
    comparison_table,
    held,
    label,
    policy_of,
    reference,
    setting,
    short_label,
)
from harness.report.figures.series import (
    axis_scale,
    evenly,
    series_colours,
    side_legend,
    value_axis,
    zero_based,
)
from harness.report.study import Record, Study
from harness.report.style import GREY, PAGE_IN, Drawing, Missing, Picture, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel


_SHOWN = (
    "output_throughput",
    "ttft_p50",
    "tpot_p50",
    "internal_share",
    "sharing_saving",
    "attention_per_decode_step",
)
_DASHED: Any = (0, (4, 2))


def draw(study: Study, axes: Axes, key: str) -> Picture:
    """Six metrics along `key`. Lines differ in a second setting; the others stay at their middle value."""
    name = "curve_" + key.replace(".", "_")
    main = [record for record in study.records if setting(record, key) is not None]
    policy = _main_policy(main, key)
    main = [record for record in main if policy_of(record) == policy]
    like = reference(main, axes, "middle")
    if like is None:
        return Missing(name, f"No point has a value of {label(key)}.")
    second = next((other for other in axes.values if other != key), None)
    free = [key, second] if second else [key]
    table = _series(study, alike(main, like, axes, free=free), axes, key, second)
    if table["x"].nunique() < 2:
        return Missing(name, f"No two points differ in {label(key)} alone.")
    table = _with_flat(study, table, like, axes, key)
    figure, grid = panels(PAGE_IN, 4.3, 2, 3)
    for panel, metric in zip(grid, _SHOWN, strict=True):
        _panel(panel, metric, table[table["metric"] == metric], key)
    _legend(grid[0], table, second)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return Drawing(name, _caption(like, axes, free, table), figure, table)


def _main_policy(records: Sequence[Record], key: str) -> str | None:
    """The policy in which the setting has the most values. Block sizes, for example, vary only with paged memory."""
    seen: dict[str, set[Any]] = {}
    for record in records:
        seen.setdefault(policy_of(record), set()).add(setting(record, key))
    return max(seen, key=lambda policy: (len(seen[policy]), policy == "paged"), default=None)


def _series(
    study: Study, records: Sequence[Record], axes: Axes, key: str, second: str | None
) -> "pd.DataFrame":
    table = comparison_table(records, axes, _SHOWN)
    values = evenly([v for v in axes.values[second] if (table[second] == v).any()]) if second else []
    if second:
        table = table[table[second].isin(values)]
    return table.assign(x=table[key].astype(float), series=table[second].astype(str) if second else "")


def _with_flat(study: Study, table: "pd.DataFrame", like: Record, axes: Axes, key: str) -> "pd.DataFrame":
    """Add the points of the other policies that match in all settings they have in common."""
    import pandas as pd

    rest = [r for r in study.records if policy_of(r) != policy_of(like)]
    same = [
        r
        for r in rest
        if all(setting(r, k) == setting(like, k) for k in axes.values if k not in (key, "cache.block_size"))
    ]
    if not same:
        return table
    flat = comparison_table(same, axes, _SHOWN)
    flat = flat.assign(x=flat[key].astype(float), series=flat[POLICY])
    if key == "cache.block_size":
        flat = flat.assign(x=float("nan"))
    return pd.concat([table, flat], ignore_index=True)


def _panel(panel: "Panel", metric: str, found: "pd.DataFrame", key: str) -> None:
    if found["simulated"].notna().any():
        largest = float(found[["simulated", "high"]].max().max())
        scale, unit = axis_scale(metric, largest)
        for series, colour in _colours(found).items():
            _line(panel, found[found["series"] == series].sort_values("x"), scale, colour, series)
        panel.set_ylabel(unit)
        zero_based(panel, scale * float(found[["simulated", "low"]].min().min()), scale * largest)
    else:
        panel.text(0.5, 0.5, "no figure at these points", transform=panel.transAxes, ha="center", color=GREY)
    if found["x"].notna().any():
        value_axis(panel, key, sorted(found["x"].dropna().unique()))
    panel.set_title(METRICS[metric].label)


def _line(panel: "Panel", mine: "pd.DataFrame", scale: float, colour: str, series: str) -> None:
    other = series in set(mine[POLICY])
    dashes: Any = _DASHED if other else "solid"
    if mine["x"].isna().all():
        panel.axhline(scale * float(mine["simulated"].iloc[0]), color=colour, linestyle=dashes, zorder=1)
        panel.axhspan(
            scale * float(mine["low"].iloc[0]), scale * float(mine["high"].iloc[0]), color=colour, alpha=0.3
        )
        return
    panel.plot(mine["x"], scale * mine["simulated"], color=colour, linestyle=dashes, zorder=2)
    bars = scale * (mine["measured"] - mine["low"]), scale * (mine["high"] - mine["measured"])
    panel.errorbar(
        mine["x"], scale * mine["measured"], yerr=bars, fmt="o", color=colour, capsize=2, elinewidth=0.8
    )


def _colours(table: "pd.DataFrame") -> Mapping[str, str]:
    series = list(dict.fromkeys(table["series"]))
    others = [name for name in series if name in set(table[POLICY])]
    swept = [name for name in series if name not in others]
    return {**series_colours(swept), **dict.fromkeys(others, "#949494")}


def _legend(panel: "Panel", table: "pd.DataFrame", second: str | None) -> None:
    side_legend(panel, measured=bool(table["measured"].notna().any()))
    for series, colour in _colours(table).items():
        if series in set(table[POLICY]):
            panel.plot([], [], color=colour, linestyle=_DASHED, label=series)
        elif second:
            panel.plot([], [], color=colour, linewidth=3, label=f"{short_label(second)} {series}")


def _caption(like: Record, axes: Axes, free: Sequence[str], table: "pd.DataFrame") -> str:
    fixed = held(like, axes, free=free)
    sides = (
        "Lines are predicted, marks measured" if table["measured"].notna().any() else "Lines are predicted"
    )
    text = f"{sides}; cache policy {policy_of(like)}" + (f", {fixed}." if fixed else ".")
    others = [name for name in dict.fromkeys(table[POLICY]) if name != policy_of(like)]
    if others:
        text += f" In grey {', '.join(others)} with the same settings where they apply"
        text += " (band: measured)." if table["x"].isna().any() else "."
    return text
