"""What reading a shared prefix once gains."""

from typing import TYPE_CHECKING

from harness.bench.kernels.names import ALWAYS, CASCADE, OURS
from harness.report.drawing import Drawing, Missing, Picture
from harness.report.style import COLUMN_IN, GREY, PALETTE, panels

if TYPE_CHECKING:
    import pandas as pd

NAME = "kernel_shared_prefix"
_CASE = ["batch", "context", "heads", "kv_heads", "head_dim", "dtype", "block_size", "layout"]


def draw(table: "pd.DataFrame") -> Picture:
    """Speed-up over the flat kernel by the length of the shared prefix, beside what bytes alone would allow."""
    data = _gains(table)
    if data.empty:
        return Missing(NAME, f"No case with a shared prefix was timed by both '{OURS}' and '{CASCADE}'.")
    figure, (panel,) = panels(COLUMN_IN * 1.3, 2.6, 1, 1)
    for place, (_, case) in enumerate(data.groupby(_CASE, sort=True)):
        colour = PALETTE[place % len(PALETTE)]
        label = f"{case['batch'].iloc[0]} × {case['context'].iloc[0]:,}"
        for rule, face, line in ((CASCADE, colour, "-"), (ALWAYS, "white", "--")):
            part = case[case["rule"] == rule].sort_values("shared_prefix")
            name = label if rule == CASCADE else f"{label}, always"
            if len(part):
                panel.plot(
                    part["shared_prefix"], part["gain"], f"o{line}", color=colour, mfc=face, label=name
                )
        bound = case.drop_duplicates("shared_prefix").sort_values("shared_prefix")
        panel.plot(bound["shared_prefix"], bound["possible"], ":", color=colour)
    panel.axhline(1, color=GREY, linewidth=0.8)
    panel.set_ylim(bottom=0)
    panel.set(xlabel="shared prefix, tokens", ylabel="speed-up over flat")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside right upper", title="sequences × tokens")
    caption = (
        "Speed-up from reading a shared prefix once for all sequences: where our cost rule says that it pays (full), "
        "always (hollow), and what the saved bytes would allow at most (dotted): "
        "context / (prefix / sequences + own tokens)."
    )
    return Drawing(NAME, caption, figure, data)


def _gains(table: "pd.DataFrame") -> "pd.DataFrame":
    shared = table[table["shared_prefix"] > 0]
    ours = shared[shared["provider"] == OURS]
    others = shared[shared["provider"].isin([CASCADE, ALWAYS])].rename(columns={"provider": "rule"})
    both = ours.merge(others[["name", "rule", "median_us"]], on="name", suffixes=("", "_cascade"))
    own = both["context"] - both["shared_prefix"]
    both["gain"] = both["median_us"] / both["median_us_cascade"]
    both["possible"] = both["context"] / (both["shared_prefix"] / both["batch"] + own)
    return both[
        ["name", "rule", *_CASE, "shared_prefix", "median_us", "median_us_cascade", "gain", "possible"]
    ]
