"""Every timed call between the ceilings that were measured in the same run."""

from typing import TYPE_CHECKING

from harness.bench.kernels.names import OURS
from harness.report.drawing import Drawing, Missing, Picture
from harness.report.style import GREY, PAGE_IN, PALETTE, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from harness.bench.kernels.results import Ceilings

NAME = "kernel_roofline"


def draw(table: "pd.DataFrame", limits: "Ceilings") -> Picture:
    """TFLOP/s against operations per byte, providers by colour, decode and prefill by marker."""
    if table.empty:
        return Missing(NAME, "No case was timed.")
    data = table[["name", "provider", "queries", "gbytes_s", "tflop_s"]].copy()
    data["flop_per_byte"] = data["tflop_s"] * 1e3 / data["gbytes_s"]
    figure, (panel,) = panels(PAGE_IN, 3.0, 1, 1)
    _roof(panel, limits, float(data["flop_per_byte"].min()), float(data["flop_per_byte"].max()))
    names = list(dict.fromkeys(data["provider"]))
    for place, name in enumerate(sorted(names, key=lambda name: name != OURS)):
        for decode, marker in ((True, "o"), (False, "s")):
            part = data[(data["provider"] == name) & ((data["queries"] == 1) == decode)]
            colour = PALETTE[place % len(PALETTE)]
            kind = "" if decode else " (prefill)"
            if len(part):
                label, face = f"{name}{kind}", colour if name == OURS else "none"
                panel.plot(
                    part["flop_per_byte"], part["tflop_s"], marker, color=colour, mfc=face, label=label
                )
    panel.set(xscale="log", yscale="log", xlabel="FLOP per byte that must move", ylabel="TFLOP/s")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside right upper")
    caption = (
        "Speed of every call against its arithmetic intensity. Bytes count each distinct key, value, query and output "
        f"once. Lines: {limits.read_bytes_s / 1e9:,.0f} GB/s read, {limits.copy_bytes_s / 1e9:,.0f} GB/s copied and "
        f"{limits.matmul_flop_s / 1e12:,.3g} TFLOP/s of a matrix product, all measured in the same run."
    )
    return Drawing(NAME, caption, figure, data)


def _roof(panel: "Axes", limits: "Ceilings", least: float, most: float) -> None:
    ridge = limits.matmul_flop_s / limits.read_bytes_s
    low, high = least / 2, max(most, ridge) * 2
    points = [low, ridge, high]
    heights = [min(limits.matmul_flop_s, point * limits.read_bytes_s) / 1e12 for point in points]
    panel.plot(points, heights, color=GREY, label="read, matmul ceiling")
    ridge = limits.matmul_flop_s / limits.copy_bytes_s
    panel.plot(
        [low, ridge],
        [point * limits.copy_bytes_s / 1e12 for point in (low, ridge)],
        color=GREY,
        linestyle=":",
        label="copy ceiling",
    )
