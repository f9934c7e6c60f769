"""What memory holds: a pool by allocator, over time and by cause; what blocks cost and what the prefix cache finds."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.metrics import METRICS
from harness.metrics.analytic import expected_tail_waste
from harness.metrics.log import SLOT_STATES, WASTE_COLUMNS
from harness.metrics.record import PointRecord
from harness.report.axes import BLOCK, Axes, alike, comparison_table, held, label, reference
from harness.report.figures.series import axis_scale, policies, value_axis
from harness.report.study import Study, spread
from harness.report.style import PAGE_IN, PALETTE, STATE_COLOURS, Drawing, Missing, Picture, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel


_SIDES = ("analytic", "simulated", "measured")
_POOL: Mapping[str, str] = {f"{state}_share": state for state in SLOT_STATES}
_ALLOCATED: Mapping[str, str] = {
    "utilisation": "token",
    "reserved_of_allocated": "reserved",
    "internal_of_allocated": "internal",
}


def draw_memory(study: Study, axes: Axes) -> Picture:
    """Stacked bars: left of the whole pool, right of the allocated slots, for which closed forms exist."""
    chosen = [record for policy in policies(study.records) for record in _of_policy(study, axes, policy)]
    table = comparison_table(chosen, axes, [*_POOL, *_ALLOCATED])
    if table.empty:
        return Missing("memory", "No point has figures about slots: no request held memory long enough.")
    table = table.assign(allocator=table["point"].map({r.point_label: _allocator(r) for r in chosen}))
    names = list(dict.fromkeys(table["allocator"]))
    figure, (left, right) = panels(PAGE_IN, 0.95 + 0.42 * len(names), 1, 2)
    sides = _SIDES if table["measured"].notna().any() else _SIDES[:2]
    _stack(left, table, names, _POOL, sides[1:])
    _stack(right, table, names, _ALLOCATED, sides)
    left.set_title("share of the pool")
    right.set_title("share of the allocated slots")
    for state, colour in STATE_COLOURS.items():
        left.barh(0, 0, color=colour, label=state)
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return Drawing("memory", _memory_caption(chosen[0], axes), figure, table)


def _memory_caption(like: PointRecord, axes: Axes) -> str:
    fixed = held(like, axes, free=[BLOCK])
    return (
        "Time-weighted slot states by allocator. A: analytic, S: simulated, M: measured (median run); closed forms "
        "exist for the allocated slots alone, where sequences share nothing but their own prompt"
    ) + (f". Held: {fixed}." if fixed else ".")


def _of_policy(study: Study, axes: Axes, policy: str) -> list[PointRecord]:
    """The points of a policy that differ in block size alone, at the lowest value of every other axis."""
    mine = [record for record in study.records if record.policy == policy]
    like = reference(mine, axes, "low")
    same = alike(mine, like, axes, free=[BLOCK]) if like else []
    sizes = spread(sorted({record.setting(BLOCK) for record in same}), 6)
    return sorted((r for r in same if r.setting(BLOCK) in sizes), key=lambda r: int(r.setting(BLOCK)))


def _allocator(record: PointRecord) -> str:
    policy = record.policy
    return f"paged, {record.setting(BLOCK)}-token blocks" if policy == "paged" else policy


def _stack(
    panel: "Panel", table: "pd.DataFrame", names: Sequence[str], states: Mapping[str, str], sides: Sequence[str]
) -> None:  # fmt: skip
    height = 0.8 / len(sides)
    ticks: dict[float, str] = {}
    for row, name in enumerate(names):
        found = table[table["allocator"] == name].drop_duplicates("metric").set_index("metric")
        for index, side in enumerate(sides):
            at = row + (index - (len(sides) - 1) / 2) * height
            ticks[at] = side[0].upper()
            values = {state: 100 * float(found[side].get(metric, 0.0)) for metric, state in states.items()}
            _slot_bar(
                panel, at, 0.88 * height, values, "no closed form" if side == "analytic" else "not measured"
            )
    panel.set_yticks(list(ticks), list(ticks.values()), fontsize=6)
    _name_rows(panel, names)
    panel.set(xlim=(0, 100), ylim=(len(names) - 0.45, -0.55), xlabel="%")
    panel.grid(visible=False, axis="y")


def _slot_bar(panel: "Panel", at: float, height: float, values: Mapping[str, float], absent: str) -> None:
    """One stacked bar, or the reason why there is none. NaN marks a figure that this side does not have."""
    left = 0.0
    for state, value in values.items():
        if value > 0:
            panel.barh(at, value, left=left, height=height, color=STATE_COLOURS[state], linewidth=0)
            left += value
    if left == 0:
        panel.text(1, at, absent, va="center", size=6)


def _name_rows(panel: "Panel", names: Sequence[str]) -> None:
    """The allocators' names, left of the sides' letters."""
    outer = panel.secondary_yaxis(-0.06)
    outer.set_yticks(range(len(names)), [name.replace(", ", "\n") for name in names])
    outer.tick_params(length=0)
    outer.spines["left"].set_visible(False)


_BINS = 120
_REPLAYED = ("simulated", "measured")
Float = npt.NDArray[np.float64]


def draw_pool(study: Study, axes: Axes) -> Picture:
    """One stacked area for each policy and side, at the middle point of every axis. Gaps are idle time."""
    data = _pool_table(study, axes)
    if data is None:
        return Missing(
            "pool_over_time", "No point in the middle of the sweep has a readable step table (steps.parquet)."
        )
    names = list(dict.fromkeys(data["policy"]))
    sides = [side for side in _REPLAYED if (data["side"] == side).any()]
    figure, grid = panels(PAGE_IN, 0.7 + 1.5 * len(names), len(names), len(sides))
    cells = [(name, side) for name in names for side in sides]
    for panel, (name, side) in zip(grid, cells, strict=True):
        mine = data[data["policy"] == name]
        _areas(panel, mine[mine["side"] == side], {state: STATE_COLOURS[state] for state in SLOT_STATES})
        panel.grid(visible=False)
        panel.set(title=f"{name}, {side}", ylim=(0, 100), xlim=(0, mine["time_s"].max()))
    for panel in grid[:: len(sides)]:
        panel.set_ylabel("slots of the pool (%)")
    for panel in grid[-len(sides) :]:
        panel.set_xlabel("virtual time (s)")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    points = "; ".join(dict.fromkeys(data["point"]))
    caption = (
        f"What the slots hold while the trace is replayed (white: nothing runs or waits). Points: {points}."
    )
    return Drawing("pool_over_time", caption, figure, data)


def _pool_table(study: Study, axes: Axes) -> "pd.DataFrame | None":
    import pandas as pd

    parts = []
    for policy in policies(study.records):
        record = reference([r for r in study.records if r.policy == policy], axes, "middle")
        steps = study.steps(record) if record else None
        if record is None or steps is None or steps.empty:
            continue
        first = steps[steps["run"] == steps.groupby("side")["run"].transform("min")]
        end = float((first["start_s"] + first["seconds"]).max())
        for side, mine in first.groupby("side"):
            part = _bin(mine, end)
            parts.append(part.assign(policy=policy, side=side, point=record.point_label))
    return pd.concat(parts, ignore_index=True) if parts else None


def _bin(steps: "pd.DataFrame", end_s: float) -> "pd.DataFrame":
    """Shares of the pool per bin of time, each step weighted by its overlap; NaN where no step runs."""
    states = steps[list(SLOT_STATES)]
    return binned(steps, 100 * states.div(states.sum(axis=1), axis=0), end_s)


def binned(steps: "pd.DataFrame", heights: "pd.DataFrame", end_s: float | None = None) -> "pd.DataFrame":
    """Columns that have a value in each step, as means of bins of time; NaN where no step runs.

    Rows are those of `steps`.
    """
    import pandas as pd

    start, seconds = steps["start_s"].to_numpy(np.float64), steps["seconds"].to_numpy(np.float64)
    end_s = float((start + seconds).max()) if end_s is None else end_s
    edges = np.linspace(0.0, end_s or 1.0, _BINS + 1)
    busy = np.diff(_integral(edges, start, seconds, np.ones_like(start)))
    columns = {"time_s": (edges[1:] + edges[:-1]) / 2}
    for state in heights:
        held = np.diff(_integral(edges, start, seconds, heights[state].to_numpy(np.float64)))
        # in a bin that is busy for less than a tenth, rounding dominates
        columns[str(state)] = np.divide(held, busy, out=np.full(_BINS, np.nan), where=busy > 0.1 * edges[1])
    return pd.DataFrame(columns)


def _integral(at: Float, start: Float, seconds: Float, height: Float) -> Float:
    """∫ of the sum over steps (height[i] during step i, else 0) from 0 to each time in `at`; replicas run at once."""
    knots = np.concatenate([start, start + seconds])
    order = np.argsort(knots, kind="stable")
    slopes = np.concatenate([height, -height])[order].cumsum()
    sums = np.concatenate([[0.0], (slopes[:-1] * np.diff(knots[order])).cumsum()])
    return np.asarray(np.interp(at, knots[order], sums, left=0.0), dtype=np.float64)


def _areas(panel: "Panel", data: "pd.DataFrame", colours: Mapping[str, str], unit: float = 1.0) -> None:
    """Columns of `data` over time, stacked, in multiples of `unit`."""
    bottom = np.zeros(len(data))
    for name, colour in colours.items():
        top = bottom + data[name].to_numpy(np.float64) / unit
        words = name.replace("_", " ")
        panel.fill_between(data["time_s"], bottom, top, color=colour, linewidth=0, step="mid", label=words)
        bottom = top


_GIB = 2**30
_MOST_BARS = 16  # points of a figure of bars
_CAUSE_COLOURS = {
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


def draw_causes(study: Study, axes: Axes) -> Picture:
    """One stacked bar for each point; the mark is the share of blocks in use."""
    metrics = [*(f"waste_{name}" for name in WASTE_COLUMNS), "gauge"]
    grouped = [record for record in study.records if "waste_token" in record.simulated]
    if not grouped:
        return Missing(
            "causes", "No point has layers in groups (cache.groups=uniform), so causes are not drawn."
        )
    table = comparison_table(bars := spread(grouped, _MOST_BARS), axes, metrics)
    points = list(dict.fromkeys(table["point"]))
    figure, (panel,) = panels(PAGE_IN, 1.1 + 0.34 * len(points), 1, 1)
    wide = table.pivot_table(index="point", columns="metric", values="simulated", sort=False)
    for row, point in enumerate(points):
        shares = {name: float(wide.loc[point].get(f"waste_{name}", 0.0)) for name in WASTE_COLUMNS}
        _cause_bar(panel, row, shares)
        held_now = 100 * float(wide.loc[point]["gauge"])
        panel.plot(held_now, row, "|", color="black", markersize=14, markeredgewidth=2)
    for name, colour in _CAUSE_COLOURS.items():
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
        + _of_all(bars, grouped)
    )
    return Drawing("causes", caption, figure, table)


def _cause_bar(panel: "Panel", row: int, shares: dict[str, float]) -> None:
    left = 0.0
    for name, share in shares.items():
        panel.barh(row, 100 * share, left=left, height=0.7, color=_CAUSE_COLOURS[name], linewidth=0)
        left += 100 * share


def draw_groups(study: Study, axes: Axes) -> Picture:
    """Above: what the bytes of the pools hold; below: the bytes that each group has in use. One point of the middle."""
    grouped = [record for record in study.records if record.pool.get("groups")]
    record = reference(grouped, axes, "middle") if grouped else None
    steps = study.steps(record) if record else None
    waste = study.table(record, "waste") if record else None
    if record is None or steps is None or waste is None or "group_0" not in waste or steps.empty:
        return Missing(
            "groups_over_time",
            "No point with groups of layers has a readable table of its bytes (waste.parquet).",
        )
    steps, waste = (table[table["side"] == "simulated"].reset_index(drop=True) for table in (steps, waste))
    layers = record.pool["groups"]["layers"]
    names = [f"group_{index}" for index in range(len(layers))]
    data = binned(steps, waste[[*WASTE_COLUMNS, *names]])
    figure, (causes, groups) = panels(PAGE_IN, 4.2, 2, 1)
    _areas(causes, data, _CAUSE_COLOURS, _GIB)
    for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
        seen = f" {layer['window']:,}" if layer["window"] else ""
        words = f"{index}: {layer['layers']} {layer['kind']}{seen}"
        groups.plot(data["time_s"], data[name] / _GIB, color=PALETTE[index % len(PALETTE)], label=words)
    causes.set(ylabel="bytes of the pools (GiB)", ylim=(0, None))
    groups.set(ylabel="in use (GiB)", xlabel="virtual time (s)", ylim=(0, None))
    for panel in (causes, groups):
        panel.set_xlim(0, float(data["time_s"].max()))
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=6)
    caption = (
        f"Predicted bytes over time at {record.point_label}. Above: what they hold; the parts add up to the pools. "
        "Below: the pages that each group of layers has in use, with its number of layers and its window in tokens."
    )
    return Drawing("groups_over_time", caption, figure, data)


_OF_BLOCKS: Mapping[str, str] = {
    "tail_waste": "reserved and internal slots per sequence that decodes, with the closed form (B − 1) / 2 of a length "
    "that is uniform modulo the block size",
    "hit_ratio": "prompt tokens found in the cache, whole blocks only, so large blocks find less",
}


def draw_waste(study: Study, axes: Axes) -> Picture:
    """Unfilled slots per decoding sequence and hit ratio, where known. Marks: points; line: (B − 1) / 2."""
    if BLOCK not in axes.values:
        return Missing(
            "waste", "The block size was not swept (cache.block_size=8,16,32), so its cost is not drawn."
        )
    paged = [record for record in study.records if record.policy == "paged"]
    table = comparison_table(paged, axes, [*_OF_BLOCKS])
    shown = [name for name in _OF_BLOCKS if (table["metric"] == name).any()]
    if not shown:
        return Missing("waste", "No paged point has figures about blocks.")
    figure, grid = panels(PAGE_IN, 2.5, 1, len(shown))
    for panel, name in zip(grid, shown, strict=True):
        _block_panel(panel, name, table[table["metric"] == name])
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    meaning = " ".join(f"{METRICS[name].label.capitalize()}: {_OF_BLOCKS[name]}." for name in shown)
    return Drawing("waste", f"Every mark is one paged point. {meaning}", figure, table)


def _block_panel(panel: "Panel", name: str, found: "pd.DataFrame") -> None:
    scale, unit = axis_scale(name, float(found["simulated"].max()))
    sizes = sorted(found[BLOCK].astype(float).unique())
    if name == "tail_waste":
        line = np.linspace(min(sizes), max(sizes), 50)
        expected = [expected_tail_waste(size) for size in line]
        panel.plot(line, expected, color="#444444", linestyle="--", label="(B − 1) / 2")
    x = found[BLOCK].astype(float)
    panel.plot(
        x * 0.98, scale * found["simulated"], "D", color=PALETTE[0], markerfacecolor="none", label="predicted"
    )
    if found["measured"].notna().any():
        panel.plot(x * 1.02, scale * found["measured"], "o", color=PALETTE[3], alpha=0.7, label="measured")
    value_axis(panel, BLOCK, sizes)
    panel.set(xlabel=label(BLOCK), ylabel=unit, title=METRICS[name].label)
    panel.set_ylim(bottom=0)


_HITS = ("hit_ratio", "optimal_hit_ratio")
_NO_GROUPS = "no groups"
_LINES = ("-", "--", ":", "-.", "-", "--")


def draw_hits(study: Study, axes: Axes) -> Picture:
    """Left: the hit ratio of each point, and the bound for its run. Right: hit ratio against the match unit."""
    paged = [record for record in study.records if record.policy == "paged"]
    asked = [record for record in paged if _HITS[1] in record.simulated]
    best = spread(asked, _MOST_BARS)
    table = comparison_table(paged, axes, _HITS).drop_duplicates(["point", "metric"])
    units = {record.point_label: _unit(record) for record in paged}
    table["match_unit"] = [units[point][0] for point in table["point"]]
    table["pages"] = [units[point][1] for point in table["point"]]
    swept = table["match_unit"].nunique() > 1 and (table["pages"] != _NO_GROUPS).any()
    if not best and not swept:
        return Missing(
            "hits",
            "No point asked for the bound on hits (replay.optimum=true), and no points with groups of layers "
            "have different match units, so hits are not drawn.",
        )
    columns = bool(best) + bool(swept)
    figure, grid = panels(PAGE_IN, max(2.6, 1.1 + 0.3 * len(best)), 1, columns)
    if best:
        _against_the_best(grid[0], comparison_table(best, axes, _HITS))
    if swept:
        _against_the_unit(grid[-1], table[table["metric"] == "hit_ratio"])
    caption = "Predicted share of prompt tokens that the prefix cache finds."
    if best:
        caption += (
            " Bars are points; the mark is a bound on what any order of eviction finds with the run's own admissions "
            "and ends (Belady). Blocks of running requests may put it out of reach, so a better rule gains at most "
            f"what lies between them. Of the points that asked for it {_most_found(asked)}.{_of_all(best, asked)}"
        )
    if swept:
        caption += (
            " The match unit is the length of which the end of every hit is a multiple: less is never found."
        )
    return Drawing("hits", caption, figure, table)


def _of_all(bars: Sequence[PointRecord], points: Sequence[PointRecord]) -> str:
    """How many of the points have a bar; empty where all have."""
    few = f" Shown: {len(bars):,} of {len(points):,} points, spread evenly."
    return few if len(bars) < len(points) else ""


def _most_found(records: Sequence[PointRecord]) -> str:
    """Which of the points finds most, in words."""
    most = max(records, key=lambda record: record.simulated["hit_ratio"])
    return f"{most.point_label} finds most: {100 * most.simulated['hit_ratio']:.3g} %"


def _unit(record: PointRecord) -> tuple[int, str]:
    """The match unit in tokens, and how groups share the memory."""
    groups = record.pool.get("groups")
    plain = record.pool.get("block_size", 0), _NO_GROUPS
    return (groups["match_unit"], groups["pages"]) if groups else plain


def _against_the_best(panel: "Panel", table: "pd.DataFrame") -> None:
    wide = table.pivot_table(index="point", columns="metric", values="simulated", sort=False)
    places = range(len(wide))
    panel.barh(places, 100 * wide["hit_ratio"], height=0.7, color=PALETTE[0], linewidth=0, label="found")
    panel.plot(
        *(100 * wide["optimal_hit_ratio"], places, "|"), color="black", markersize=12, markeredgewidth=2,
        label="bound for any order",
    )  # fmt: skip
    panel.set_yticks(places, list(wide.index), fontsize=6)
    panel.set(ylim=(len(wide) - 0.5, -0.5), xlabel="prompt tokens found (%)")
    panel.set_xlim(left=0)
    panel.grid(visible=False, axis="y")
    panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=6)


def _against_the_unit(panel: "Panel", table: "pd.DataFrame") -> None:
    styles = zip(PALETTE, _LINES, table.groupby("pages", sort=False), strict=False)
    for colour, line, (pages, mine) in styles:  # lines that lie on each other stay visible
        ordered = mine.sort_values("match_unit")
        shares = 100 * ordered["simulated"]
        panel.plot(ordered["match_unit"], shares, line, marker="o", color=colour, label=str(pages))
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.set(xlabel="match unit (tokens)", ylabel="prompt tokens found (%)")
    panel.set_ylim(0, 105 * float(table["simulated"].max()) or 1)
    panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=6)
