"""The figures of a run: roofline, latency by block size, the cost of paging, the gain from shared prefixes.

Each function returns a drawing with its data, or the reason why there is none.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from harness.cost.timings import ALWAYS, CASCADE, CONTIGUOUS, OURS, SDPA
from harness.report.style import GREY, PAGE_IN, PALETTE, Drawing, Missing, Picture, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from harness.cost.timings import Ceilings


ROOFLINE_NAME = "kernel_roofline"
BLOCK_SIZES_NAME = "kernel_block_size"
MOST_PANELS = 3
_SAME = ["batch", "context", "heads", "kv_heads", "head_dim", "dtype", "ragged", "shared_prefix", "queries"]
PAGING_NAME = "kernel_paging"
MOST_PAGING_CASES = 24
_CAPTIONS = {
    CONTIGUOUS: "What paging adds to a call: our kernel on permuted blocks against its twin with plain addresses.",
    SDPA: "Our attention on permuted blocks against torch's fused attention on contiguous KV: paging and all else.",
}
SHARED_PREFIX_NAME = "kernel_shared_prefix"
MOST_PREFIX_CASES = 6
_CASE = [one for one in (*_SAME, "block_size", "layout") if one != "shared_prefix"]


def draw_roofline(table: "pd.DataFrame", limits: "Ceilings") -> Picture:
    """TFLOP/s against operations per byte; colours show providers, markers show decode and prefill."""
    if table.empty:
        return Missing(ROOFLINE_NAME, "No case was timed.")
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
                look: dict[str, Any] = {"color": colour, "mfc": colour if name == OURS else "none"}
                panel.plot(part["flop_per_byte"], part["tflop_s"], marker, label=f"{name}{kind}", **look)
    panel.set(xscale="log", yscale="log", xlabel="FLOP per byte that must move", ylabel="TFLOP/s")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside right upper")
    caption = (
        "Speed of every call against its arithmetic intensity. Bytes count each distinct key, value, query and output "
        f"once. Lines: {limits.read_bytes_s / 1e9:,.0f} GB/s read, {limits.copy_bytes_s / 1e9:,.0f} GB/s copied and "
        f"{limits.matmul_flop_s / 1e12:,.3g} TFLOP/s of a matrix product, all measured in the same run."
    )
    return Drawing(ROOFLINE_NAME, caption, figure, data)


def _roof(panel: "Axes", limits: "Ceilings", least: float, most: float) -> None:
    ridge = limits.matmul_flop_s / limits.read_bytes_s
    low, high = least / 2, max(most, ridge) * 2
    points = [low, ridge, high]
    heights = [min(limits.matmul_flop_s, point * limits.read_bytes_s) / 1e12 for point in points]
    panel.plot(points, heights, color=GREY, label="read, matmul ceiling")
    ridge = limits.matmul_flop_s / limits.copy_bytes_s
    heights = [point * limits.copy_bytes_s / 1e12 for point in (low, ridge)]
    panel.plot([low, ridge], heights, color=GREY, linestyle=":", label="copy ceiling")


def draw_block_sizes(table: "pd.DataFrame") -> Picture:
    """One panel for each set of cases that differ only in block size; sets with the most sizes, then largest calls."""
    sets = [part for _, part in table.groupby(_SAME, sort=True) if part["block_size"].nunique() > 1]
    sets.sort(key=lambda part: (-int(part["block_size"].nunique()), -int(part["flat_bytes"].max())))
    if not sets:
        return Missing(BLOCK_SIZES_NAME, "No two cases differ in block size alone.")
    shown = sets[:MOST_PANELS]
    figure, grid = panels(PAGE_IN, 2.8, 1, len(shown))
    names = dict.fromkeys(label for part in shown for label in _labels(part))
    colours = {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(names)}
    entries: dict[str, Any] = {}
    for panel, part in zip(grid, shown, strict=True):
        _panel(panel, part, colours)
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend([entries[name] for name in names], list(names), loc="outside upper center", ncols=4)
    caption = (
        "Time of one call by block size: median of the rounds, bars from the fastest to the slowest. Our GPU kernels "
        "take the same number of keys per tile at every block size, so the figure shows the effect of blocks alone."
    )
    if len(sets) > MOST_PANELS:
        caption += (
            f" Shown: {MOST_PANELS} of {len(sets)} sets of cases, most sizes first; the data file has all."
        )
    import pandas as pd

    columns = [*_SAME, "layout", "block_size", "provider", "median_us", "least_us", "most_us"]
    return Drawing(BLOCK_SIZES_NAME, caption, figure, pd.concat(sets)[columns])


def _labels(part: "pd.DataFrame") -> "pd.Series[str]":
    """The line that each row belongs to."""
    return part["provider"] + part["layout"].map(lambda layout: "" if layout == "NHD" else f", {layout}")


def _panel(panel: "Axes", part: "pd.DataFrame", colours: Mapping[str, str]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    for label, line in part.groupby(_labels(part), sort=False):
        line = line.sort_values("block_size")
        bars = [line["median_us"] - line["least_us"], line["most_us"] - line["median_us"]]
        colour = colours[str(label)]
        panel.errorbar(
            line["block_size"], line["median_us"], bars, marker="o", capsize=2, color=colour, label=label
        )
    first = part.iloc[0]
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticks(sorted(part["block_size"].unique()))
    panel.set_ylim(bottom=0)
    panel.set(xlabel="block size, tokens", ylabel="µs per call")
    heads = f"{first['heads']}/{first['kv_heads']} heads of {first['head_dim']}"
    shared = f", {first['shared_prefix']:,} shared" if first["shared_prefix"] else ""
    panel.set_title(
        f"{first['batch']} × {first['context']:,} tokens{shared}{_form(first)}\n{heads}, {first['dtype']}"
    )


def _form(case: Any) -> str:
    queries = f", {case['queries']} queries" if case["queries"] > 1 else ""
    return queries + (", ragged" if case["ragged"] else "")


def draw_paging(table: "pd.DataFrame") -> Picture:
    """The overhead of paging in per cent by case, with the range that the spreads of both sides allow."""
    other = CONTIGUOUS if (table["provider"] == CONTIGUOUS).any() else SDPA
    data = _overheads(table, other)
    if data.empty:
        return Missing(PAGING_NAME, f"No case was timed by both '{OURS}' and '{CONTIGUOUS}' or '{SDPA}'.")
    shown = data[data["median_us_contiguous"].rank(ascending=False, method="first") <= MOST_PAGING_CASES]
    figure, (panel,) = panels(PAGE_IN, 0.7 + 0.17 * len(shown), 1, 1)
    place = range(len(shown))[::-1]
    bars = [shown["overhead"] - shown["least"], shown["most"] - shown["overhead"]]
    panel.errorbar(shown["overhead"], place, xerr=bars, fmt="o", color=PALETTE[0], capsize=2, elinewidth=0.8)
    panel.axvline(0, color=GREY, linewidth=0.8)
    panel.set_yticks(list(place), shown["name"])
    panel.set(xlabel="time over contiguous KV, per cent")
    caption = f"{_CAPTIONS[other]} Bars: quartiles of one side against the opposite ones of the other."
    if len(shown) < len(data):
        caption += f" Shown: the {len(shown)} longest of {len(data)} cases; the data file has all."
    return Drawing(PAGING_NAME, caption, figure, data)


def _overheads(table: "pd.DataFrame", other: str) -> "pd.DataFrame":
    wanted = ["name", "median_us", "spread"]
    ours, whole = (table.loc[table["provider"] == one, wanted] for one in (OURS, other))
    both = ours.merge(whole, on="name", suffixes=("", "_contiguous"))
    own, other_s = both["spread"] / 2, both["spread_contiguous"] / 2  # from the median to a quartile
    ratio = both["median_us"] / both["median_us_contiguous"]
    both["overhead"] = (ratio - 1) * 100
    both["least"] = (ratio * (1 - own) / (1 + other_s) - 1) * 100
    both["most"] = (ratio * (1 + own) / (1 - other_s) - 1) * 100
    return both[["name", "median_us", "median_us_contiguous", "overhead", "least", "most"]]


def draw_shared_prefix(table: "pd.DataFrame") -> Picture:
    """Speed-up over the flat kernel by length of the shared prefix, with the limit that the saved bytes set."""
    data = _gains(table)
    if data.empty:
        reason = f"No case with a shared prefix was timed by both '{OURS}' and '{CASCADE}'."
        return Missing(SHARED_PREFIX_NAME, reason)
    figure, (panel,) = panels(PAGE_IN, 2.6, 1, 1)
    cases = [case for _, case in data.groupby(_CASE, sort=True)]
    cases.sort(key=lambda case: (-case["shared_prefix"].nunique(), -int(case["flat_bytes"].max())))
    for colour, case in zip(PALETTE, cases[:MOST_PREFIX_CASES], strict=False):
        _draw_case(panel, case, colour)
    panel.axhline(1, color=GREY, linewidth=0.8)
    panel.set_ylim(bottom=0)
    panel.set(xlabel="shared prefix, tokens", ylabel="speed-up over flat")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside right upper", title="sequences × tokens")
    caption = (
        "Speed-up from reading a shared prefix once for all sequences: by the cost rule (full marks), always (hollow "
        "marks), and the limit that the saved bytes set (dotted): context / (prefix / sequences + own tokens)."
    )
    if len(cases) > MOST_PREFIX_CASES:
        caption += f" Shown: the {MOST_PREFIX_CASES} largest of {len(cases)} cases; the data file has all."
    return Drawing(SHARED_PREFIX_NAME, caption, figure, data)


def _draw_case(panel: "Axes", case: "pd.DataFrame", colour: str) -> None:
    """Draw one case: full marks by the cost rule, hollow marks always, a dotted limit; one label for all."""
    first = case.iloc[0]
    label = f"{first['batch']} × {first['context']:,}, blocks of {first['block_size']}{_form(first)}"
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
    figures = ["median_us", "median_us_cascade", "gain", "possible"]
    return both[["name", "rule", *_CASE, "shared_prefix", "flat_bytes", *figures]]


def pictures(table: "pd.DataFrame", limits: "Ceilings") -> "Iterator[Picture]":
    """All figures of a run, each with its data or the reason why there is none; call it inside `style()`."""
    yield draw_roofline(table, limits)
    yield draw_block_sizes(table)
    yield draw_paging(table)
    yield draw_shared_prefix(table)
