"""The curve: each goal's metric against what was searched over, with its bound and where the edge lies."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.capacity.finding import Answer
from harness.capacity.slo import Goal, Slo
from harness.capacity.trials import Trial
from harness.metrics import METRICS
from harness.report.style import GREY, PALETTE, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN, _HEIGHT_IN = 3.4, 2.5
_FAR = 3.0  # a panel ends at so many times the bound: what is far beyond says no more


def draw(trials: Sequence[Trial], slo: Slo, answer: Answer, axis: str) -> "Figure":
    """A panel a goal; call under `harness.report.style.style()`."""
    figure = new_figure(_WIDTH_IN * len(slo), _HEIGHT_IN)
    panels = figure.subplots(1, len(slo), squeeze=False)[0]
    for panel, goal in zip(panels, slo, strict=True):
        _panel(panel, trials, goal, answer, axis)
    return figure


def _panel(panel: "Axes", trials: Sequence[Trial], goal: Goal, answer: Answer, axis: str) -> None:
    metric = METRICS[goal.metric]
    found = sorted((_place(trial, axis), trial.metrics[goal.metric], trial.met)
                   for trial in trials if goal.metric in trial.metrics)  # fmt: skip
    for kept, colour, label in ((True, PALETTE[2], "SLO met"), (False, PALETTE[3], "SLO broken")):
        chosen = [(x, y) for x, y, met in found if met is kept]
        if chosen:
            xs, ys = zip(*chosen, strict=True)
            panel.scatter(xs, ys, s=10, color=colour, alpha=0.7, linewidths=0, label=label)
    panel.plot(*_median_line(found), color=GREY, linewidth=0.9, zorder=0)
    panel.axhline(goal.bound, color="#444444", linewidth=0.8, linestyle="--", label=f"goal: {goal}")
    if answer.value is not None:
        panel.axvline(answer.value.mean, color=PALETTE[0], linewidth=1.0, label="answer")
        if answer.value.low is not None and answer.value.high is not None:
            panel.axvspan(answer.value.low, answer.value.high, color=PALETTE[0], alpha=0.15, linewidth=0)
    if goal.upper and found:
        highest = max(y for _, y, _ in found) * 1.05
        panel.set_ylim(0, min(max(highest, 1.15 * goal.bound), _FAR * goal.bound) or 1)
    panel.set(xlabel=_LABELS[axis], ylabel=f"{metric.label} ({metric.unit})")
    panel.legend(loc="best", fontsize=6)


_LABELS = {"rate": "request rate (requests/s)", "pool": "pool (KV tokens)", "block": "block size (tokens)"}


def _place(trial: Trial, axis: str) -> float:
    if axis == "rate":
        return float(trial.rate or 0.0)
    return float(trial.block_size if axis == "block" else trial.pool_tokens or 0)


def _median_line(found: Sequence[tuple[float, float, bool]]) -> tuple[list[float], list[float]]:
    from statistics import median

    by_place: dict[float, list[float]] = {}
    for place, value, _ in found:
        by_place.setdefault(place, []).append(value)
    places = [place for place, values in by_place.items() if len(values) > 1] or list(by_place)
    return places, [median(by_place[place]) for place in places]
