"""The answer as files: one page, the curve as SVG and PNG, every trial as CSV, and everything as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.capacity import RATE, CapacityAnswer, Estimate
from harness.capacity.advice import breaks_first, rate_text
from harness.capacity.case import LoadCase, Trial, in_the_same_memory
from harness.capacity.slo import Goal
from harness.config.values import replaced
from harness.metrics import METRICS
from harness.point.bands import unseen
from harness.point.cost import cost_model
from harness.report.style import GREY, PALETTE, filled, inline, new_figure, style, svg_bytes
from harness.store.atomic import write_files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_WIDTH_IN, _HEIGHT_IN = 3.4, 2.5
_FAR = 3.0  # a panel ends at this multiple of the bound; points far beyond add no information
_LABELS = {"rate": "request rate (requests/s)", "pool": "pool (KV tokens)", "block": "block size (tokens)"}


def draw(trials: Sequence[Trial], case: LoadCase, answer: CapacityAnswer, axis: str) -> "Figure":
    """One panel for each goal. Call it inside `harness.report.style.style()`."""
    figure = new_figure(_WIDTH_IN * len(case.slo), _HEIGHT_IN)
    panels = figure.subplots(1, len(case.slo), squeeze=False)[0]
    found = [(_place(case, trial, axis), trial) for trial in trials]
    for panel, goal in zip(panels, case.slo, strict=True):
        _panel(panel, found, goal, answer, axis)
    return figure


def _panel(
    panel: "Axes", placed: Sequence[tuple[float, Trial]], goal: Goal, answer: CapacityAnswer, axis: str
) -> None:
    name, metric = goal.metric, METRICS[goal.metric]
    found = sorted((at, one.metrics[name], one.met) for at, one in placed if name in one.metrics)
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


def _place(case: LoadCase, trial: Trial, axis: str) -> float:
    if axis == "rate":
        return float(trial.rate or 0.0)
    pool, size = _memory(case, trial)
    return float(size if axis == "block" else pool or 0)


def _memory(case: LoadCase, trial: Trial) -> tuple[int | None, int]:
    """Tokens of the pool, as far as they are set, and the block size."""
    cache = replaced(case.config, in_the_same_memory(case.config, trial.changes)).cache
    return cache.pool_tokens, cache.block_size


def _median_line(found: Sequence[tuple[float, float, bool]]) -> tuple[list[float], list[float]]:
    from statistics import median

    by_place: dict[float, list[float]] = {}
    for place, value, _ in found:
        by_place.setdefault(place, []).append(value)
    places = [place for place, values in by_place.items() if len(values) > 1] or list(by_place)
    return places, [median(by_place[place]) for place in places]


@dataclass(frozen=True)
class CapacityStudy:
    """A finished search: its settings, its answer, and its trials."""

    settings: Sequence[tuple[str, str]]
    case: LoadCase
    axis: str
    answer: CapacityAnswer
    shown: Sequence[Trial]  # those in the picture


def write_study(study: CapacityStudy, folder: Path) -> Path:
    """Write `capacity.html` and its files; returns the page's path. Raises StoreError where it cannot be written."""
    with style():
        figure = draw(study.shown, study.case, study.answer, study.axis)
        svg, png = svg_bytes(figure, "capacity"), BytesIO()
        figure.savefig(png, format="png", dpi=150, metadata={"Software": "PageTwin"})
    files = {
        "capacity.html": _page(study, svg).encode(),
        "capacity.svg": svg,
        "capacity.png": png.getvalue(),
        "capacity.csv": _csv(study.case).encode(),
        "capacity.json": json.dumps(_document(study), indent=1).encode(),
    }
    write_files(folder, files)
    return folder / "capacity.html"


