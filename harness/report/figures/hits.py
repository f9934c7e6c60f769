"""What the prefix cache finds: each point beside the best order of eviction, and against the match unit."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.metrics.verdict import point_label
from harness.report.axes import Axes, comparison_table, policy_of
from harness.report.figures.series import evenly
from harness.report.study import Study
from harness.report.style import PAGE_IN, PALETTE, Drawing, Missing, Picture, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel


NAME = "hits"
_MOST_BARS = 16
_SHOWN = ("hit_ratio", "optimal_hit_ratio")
_NO_GROUPS = "no groups"
_LINES = ("-", "--", ":", "-.", "-", "--")


def draw(study: Study, axes: Axes) -> Picture:
    """Left: the hit ratio of each point, and Belady's optimum for its run. Right: hit ratio against the match unit."""
    paged = [record for record in study.records if policy_of(record) == "paged"]
    best = evenly([record for record in paged if _SHOWN[1] in (record.get("simulated") or {})], _MOST_BARS)
    table = comparison_table(paged, axes, _SHOWN).drop_duplicates(["point", "metric"])
    units = {point_label(record): _unit(record) for record in paged}
    table["match_unit"] = [units[point][0] for point in table["point"]]
    table["pages"] = [units[point][1] for point in table["point"]]
    swept = table["match_unit"].nunique() > 1 and (table["pages"] != _NO_GROUPS).any()
    if not best and not swept:
        return Missing(
            NAME,
            "No point asked for the best order of eviction (replay.optimum=true), and no points with groups of layers "
            "have different match units, so hits are not drawn.",
        )
    columns = bool(best) + bool(swept)
    figure, grid = panels(PAGE_IN, max(2.6, 1.1 + 0.3 * len(best)), 1, columns)
    if best:
        _against_the_best(grid[0], comparison_table(best, axes, _SHOWN))
    if swept:
        _against_the_unit(grid[-1], table[table["metric"] == "hit_ratio"])
    caption = "Predicted share of prompt tokens that the prefix cache finds."
    if best:
        caption += (
            " Bars are points; the mark is the most that any order of eviction finds with the run's own admissions and "
            "ends (Belady). What lies between them is all that a better rule of keeping could gain."
        )
    if swept:
        caption += (
            " The match unit is the length of which the end of every hit is a multiple: less is never found."
        )
    return Drawing(NAME, caption, figure, table)


def _unit(record: Mapping[str, Any]) -> tuple[int, str]:
    """The match unit in tokens, and how groups share the memory."""
    pool = record.get("pool") or {}
    groups = pool.get("groups")
    return (groups["match_unit"], groups["pages"]) if groups else (pool.get("block_size", 0), _NO_GROUPS)


def _against_the_best(panel: "Panel", table: "pd.DataFrame") -> None:
    wide = table.pivot_table(index="point", columns="metric", values="simulated", sort=False)
    places = range(len(wide))
    panel.barh(places, 100 * wide["hit_ratio"], height=0.7, color=PALETTE[0], linewidth=0, label="found")
    panel.plot(
        *(100 * wide["optimal_hit_ratio"], places, "|"),
        color="black",
        markersize=12,
        markeredgewidth=2,
        label="best order of eviction",
    )
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
