"""The origin of the figures and of their errors: environment, cost model, traces and every change made to them."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from math import prod
from statistics import median
from typing import Any

from harness.console import numbered
from harness.metrics import METRICS
from harness.metrics.record import PointRecord
from harness.report import numbers
from harness.report.axes import leaves
from harness.report.study import Study
from harness.report.tables import Table
from harness.report.verdict_text import beside_figures

_MOST_VALUES = 4
_MOST_ROWS = 40
# a mean error of held-out steps, or an error of a held-out workload, beyond this is a caution
_HELD_OUT = 0.15
_MOVED = (0.8, 1.25)  # pace of the device during the runs, relative to its calibration
_OUTSIDE = 0.05  # share of the predicted time outside the range of the calibration
WORDS: Mapping[str, str] = {
    "kind": "cost model",
    "name": "calibrated model",
    "what": "fit",
    "load_average": "load average",
    "gpu": "GPU",
    "cpu": "CPU",
    "cores": "CPU cores",
    "code": "digest of the code",
    "clock": "a measured second is",
    "probe_s": "time of the probe (s)",
    "yardstick_s": "times of the yardstick's parts (s)",
    "by": "followed by",
    "since": "relative to",
    "mape": "mean |error|",
    "ratio": "pace, median",
    "low": "lowest",
    "high": "highest",
    "n": "steps",
    "p95": "95th percentile of |error|",
    "max": "largest |error|",
    "hull": "measured range",
    "extrapolated": "outside the measured range",
    "provenance": "origin",
}
_CLOCKS = {"cpu": "CPU seconds of the engine's thread", "wall": "wall time"}


def facts_table(section: str, records: Sequence[PointRecord], *, without: Sequence[str] = ()) -> Table:
    """One section of the records as keys and values, except the keys in `without`.

    Where the points differ, numbers are shown as a range and other values as a list.
    """
    found: dict[str, dict[Any, None]] = {}
    for record in records:
        for key, value in map(_dated, leaves(getattr(record, section))):
            if key.partition(".")[0] not in without:
                found.setdefault(key, {})[value] = None
    return Table(["", ""], [[_words(key), _together(list(values))] for key, values in found.items()], words=2)


def _words(key: str) -> str:
    """A dotted key in words: 'origin: steps fitted'."""
    return ": ".join(WORDS.get(part, part.replace("_", " ")) for part in key.split("."))


def headline(study: Study) -> list[tuple[str, str]]:
    """What the report is about: date, models, devices, traces, requests, points."""
    records = study.records
    facts = [("date", study.date)] if study.date else []
    facts.append(("model", _several(str(record.setting("model.name") or "") for record in records)))
    measured_on = _several(r.environment.get("gpu") or _device(r) for r in study.measured)
    predicted_for = _several(_predicted(record) for record in records)
    facts += [("measured on", measured_on)] if study.measured else []
    facts += [("predicted for", predicted_for)]
    facts.append(("trace", _several(str(record.trace.get("name")) for record in records)))
    requests = sorted({int(n) for r in records if (n := r.trace.get("requests")) is not None})
    if requests:
        few = f"{requests[0]:,}" if len(requests) == 1 else f"{requests[0]:,} to {requests[-1]:,}"
        facts.append(("requests a point", few))
    facts.append(("points", f"{len(records):,}, {len(study.measured):,} of them measured"))
    if study.failures:
        facts.append(("failed", f"{len(study.failures):,}"))
    clocks = {_second_of(record) for record in study.measured}
    if clocks:
        facts.append(("a measured second is", ", ".join(sorted(clocks))))
    return [(key, value) for key, value in facts if value]


def _second_of(record: PointRecord) -> str:
    """What the record's measured seconds are, and at which pace of the device they are stated."""
    clock = str(record.environment.get("clock"))
    pace = record.pace
    since = pace.get("since", "calibration")
    return _CLOCKS.get(clock, clock) + (
        f", at the pace of the {since}" if pace.get("by") == "yardstick" else ""
    )


def _device(record: PointRecord) -> str:
    found = record.environment
    return str(found.get("device") or found.get("cpu") or "")


def _predicted(record: PointRecord) -> str:
    """The device that a cost model knows: the calibrated one, or as many as there are of that of the datasheet."""
    name = str(record.provenance.get("device") or record.setting("device.name") or "")
    many = (record.setting(f"device.{which}_parallel") or 1 for which in ("tensor", "data"))
    return f"{count} x {name}" if (count := prod(many)) > 1 else name


