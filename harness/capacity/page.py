"""The answer as files: one page, the curve as SVG and PNG, every trial as CSV, and everything as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.capacity import DROPPED, CapacityAnswer, Goal, Slo, Trial
from harness.metrics import METRICS
from harness.report.style import GREY, PALETTE, filled, inline, new_figure, style, svg_bytes
from harness.store.atomic import write_files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_WIDTH_IN, _HEIGHT_IN = 3.4, 2.5
_FAR = 3.0  # a panel ends at this multiple of the bound; points far beyond add no information
_LABELS = {"rate": "request rate (requests/s)", "pool": "pool (KV tokens)", "block": "block size (tokens)"}
_STEADY = 10  # mean latencies that the arrivals should span


def draw(trials: Sequence[Trial], slo: Slo, answer: CapacityAnswer, axis: str) -> "Figure":
    """One panel for each goal. Call it inside `harness.report.style.style()`."""
    figure = new_figure(_WIDTH_IN * len(slo), _HEIGHT_IN)
    panels = figure.subplots(1, len(slo), squeeze=False)[0]
    for panel, goal in zip(panels, slo, strict=True):
        _panel(panel, trials, goal, answer, axis)
    return figure


def _panel(panel: "Axes", trials: Sequence[Trial], goal: Goal, answer: CapacityAnswer, axis: str) -> None:
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


@dataclass(frozen=True)
class CapacityStudy:
    """A finished search: its settings, its answer, and its trials."""

    name: str
    settings: Sequence[tuple[str, str]]
    slo: Slo
    axis: str
    answer: CapacityAnswer
    trials: Sequence[Trial]
    shown: Sequence[Trial]  # those in the picture


def write_study(study: CapacityStudy, folder: Path) -> Path:
    """Write `capacity.html` and its files; returns the page's path. Raises StoreError where it cannot be written."""
    with style():
        figure = draw(study.shown, study.slo, study.answer, study.axis)
        svg, png = svg_bytes(figure, "capacity"), _png(figure)
    files = {
        "capacity.html": _page(study, svg).encode(),
        "capacity.svg": svg,
        "capacity.png": png,
        "capacity.csv": _csv(study.trials).encode(),
        "capacity.json": json.dumps(_document(study), indent=1).encode(),
    }
    write_files(folder, files)
    return folder / "capacity.html"


def answer_text(answer: CapacityAnswer) -> str:
    """The answer in words, with its interval."""
    if answer.value is None:
        return f"{answer.question}: none; {answer.reason}"
    value = answer.value
    text = f"{answer.question}: {value.mean:,.4g} {answer.unit}"
    if value.low is not None and value.high is not None:
        text += f" (95 % interval {value.low:,.4g} to {value.high:,.4g}, {len(value.values)} seeds)"
    return f"{text}; {answer.reason}" if answer.reason else text


def left_out_text(trials: Sequence[Trial]) -> str:
    """The requests of the trace that the model does not take, in words; empty if there are none."""
    most = max(trials, key=lambda trial: trial.outcome.get(DROPPED, 0), default=None)
    if most is None or not (dropped := most.outcome.get(DROPPED, 0)):
        return ""
    whole = dropped + sum(count for name, count in most.outcome.items() if name != DROPPED)
    return (
        f"Left out: {dropped:,} of {whole:,} requests of the trace, because they are longer than the model takes or "
        "their row was dropped by the reader. A server refuses them at any load."
    )


def notes(study: CapacityStudy) -> list[str]:
    """Limits of the answer that the reader must know."""
    found = [text] if (text := left_out_text(study.trials)) else []
    unpriced = dict(study.settings).get("not priced", "")
    if study.axis == "block" and "block size" in unpriced:
        found.append(
            "The cost model does not price block size: sizes differ here by the memory that they waste alone."
        )
    outside = [
        trial.extrapolated for trial in study.trials if trial.extrapolated and trial.extrapolated["steps"]
    ]
    if outside:
        share = max(float(section["share_of_time"]) for section in outside)
        found.append(
            f"Extrapolation: in {len(outside):,} of {len(study.trials):,} simulations steps lie outside the range that "
            f"the cost model was measured on, up to {100 * share:.0f} % of the time."
        )
    if not any(trial.extrapolated for trial in study.trials):
        found.append(
            "The cost model was not measured on a device: it is the datasheet's roofline plus assumed host times."
        )
    return found + _load(study) + _short(study)


def _load(study: CapacityStudy) -> list[str]:
    """Over how many requests and seconds a rate was found."""
    met = [trial for trial in study.trials if trial.met and trial.rate]
    if study.axis != "rate" or not met or study.answer.value is None:
        return []
    last = max(met, key=lambda trial: trial.rate or 0.0)
    count = last.outcome.get("finished", 0)
    return [
        f"Found over {count:,} requests a simulation, which arrive in {count / (last.rate or 1.0):.3g} s. Whether the "
        "rate lasts longer, or for other requests of the trace, was not tried."
    ]


def _short(study: CapacityStudy) -> list[str]:
    """A note if all requests arrive within a few of their latencies: then a queue that keeps growing does not show."""
    met = [trial for trial in study.trials if trial.met and trial.rate and "e2e_mean" in trial.metrics]
    if not met:
        return []
    last = max(met, key=lambda trial: trial.rate or 0.0)
    window = last.outcome.get("finished", 0) / (last.rate or 1.0)
    latency = last.metrics["e2e_mean"]
    if window >= _STEADY * latency:
        return []
    return [
        f"Short: at {last.rate:.4g} requests/s all requests of a simulation arrive within {window:.3g} s, "
        f"{window / latency:.1f} times their mean latency. A queue that keeps growing does not show in so short a "
        f"time: use more requests (workload.num_requests) to find a rate that can be sustained."
    ]


def _page(study: CapacityStudy, svg: bytes) -> str:
    from markupsafe import Markup

    return filled(
        Path(__file__).with_name("capacity.html.j2"),
        name=study.name,
        answer=answer_text(study.answer),
        found=study.answer.value is not None,
        slo=[str(goal) for goal in study.slo],
        settings=study.settings,
        notes=notes(study),
        choices=[(size, _rate(rate)) for size, rate in study.answer.choices],
        figure=Markup(inline(svg, "capacity", study.answer.question)),
        simulations=len(study.trials),
    )


def _rate(rate: Any) -> str:
    if rate is None:
        return "no edge found"
    interval = f" ({rate.low:,.4g} – {rate.high:,.4g})" if rate.low is not None else ""
    return f"{rate.mean:,.4g} requests/s{interval}"


def _png(figure: Any) -> bytes:
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": "PageTwin"})
    return buffer.getvalue()


def _csv(trials: Sequence[Trial]) -> str:
    names = sorted({name for trial in trials for name in trial.metrics})
    head = ["request_rate", "pool_tokens", "block_size", "seed", "met", *names]
    lines = [",".join(head)]
    for trial in trials:
        facts = [trial.rate, trial.pool_tokens, trial.block_size, trial.seed, int(trial.met)]
        cells = [*facts, *(trial.metrics.get(name) for name in names)]
        lines.append(",".join("" if cell is None else f"{cell:.9g}" for cell in cells))
    return "\n".join(lines) + "\n"


def _document(study: CapacityStudy) -> dict[str, Any]:
    return {
        "question": study.answer.question,
        "answer": asdict(study.answer),
        "slo": [asdict(goal) for goal in study.slo],
        "settings": dict(study.settings),
        "simulations": len(study.trials),
        "notes": notes(study),
    }
