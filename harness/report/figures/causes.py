"""Where the bytes of a pool go where layers are in groups: waste by cause, vLLM's gauge, and both over time."""

from typing import TYPE_CHECKING

from harness.metrics.log import WASTE_COLUMNS
from harness.report.axes import Axes, comparison_table, reference
from harness.report.figures.series import evenly
from harness.report.figures.timeline import binned
from harness.report.study import Study
from harness.report.style import PAGE_IN, PALETTE, Drawing, Missing, Picture, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Panel


NAME = "causes"
OVER_TIME = "groups_over_time"
_GIB = 2**30
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


def draw_over_time(study: Study, axes: Axes) -> Picture:
    """Above: what the bytes of the pools hold; below: the bytes that each group has in use. One point of the middle."""
    from harness.metrics.verdict import point_label

    grouped = [record for record in study.records if (record.get("pool") or {}).get("groups")]
    record = reference(grouped, axes, "middle") if grouped else None
    steps = study.steps(record) if record else None
    waste = study.table(record, "waste") if record else None
    if record is None or steps is None or waste is None or "group_0" not in waste or steps.empty:
        return Missing(
            OVER_TIME, "No point with groups of layers has a readable table of its bytes (waste.parquet)."
        )
    steps, waste = (table[table["side"] == "simulated"].reset_index(drop=True) for table in (steps, waste))
    layers = record["pool"]["groups"]["layers"]
    names = [f"group_{index}" for index in range(len(layers))]
    data = binned(steps, waste[[*WASTE_COLUMNS, *names]])
    figure, (causes, groups) = panels(PAGE_IN, 4.2, 2, 1)
    bottom = 0 * data["time_s"]
    for name, colour in _COLOURS.items():
        top = bottom + data[name] / _GIB
        causes.fill_between(
            data["time_s"], bottom, top, color=colour, linewidth=0, step="mid", label=name.replace("_", " ")
        )
        bottom = top
    for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
        words = f"{index}: {layer['layers']} {layer['kind']}" + (
            f" {layer['window']:,}" if layer["window"] else ""
        )
        groups.plot(data["time_s"], data[name] / _GIB, color=PALETTE[index % len(PALETTE)], label=words)
    causes.set(ylabel="bytes of the pools (GiB)", ylim=(0, None))
    groups.set(ylabel="in use (GiB)", xlabel="virtual time (s)", ylim=(0, None))
    for panel in (causes, groups):
        panel.set_xlim(0, float(data["time_s"].max()))
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=6)
    caption = (
        f"Predicted bytes over time at {point_label(record)}. Above: what they hold; the parts add up to the pools. "
        "Below: the pages that each group of layers has in use, with its number of layers and its window in tokens."
    )
    return Drawing(OVER_TIME, caption, figure, data)
