"""What paging costs: the same kernel on blocks and on contiguous KV."""

from typing import TYPE_CHECKING

from harness.bench.kernels.names import CONTIGUOUS, OURS, SDPA
from harness.report.drawing import Drawing, Missing, Picture
from harness.report.style import GREY, PAGE_IN, PALETTE, panels

if TYPE_CHECKING:
    import pandas as pd

NAME = "kernel_paging"
MOST_CASES = 24
_CAPTIONS = {
    CONTIGUOUS: "What paging adds to a call: our kernel on permuted blocks against its twin with plain addresses.",
    SDPA: "Our attention on permuted blocks against torch's fused attention on contiguous KV: paging and all else.",
}


def draw(table: "pd.DataFrame") -> Picture:
    """Overhead in per cent by case, with the range that the spread of both sides allows."""
    other = CONTIGUOUS if (table["provider"] == CONTIGUOUS).any() else SDPA
    data = _overheads(table, other)
    if data.empty:
        return Missing(NAME, f"No case was timed by both '{OURS}' and '{CONTIGUOUS}' or '{SDPA}'.")
    shown = data[data["median_us_contiguous"].rank(ascending=False, method="first") <= MOST_CASES]
    figure, (panel,) = panels(PAGE_IN, 0.7 + 0.17 * len(shown), 1, 1)
    place = range(len(shown))[::-1]
    bars = [shown["overhead"] - shown["least"], shown["most"] - shown["overhead"]]
    panel.errorbar(shown["overhead"], place, xerr=bars, fmt="o", color=PALETTE[0], capsize=2, elinewidth=0.8)
    panel.axvline(0, color=GREY, linewidth=0.8)
    panel.set_yticks(list(place), shown["name"])
    panel.set(xlabel="time over contiguous KV, per cent")
    caption = f"{_CAPTIONS[other]} Bars: quartiles of one side against the opposite ones of the other."
    if len(shown) < len(data):
        caption += f" Shown: the {len(shown)} longest of {len(data)} cases; the data hold all."
    return Drawing(NAME, caption, figure, data)


def _overheads(table: "pd.DataFrame", other: str) -> "pd.DataFrame":
    wanted = ["name", "median_us", "spread"]
    ours, whole = (table.loc[table["provider"] == one, wanted] for one in (OURS, other))
    both = ours.merge(whole, on="name", suffixes=("", "_contiguous"))
    noise = (both["spread"] + both["spread_contiguous"]) / 2
    ratio = both["median_us"] / both["median_us_contiguous"]
    both["overhead"] = (ratio - 1) * 100
    both["least"], both["most"] = (ratio * (1 - noise) - 1) * 100, (ratio * (1 + noise) - 1) * 100
    return both[["name", "median_us", "median_us_contiguous", "overhead", "least", "most"]]
