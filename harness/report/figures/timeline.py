"""The pool over time: what its slots hold while the trace is replayed, on both sides."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.metrics import SLOT_STATES
from harness.report.axes import Axes, policy_of, reference
from harness.report.figures.series import policies
from harness.report.study import Study
from harness.report.style import PAGE_IN, STATE_COLOURS, Drawing, Missing, Picture, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel


NAME = "pool_over_time"
_BINS = 120
_SIDES = ("simulated", "measured")
Float = npt.NDArray[np.float64]


def draw(study: Study, axes: Axes) -> Picture:
    """One stacked area for each policy and side, at the middle point of every axis. Gaps are idle time."""
    data = _binned(study, axes)
    if data is None:
        return Missing(NAME, "No point in the middle of the sweep has a readable step table (steps.parquet).")
    names = list(dict.fromkeys(data["policy"]))
    sides = [side for side in _SIDES if (data["side"] == side).any()]
    figure, grid = panels(PAGE_IN, 0.7 + 1.5 * len(names), len(names), len(sides))
    cells = [(name, side) for name in names for side in sides]
    for panel, (name, side) in zip(grid, cells, strict=True):
        mine = data[data["policy"] == name]
        _area(panel, mine[mine["side"] == side])
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
    return Drawing(NAME, caption, figure, data)


def _binned(study: Study, axes: Axes) -> "pd.DataFrame | None":
    import pandas as pd

    from harness.metrics.verdict import point_label

    parts = []
    for policy in policies(study.records):
        record = reference([r for r in study.records if policy_of(r) == policy], axes, "middle")
        steps = study.steps(record) if record else None
        if record is None or steps is None or steps.empty:
            continue
        first = steps[steps["run"] == steps.groupby("side")["run"].transform("min")]
        end = float((first["start_s"] + first["seconds"]).max())
        for side, mine in first.groupby("side"):
            part = _bin(mine, end)
            parts.append(part.assign(policy=policy, side=side, point=point_label(record)))
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
    """∫ of the step function (height[i] during step i, else 0) from 0 to each time in `at`; steps are in order."""
    knots = np.column_stack([start, start + seconds]).ravel()
    sums = np.column_stack([np.zeros_like(start), seconds * height]).ravel().cumsum()
    return np.asarray(np.interp(at, knots, sums, left=0.0), dtype=np.float64)


def _area(panel: "Panel", data: "pd.DataFrame") -> None:
    bottom = np.zeros(len(data))
    for state in SLOT_STATES:
        top = bottom + data[state].to_numpy(np.float64)
        panel.fill_between(
            data["time_s"], bottom, top, color=STATE_COLOURS[state], linewidth=0, step="mid", label=state
        )
        bottom = top
    panel.grid(visible=False)
