"""The origin of the figures: environment, cost model and its held-out error, traces and every change made to them."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from harness.metrics import METRICS
from harness.metrics.verdict import point_label
from harness.report import numbers
from harness.report.study import Record
from harness.report.tables import Table

_MOST_VALUES = 4
_MOST_ROWS = 40


def facts_table(section: str, records: Sequence[Record], *, without: Sequence[str] = ()) -> Table:
    """One section of the records as keys and values, except the keys in `without`.

    Where the points differ, numbers are shown as a range and other values as a list.
    """
    found: dict[str, dict[Any, None]] = {}
    for record in records:
        for key, value in map(_dated, _leaves(record.get(section) or {})):
            if key.partition(".")[0] not in without:
                found.setdefault(key, {})[tuple(value) if isinstance(value, list) else value] = None
    return Table(["", ""], [[key, _together(list(values))] for key, values in found.items()], words=2)


def bounds_table(records: Sequence[Record]) -> Table | None:
    """Each point's expected values between the datasheet's bound and the ends of assumed ranges; None without any."""
    rows = [row for record in records for row in _bounds_rows(record)]
    if not rows:
        return None
    head = [
        "point",
        "metric",
        "datasheet's bound",
        "expected",
        "if all that is assumed is fast",
        "... is slow",
    ]
    return Table(
        head, rows, words=2, title="Datasheet's bound and expected value", folded=len(rows) > _MOST_ROWS
    )


def _bounds_rows(record: Record) -> Iterable[list[str]]:
    bounds = record.get("bounds") or {}
    for name, bound in (bounds.get("datasheet") or {}).items():
        metric = METRICS[name]
        ends = [(bounds.get(end) or {}).get(name) for end in ("fast_end", "slow_end")]
        values = [bound, (record.get("simulated") or {}).get(name), *ends]
        yield [point_label(record), metric.label, *(numbers.figure(metric, value) for value in values)]


def heldout_table(records: Sequence[Record]) -> Table | None:
    """The errors of the cost models on held-out steps; None if no model was fitted."""
    rows = {
        tuple(_heldout_cells(str(cost.get("name")), part, errors)): None
        for record in records
        for cost in (record.get("cost") or {},)
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
    return " · ".join(shown) + (
        f" · and {len(values) - _MOST_VALUES} more" if len(values) > _MOST_VALUES else ""
    )


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


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


def traces_table(records: Sequence[Record]) -> Table:
    """Each distinct trace file or generator with its size and digest."""
    head = [
        "trace",
        "format",
        "source",
        "clock",
        "requests",
        "prompt tokens",
        "output tokens",
        "shared prefix",
        "sha256",
    ]
    rows = {_trace_cells(record): None for record in records if record.get("trace")}
    return Table(head, sorted(rows), words=4)


def _trace_cells(record: Record) -> tuple[str, ...]:
    trace = record["trace"]
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


def trace_changes(records: Sequence[Record]) -> list[str]:
    """Every sentence about a change of a trace, with the number of points that it applies to."""
    found: dict[str, int] = {}
    for record in records:
        for sentence in (record.get("trace") or {}).get("changes") or ():
            found[sentence] = found.get(sentence, 0) + 1
    return [
        s if count == len(records) else f"{s} ({count} of {len(records)} points)"
        for s, count in found.items()
    ]


def left_out(records: Sequence[Record]) -> list[str]:
    """Rows that a trace reader dropped or noted, by reason; the largest number over the points."""
    found: dict[str, int] = {}
    for record in records:
        for kind in ("dropped", "noted"):
            for reason, count in ((record.get("trace") or {}).get(kind) or {}).items():
                key = f"{reason} ({kind})"
                found[key] = max(found.get(key, 0), int(count))
    return [f"{reason}: {count:,} rows" for reason, count in found.items() if count]