def _several(values: Iterable[str]) -> str:
    found = [value for value in dict.fromkeys(values) if value]
    rest = f" and {len(found) - _MOST_VALUES} more" if len(found) > _MOST_VALUES else ""
    return ", ".join(found[:_MOST_VALUES]) + rest


def cautions(study: Study) -> list[str]:
    """What a reader must know before believing a figure: the cost model's errors, and what it does not know."""
    costs = [record.cost for record in study.records]
    found = [
        *beside_figures(study.records),
        *_pools(study),
        *_heldout_cautions(costs),
        *_moved(study),
        *_outside(study),
    ]
    if study.not_priced:
        found += [f"Not priced: {text}." for text in study.not_priced]
    for record, cost in zip(study.records, costs, strict=True):
        if cost.get("kind") == "roofline":
            found.append(_of_roofline(record.setting("device.fitted_from")))
        if cost.get("kind") in _NOT_MEASURED_HERE and not record.setting("scheduler.async_scheduling"):
            found.append(
                "A step is scheduled when the step before it has ended. vLLM schedules ahead from 0.19 on, and its "
                "first tokens come up to a step later (scheduler.async_scheduling=true)."
            )
    return list(dict.fromkeys(found))


_NOT_MEASURED_HERE = ("roofline", "operators", "published")


def _of_roofline(fitted: str | None) -> str:
    if fitted:
        return f"The device's constants were fitted to {fitted}. For another model, engine or load they are less sure."
    return "The prediction comes from a datasheet and assumed host times; nothing of it was measured."


