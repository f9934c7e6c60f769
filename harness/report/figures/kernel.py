"""Attention latency, predicted and measured, for each block size: of the kernel alone and inside the replay."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.metrics.verdict import point_label
from harness.report.axes import Axes, policy_of, setting
from harness.report.figures.series import axis_scale
from harness.report.study import Record, Study
from harness.report.style import PAGE_IN, PALETTE, Drawing, Missing, Picture, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel


NAME = "kernel"
_PANELS: Mapping[str, str] = {
    "kernel_call": "attention per step, same steps",
    "attention_per_decode_step": "attention per decode step",
    "attention_per_kv_token": "attention per KV slot read",
}

_LOOKS: Mapping[str, dict[str, Any]] = {
    "predicted": {
        "fmt": "D",
        "color": PALETTE[0],
        "markerfacecolor": "white",
        "capsize": 2,
        "elinewidth": 0.8,
    },
    "measured": {"fmt": "o", "color": PALETTE[3], "capsize": 2, "elinewidth": 0.8},
}


def draw(study: Study, axes: Axes) -> Picture:
    """One panel for each quantity: at each block size the median over points with their range, for both sides."""
    del axes  # block sizes come from the points, swept or not
    data = _table(study)
    shown = [name for name in _PANELS if (data["quantity"] == name).any()]
    if not shown:
        return Missing(NAME, "No point has attention times.")
    figure, grid = panels(PAGE_IN * (len(shown) + 0.3) / 3.3, 2.5, 1, len(shown))
    for panel, name in zip(grid, shown, strict=True):
        _panel(panel, name, data[data["quantity"] == name])
    _legend(grid[0], measured=bool(data["measured"].notna().any()))
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    caption = (
        "Attention time over all layers by block size: median over the points of that size, bars from the smallest "
        "to the largest point. Left, both sides have the steps that the engine took (level 1 below); in the "
        "others each side has the steps of its own replay."
    )
    return Drawing(NAME, caption, figure, data)


def _table(study: Study) -> "pd.DataFrame":
    import pandas as pd

    columns = ["point", "policy", "layout", "quantity", "predicted", "measured"]
    rows = [{**_identity(r), **values} for r in study.records for values in _quantities(r)]
    return pd.DataFrame(rows, columns=columns).astype({"predicted": "float64", "measured": "float64"})


def _identity(record: Record) -> dict[str, Any]:
    paged = policy_of(record) == "paged"
    layout = str(setting(record, "cache.block_size")) if paged else "contiguous"
    return {"point": point_label(record), "policy": policy_of(record), "layout": layout}


def _quantities(record: Record) -> list[dict[str, Any]]:
    kernel = (record.get("levels") or {}).get("kernel") or {}
    found = [
        {"quantity": row["metric"], "predicted": row["simulated"], "measured": row["measured"]}
        for row in record.get("comparison") or ()
        if row["metric"] in _PANELS
    ]
    if kernel.get("measured_mean_s"):
        measured, predicted = kernel["measured_mean_s"], kernel.get("predicted_mean_s")
        found.append({"quantity": "kernel_call", "predicted": predicted, "measured": measured})
    return found


def _panel(panel: "Panel", name: str, data: "pd.DataFrame") -> None:
    layouts = sorted(dict.fromkeys(data["layout"]), key=lambda text: (not text.isdigit(), text.zfill(9)))
    largest = float(data[["predicted", "measured"]].max().max())
    scale, unit = axis_scale("attention_per_step" if name == "kernel_call" else name, largest)
    for side, offset in (("predicted", -0.1), ("measured", 0.1)):
        groups = [scale * data[data["layout"] == layout][side].dropna() for layout in layouts]
        known = [(index + offset, group) for index, group in enumerate(groups) if len(group)]
        middle = [float(group.median()) for _, group in known]
        below = [m - float(group.min()) for m, (_, group) in zip(middle, known, strict=True)]
        above = [float(group.max()) - m for m, (_, group) in zip(middle, known, strict=True)]
        panel.errorbar([at for at, _ in known], middle, yerr=(below, above), **_LOOKS[side])
    panel.set_xticks(range(len(layouts)), [text.replace("contiguous", "contig.") for text in layouts])
    panel.set(xlabel="block size (tokens)", ylabel=unit, title=_PANELS[name], xlim=(-0.5, len(layouts) - 0.5))
    panel.set_ylim(0, 1.08 * scale * largest)
    panel.grid(visible=False, axis="x")


def _legend(panel: "Panel", *, measured: bool) -> None:
    for side in ("predicted", "measured") if measured else ("predicted",):
        panel.errorbar([], [], yerr=[], label=side, **_LOOKS[side])
