"""Memory by allocator: what the slots of the pool hold on average, analytic, simulated and measured."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from harness.metrics import SLOT_STATES
from harness.report.axes import Axes, alike, comparison_table, held, policy_of, reference, setting
from harness.report.figures.series import evenly, policies
from harness.report.study import Record, Study
from harness.report.style import PAGE_IN, STATE_COLOURS, Drawing, Missing, Picture, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel


NAME = "memory"
_BLOCK = "cache.block_size"
_SIDES = ("analytic", "simulated", "measured")
_POOL: Mapping[str, str] = {f"{state}_share": state for state in SLOT_STATES}
_ALLOCATED: Mapping[str, str] = {
    "utilisation": "token",
    "reserved_of_allocated": "reserved",
    "internal_of_allocated": "internal",
}


def draw(study: Study, axes: Axes) -> Picture:
    """Stacked bars: left of the whole pool, right of the allocated slots, for which closed forms exist."""
    chosen = [record for policy in policies(study.records) for record in _of_policy(study, axes, policy)]
    table = comparison_table(chosen, axes, [*_POOL, *_ALLOCATED])
    if table.empty:
        return Missing(NAME, "No point has figures about slots: no request held memory long enough.")
    table = table.assign(allocator=table["point"].map({_label_key(r): _allocator(r) for r in chosen}))
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
    return Drawing(NAME, _caption(chosen[0], axes), figure, table)


def _caption(like: Record, axes: Axes) -> str:
    fixed = held(like, axes, free=[_BLOCK])
    return (
        "Time-weighted slot states by allocator. A: analytic, S: simulated, M: measured (median run); closed forms "
        "exist for the allocated slots alone, where sequences share nothing but their own prompt"
    ) + (f". Held: {fixed}." if fixed else ".")


def _of_policy(study: Study, axes: Axes, policy: str) -> list[Record]:
    """The points of a policy that differ in block size alone, at the lowest value of every other axis."""
    mine = [record for record in study.records if policy_of(record) == policy]
    like = reference(mine, axes, "low")
    same = alike(mine, like, axes, free=[_BLOCK]) if like else []
    sizes = evenly(sorted({setting(record, _BLOCK) for record in same}), 6)
    return sorted((r for r in same if setting(r, _BLOCK) in sizes), key=lambda r: int(setting(r, _BLOCK)))


def _label_key(record: Record) -> str:
    from harness.metrics.verdict import point_label

    return point_label(record)


def _allocator(record: Record) -> str:
    policy = policy_of(record)
    return f"paged, {setting(record, _BLOCK)}-token blocks" if policy == "paged" else policy


def _stack(
    panel: "Panel",
    table: "pd.DataFrame",
    names: Sequence[str],
    states: Mapping[str, str],
    sides: Sequence[str],
) -> None:
    height = 0.8 / len(sides)
    ticks: dict[float, str] = {}
    for row, name in enumerate(names):
        found = table[table["allocator"] == name].drop_duplicates("metric").set_index("metric")
        for index, side in enumerate(sides):
            at = row + (index - (len(sides) - 1) / 2) * height
            ticks[at] = side[0].upper()
            values = {state: 100 * float(found[side].get(metric, 0.0)) for metric, state in states.items()}
            _bar(panel, at, 0.88 * height, values, "no closed form" if side == "analytic" else "not measured")
    panel.set_yticks(list(ticks), list(ticks.values()), fontsize=6)
    _name_rows(panel, names)
    panel.set(xlim=(0, 100), ylim=(len(names) - 0.45, -0.55), xlabel="%")
    panel.grid(visible=False, axis="y")


def _bar(panel: "Panel", at: float, height: float, values: Mapping[str, float], absent: str) -> None:
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