def _heldout_cautions(costs: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    worst: tuple[float, str] = (_HELD_OUT, "")
    for cost in costs:
        for part, errors in (cost.get("heldout") or {}).items():
            size = abs(errors.get("mape") or 0.0)
            worst = max(worst, (size, f"steps of the calibration (mean error of {part})"))
        for workload, metrics in (cost.get("validation") or {}).items():
            for name, errors in metrics.items():
                words = f"{METRICS[name].label if name in METRICS else name} of '{workload}'"
                worst = max(worst, (abs(errors.get("error") or 0.0), words))
    if worst[1]:
        yield (
            f"Held-out error: the cost model is off by {100 * worst[0]:.0f} % on {worst[1]}, which it was "
            "not fitted to."
        )


def _pools(study: Study) -> Iterable[str]:
    """What the pools of the points keep otherwise than an engine would by default."""
    notes = [str(note) for record in study.records if (note := record.pool.get("note"))]
    for note in dict.fromkeys(notes):
        share = f" ({notes.count(note)} of {len(study.records)} points)" if len(study.records) > 1 else ""
        yield f"{note[0].upper()}{note[1:]}{share}."


def _moved(study: Study) -> Iterable[str]:
    paces = [
        (pace["ratio"], record)
        for record in study.records
        if (pace := record.pace).get("ratio") and pace.get("since", "calibration") == "calibration"
    ]
    off = [ratio for ratio, _ in paces if not _MOVED[0] <= ratio <= _MOVED[1]]
    if off:
        yield (
            f"The device moved: at {len(off):,} of {len(paces):,} points it ran at {min(off):.2f} to {max(off):.2f} "
            "times its calibrated step time. Times were corrected for that, and the correction is an estimate."
        )
    unsteady = [r for r in study.records if r.provenance.get("stability", {}).get("moved")]
    if unsteady:
        yield (
            "The device changed its pace while it was calibrated; a calibration on a quiet machine is "
            "better (cost.recalibrate=true)."
        )


def _outside(study: Study) -> Iterable[str]:
    shares = [(r.cost.get("extrapolated") or {}).get("share_of_time") or 0.0 for r in study.records]
    over = [share for share in shares if share > _OUTSIDE]
    if over:
        yield (
            f"Extrapolation: at {numbered(len(over), 'point')} up to {100 * max(over):.0f} % of the predicted time "
            "lies outside the range that the cost model was measured on."
        )


def bounds_table(records: Sequence[PointRecord]) -> Table | None:
    """Each point's expected values between the datasheet's bound and the ends of assumed ranges; None without any."""
    rows = [row for record in records for row in _bounds_rows(record)]
    if not rows:
        return None
    head = ["point", "metric", "datasheet's bound", "expected", "if all that is assumed is fast",
            "... is slow"]  # fmt: skip
    return Table(
        head, rows, words=2, title="Datasheet's bound and expected value", folded=len(rows) > _MOST_ROWS
    )


def _bounds_rows(record: PointRecord) -> Iterable[list[str]]:
    bounds = record.bounds
    for name, bound in (bounds.get("datasheet") or {}).items():
        metric = METRICS[name]
        ends = [(bounds.get(end) or {}).get(name) for end in ("fast_end", "slow_end")]
        values = [bound, record.simulated.get(name), *ends]
        yield [record.point_label, metric.label, *(numbers.figure(metric, value) for value in values)]


def heldout_table(records: Sequence[PointRecord]) -> Table | None:
    """The errors of the cost models on held-out steps; None if no model was fitted."""
    rows = {
        tuple(_heldout_cells(str(cost.get("name")), part, errors)): None
        for record in records
        for cost in (record.cost,)
        for part, errors in (cost.get("heldout") or {}).items()
    }
    head = ["model", "predicts", "held out", "mean |error|", "bias", "95th percentile", "worst"]
    return Table(head, list(rows), words=2) if rows else None


def _heldout_cells(name: str, part: str, errors: Mapping[str, float]) -> Iterable[str]:
    yield from (name, "whole step" if part == "step" else part, numbers.plain(errors.get("n", 0)))
    for key in ("mape", "bias", "p95", "max"):
        value = errors.get(key)
        yield numbers.NONE if value is None else f"{100 * value:.1f} %".replace("-", "−")


def _together(values: list[Any]) -> str:
    amounts = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(amounts) == len(values) > 1:
        return f"{_text(min(amounts))} – {_text(max(amounts))}"
    shown = [_text(value) for value in values[:_MOST_VALUES]]
    rest = f" · and {len(values) - _MOST_VALUES} more" if len(values) > _MOST_VALUES else ""
    return " · ".join(shown) + rest


def _dated(fact: tuple[str, Any]) -> tuple[str, Any]:
    """The fact with a time in seconds since 1970 turned into a date. A date stays unchanged."""
    key, value = fact
    if key.rpartition(".")[2] == "started" and isinstance(value, int | float):
        value = datetime.fromtimestamp(value, UTC).isoformat(sep=" ", timespec="minutes")
    return key, value


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return "; ".join(map(_text, value)) or numbers.NONE
    return numbers.NONE if value is None else str(value)


def traces_table(records: Sequence[PointRecord]) -> Table:
    """Each distinct trace file or generator with its size and digest."""
    head = ["trace", "format", "source", "clock", "requests", "prompt tokens", "output tokens",
            "shared prefix", "sha256"]  # fmt: skip
    rows = {_trace_cells(record): None for record in records if record.trace}
    return Table(head, sorted(rows), words=4)


def _trace_cells(record: PointRecord) -> tuple[str, ...]:
    trace = record.trace
    counts = (trace.get(name) for name in ("requests", "prompt_tokens", "output_tokens"))
    share = trace.get("realised_prefix_share")
    return (
        str(trace.get("name")),
        str(trace.get("format")),
        str(trace.get("source")),
        f"{trace.get('clock_quantum_us', '?')} µs",
        *("–" if value is None else f"{value:,}" for value in counts),
        "–" if share is None else f"{100 * share:.1f} %",
        str(trace.get("sha256") or "")[:12],
    )


def trace_changes(records: Sequence[PointRecord]) -> list[str]:
    """Every sentence about a change of a trace, with the number of points that it applies to."""
    found: dict[str, int] = {}
    for record in records:
        for sentence in record.trace.get("changes") or ():
            found[sentence] = found.get(sentence, 0) + 1
    return [
        s if count == len(records) else f"{s} ({count} of {len(records)} points)"
        for s, count in found.items()
    ]


def left_out(records: Sequence[PointRecord], kinds: Sequence[str] = ("dropped", "noted")) -> list[str]:
    """Rows that a trace reader dropped, or kept and noted, by reason; the largest number over the points."""
    found: dict[str, int] = {}
    for record in records:
        for kind in kinds:
            for reason, count in (record.trace.get(kind) or {}).items():
                key = f"{reason} ({kind})"
                found[key] = max(found.get(key, 0), int(count))
    return [f"{reason}: {count:,} rows" for reason, count in found.items() if count]


def trace_line(records: Sequence[PointRecord]) -> str:
    """What was left out of the trace, what was kept and noted, and how many changes were made, in a sentence."""
    out, noted = (left_out(records, [kind]) for kind in ("dropped", "noted"))
    changes = len(trace_changes(records))
    kept = f"left out: {'; '.join(out)}" if out else "no row was left out"
    kept += f" (kept: {'; '.join(noted)})" if noted else ""
    return f"{kept}, {changes} changes were made" if changes else f"{kept}, and nothing was changed"


LEVELS = {
    "kernel": "price of attention",
    "rest_of_step": "price of the rest",
    "divergence": "other schedules",
}
_SUB = ("", "spread", "share")
VALIDATED = ("output_throughput", "tpot_mean", "ttft_p50")


def attribution_table(records: Sequence[PointRecord]) -> Table | None:
    """The error of each level by metric, with its spread over repeats and its share; medians over the points."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        for name, parts in (record.levels.get("attribution") or {}).items():
            found.setdefault(name, []).append(parts)
    if not found:
        return None
    rows = [[METRICS[name].label, *_level_cells(name, points)] for name, points in found.items()]
    head = ["metric", *("error" if place % 3 == 0 else _SUB[place % 3] for place in range(9)), "all levels"]
    groups = [("", 1), *((title, 3) for title in LEVELS.values()), ("", 1)]
    title = "Signed error by level, its spread over repeated runs, its share; medians over points, which do not add up"
    return Table(head, rows, title=title, groups=groups)


def _level_cells(name: str, points: Sequence[Mapping[str, Any]]) -> list[str]:
    metric, cells = METRICS[name], []
    for level in LEVELS:
        spreads = [point["spread"][level] for point in points if point["spread"][level] is not None]
        cells.append(numbers.error(metric, median(point["error"][level] for point in points)))
        cells.append(numbers.error_size(metric, median(spreads) if spreads else None))
        cells.append(f"{100 * median(point['share'][level] for point in points):.0f} %")
    return [*cells, numbers.error(metric, median(point["total"] for point in points))]


def divergence_lines(records: Sequence[PointRecord]) -> list[str]:
    """How much of the simulated schedules equals the measured ones, and a hint at what the step prices lack."""
    found = [levels for r in records if (levels := r.levels).get("divergence")]
    if not found:
        return []
    equal = median(levels["divergence"]["equal_steps"] for levels in found)
    lines = [f"Schedules: {100 * equal:.0f} % of steps have the measured composition (median over points)."]
    hints = [levels["suspect"] for levels in found if (levels.get("suspect") or {}).get("feature")]
    if hints:
        worst = max(hints, key=lambda hint: float(hint["explained"]))
        lines.append(
            f"The residuals of the step prices depend most on '{worst['feature']}': it explains up to "
            f"{100 * worst['explained']:.0f} % of their variance."
        )
    return lines


def validation_table(records: Sequence[PointRecord]) -> Table | None:
    """The calibrations' errors on workloads that they were not fitted to; None where there are none."""
    rows: dict[tuple[str, ...], None] = {}
    for record in records:
        cost = record.cost
        for workload, errors in (cost.get("validation") or {}).items():
            rows[(str(cost.get("name")), workload, *_validation_cells(errors))] = None
    names = [f"{METRICS[name].label} (spread)" for name in VALIDATED]
    head = ["model", "held-out workload", *names]
    title = "Free-running error on held-out workloads, and the spread of repeats"
    return Table(head, list(rows), words=2, title=title) if rows else None


def _validation_cells(errors: Mapping[str, Mapping[str, float]]) -> list[str]:
    cells = []
    for name in VALIDATED:
        found = errors.get(name) or {}
        error, spread = found.get("error"), found.get("spread")
        said = f"{numbers.error(METRICS[name], error)} ({numbers.error_size(METRICS[name], spread)})"
        cells.append(said if found else numbers.NONE)
    return cells


def extrapolation_notes(records: Sequence[PointRecord]) -> list[str]:
    """A note on points whose steps lie outside the range that their cost model was measured on."""
    outside = {
        record.point_label: section
        for record in records
        if (section := record.cost.get("extrapolated")) and section["steps"]
    }
    if not outside:
        return []
    label, worst = max(outside.items(), key=lambda item: float(item[1]["share_of_time"]))
    why = ", ".join(f"{name} ({count:,} steps)" for name, count in worst["by"].items())
    points = f"{numbered(len(outside), 'point')} predict{'s' if len(outside) == 1 else ''}"
    return [
        f"Extrapolation: {points} steps outside the range that the cost model was measured on; at most "
        f"{100 * worst['share_of_time']:.1f} % of the predicted time, at {label}: {why}."
    ]
