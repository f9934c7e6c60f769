"""The points as data for the page's chart: settings and figures of each point, small enough to lie in the page."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness.metrics import METRICS
from harness.report.axes import POLICY, Axes, plain_point, setting, short_label
from harness.report.figures.series import axis_scale, evenly, policy_style
from harness.report.study import Record, Study

MOST_POINTS = 1000
"""The most points whose figures lie in the page; `points.csv` has all."""

EXPLORED = (
    *(
        "request_throughput",
        "output_throughput",
        "generated_throughput",
        "norm_latency_mean",
        "ttft_p50",
        "ttft_p99",
    ),
    *(
        "tpot_p50",
        "itl_p99",
        "e2e_mean",
        "queue_mean",
        "utilisation",
        "internal_share",
        "external_share",
        "free_share",
    ),
    *(
        "sharing_saving",
        "tail_waste",
        "peak_kv",
        "hit_ratio",
        "copies_per_token",
        "recomputed_tokens",
        "preemptions",
    ),
    *(
        "running_mean",
        "waiting_mean",
        "steps",
        "busy_share",
        "attention_per_decode_step",
        "kv_read_per_decode_step",
    ),
)
_SIDES = ("simulated", "measured", "low", "high")
_DIGITS = 5

Figures = int | float | list[int | float | None] | None
"""How the figures of one metric at one point stand in the page."""


def shown_records(study: Study) -> list[Record]:
    """The points that the page holds: all, or `MOST_POINTS` spread evenly over them."""
    return evenly(study.records, MOST_POINTS)


def points_json(study: Study, axes: Axes) -> str:
    """The axes, metrics and points as JSON that may stand in a script element; empty for a single point."""
    if len(study.records) < 2:
        return ""
    records = shown_records(study)
    rows = [{row["metric"]: row for row in record.get("comparison") or ()} for record in records]
    keys = [POLICY, *axes.values]
    known = [name for name in EXPLORED if any(row.get(name, {}).get("simulated") is not None for row in rows)]
    scales = {name: _scale(name, rows) for name in known}
    content = {
        "axes": [_axis(records, key) for key in keys],
        "metrics": [
            {"name": name, "label": METRICS[name].label, "unit": unit} for name, (_, unit) in scales.items()
        ],
        "points": [
            {
                "l": plain_point(record),
                "s": [_plain(setting(record, key)) for key in keys],
                "v": [_figures(row.get(name), scale) for name, (scale, _) in scales.items()],
            }
            for record, row in zip(records, rows, strict=True)
        ],
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def _axis(records: Sequence[Record], key: str) -> dict[str, Any]:
    """A setting and its values. Cache policies bring the colours that they have in the figures."""
    values = _values(records, key)
    axis = {"key": key, "label": short_label(key), "values": values}
    return axis | ({"colours": [policy_style(value)["color"] for value in values]} if key == POLICY else {})


def _scale(name: str, rows: Sequence[Mapping[str, Mapping[str, Any]]]) -> tuple[float, str]:
    return axis_scale(name, max(abs(row[name]["simulated"] or 0.0) for row in rows if name in row))


def _values(records: Sequence[Record], key: str) -> list[Any]:
    found = {_plain(setting(record, key)) for record in records}
    return sorted(
        found,
        key=lambda value: (isinstance(value, str), value if not isinstance(value, str) else 0, str(value)),
    )


def _plain(value: Any) -> Any:
    """Numbers stay numbers; everything else becomes a word."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _figures(row: Mapping[str, Any] | None, scale: float) -> Figures:
    """The sides of a metric; one number where all are equal, and no more than are known. The script fills them up."""
    if row is None:
        return None
    values = [None if row[side] is None else _rounded(scale * row[side]) for side in _SIDES]
    while values and values[-1] is None:
        values.pop()
    if len(values) == len(_SIDES) and len(set(values)) == 1:
        return values[0]
    return values or None


def _rounded(value: float) -> int | float:
    found = float(f"{value:.{_DIGITS}g}")
    return int(found) if found.is_integer() else found
