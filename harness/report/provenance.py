"""The origin of the figures: environment, cost model and its held-out error, traces and every change made to them."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from harness.console import numbered
from harness.metrics import METRICS
from harness.metrics.verdict import point_label
from harness.report import numbers
from harness.report.study import Record, Study
from harness.report.tables import Table

_MOST_VALUES = 4
_MOST_ROWS = 40
_HELD_OUT = (
    0.15  # a mean error of held-out steps, or an error of a held-out workload, beyond this is a caution
)
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


def facts_table(section: str, records: Sequence[Record], *, without: Sequence[str] = ()) -> Table:
    """One section of the records as keys and values, except the keys in `without`.

    Where the points differ, numbers are shown as a range and other values as a list.
    """
    found: dict[str, dict[Any, None]] = {}
    for record in records:
        for key, value in map(_dated, _leaves(record.get(section) or {})):
            if key.partition(".")[0] not in without:
                found.setdefault(key, {})[tuple(value) if isinstance(value, list) else value] = None
    return Table(["", ""], [[_words(key), _together(list(values))] for key, values in found.items()], words=2)


def _words(key: str) -> str:
    """A dotted key in words: 'origin: steps fitted'."""
    return ": ".join(WORDS.get(part, part.replace("_", " ")) for part in key.split("."))


def headline(study: Study) -> list[tuple[str, str]]:
    """What the report is about: date, models, devices, traces, requests, points."""
    records = study.records
    facts = [("date", study.date)] if study.date else []
    facts.append(("model", _several(str(record["config"]["model"]["name"]) for record in records)))
    measured_on = _several((r.get("environment") or {}).get("gpu") or _device(r) for r in study.measured)
    predicted_for = _several(_predicted(record) for record in records)
    facts += [("measured on", measured_on)] if study.measured else []
    facts += [("predicted for", predicted_for)]
    facts.append(("trace", _several(str((record.get("trace") or {}).get("name")) for record in records)))
    requests = sorted({int(n) for r in records if (n := (r.get("trace") or {}).get("requests")) is not None})
    if requests:
        few = f"{requests[0]:,}" if len(requests) == 1 else f"{requests[0]:,} to {requests[-1]:,}"
        facts.append(("requests a point", few))
    facts.append(("points", f"{len(records):,}, {len(study.measured):,} of them measured"))
    if study.failures:
        facts.append(("failed", f"{len(study.failures):,}"))
    clocks = {_second(record) for record in study.measured}
    if clocks:
        facts.append(("a measured second is", ", ".join(sorted(clocks))))
    return [(key, value) for key, value in facts if value]


def _second(record: Record) -> str:
    """What the record's measured seconds are, and at which pace of the device they are stated."""
    clock = str((record.get("environment") or {}).get("clock"))
    pace = record.get("pace") or {}
    since = pace.get("since", "calibration")
    return _CLOCKS.get(clock, clock) + (
        f", at the pace of the {since}" if pace.get("by") == "yardstick" else ""
    )


def _device(record: Record) -> str:
    found = record.get("environment") or {}
    return str(found.get("device") or found.get("cpu") or "")


def _predicted(record: Record) -> str:
    """The device that a cost model knows: the calibrated one, or the one of the datasheet."""
    cost = record.get("cost") or {}
    device = (cost.get("provenance") or {}).get("device")
    return str(device or record["config"]["device"]["name"])


def _several(values: Iterable[str]) -> str:
    found = [value for value in dict.fromkeys(values) if value]
    rest = f" and {len(found) - _MOST_VALUES} more" if len(found) > _MOST_VALUES else ""
    return ", ".join(found[:_MOST_VALUES]) + rest


def cautions(study: Study) -> list[str]:
    """What a reader must know before believing a figure: the cost model's errors, and what it does not know."""
    costs = [record.get("cost") or {} for record in study.records]
    found = [*_pools(study), *_heldout_cautions(costs), *_moved(study), *_outside(study)]
    if study.not_priced:
        found += [f"Not priced: {text}." for text in study.not_priced]
    for record, cost in zip(study.records, costs, strict=True):
        config = record.get("config") or {}
        if cost.get("kind") == "roofline":
            found.append(_of_roofline(config.get("device") or {}))
        if cost.get("kind") in _NOT_MEASURED_HERE and not (config.get("scheduler") or {}).get(
            "async_scheduling"
        ):
            found.append(
                "A step is scheduled when the step before it has ended. vLLM schedules ahead from 0.19 on, and its "
                "first tokens come up to a step later (scheduler.async_scheduling=true)."
            )
    return list(dict.fromkeys(found))


_NOT_MEASURED_HERE = ("roofline", "operators", "published")


def _of_roofline(device: Mapping[str, Any]) -> str:
    fitted = device.get("fitted_from")
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
    notes = [str(note) for record in study.records if (note := (record.get("pool") or {}).get("note"))]
    for note in dict.fromkeys(notes):
        share = f" ({notes.count(note)} of {len(study.records)} points)" if len(study.records) > 1 else ""
        yield f"{note[0].upper()}{note[1:]}{share}."


def _moved(study: Study) -> Iterable[str]:
    paces = [
        (pace["ratio"], record)
        for record in study.records
        if (pace := record.get("pace") or {}).get("ratio")
        and pace.get("since", "calibration") == "calibration"
    ]
    off = [ratio for ratio, _ in paces if not _MOVED[0] <= ratio <= _MOVED[1]]
    if off:
        yield (
            f"The device moved: at {len(off):,} of {len(paces):,} points it ran at {min(off):.2f} to "
            f"{max(off):.2f} times its "
            "calibrated step time. Times were corrected for that, and the correction is an estimate."
        )
    unsteady = [
        r
        for r in study.records
        if ((r.get("cost") or {}).get("provenance") or {}).get("stability", {}).get("moved")
    ]
    if unsteady:
        yield (
            "The device changed its pace while it was calibrated; a calibration on a quiet machine is "
            "better (cost.recalibrate=true)."
        )


def _outside(study: Study) -> Iterable[str]:
    shares = [
        ((r.get("cost") or {}).get("extrapolated") or {}).get("share_of_time") or 0.0 for r in study.records
    ]
    over = [share for share in shares if share > _OUTSIDE]
    if over:
        yield (
            f"Extrapolation: at {numbered(len(over), 'point')} up to {100 * max(over):.0f} % of the predicted time "
            "lies outside the range "
            "that the cost model was measured on."
        )


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
