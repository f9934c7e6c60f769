"""The axes of a sweep: the settings that vary, and the points that represent the others in a figure.

`comparison_table` has the comparison rows of all points. Figures draw it, and their CSV files contain it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from harness.metrics.record import PointRecord

if TYPE_CHECKING:
    import pandas as pd


Value = Any

POLICY, BLOCK, RATE = "cache.policy", "cache.block_size", "workload.request_rate"
# Where and how a sweep runs; these settings do not belong to the question of the sweep.
_NOT_SETTINGS = frozenset({"out", "name", "workers", "measure"})

LABELS: Mapping[str, str] = {
    "cache.policy": "cache policy",
    "cache.prefix_caching": "prefix cache",
    "cache.max_model_len": "longest sequence (tokens)",
    "cache": "cache",
    "workload.num_requests": "requests",
    "workload.length_scale": "length scale",
    "workload.seed": "seed",
    "scheduler.max_running": "most running requests",
    "scheduler.max_batched_tokens": "tokens of a step",
    "device": "device",
    "model": "model",
    "model.name": "model",
    "device.name": "device",
    "trace.name": "trace",
    "device.tensor_parallel": "tensor parallel",
    "cache.block_size": "block size (tokens)",
    "cache.eviction": "rule of eviction",
    "cache.pool_tokens": "pool (KV slots)",
    "workload.prefix_share": "shared prompt tokens (share)",
    "workload.request_rate": "request rate (1/s)",
    "decoding.beam_width": "beam width",
    "decoding.n": "parallel samples",
}
VALUES = ("analytic", "simulated", "measured", "low", "high", "spread", "error", "raw")
"""Columns of figures. `raw` is the measured value as it was before it was corrected for the machine's pace."""


@dataclass(frozen=True)
class Axes:
    """The settings that differ between points of one policy, each with its values in order."""

    values: Mapping[str, tuple[Value, ...]]

    @property
    def numeric(self) -> tuple[str, ...]:
        """Axes that can be drawn along a line: those with at least two numbers."""
        return tuple(key for key, values in self.values.items() if len(_numbers(values)) > 1)


def find_axes(records: Sequence[PointRecord]) -> Axes:
    """Settings that vary among the points of one policy.

    Dependent settings are no axes: those that differ only between policies, those that follow from a named choice (a
    model's shape follows from `model.name`), and those that vary together with an earlier axis.
    """
    flat = [{k: v for k, v in leaves(record.config) if k not in _NOT_SETTINGS} for record in records]
    kept: dict[str, tuple[Value, ...]] = {}
    patterns: set[tuple[int, ...]] = set()
    policies = _groups(flat)
    for key in dict.fromkeys(key for settings in flat for key in settings):
        pattern = _pattern([settings.get(key) for settings in flat])
        within = ({settings.get(key) for settings in group} for group in policies)
        varied = [values for values in within if len(values) > 1]
        if key == POLICY or not varied or _follows(flat, key, kept) or pattern in patterns:
            continue
        kept[key] = tuple(sorted(set[Value]().union(*varied), key=order))
        patterns.add(pattern)
    named = [text.partition("=")[0] for record in records[:1] for text in record.overrides]
    asked = sorted(kept, key=lambda key: named.index(key) if key in named else len(named))
    return Axes({key: kept[key] for key in asked})


def _groups(flat: Sequence[Mapping[str, Value]]) -> list[list[Mapping[str, Value]]]:
    policies = dict.fromkeys(settings.get(POLICY) for settings in flat)
    return [[settings for settings in flat if settings.get(POLICY) == policy] for policy in policies]


def _follows(flat: Sequence[Mapping[str, Value]], key: str, kept: Mapping[str, Any]) -> bool:
    """Whether a named choice of the same group, itself an axis, fixes this setting."""
    name = key.rpartition(".")[0] + ".name"
    pairs = {(settings.get(name), settings.get(key)) for settings in flat}
    return name in kept and name != key and len(pairs) == len({choice for choice, _ in pairs})


def _pattern(column: Sequence[Value]) -> tuple[int, ...]:
    first: dict[Value, int] = {}
    return tuple(first.setdefault(value, len(first)) for value in column)


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    """Leaves of a nested section by dotted key; lists become tuples."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", tuple(value) if isinstance(value, list) else value


# Where files lie and how a sweep is reported: nothing that two sweeps differ in.
_ELSEWHERE = ("report.", "cost.cache_dir", "cost.recalibrate", "replay.compiled", "oracle.python")


def differing(one: PointRecord, other: PointRecord) -> set[str]:
    """The settings in which two points differ; a named choice (a device) stands for all that follows from it."""
    mine, theirs = (dict(leaves(record.config)) for record in (one, other))
    known = mine.keys() & theirs.keys() - _NOT_SETTINGS
    found = {key for key in known if mine[key] != theirs[key] and not key.startswith(_ELSEWHERE)}
    if not found and one.trace.get("digest") != other.trace.get("digest"):
        return {"the requests of the trace"}
    named = {key for key in found if key.endswith(".name")}
    return {key for key in found if key in named or f"{key.partition('.')[0]}.name" not in named}


def label(key: str) -> str:
    """The axis label of a setting."""
    return LABELS.get(key, key)


def short_label(key: str) -> str:
    """The label without its unit, for legends and table heads."""
    return label(key).partition(" (")[0]


def plain_point(record: PointRecord) -> str:
    """The point's name in words: 'paged, block size 16, beam width 2'."""
    return plain_words(record.point_label)


