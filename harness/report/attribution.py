"""Tables of where the error comes from, of held-out workloads, and of predictions outside the measured range."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from harness.metrics import METRICS
from harness.metrics.verdict import point_label
from harness.report import numbers
from harness.report.study import Record
from harness.report.tables import Table

LEVELS = {
    "kernel": "price of attention",
    "rest_of_step": "price of the rest",
    "divergence": "other schedules",
}
_SUB = ("", "spread", "share")
VALIDATED = ("output_throughput", "tpot_mean", "ttft_p50")


def attribution_table(records: Sequence[Record]) -> Table | None:
    """The error of each level by metric, with its spread over repeats and its share; medians over the points."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        for name, parts in ((record.get("levels") or {}).get("attribution") or {}).items():
            found.setdefault(name, []).append(parts)
    if not found:
        return None
    rows = [[METRICS[name].label, *_cells(name, points)] for name, points in found.items()]
    head = ["metric", *("error" if place % 3 == 0 else _SUB[place % 3] for place in range(9)), "all levels"]
    groups = [("", 1), *((title, 3) for title in LEVELS.values()), ("", 1)]
    title = "Signed error by level (the levels add up), its spread over repeated runs, its share; medians over points"
    return Table(head, rows, title=title, groups=groups)


def _cells(name: str, points: Sequence[Mapping[str, Any]]) -> list[str]:
    metric, cells = METRICS[name], []
    for level in LEVELS:
        spreads = [point["spread"][level] for point in points if point["spread"][level] is not None]
        cells.append(numbers.error(metric, median(point["error"][level] for point in points)))
        cells.append(numbers.error_size(metric, median(spreads) if spreads else None))
        cells.append(f"{100 * median(point['share'][level] for point in points):.0f} %")
    return [*cells, numbers.error(metric, median(point["total"] for point in points))]


def divergence_lines(records: Sequence[Record]) -> list[str]:
    """How much of the simulated schedules equals the measured ones, and a hint at what the step prices lack."""
    found = [levels for r in records if (levels := r.get("levels") or {}).get("divergence")]
    if not found:
        return []
    equal = median(levels["divergence"]["equal_steps"] for levels in found)
    lines = [
        f"Schedules: {100 * equal:.0f} % of the steps have the measured composition (median over points)."
    ]
    hints = [levels["suspect"] for levels in found if (levels.get("suspect") or {}).get("feature")]
    if hints:
        worst = max(hints, key=lambda hint: float(hint["explained"]))
        lines.append(
            f"The residuals of the step prices depend most on '{worst['feature']}': it explains up to "
            f"{100 * worst['explained']:.0f} % of their variance."
        )
    return lines


def validation_table(records: Sequence[Record]) -> Table | None:
    """The calibrations' errors on workloads that they were not fitted to; None where there are none."""
    rows: dict[tuple[str, ...], None] = {}
    for record in records:
        cost = record.get("cost") or {}
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
        cells.append(
            f"{numbers.error(METRICS[name], error)} ({numbers.error_size(METRICS[name], spread)})"
            if found
            else numbers.NONE
        )
    return cells


def extrapolation_notes(records: Sequence[Record]) -> list[str]:
    """A note on points whose steps lie outside the range that their cost model was measured on."""
    outside = {
        point_label(record): section
        for record in records
        if (section := (record.get("cost") or {}).get("extrapolated")) and section["steps"]
    }
    if not outside:
        return []
    label, worst = max(outside.items(), key=lambda item: float(item[1]["share_of_time"]))
    why = ", ".join(f"{name} ({count:,} steps)" for name, count in worst["by"].items())
    points = "1 point predicts" if len(outside) == 1 else f"{len(outside):,} points predict"
    return [
        f"Extrapolation: {points} steps outside the range that the cost model was measured on; at most "
        f"{100 * worst['share_of_time']:.1f} % of the predicted time, at {label}: {why}."
    ]
