"""Attention latency at equal load: time of a step against the KV slots that it reads, and the error of its price."""

from typing import TYPE_CHECKING, Any

from harness.metrics.verdict import point_label
from harness.report.axes import Axes, policy_of, setting
from harness.report.figures.series import axis_scale, series_colours
from harness.report.study import Record, Study
from harness.report.style import GREY, PAGE_IN, PALETTE, WARNING, Drawing, Missing, Picture, new_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel


NAME = "kernel"
_LOAD, _TIME = "kv_read_per_decode_step", "attention_per_decode_step"
_PER_SLOT = "attention_per_kv_token"


def draw(study: Study, axes: Axes) -> Picture:
    """Left: attention of a decode step against its load, one mark a point; right: predicted / measured, same steps."""
    del axes  # block sizes come from the points, swept or not
    data = _table(study)
    if data.empty:
        return Missing(NAME, "No point has attention times.")
    figure = new_figure(PAGE_IN, 2.8)
    ratios = data["ratio"].notna().any()
    panels = figure.subplots(1, 2, width_ratios=(2, 1)) if ratios else [figure.subplots()]
    layouts = sorted(dict.fromkeys(data["layout"]), key=lambda text: (not text.isdigit(), text.zfill(9)))
    colours = series_colours([name for name in layouts if name.isdigit()])
    colours |= {name: PALETTE[1] for name in layouts if not name.isdigit()}
    _load(panels[0], data, colours)
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
    return Drawing(NAME, caption, figure, data)


def _table(study: Study) -> "pd.DataFrame":
    import pandas as pd

    columns = ["point", "policy", "layout", "side", "kv_slots", "seconds", "ratio"]
    rows = [{**_identity(r), **values} for r in study.records for values in _values(r)]
    return pd.DataFrame(rows, columns=columns).astype(
        dict.fromkeys(("kv_slots", "seconds", "ratio"), "float64")
    )


def _identity(record: Record) -> dict[str, Any]:
    paged = policy_of(record) == "paged"
    layout = str(setting(record, "cache.block_size")) if paged else "contiguous"
    return {"point": point_label(record), "policy": policy_of(record), "layout": layout}


def _values(record: Record) -> list[dict[str, Any]]:
    rows = {row["metric"]: row for row in record.get("comparison") or ()}
    kernel = (record.get("levels") or {}).get("kernel") or {}
    measured, predicted = kernel.get("measured_mean_s"), kernel.get("predicted_mean_s")
    ratio = predicted / measured if measured and predicted is not None else None
    found = []
    for side, key in (("predicted", "simulated"), ("measured", "measured")):
        seconds, load = (rows.get(name, {}).get(key) for name in (_TIME, _LOAD))
        per_slot = rows.get(_PER_SLOT, {}).get(key)
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


def _load(panel: "Panel", data: "pd.DataFrame", colours: dict[str, str]) -> None:
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
