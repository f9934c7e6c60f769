"""What reading a shared prefix once gains."""

from typing import TYPE_CHECKING

from harness.bench.kernels.names import ALWAYS, CASCADE, OURS
from harness.report.drawing import Drawing, Missing, Picture
from harness.report.style import GREY, PAGE_IN, PALETTE, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

NAME = "kernel_shared_prefix"
MOST_CASES = 6
_CASE = ["batch", "context", "heads", "kv_heads", "head_dim", "dtype", "block_size", "layout"]


def draw(table: "pd.DataFrame") -> Picture:
    """Speed-up over the flat kernel by the length of the shared prefix, beside what bytes alone would allow."""
    data = _gains(table)
    if data.empty:
        return Missing(NAME, f"No case with a shared prefix was timed by both '{OURS}' and '{CASCADE}'.")
    figure, (panel,) = panels(PAGE_IN, 2.6, 1, 1)
    cases = [case for _, case in data.groupby(_CASE, sort=True)]
    cases.sort(key=lambda case: (-case["shared_prefix"].nunique(), -int(case["flat_bytes"].max())))
    for colour, case in zip(PALETTE, cases[:MOST_CASES], strict=False):
        _draw_case(panel, case, colour)
    panel.axhline(1, color=GREY, linewidth=0.8)
    panel.set_ylim(bottom=0)
    panel.set(xlabel="shared prefix, tokens", ylabel="speed-up over flat")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside right upper", title="sequences × tokens")
    caption = (
        "Speed-up from reading a shared prefix once for all sequences: where our cost rule says that it pays (full), "
        "always (hollow), and what the saved bytes would allow at most (dotted): "
        "context / (prefix / sequences + own tokens)."
    )
    if len(cases) > MOST_CASES:
        caption += f" Shown: {MOST_CASES} of {len(cases)} cases, the largest; the data hold all."
    return Drawing(NAME, caption, figure, data)


def _draw_case(panel: "Axes", case: "pd.DataFrame", colour: str) -> None:
    """Full where the rule was asked, hollow always, dotted what bytes allow; a label for the first."""
    first = case.iloc[0]
    label = f"{first['batch']} × {first['context']:,}, blocks of {first['block_size']}"
    for rule, face, line in ((CASCADE, colour, "-"), (ALWAYS, "white", "--")):
        part = case[case["rule"] == rule].sort_values("shared_prefix")
        if len(part):
            panel.plot(part["shared_prefix"], part["gain"], f"o{line}", color=colour, mfc=face, label=label)
            label = "_nolegend_"
    bound = case.drop_duplicates("shared_prefix").sort_values("shared_prefix")
    panel.plot(bound["shared_prefix"], bound["possible"], ":", color=colour)


def _gains(table: "pd.DataFrame") -> "pd.DataFrame":
    shared = table[table["shared_prefix"] > 0]
    ours = shared[shared["provider"] == OURS]
    others = shared[shared["provider"].isin([CASCADE, ALWAYS])].rename(columns={"provider": "rule"})
    both = ours.merge(others[["name", "rule", "median_us"]], on="name", suffixes=("", "_cascade"))
    own = both["context"] - both["shared_prefix"]
    both["gain"] = both["median_us"] / both["median_us_cascade"]
    both["possible"] = both["context"] / (both["shared_prefix"] / both["batch"] + own)
    return both[
        [
            "name",
            "rule",
            *_CASE,
            "shared_prefix",
            "flat_bytes",
            "median_us",
            "median_us_cascade",
            "gain",
            "possible",
        ]
    ]