def plain_words(text: str) -> str:
    """A label of overrides in words; a label without overrides stays."""
    words = [part.partition("=") for part in text.split(" ")]
    if not all(sign for _, sign, _ in words):
        return text
    bare = ("cache", POLICY, "model", "device", "trace")
    return ", ".join(value if key in bare else f"{short_label(key)} {value}" for key, _, value in words)


def reference(
    records: Sequence[PointRecord], axes: Axes, prefer: Literal["low", "middle"]
) -> PointRecord | None:
    """The point nearest to the lowest or the middle value of every axis; of several, the first."""
    if not records:
        return None
    aim = {key: values[0 if prefer == "low" else len(values) // 2] for key, values in axes.values.items()}
    return max(records, key=lambda record: sum(record.setting(key) == value for key, value in aim.items()))


def alike(
    records: Sequence[PointRecord], like: PointRecord, axes: Axes, *, free: Sequence[str]
) -> list[PointRecord]:
    """The points with the policy of `like` and its settings on all axes except `free`."""
    fixed = [POLICY, *(key for key in axes.values if key not in free)]
    aim = {key: like.setting(key) for key in fixed}
    return [record for record in records if all(record.setting(key) == value for key, value in aim.items())]


def held(like: PointRecord, axes: Axes, *, free: Sequence[str]) -> str:
    """The settings that a figure holds fixed, in words."""
    return ", ".join(f"{key}={like.setting(key)}" for key in axes.values if key not in free)


def _numbers(values: Sequence[Value]) -> list[float]:
    return [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def order(value: Value) -> tuple[int, float, str]:
    """A sort key: numbers by size, then words by letter, then unset values."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return (2 if value is None else 1, 0.0, str(value))
    return (0, float(value), "")


def comparison_table(
    records: Sequence[PointRecord], axes: Axes, metrics: Sequence[str] | None = None
) -> "pd.DataFrame":
    """One row for each point and metric: label, policy, axes, metric, unit and `VALUES` (NaN where a side has none)."""
    import pandas as pd

    rows = [
        {**settings, **_with_raw(record, row)}
        for record in records
        for settings in (_settings(record, axes),)
        for row in record.comparison
        if metrics is None or row["metric"] in metrics
    ]
    columns = ["point", POLICY, *axes.values, "metric", "unit", *VALUES]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(VALUES, "float64"))


def _with_raw(record: PointRecord, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with `raw`: where a yardstick's pace was divided out of measured times, multiplied by the point's pace.

    Exact for totals of a run, in whose span nothing is divided out of idle time; a quantile is that of the mean pace.
    Other figures are as they were measured.
    """
    raw, unit = row.get("measured"), row.get("unit") or ""
    if raw is not None and record.pace.get("by") == "yardstick":
        pace, busy = record.pace["ratio"], record.value("busy_share", "measured")
        span = 1 + (1.0 if busy is None else busy) * (pace - 1)
        raw *= span if row["metric"] == "span" else pace if unit == "s" or unit.startswith("s/") else 1.0
        raw /= span if unit.endswith("/s") else 1.0
    return {**row, "raw": raw}


def point_cells(record: PointRecord, axes: Axes) -> list[str]:
    """Label, policy and axes of a point as text, as its lines in a CSV begin."""
    settings = _settings(record, axes)
    return [_cell(settings[key]) for key in ("point", POLICY, *axes.values)]


def comparison_lines(record: PointRecord, axes: Axes) -> Iterator[list[str]]:
    """The rows of `comparison_table` of one point as text, as its CSV has them."""
    first = point_cells(record, axes)
    for row in record.comparison:
        values = _with_raw(record, row)
        numbers = [values.get(key) for key in VALUES]
        yield [
            *first,
            row["metric"],
            row.get("unit") or "",
            *["" if n is None else f"{n:.9g}" for n in numbers],
        ]


def _cell(value: Value) -> str:
    if value is None:
        return ""
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _settings(record: PointRecord, axes: Axes) -> dict[str, Any]:
    return {"point": record.point_label, **{key: record.setting(key) for key in (POLICY, *axes.values)}}
