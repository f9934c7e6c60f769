"""Helpers that the figures share: styles of policies and values, units and ticks of axes."""

from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import TYPE_CHECKING, Any

from harness.metrics import METRICS
from harness.metrics.record import PointRecord
from harness.report.axes import label
from harness.report.study import spread
from harness.report.style import GREY, PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Panel


_POLICY_LOOKS = {
    "paged": (PALETTE[0], "o"),
    "contiguous_max": (PALETTE[1], "s"),
    "contiguous_pow2": (PALETTE[4], "^"),
    "contiguous_oracle": (PALETTE[5], "v"),
}

# The most lines in one panel; more cannot be distinguished.
MOST_SERIES = 5


def policies(records: Sequence[PointRecord]) -> list[str]:
    """The cache policies of these points, paged first."""
    return sorted({record.policy for record in records}, key=lambda policy: (policy != "paged", policy))


def policy_style(policy: str) -> dict[str, Any]:
    """Colour and marker of a cache policy, the same in every figure."""
    colour, marker = _POLICY_LOOKS.get(policy, (GREY, "X"))
    return {"color": colour, "marker": marker}


_POLICY_DASHES: Mapping[str, Any] = {
    "contiguous_max": (0, (4, 2)),
    "contiguous_pow2": (0, (1, 1)),
    "contiguous_oracle": (0, (6, 2, 1, 2)),
}


def policy_line(policy: str) -> dict[str, Any]:
    """Colour, marker and dashes of a cache policy among lines of another policy."""
    return policy_style(policy) | {"linestyle": _POLICY_DASHES.get(policy, (0, (2, 2)))}


def side_by_side(count: int, width: float) -> list[float]:
    """Offsets that set `count` marks beside each other, `width` from the first to the last."""
    return [width * (index / max(1, count - 1) - 0.5) if count > 1 else 0.0 for index in range(count)]


def series_colours(values: Sequence[Any]) -> dict[Any, str]:
    """A colour for each value of a setting, dark to light in the order of the values."""
    import matplotlib as mpl

    scale = mpl.colormaps["viridis"]
    steps = [index / max(1, len(values) - 1) for index in range(len(values))]
    colours = [mpl.colors.to_hex(scale(0.08 + 0.72 * step)) for step in steps]
    return dict(zip(values, colours, strict=True)) if len(values) > 1 else dict.fromkeys(values, PALETTE[0])


def axis_scale(name: str, largest: float) -> tuple[float, str]:
    """Factor and unit in which a metric is drawn: milliseconds for 0.02 s, percent for shares."""
    metric = METRICS[name]
    if metric.is_share:
        return 100.0, "%"
    if not metric.is_time:
        return 1.0, metric.unit
    rest = metric.unit[1:]
    for factor, prefix in ((1.0, ""), (1e3, "m"), (1e6, "µ")):
        if largest * factor >= 1:
            return factor, f"{prefix}s{rest}"
    return 1e9, f"ns{rest}"


def column_scale(name: str, records: Sequence[PointRecord]) -> tuple[float, str]:
    """The scale and unit of a column of a table, from its largest prediction."""
    found = (abs(record.value(name, "simulated") or 0.0) for record in records)
    return axis_scale(name, max(found, default=0.0))


def value_axis(panel: "Panel", key: str, values: Sequence[float], *, most: int = 7) -> None:
    """The x axis of a swept setting: at most `most` of its values as ticks, and logarithmic from a factor of 4 on."""
    low, high = min(values), max(values)
    logarithmic = low > 0 and high / low >= 4
    if logarithmic:
        panel.set_xscale("log", base=2)
    ticks = _apart(spread(sorted(values), most), most, log if logarithmic else float)
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_xlabel(label(key))


def _apart(ticks: Sequence[float], most: int, place: Callable[[float], float]) -> list[float]:
    """The ticks without those whose labels would touch: the first and the last stay."""
    first, last = place(ticks[0]), place(ticks[-1])
    gap = 0.8 * (last - first) / most
    kept = [ticks[0]]
    for tick in ticks[1:-1]:
        if place(tick) - place(kept[-1]) >= gap and last - place(tick) >= gap:
            kept.append(tick)
    return kept if len(ticks) < 2 else [*kept, ticks[-1]]


def zero_based(panel: "Panel", low: float, high: float) -> None:
    """Start the y axis at zero, unless that would push the values into the upper half and hide the error."""
    if 0 <= low < 0.5 * high:
        panel.set_ylim(0, 1.08 * high)
    elif high > low:
        panel.set_ylim(low - 0.12 * (high - low), high + 0.12 * (high - low))


def side_legend(panel: "Panel", *, measured: bool) -> None:
    """Add legend entries for prediction and measurement, which do not depend on the colour."""
    panel.plot([], [], color=GREY, label="predicted")
    if measured:
        panel.errorbar(
            [], [], yerr=[], color=GREY, fmt="o", capsize=2, elinewidth=0.8, label="measured, range of runs"
        )