def answer_text(case: LoadCase, answer: CapacityAnswer) -> str:
    """The answer in words, with its interval."""
    if answer.value is None:
        return f"{answer.question}: none; {answer.reason}"
    value = answer.value
    if answer.question == RATE:
        first = " Of the first seed:" if len(value.values) > 1 else ""
        text = rate_text(case, answer)
        return f"{text}{first} {breaks_first(case, answer.bad)}" if answer.bad else text
    text = f"{answer.question}: {value.mean:,.0f} {answer.unit}{_interval(value, ',.0f')}"
    return f"{text}; {answer.reason}" if answer.reason else text


def _interval(value: Estimate, shape: str = ",.4g") -> str:
    if value.low is None or value.high is None:
        return ""
    return f" (95 % interval {value.low:{shape}} to {value.high:{shape}}, {len(value.values)} seeds)"


def notes(study: CapacityStudy) -> list[str]:
    """Limits of the answer that the reader must know."""
    found, trials, value = [], study.case.made, study.answer.value
    if study.case.served and (new := unseen(study.case.served)):
        found.append(f"Warning: {new}. Figures may be far off.")
    if study.case.served and (kept := study.case.served.pool.note):
        found.append(f"Of the pool: {kept}.")
    unpriced = dict(study.settings).get("not priced", "")
    if study.axis == "block" and "block size" in unpriced:
        found.append("The cost model does not price block size: sizes differ by the memory they waste alone.")
    outside = [one.extrapolated for one in trials if one.extrapolated and one.extrapolated["steps"]]
    if outside:
        share = max(float(section["share_of_time"]) for section in outside)
        found.append(
            f"Extrapolation: in {len(outside):,} of {len(trials):,} simulations steps lie outside the range that "
            f"the cost model was measured on, up to {100 * share:.0f} % of the time."
        )
    if study.case.served and not any(trial.extrapolated for trial in trials):
        what = cost_model(study.case.served.deployment).source.provenance.get("what")
        found.append(f"The cost model was not measured on a device: {what}.")
    good = study.answer.good
    if study.axis == "rate" and value is not None and good is not None:
        found += [f"Over the seeds: {rate_words(value)}."] if value.low is not None else []
        of = f"of {good.outcome.get('finished', 0):,} requests in {good.span_s:,.0f} s"
        found.append(f"It lasts: {of} the number in the server does not grow.")
    return found


def _page(study: CapacityStudy, svg: bytes) -> str:
    from markupsafe import Markup

    return filled(
        Path(__file__).with_name("capacity.html.j2"),
        name=study.case.config.name,
        answer=answer_text(study.case, study.answer),
        found=study.answer.value is not None,
        slo=[str(goal) for goal in study.case.slo],
        scope=str(study.case.scope),
        settings=study.settings,
        notes=notes(study),
        choices=[(size, rate_words(rate)) for size, rate in study.answer.choices],
        figure=Markup(inline(svg, "capacity", study.answer.question)),
        simulations=len(study.case.made),
    )


def rate_words(rate: Estimate | None) -> str:
    """A rate with its interval."""
    return f"{rate.mean:,.4g} requests/s{_interval(rate)}" if rate else "no edge found"


def _csv(case: LoadCase) -> str:
    names = sorted({name for trial in case.made for name in trial.metrics})
    head = ["request_rate", "pool_tokens", "block_size", "seed", "end", "met", "growth", *names]
    lines = [",".join(head)]
    for trial in case.made:
        facts = [trial.rate, *_memory(case, trial), trial.seed, trial.end, int(trial.met), trial.growth]
        cells = [*facts, *(trial.metrics.get(name) for name in names)]
        said = (cell if isinstance(cell, str) else "" if cell is None else f"{cell:.9g}" for cell in cells)
        lines.append(",".join(said))
    return "\n".join(lines) + "\n"


def _document(study: CapacityStudy) -> dict[str, Any]:
    return {
        "question": study.answer.question,
        "answer": asdict(study.answer),
        "slo": [asdict(goal) for goal in study.case.slo],
        "scope": asdict(study.case.scope),
        "settings": dict(study.settings),
        "simulations": len(study.case.made),
        "notes": notes(study),
    }
